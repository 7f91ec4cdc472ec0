"""A pairwise covering array: few rows in which every two values of two axes meet that may meet at all."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

Item = tuple[str, str]
"""An axis and one of its values."""
Pair = tuple[Item, Item]
"""Two items, that of the axis that stands first in ``axes`` first."""
Row = dict[str, str]


def pairs_of(axes: Mapping[str, Sequence[str]]) -> Iterator[Pair]:
    """Every pair of values of two axes, in order."""
    for (first, values), (second, others) in itertools.combinations(axes.items(), 2):
        yield from (((first, value), (second, other)) for value in values for other in others)


def covering_array(axes: Mapping[str, Sequence[str]], allows: Callable[[Pair], bool]) -> list[Row]:
    """Rows with one value of each axis, none of them with a pair that is not allowed.

    Greedy and deterministic: a row begins with the first pair that no row has yet, and the other axes, the longest
    first, take the values that add most pairs; where that is equal, those whose pairs occurred least.

    Raises:
        ValueError: an allowed pair is in no row that is allowed.
    """
    places = {axis: place for place, axis in enumerate(axes)}
    longest_first = sorted(axes, key=lambda axis: -len(axes[axis]))
    counts: Counter[Pair] = Counter()
    rows: list[Row] = []

    def pairs_with(row: Row, new: Item) -> list[Pair]:
        return [(new, old) if places[new[0]] < places[old[0]] else (old, new) for old in row.items()]

    def complete(row: Row) -> Row | None:
        axis = next((each for each in longest_first if each not in row), None)
        if axis is None:
            return row
        values = [value for value in axes[axis] if all(map(allows, pairs_with(row, (axis, value))))]
        new = {value: [counts[pair] for pair in pairs_with(row, (axis, value))] for value in values}
        values.sort(key=lambda value: (-new[value].count(0), sum(new[value])))
        return next(filter(None, (complete({**row, axis: value}) for value in values)), None)

    for pair in filter(allows, pairs_of(axes)):
        if not counts[pair]:
            row = complete(dict(pair))
            if row is None:
                raise ValueError(f"no row can have both {pair[0]} and {pair[1]}")
            rows.append({axis: row[axis] for axis in axes})
            counts.update(itertools.combinations(rows[-1].items(), 2))
    return rows
