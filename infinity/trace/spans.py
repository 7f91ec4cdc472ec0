"""``Recorder``: who did what from when to when, step by step.

A *span* is one piece of work on one *track*: a unit's forward, a wait, a sub-group's arithmetic, the transfer of a
shard. Every thread reports its own, when they have ended; times are those of ``time.perf_counter``.

Guarantees
    * Safe from any thread, and cheap, about a microsecond for each: a span is one append to a ``deque``. There is no
      lock on that path: a thread that is interrupted while it holds one would keep the others waiting for a turn of
      the interpreter (5 ms), and one of them trains.
    * Bounded: at most ``max_spans`` of one step are kept, of the step that runs and of the last ``keep_steps`` complete
      ones. What is more is counted.
    * A span belongs to the step in which it ends. Those of ``span`` that are still open when a step ends are told to
      that step as well, so that its figures know of the work under way.

Rejected: keeping totals in place of spans. Overlap is a question about two tracks at the same instant, which totals
cannot answer, and the same spans are the trace that a person looks at.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol

TRAINING = "training"
"""Track of the training thread's work: spans ``forward`` and ``backward``; others do not count as computing."""

STALL = "stall"
"""Track of the training thread's waits: spans named by their cause."""

OPTIMIZER = "optimizer"
"""Track of the optimizer's arithmetic: spans ``step``."""

READ = "read"
"""Track of reads from NVMe: spans named by the kind of shard."""

WRITE = "write"
"""Track of writes to NVMe, likewise."""

COPY = "copy"
"""Track of copies between host and device: spans named by their route, one of the two below."""

HOST_TO_DEVICE = "host_to_device"
DEVICE_TO_HOST = "device_to_host"

COMMIT = "commit"
"""Track of commits: spans ``commit``, from when one is due until it is durable, and in them what it waits for."""

COUNTER = "counter"
"""Not a track: a value at one instant, under its name."""

_MAX_SPANS = 100_000


