"""``run_pass``: keep some requests in flight for a while, and note what they cost."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from infinity.bench.results import Run
from infinity.console.interrupt import StopRequest
from infinity.io.completion import call_in_thread
from infinity.io.latency import LatencyHistogram
from infinity.io.tasks import gather_all


class InterruptedRunError(Exception):
    """A signal asked the run to end."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction of a pass, on one device.

    Attributes:
        direction: its name; lanes of one direction are counted together.
        depth: requests in flight.
        max_requests: most of them in one pass.
        move: moves the next request, in any number at once; the bytes it moved.
    """

    direction: str
    depth: int
    max_requests: int
    move: Callable[[], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Limit:
    """When a pass ends: when a lane is through, or the time is up, but not before each lane has begun so many requests.

    Attributes:
        seconds: how long requests are begun.
        min_requests: fewest requests of each lane; by default as many as are in flight at once.
        together: a lane that is through ends the pass, since the others would go on alone; else each goes to its end.
    """

    seconds: float = float("inf")
    min_requests: int = 0
    together: bool = True


ALL = Limit(together=False)
"""Every lane to its end."""


@dataclass(slots=True)
class Sample:
    """What one pass moved and took.

    Attributes:
        direction_bytes: bytes moved, by direction.
        num_requests: of each lane.
        seconds: from the first request to the end of the last, and of ``finish``.
        cpu_seconds: CPU time of the whole process meanwhile.
        latency: how long the pieces took that the bytes went in: a call or a copy.
    """

    direction_bytes: dict[str, int] = field(default_factory=dict)
    num_requests: list[int] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)

    def as_run(self) -> Run:
        """The figures that are kept."""
        num_bytes = sum(self.direction_bytes.values())
        each = self.direction_bytes if len(self.direction_bytes) > 1 else {}
        return Run(num_bytes, self.seconds, self.cpu_seconds, dict(each))


class _Pass:
    def __init__(self, lanes: Sequence[Lane], limit: Limit, stop: StopRequest) -> None:
        self.sample = Sample({lane.direction: 0 for lane in lanes}, [0] * len(lanes))
        self._lanes = lanes
        self._limit = limit
        self._stop = stop
        self._deadline = time.perf_counter() + limit.seconds
        self._ended = False
        self._failed = False

    async def work(self, index: int) -> None:
        """One request after the other, until the pass ends."""
        lane, sample = self._lanes[index], self.sample
        try:
            while self._may_begin(index):
                sample.num_requests[index] += 1
                began = time.perf_counter()
                num_bytes = await lane.move()
                sample.latency.add(time.perf_counter() - began)
                sample.direction_bytes[lane.direction] += num_bytes
        except BaseException:
            self._failed = True
            raise

    def _may_begin(self, index: int) -> bool:
        if self._stop:
            raise InterruptedRunError
        num_begun, most = self.sample.num_requests[index], self._lanes[index].max_requests
        if num_begun >= most:
            self._ended |= self._limit.together
        if self._failed or num_begun >= most:
            return False
        if num_begun < max(self._limit.min_requests, self._lanes[index].depth):
            return True
        return not self._ended and time.perf_counter() < self._deadline


async def run_pass(
    lanes: Sequence[Lane], limit: Limit, stop: StopRequest, finish: Callable[[], Awaitable[None]] | None = None
) -> Sample:
    """Run all lanes side by side until the limit.

    Args:
        lanes: what moves.
        limit: when to end.
        stop: ends the pass after the requests in flight.
        finish: awaited once all requests have ended, as part of the pass.

    Returns:
        What was moved; the latencies are those of requests.

    Raises:
        InterruptedRunError: ``stop`` was asked; nothing is in flight.
        StorageError: a request failed; nothing is in flight.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    current = _Pass(lanes, limit, stop)
    await gather_all(current.work(index) for index, lane in enumerate(lanes) for _ in range(lane.depth))
    if finish is not None:
        await finish()
    sample = current.sample
    sample.seconds = time.perf_counter() - began
    sample.cpu_seconds = time.process_time() - cpu_began
    return sample


async def run_work(name: str, start: Callable[[], Callable[[], int]], seconds: float, stop: StopRequest) -> Sample:
    """Repeat a computation on a thread of its own, as the engine has one for each kind of work.

    Args:
        name: of the direction.
        start: makes what does one piece and returns the bytes it went through. That is called once before the clock
            runs: the thread's pool of helpers is made then.
        seconds: how long pieces are begun; one is done in any case.
        stop: ends the pass after the piece in progress.

    Raises:
        InterruptedRunError: ``stop`` was asked.
    """
    sample = Sample({name: 0}, [0])

    def repeat() -> None:
        work = start()
        work()
        began, cpu_began = time.perf_counter(), time.process_time()
        now = began
        while not stop and (now < began + seconds or not sample.num_requests[0]):
            sample.direction_bytes[name] += work()
            sample.num_requests[0] += 1
            before, now = now, time.perf_counter()
            sample.latency.add(now - before)
        sample.seconds = now - began
        sample.cpu_seconds = time.process_time() - cpu_began

    await call_in_thread(repeat)
    if stop:
        raise InterruptedRunError
    return sample
