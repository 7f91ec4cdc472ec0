"""The order in which training touches shards: recorded over one cycle, then known for the next.

Training repeats itself, so the accesses of the last complete cycle (one optimizer step to the next) predict this one.
``AccessOrder`` answers the two questions that follow: what comes next (to fetch it) and how far away is the next use of
this key (to evict what is farthest: Belady's rule, IBM Systems Journal 5(2), 1966).

A wrong prediction costs speed and never correctness: an access that was not expected moves the cursor to its next
occurrence, or leaves it where it is when the access is unknown.

Optimizer steps run beside training at a pace of their own: under backward, or under the next forward, as fast as the
disk brings what they need. Their place among training's accesses varies from cycle to cycle, so they have no place in
the order. A cycle of training's accesses is a lap of a clock instead, and what recurs once per lap is expected one lap
after it last happened (``Recurrence``).
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections import OrderedDict
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


class Access(NamedTuple):
    """One event in the order: what is done, and to which unit or part."""

    use: Use
    where: int


class AccessOrder:
    """A cyclic order of accesses with a cursor.

    Args:
        keys_of: the keys that an access touches; a key's distance is that of the nearest access touching it.

    Attributes:
        now: the clock: how far training has come, in accesses of complete laps and of this one.
        num_surprises: how many accesses were not the next ones.
    """

    def __init__(self, keys_of: Callable[[Access], Iterable[Hashable]]) -> None:
        self._keys_of = keys_of
        self._accesses: tuple[Access, ...] = ()
        self._positions: dict[Hashable, list[int]] = {}
        self._recorded: list[Access] = []
        self._cursor = 0
        self.now = 0
        self.num_surprises = 0

    def __len__(self) -> int:
        return len(self._accesses)

    @property
    def num_left(self) -> int:
        """How many accesses are expected in the rest of this cycle; none once it has come round to its start."""
        return len(self._accesses) - self._cursor if self._cursor or not self._recorded else 0

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
        self.now += -self._cursor % max(len(self._accesses), 1)
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
            self.now += int(distance) + 1
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


class Reversal:
    """What is used in the reverse of the order in which it came, each right after an access that is known then.

    Args:
        order: whose accesses and clock.
    """

    _TICK = 1e-6

    def __init__(self, order: AccessOrder) -> None:
        self._order = order
        self._due: dict[Hashable, float] = {}

    def add(self, what: Hashable, after: Hashable) -> None:
        """It has come, and is used after the next access that touches ``after``; of several the latest goes first."""
        self._due[what] = self._order.now + self._order.distance(after) + 1 - self._TICK * len(self._due)

    def discard(self, what: Hashable) -> None:
        """It is not used any more; harmless when it is not known."""
        self._due.pop(what, None)

    def distance(self, what: Hashable) -> float:
        """How far away it is, in accesses; 0 if it is late, infinite if nothing is known of it."""
        due = self._due.get(what)
        return math.inf if due is None else max(due - self._order.now, 0.0)


class Recurrence:
    """What happens once per lap of an order's clock, beside the order: when each is due, and who is due next.

    Args:
        order: whose clock it follows.
        expected: what is expected at first, with its time in the lap, soonest first.
    """

    _TICK = 1e-6

    def __init__(self, order: AccessOrder, expected: Iterable[tuple[int, float]]) -> None:
        self._order = order
        self._due: OrderedDict[int, float] = OrderedDict(expected)
        self._last = 0.0

    def happened(self, what: int) -> None:
        """It happened now, and is due again in a lap: after all that happened before it, at the same time too."""
        self._last = max(float(self._order.now), self._last + self._TICK)
        self._due[what] = self._last + len(self._order)
        self._due.move_to_end(what)

    def end_lap(self) -> None:
        """A lap is over: what was left out of it is not expected in the next, until it happens again."""
        half_a_lap_ago = self._order.now - len(self._order) / 2
        for what in [what for what, due in self._due.items() if due < half_a_lap_ago]:
            del self._due[what]

    def distance(self, what: int) -> float:
        """How far away it is, in accesses; 0 if it is late, infinite if nothing is known of it."""
        due = self._due.get(what)
        return math.inf if due is None else max(due - self._order.now, 0.0)

    def upcoming(self) -> Iterator[int]:
        """All of them, in the order in which they are expected. The next may happen while this is iterated."""
        return iter(list(self._due))