class Span(NamedTuple):
    """One piece of work.

    Attributes:
        track: where it is shown, and what its time counts as: one of the names above, or another, which counts as
            nothing.
        name: what it was.
        start_seconds: when it began (``time.perf_counter``).
        end_seconds: when it ended.
        args: what else is known, as JSON has it. Understood are ``unit`` (name), ``part`` (number), ``num_bytes``, and
            for a copy ``kind`` (of shard).
    """

    track: str
    name: str
    start_seconds: float
    end_seconds: float
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What was recorded of one step.

    Attributes:
        step: number of the step, from 1.
        start_seconds: the end of the step before.
        end_seconds: its own end.
        spans: those that ended in it, in the order of their end or nearly so. They may have begun before it did.
        unfinished: those that were open when it ended, as if they had ended then. The next step has them whole.
        num_dropped: how many more there were.
    """

    step: int
    start_seconds: float
    end_seconds: float
    spans: Sequence[Span]
    unfinished: Sequence[Span] = ()
    num_dropped: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds


class TransferObserver(Protocol):
    """Told of each transfer between tiers that went well; ``ShardSpans`` is one."""

    def __call__(
        self,
        route: str,
        shard: tuple[int, int, str],
        start_seconds: float,
        end_seconds: float,
        *,
        num_bytes: int,
        queued_seconds: float,
    ) -> None:
        """A shard (unit, part, kind) was moved; before that it stood in line for ``queued_seconds``.

        The route is ``READ``, ``WRITE``, ``HOST_TO_DEVICE`` or ``DEVICE_TO_HOST``.
        """


class Recorder:
    """Collects the spans of all threads. Safe from any thread; ``end_step`` belongs to one.

    Args:
        max_spans: how many to keep of one step.
        keep_steps: how many complete steps to keep; may be set at any time.
        clock: the time in seconds.
    """

    def __init__(
        self, *, max_spans: int = _MAX_SPANS, keep_steps: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.keep_steps = keep_steps
        self._max_spans = max_spans
        self._clock = clock
        self._fresh: deque[Span] = deque()
        self._open: dict[int, _Open] = {}
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._steps: deque[StepTrace] = deque()
        self._num_steps = 0
        self._mark = clock()

    def record(self, track: str, name: str, start_seconds: float, end_seconds: float, **args: Any) -> None:
        """Note a span that has ended."""
        self._add(Span(track, name, start_seconds, end_seconds, args))

    def span(self, track: str, name: str, **args: Any) -> AbstractContextManager[None]:
        """A context manager: what it encloses is one span, also where it raises."""
        return _Open(self, track, name, args)

    def count(self, name: str, value: float) -> None:
        """Note a value as it is now."""
        now = self._clock()
        self.record(COUNTER, name, now, now, value=value)

    def start(self) -> None:
        """Begin the first step now, and forget what was recorded before."""
        self._take()
        self._mark = self._clock()

    def end_step(self) -> StepTrace:
        """End the step that runs and begin the next.

        Returns:
            What was recorded of it.
        """
        now = self._clock()
        unfinished = [each.until(now) for each in list(self._open.values())]
        spans, num_dropped = self._take()
        self._num_steps += 1
        trace = StepTrace(self._num_steps, self._mark, now, spans, unfinished, num_dropped)
        self._mark = now
        self._steps.append(trace)
        while len(self._steps) > self.keep_steps:
            self._steps.popleft()
        return trace

    @property
    def steps(self) -> tuple[StepTrace, ...]:
        """The last complete steps, the latest last."""
        return tuple(self._steps)

    def _add(self, span: Span) -> None:
        if len(self._fresh) < self._max_spans:
            self._fresh.append(span)
        else:
            with self._lock:
                self._num_dropped += 1

    def _take(self) -> tuple[list[Span], int]:
        """What has come up to now: others go on recording meanwhile."""
        spans = [self._fresh.popleft() for _ in range(len(self._fresh))]
        with self._lock:
            num_dropped, self._num_dropped = self._num_dropped, 0
        return spans, num_dropped


class _Open(AbstractContextManager[None]):
    """A span under way."""

    __slots__ = ("_args", "_name", "_recorder", "_start_seconds", "_track")

    def __init__(self, recorder: Recorder, track: str, name: str, args: dict[str, Any]) -> None:
        self._recorder = recorder
        self._track = track
        self._name = name
        self._args = args
        self._start_seconds = 0.0

    def __enter__(self) -> None:
        self._start_seconds = self._recorder._clock()
        self._recorder._open[id(self)] = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end_seconds = self._recorder._clock()
        del self._recorder._open[id(self)]
        self._recorder._add(self.until(end_seconds))

    def until(self, now: float) -> Span:
        """What it is so far."""
        return Span(self._track, self._name, self._start_seconds, now, self._args)


class ShardSpans:
    """Records the transfers of shards, and how what the tiers hold changes over them.

    Args:
        recorder: where.
        unit_names: the units by number.
    """

    def __init__(self, recorder: Recorder, unit_names: Sequence[str]) -> None:
        self._recorder = recorder
        self._unit_names = unit_names
        self._gauges: dict[str, Callable[[], float]] = {}
        self._levels: dict[str, float] = {}

    def add_gauge(self, name: str, gauge: Callable[[], float]) -> None:
        """From now on note what ``gauge`` says after each transfer, if it has changed; called where these are told."""
        self._gauges[name] = gauge

    def __call__(
        self,
        route: str,
        shard: tuple[int, int, str],
        start_seconds: float,
        end_seconds: float,
        *,
        num_bytes: int,
        queued_seconds: float,
    ) -> None:
        """As ``TransferObserver`` says."""
        unit, part, kind = shard
        args = {"unit": self._unit_names[unit], "part": part, "num_bytes": num_bytes, "queued_seconds": queued_seconds}
        if route in (READ, WRITE):
            self._recorder.record(route, kind, start_seconds, end_seconds, **args)
        else:
            self._recorder.record(COPY, route, start_seconds, end_seconds, kind=kind, **args)
        for name, gauge in self._gauges.items():
            if (level := gauge()) != self._levels.get(name):
                self._levels[name] = level
                self._recorder.count(name, level)
