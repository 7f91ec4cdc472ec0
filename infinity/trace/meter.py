"""``StepMeter``: the figures of a step, out of its spans.

What counts as what: the training thread computes while a span ``forward`` or ``backward`` runs and none of ``STALL``;
the optimizer while one of ``OPTIMIZER`` does; NVMe is busy while one of ``READ`` or ``WRITE`` runs, which is from the
first block taken to the last one moved. What else the training thread does (a loss outside of the model, a loader) is
neither computing nor waiting. On an accelerator, whose kernels run on after the call that began them, forward and
backward are the time that the training thread gave to them.

The best bandwidth is a lower bound by construction. It is taken over whole periods between two pauses of a route,
joined until they hold 64 MiB, so that no transfer is cut and no byte credited to a moment in which it may not have
moved. A rate from a share of a transfer, or from a short burst, could exceed what the device ever does. For both
directions at once, only windows count in which each moved a quarter of the bytes: a window of little else than writes
says nothing of the mix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from infinity.trace.spans import COMMIT, COPY, COUNTER, OPTIMIZER, READ, STALL, TRAINING, WRITE, Span, StepTrace
from infinity.trace.stats import Bandwidths, RouteStats, StepStats, UnitStats
from infinity.trace.timeline import Timeline, busy_periods, exclusive_seconds

NVME_READ = "nvme_read"
NVME_WRITE = "nvme_write"
_ROUTES = {READ: NVME_READ, WRITE: NVME_WRITE}
_BOTH = "both"
_COMPUTING = ("forward", "backward")
_WINDOW_BYTES = 64 << 20
_SMALLEST_SHARE = 0.25
_GB = 1e9


@dataclass(slots=True)
class _Best:
    """The best bandwidth of a route so far, and the window that is not full yet."""

    smallest_share: float = 0.0
    bytes_per_second: float = 0.0
    seconds: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0

    def add(self, periods: Iterable[tuple[float, int, int]]) -> None:
        """Take in the busy periods of a step."""
        for seconds, read_bytes, written_bytes in periods:
            self.seconds += seconds
            self.read_bytes += read_bytes
            self.written_bytes += written_bytes
            total_bytes = self.read_bytes + self.written_bytes
            if total_bytes >= _WINDOW_BYTES:
                if min(self.read_bytes, self.written_bytes) >= self.smallest_share * total_bytes and self.seconds > 0:
                    self.bytes_per_second = max(self.bytes_per_second, total_bytes / self.seconds)
                self.seconds, self.read_bytes, self.written_bytes = 0.0, 0, 0


@dataclass(slots=True)
class _Unit:
    """The figures of one unit while they add up."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stalls: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moved_bytes: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))

    def stats(self) -> UnitStats:
        """Frozen."""
        return UnitStats(
            forward_seconds=self.seconds["forward"],
            backward_seconds=self.seconds["backward"],
            optimizer_seconds=self.seconds[OPTIMIZER],
            stalls=dict(self.stalls),
            moved_bytes={route: dict(kinds) for route, kinds in self.moved_bytes.items()},
        )


class _Step:
    """The spans of one step, sorted by what is asked of them; of time, what lies in the step.

    Attributes:
        busy: intervals by track, those of transfers by route.
        transfers: those that ended, by route: start and end, bytes read, bytes written (or copied).
        stalls: seconds by cause.
        units: figures by name.
        commit_bytes: what commits have written that ended.
    """

    def __init__(self, trace: StepTrace) -> None:
        self.busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.transfers: dict[str, list[tuple[float, float, int, int]]] = {}
        self.stalls: dict[str, float] = defaultdict(float)
        self.units: dict[str, _Unit] = defaultdict(_Unit)
        begin = trace.start_seconds
        on_thread: list[Span] = []
        for span in [*trace.spans, *trace.unfinished]:
            track, name, start, end, args = span
            if track == COUNTER:
                continue
            if track != TRAINING or name in _COMPUTING:
                self.busy[name if track == COPY else _ROUTES.get(track, track)].append((start, end))
            if track in (TRAINING, STALL):
                on_thread.append(span)
            elif track == OPTIMIZER and "unit" in args:
                self.units[args["unit"]].seconds[OPTIMIZER] += max(0.0, end - max(start, begin))
        self.commit_bytes = sum(span.args.get("num_bytes", 0) for span in trace.spans if span.track == COMMIT)
        for track, name, start, end, args in trace.spans:
            if (route := name if track == COPY else _ROUTES.get(track)) is not None:
                num_bytes = args["num_bytes"]
                moved = (num_bytes, 0) if track == READ else (0, num_bytes)
                self.transfers.setdefault(route, []).append((start, end, *moved))
                if "unit" in args:
                    self.units[args["unit"]].moved_bytes[route][args.get("kind", name)] += num_bytes
        self._share_out(begin, on_thread)

    def _share_out(self, begin: float, on_thread: Sequence[Span]) -> None:
        """Give each moment of the training thread to the innermost of what it did then."""
        inside = [(max(span.start_seconds, begin), span.end_seconds) for span in on_thread]
        for span, seconds in zip(on_thread, exclusive_seconds(inside), strict=True):
            if span.track == STALL:
                self.stalls[span.name] += seconds
            if "unit" in span.args and (span.track == STALL or span.name in _COMPUTING):
                unit = self.units[span.args["unit"]]
                (unit.stalls if span.track == STALL else unit.seconds)[span.name] += seconds


