"""Who is needed last: the members of a changing set by distance, at a cost that does not grow with their number.

Measuring the distance of each of thousands of members takes milliseconds, too long for every eviction. But as training
goes on all distances shrink alike, so a sorted list stays sorted, but for two kinds of members:

* those that left and came back, because they were used: they are ranked apart, among themselves;
* those whose use went by without them: they are the first in the list, and their distance has grown; they join the
  others.

When more than a few are ranked apart, the list is sorted anew. So the ranking is exact while training repeats itself.
When the order changes, or a use that went by is soon followed by another of the same member, it may be wrong until the
next sort, which costs speed and never correctness. A set of a few members is always exact.

Rejected: a heap of absolute times of next use (the same cost, but every order would need a clock and a version).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Generic, TypeVar

T = TypeVar("T")

_MAX_APART = 32


class Ranking(Generic[T]):
    """A set of hashable members, iterated by distance; equals in an order that the calls so far determine.

    Args:
        distance: how far away the next use of a member is.
    """

    def __init__(self, distance: Callable[[T], float]) -> None:
        self._distance = distance
        self._sorted: deque[tuple[float, T]] = (
            deque()
        )  # by the distance at the time of sorting; some are members no more
        self._listed: dict[T, None] = {}  # the members whose place in the list still holds
        self._apart: dict[T, None] = {}  # the other members

    def __len__(self) -> int:
        return len(self._listed) + len(self._apart)

    def __contains__(self, member: T) -> bool:
        return member in self._listed or member in self._apart

    def add(self, member: T) -> None:
        """Let ``member``, which is not in the set, come in."""
        assert member not in self
        self._apart[member] = None

    def discard(self, member: T) -> None:
        """Let ``member`` leave, if it is in the set."""
        self._listed.pop(member, None)
        self._apart.pop(member, None)

    def latest_first(self) -> Iterator[tuple[float, T]]:
        """The members with their distances, the largest first. The set may not change during the iteration."""
        self._refresh()
        apart = sorted(((self._distance(member), member) for member in self._apart), key=itemgetter(0), reverse=True)
        listed = ((self._distance(member), member) for _, member in reversed(self._sorted) if member in self._listed)
        return heapq.merge(apart, listed, key=itemgetter(0), reverse=True)

    def _refresh(self) -> None:
        entries, listed = self._sorted, self._listed
        while entries and entries[-1][1] not in listed:
            entries.pop()
        while entries and (entries[0][1] not in listed or self._distance(entries[0][1]) > entries[0][0]):
            _, member = entries.popleft()
            if member in listed:
                del listed[member]
                self._apart[member] = None
        if len(self._apart) > _MAX_APART:
            listed.update(self._apart)
            self._apart.clear()
            self._sorted = deque(sorted(((self._distance(member), member) for member in listed), key=itemgetter(0)))
