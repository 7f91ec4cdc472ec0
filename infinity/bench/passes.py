"""``run_pass``: keep some requests in flight for a while, and note what they cost."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from infinity.console.interrupt import StopRequest
from infinity.io.tasks import gather_all


class InterruptedRunError(Exception):
    """A signal asked the run to end."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction of a pass.

    Attributes:
        depth: requests in flight.
        move: moves the next request, in any number at once; the bytes it moved.
    """

    depth: int
    move: Callable[[], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Limit:
    """When a pass ends: when a lane has begun ``max_requests``, or the time is up, but not before ``min_requests``.

    Attributes:
        max_requests: most requests of one lane.
        seconds: how long requests are begun.
        min_requests: fewest requests of each lane; by default as many as are in flight at once.
    """

    max_requests: int
    seconds: float = float("inf")
    min_requests: int = 0


@dataclass(slots=True)
class Sample:
    """What one pass moved and took.

    Attributes:
        lane_bytes: bytes moved by each lane.
        lane_requests: requests of each lane.
        seconds: from the first request to the end of the last, and of ``finish``.
        cpu_seconds: CPU time of the whole process meanwhile.
        latencies_seconds: of each request, from the call to its return.
    """

    lane_bytes: list[int]
    lane_requests: list[int]
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    latencies_seconds: list[float] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes moved by all lanes."""
        return sum(self.lane_bytes)

    @property
    def bytes_per_second(self) -> float:
        """Of all lanes together."""
        return self.num_bytes / self.seconds


class _Pass:
    def __init__(self, lanes: Sequence[Lane], limit: Limit, stop: StopRequest) -> None:
        self.sample = Sample([0] * len(lanes), [0] * len(lanes))
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
                sample.lane_requests[index] += 1
                began = time.perf_counter()
                num_bytes = await lane.move()
                sample.latencies_seconds.append(time.perf_counter() - began)
                sample.lane_bytes[index] += num_bytes
        except BaseException:
            self._failed = True
            raise

    def _may_begin(self, index: int) -> bool:
        if self._stop:
            raise InterruptedRunError
        num_begun = self.sample.lane_requests[index]
        if num_begun >= self._limit.max_requests:
            self._ended = True  # else the other lane would go on alone
        if self._failed or num_begun >= self._limit.max_requests:
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