class StepMeter:
    """Makes ``StepStats``, and remembers the best bandwidth that it has seen. Belongs to one thread.

    Args:
        bandwidths: what to measure NVMe against; what is not given there is the best seen so far.
    """

    def __init__(self, bandwidths: Bandwidths | None = None) -> None:
        self._bandwidths = bandwidths or Bandwidths()
        self._best: dict[str, _Best] = {_BOTH: _Best(smallest_share=_SMALLEST_SHARE)}

    def step_stats(
        self,
        trace: StepTrace,
        *,
        stall_seconds: float,
        optimizer_seconds: float,
        nvme_read_bytes: int,
        nvme_written_bytes: int,
        num_gathers: int,
        num_stalls: int,
    ) -> StepStats:
        """The figures of a step.

        Args:
            trace: what was recorded of it; steps come in their order.
            stall_seconds: these and those below are the caller's own counts, as ``StepStats`` says.
            optimizer_seconds: a count.
            nvme_read_bytes: a count.
            nvme_written_bytes: a count.
            num_gathers: a count.
            num_stalls: a count.
        """
        step = _Step(trace)
        timeline = Timeline(trace.start_seconds, trace.end_seconds, step.busy)
        computing = timeline.busy(TRAINING) & ~timeline.busy(STALL) | timeline.busy(OPTIMIZER)
        compute_seconds = timeline.seconds(computing)
        moving = timeline.busy(NVME_READ, NVME_WRITE)
        moving_seconds = timeline.seconds(moving)
        routes = self._routes(step, timeline)
        roofline_seconds = self._roofline_seconds(compute_seconds, nvme_read_bytes, nvme_written_bytes)
        return StepStats(
            step=trace.step,
            seconds=trace.seconds,
            stall_seconds=stall_seconds,
            optimizer_seconds=optimizer_seconds,
            nvme_read_bytes=nvme_read_bytes,
            nvme_written_bytes=nvme_written_bytes,
            num_gathers=num_gathers,
            num_stalls=num_stalls,
            compute_seconds=compute_seconds,
            stalls=dict(step.stalls),
            overlap_share=timeline.seconds(moving & computing) / moving_seconds if moving_seconds else 1.0,
            roofline_seconds=roofline_seconds,
            achieved=min(1.0, roofline_seconds / trace.seconds) if trace.seconds > 0 else 1.0,
            routes=routes,
            units={name: unit.stats() for name, unit in step.units.items()},
            num_dropped_spans=trace.num_dropped,
            commit_seconds=timeline.seconds(timeline.busy(COMMIT)),
            commit_bytes=step.commit_bytes,
        )

    def _routes(self, step: _Step, timeline: Timeline) -> dict[str, RouteStats]:
        """What each route moved; and see whether it was faster than ever."""
        transfers = step.transfers
        self._best[_BOTH].add(busy_periods([*transfers.get(NVME_READ, ()), *transfers.get(NVME_WRITE, ())]))
        routes = {}
        for route in sorted(transfers, key=lambda name: (name not in _ROUTES.values(), name)):
            best = self._best.setdefault(route, _Best())
            best.add(busy_periods(transfers[route]))
            moved_bytes = sum(num_read + num_written for *_, num_read, num_written in transfers[route])
            busy_seconds = timeline.seconds(timeline.busy(route))
            routes[route] = RouteStats(
                moved_bytes=moved_bytes,
                busy_seconds=busy_seconds,
                gb_s=moved_bytes / busy_seconds / _GB if busy_seconds else 0.0,
                best_gb_s=best.bytes_per_second / _GB,
            )
        return routes

    def _roofline_seconds(self, compute_seconds: float, read_bytes: int, written_bytes: int) -> float:
        given = self._bandwidths
        return max(
            compute_seconds,
            self._least_seconds(read_bytes, given.read, NVME_READ),
            self._least_seconds(written_bytes, given.write, NVME_WRITE),
            self._least_seconds(read_bytes + written_bytes, given.both, _BOTH),
        )

    def _least_seconds(self, num_bytes: int, given_gb_s: float | None, route: str) -> float:
        """How long it takes to move some bytes; 0 where the bandwidth is not known."""
        best = self._best[route].bytes_per_second if route in self._best else 0.0
        bytes_per_second = given_gb_s * _GB if given_gb_s is not None else best
        return num_bytes / bytes_per_second if bytes_per_second > 0 else 0.0
