"""The least that has to be moved: what no policy, however clever, can undercut on a given order of uses.

Who keeps a shard in memory from one use to the next saves reading it. So the least that must be read is what is left
when the most is kept: intervals of time, each taking its shard's bytes of the memory. To keep the most, go through
time, and where too much is kept, give up what is needed last: Belady's rule, for bytes. With shards of one size, and
memory for a whole number of them, it is exact (a shard is kept whole or not at all); with mixed sizes a shard may be
kept in part, which no real policy can do, so the result is a lower bound.

The least that must be written follows from the same argument on other intervals: a version is not written at all if
it is kept from where it was made to its last use.

Each of the two is attained by some policy, not always by the same one: together they are a lower bound of what is
moved. Attaining both at once where a dirty shard is used several times before it changes is NP-hard (Beckmann et al.,
writeback-aware caching, 2020); training's orders are not of the hard kind, and the bound is within a few percent.

Order is all that counts here: transfers take no time, and shards that are used together are used one after the other.
What it costs to have them in memory before they are needed, and several at once, comes on top.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import NamedTuple

_NUM_CYCLES = 5
_NUM_FIRST = 2


class Touch(NamedTuple):
    """One use of one shard.

    Attributes:
        key: which.
        num_bytes: its size, the same in each use.
        reads: whether the bytes that it has are needed.
        writes: whether it has other bytes afterwards. A shard that is neither read nor written is deleted.
        passes: whether its bytes may go past the memory, as where they are read straight into a gathered unit.
    """

    key: Hashable
    num_bytes: int
    reads: bool
    writes: bool
    passes: bool = False


class Moved(NamedTuple):
    """Bytes per cycle between memory and the tier below."""

    read_bytes: float
    written_bytes: float


def least_moved(trace: Sequence[Touch], budget_bytes: int) -> Moved:
    """The least that one cycle must read, and the least that it must write, once training repeats itself.

    Takes about 0.1 s for 5000 touches.

    Args:
        trace: one cycle, which is repeated for ever.
        budget_bytes: the memory.
    """
    read = least_read(trace, budget_bytes, _NUM_CYCLES)[_NUM_FIRST:]
    written = least_written(trace, budget_bytes, _NUM_CYCLES)[_NUM_FIRST:]
    return Moved(sum(read) / len(read), sum(written) / len(written))


def least_read(trace: Sequence[Touch], budget_bytes: int, num_cycles: int) -> list[float]:
    """The least that the first cycles must read again, after an empty start: bytes given up, by cycle.

    Args:
        trace: one cycle.
        budget_bytes: the memory.
        num_cycles: how many of them.
    """
    spans = [0] * len(trace)
    for at, (next_at, distance) in _next_uses(trace).items():
        if (trace[at].reads or trace[at].writes) and trace[next_at].reads:
            spans[at] = distance
    return _give_up(trace, spans, budget_bytes, num_cycles)


def least_written(trace: Sequence[Touch], budget_bytes: int, num_cycles: int) -> list[float]:
    """The least that must be written for the sake of the first cycles: bytes of versions given up, by cycle.

    Args:
        trace: one cycle.
        budget_bytes: the memory.
        num_cycles: how many of them.
    """
    spans = [0] * len(trace)
    next_uses = _next_uses(trace)
    for start, touch in enumerate(trace):
        if touch.writes:
            at, distance = start, 0
            while True:
                at, step = next_uses[at]
                distance += step
                if not trace[at].reads:
                    break
                spans[start] = distance
                if trace[at].writes:
                    break
    return _give_up(trace, spans, budget_bytes, num_cycles)


def _next_uses(trace: Sequence[Touch]) -> dict[int, tuple[int, int]]:
    """For each touch the next of the same shard, around the cycle, and how far away it is."""
    places: dict[Hashable, list[int]] = {}
    for at, touch in enumerate(trace):
        places.setdefault(touch.key, []).append(at)
    found = {}
    for uses in places.values():
        for at, following in zip(uses, [*uses[1:], uses[0] + len(trace)], strict=True):
            found[at] = following % len(trace), following - at
    return found


def _give_up(trace: Sequence[Touch], spans: Sequence[int], budget_bytes: int, num_cycles: int) -> list[float]:
    """Keep bytes from each touch on for its span, as many as fit; how many are given up, by cycle.

    A touch whose span is 0 leaves nothing worth keeping. What is kept is a heap of numbers that stand for an end and a
    key, the last end first; numbers whose key has ended otherwise stay in it until they come up.
    """
    numbers = {key: number for number, key in enumerate(dict.fromkeys(touch.key for touch in trace))}
    num_keys, length = len(numbers), len(trace)
    steps = [
        (at, numbers[t.key], 0 if t.passes or not (t.reads or t.writes) else t.num_bytes, t.num_bytes, span)
        for at, (t, span) in enumerate(zip(trace, spans, strict=True))
    ]
    kept, until = [0] * num_keys, [-1] * num_keys
    latest: list[int] = []
    kept_bytes = 0
    given_up = [0.0] * num_cycles

    def keep_only(limit_bytes: int) -> int:
        nonlocal kept_bytes
        lost = 0
        while kept_bytes > limit_bytes:
            end, number = divmod(-latest[0], num_keys)
            if until[number] == end:
                share = min(kept[number], kept_bytes - limit_bytes)
                kept[number] -= share
                kept_bytes -= share
                lost += share
                if kept[number]:
                    break
            heapq.heappop(latest)
        return lost

    for cycle in range(num_cycles):
        lost = 0
        for at, number, needed_bytes, num_bytes, span in steps:
            now = cycle * length + at
            if until[number] <= now:
                kept_bytes -= kept[number]
                kept[number] = 0
            if kept_bytes > budget_bytes - needed_bytes and not kept[number]:
                lost += keep_only(max(budget_bytes - needed_bytes, 0))
            if span:
                kept[number], until[number] = num_bytes, now + span
                kept_bytes += num_bytes
                heapq.heappush(latest, -(until[number] * num_keys + number))
                if kept_bytes > budget_bytes:  # where the bytes went past it, or are more than it holds
                    lost += keep_only(budget_bytes)
        given_up[cycle] = float(lost)
    return given_up
