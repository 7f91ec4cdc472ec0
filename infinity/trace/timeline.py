"""Questions about several tracks at the same instant, answered by cutting time where any of them changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


class Timeline:
    """Time between two instants, cut into pieces in which no track changes.

    Args:
        start_seconds: the first instant.
        end_seconds: the last.
        tracks: the intervals (start, end) in which each track is busy, in any order; they may overlap, and what lies
            outside of the two instants does not count.
    """

    def __init__(
        self, start_seconds: float, end_seconds: float, tracks: Mapping[str, Sequence[tuple[float, float]]]
    ) -> None:
        end_seconds = max(start_seconds, end_seconds)
        clipped = {
            name: np.clip(np.array(intervals, np.float64).reshape(-1, 2), start_seconds, end_seconds)
            for name, intervals in tracks.items()
        }
        edges = np.unique(np.concatenate([np.empty(0), *(each.ravel() for each in clipped.values())]))
        self._lengths = np.diff(edges)
        self._busy = {name: self._cover(edges, intervals) for name, intervals in clipped.items()}

    def busy(self, *names: str) -> Mask:
        """In which pieces at least one of the tracks is busy."""
        masks = [self._busy[name] for name in names if name in self._busy]
        return np.logical_or.reduce(masks) if masks else np.zeros(len(self._lengths), np.bool_)

    def seconds(self, pieces: Mask) -> float:
        """How long some of the pieces are, all together."""
        return float(self._lengths[pieces].sum())

    @staticmethod
    def _cover(edges: npt.NDArray[np.float64], intervals: npt.NDArray[np.float64]) -> Mask:
        """Which pieces between two edges lie in at least one of the intervals, whose ends are edges."""
        change = np.zeros(len(edges), np.int64)
        np.add.at(change, np.searchsorted(edges, intervals[:, 0]), 1)
        np.add.at(change, np.searchsorted(edges, intervals[:, 1]), -1)
        return np.asarray(np.cumsum(change)[:-1] > 0)


def exclusive_seconds(intervals: Sequence[tuple[float, float]]) -> list[float]:
    """Share out time among intervals: each instant goes to the one that has begun last of those that run then.

    So where work of one thread is nested, each gets what it did itself.
    """
    order = sorted(range(len(intervals)), key=lambda index: (intervals[index][0], -intervals[index][1]))
    seconds = [0.0] * len(intervals)
    running: list[int] = []
    now = 0.0

    def advance(to_seconds: float) -> None:
        nonlocal now
        while running:
            last = running[-1]
            end_seconds = min(intervals[last][1], to_seconds)
            if end_seconds > now:
                seconds[last] += end_seconds - now
                now = end_seconds
            if intervals[last][1] > to_seconds:
                break
            running.pop()
        now = to_seconds

    for index in order:
        if running:
            advance(intervals[index][0])
        now = intervals[index][0]
        running.append(index)
    if running:
        advance(max(end for _, end in intervals))
    return seconds


def busy_periods(transfers: Iterable[tuple[float, float, int, int]]) -> list[tuple[float, int, int]]:
    """Join transfers that overlap.

    Args:
        transfers: start and end in seconds, bytes read, bytes written; in any order.

    Returns:
        Of each period in which at least one was moving, in order: seconds, bytes read, bytes written.
    """
    periods: list[tuple[float, int, int]] = []
    begin = until = 0.0
    read_bytes = written_bytes = 0
    for start, end, num_read, num_written in sorted(transfers):
        if read_bytes + written_bytes and start > until:
            periods.append((until - begin, read_bytes, written_bytes))
            read_bytes = written_bytes = 0
        if not read_bytes + written_bytes:
            begin, until = start, end
        until = max(until, end)
        read_bytes += num_read
        written_bytes += num_written
    if read_bytes + written_bytes:
        periods.append((until - begin, read_bytes, written_bytes))
    return periods
