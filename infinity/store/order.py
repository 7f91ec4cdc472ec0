"""The order in which training touches shards: recorded over one cycle, then known for the next.

Training repeats itself, so the accesses of the last complete cycle (one optimizer step to the next) predict this one.
``AccessOrder`` answers the two questions that follow: what comes next (to fetch it) and how far away is the next use of
this key (to evict what is farthest: Belady's rule, IBM Systems Journal 5(2), 1966).

A wrong prediction costs speed and never correctness: an access that was not expected moves the cursor to its next
occurrence, or leaves it where it is when the access is unknown.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

_MAX_RECORDED = 1 << 18
"""Longest cycle that is recorded: training that never steps must not fill memory with its history."""


class Use(enum.Enum):
    """Why shards are touched."""

    FORWARD = "forward"
    """A forward pass of the whole model begins; touches nothing."""
    GATHER = "gather"
    """A unit's parameters are gathered."""
    GRADIENT = "gradient"
    """Gradients of a part arrive."""
    STEP = "step"
    """The optimizer steps a sub-group."""


class Access(NamedTuple):
    """One event in the order: what is done, and to which unit, part or sub-group."""

    use: Use
    where: int


class AccessOrder:
    """A cyclic order of accesses with a cursor.

    Args:
        keys_of: the keys that an access touches; a key's distance is that of the nearest access touching it.
    """

    def __init__(self, keys_of: Callable[[Access], Iterable[Hashable]]) -> None:
        self._keys_of = keys_of
        self._accesses: tuple[Access, ...] = ()
        self._positions: dict[Hashable, list[int]] = {}
        self._recorded: list[Access] = []
        self._cursor = 0
        self.num_surprises = 0

    def __len__(self) -> int:
        return len(self._accesses)

    def adopt(self, accesses: Iterable[Access]) -> None:
        """Take ``accesses`` as the prediction for the cycle that starts now."""
        accesses = tuple(accesses)
        self._cursor = 0
        if accesses == self._accesses:
            return
        self._accesses = accesses
        self._positions = {}
        for position, access in enumerate(accesses):
            for key in {access, *self._keys_of(access)}:
                self._positions.setdefault(key, []).append(position)

    def end_cycle(self) -> None:
        """The cycle is complete: what was recorded predicts the next. An empty recording predicts nothing new."""
        recorded, self._recorded = self._recorded, []
        if recorded:
            self.adopt(recorded)
        else:
            self._cursor = 0

    def abandon_cycle(self) -> None:
        """Forget what was recorded in an interrupted cycle; the former prediction stands."""
        self._recorded = []
        self._cursor = 0

    def access(self, access: Access) -> None:
        """Record that ``access`` happens now, and move the cursor past its next occurrence."""
        if len(self._recorded) < _MAX_RECORDED:
            self._recorded.append(access)
        distance = self.distance(access)
        if distance != 0:
            self.num_surprises += 1
        if math.isfinite(distance):
            self._cursor = (self._cursor + int(distance) + 1) % max(len(self._accesses), 1)

    def distance(self, key: Hashable) -> float:
        """How many accesses lie before the next use of ``key``; infinite when none is known."""
        positions = self._positions.get(key)
        if not positions:
            return math.inf
        at = bisect_left(positions, self._cursor)
        if at < len(positions):
            return positions[at] - self._cursor
        return positions[0] + len(self._accesses) - self._cursor

    def upcoming(self) -> Iterator[Access]:
        """The accesses from the cursor on, through the end of the cycle and once around."""
        accesses, cursor = self._accesses, self._cursor
        yield from accesses[cursor:]
        yield from accesses[:cursor]
