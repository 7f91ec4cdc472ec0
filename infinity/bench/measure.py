"""What is done with open tiers: write and check everything, then time every route at every point, several times.

What makes the figures worth trusting
    * The bytes are right. At each point the files get new contents, which are read back through the same backend and
      compared, every byte; and once more after all timed writes. A lost, stale or misplaced block is an error.
    * The bytes reached the device, as far as it says so: a pass that writes ends with ``fdatasync``, in the measured
      time. Where I/O goes through the page cache, the cache is dropped before each pass that reads, and the report says
      that it is in the way.
    * Blocks are first written before the clock runs, since first writes into fresh extents are slower than all later
      ones, and a round of requests on every route warms up what is left.
    * Points and routes are measured in turn, then all again: a disk whose pace drifts by the minute drifts for all.
    * The time that one pass may take follows from the whole budget; each moves at least one round of requests.

Rejected: the files' size alone to end a pass (a slow disk takes hours, a fast one too little to measure); timing reads
together with their comparison (that measures the comparison); a fresh file for each point (measures allocation).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch

from infinity.bench.passes import Limit, Sample, run_pass
from infinity.bench.pattern import Pattern
from infinity.bench.progress import Display
from infinity.bench.report import Result
from infinity.bench.routes import ROUTES, Route, Traffic
from infinity.bench.settings import BenchSettings, Point
from infinity.bench.tiers import Request, Tiers
from infinity.bench.volumes import Volume, drop_page_cache, still_cached, sync
from infinity.console.formats import format_bytes
from infinity.console.interrupt import StopRequest
from infinity.io.completion import call_in_thread

_FIRST_WRITE_FRACTION = 1 / 16
"""Of the time budget: what is not written by then is left out, unless ``--size`` was given."""


class Measurement:
    """One run over open tiers.

    Args:
        settings: what to measure.
        tiers: the tiers.
        display: told what goes on.
        stop: ends the run after the requests in flight.
        began: ``time.perf_counter()`` when the time budget began to run.

    Attributes:
        warnings: what was found that may make the figures misleading.
    """

    def __init__(
        self, settings: BenchSettings, tiers: Tiers, display: Display, stop: StopRequest, *, began: float
    ) -> None:
        self.warnings: list[str] = []
        self._settings = settings
        self._tiers = tiers
        self._display = display
        self._stop = stop
        self._began = began
        self._pattern = Pattern(0)
        self._check_seconds = 0.0
        self._verified: set[Point] = set()

    async def run(self) -> list[Result]:
        """Write, check and measure.

        Returns:
            The results in the order of routes and points.

        Raises:
            InterruptedRunError: ``stop`` was asked.
            MismatchError: what came back is not what was written.
            StorageError: a transfer failed.
        """
        points, repeats = self._settings.points, self._settings.num_repeats
        self._display.stage("writing and checking")
        self._display.expect(len(points) + (1 + repeats) * len(points) * len(ROUTES) + 1)
        await self._write_first()
        traffics = [Traffic(self._tiers, point) for point in points]
        for generation, traffic in enumerate(traffics, start=1):
            self._display.step(f"checking {traffic.point}")
            await self._rewrite(generation, traffic)
            await self._check(traffic)
        self._display.stage(f"measuring {len(ROUTES)} routes at {len(points)} points, up to {repeats} times each")
        await self._round(traffics, 0.0, name="warm-up")
        samples = await self._repeat(traffics)
        self._display.stage("checking what the timed passes wrote")
        await self._check(traffics[-1])
        return [
            self._result(route, traffic, samples[route, index])
            for route in ROUTES
            for index, traffic in enumerate(traffics)
        ]

    async def _write_first(self) -> None:
        """Make the files' blocks, and find out how much this disk can write in a fraction of the time."""
        traffic = Traffic(self._tiers, self._settings.points[0])
        num_requests, num_volumes = len(traffic.requests), len(self._tiers.volumes)
        block_bytes = traffic.point.block_bytes
        least_bytes = max(point.round_bytes for point in self._settings.points)
        limit = Limit(num_requests)
        if self._settings.size is None:
            seconds = self._settings.budget_seconds * _FIRST_WRITE_FRACTION
            limit = Limit(num_requests, seconds, -(-least_bytes // block_bytes) * num_volumes)
        await self._tiers.fill_source(self._pattern)
        sample = await run_pass([traffic.once(Request.write)], limit, self._stop, self._sync)
        [num_written] = sample.lane_requests
        if num_written < num_requests:
            self._tiers.share_bytes = num_written // num_volumes * block_bytes
            self._display.say(
                f"{format_bytes(self._tiers.size_bytes)} are measured with: more would take too long to write here "
                "(--size decides otherwise)"
            )
        for volume in self._tiers.volumes:
            if not volume.backend.direct:
                await self._warn_of_page_cache(volume)

    async def _rewrite(self, generation: int, traffic: Traffic) -> None:
        self._pattern = Pattern(generation)
        await self._tiers.fill_source(self._pattern)
        await run_pass([traffic.once(Request.write)], Limit(len(traffic.requests)), self._stop, self._sync)

    async def _check(self, traffic: Traffic) -> None:
        """Read everything back and compare; and a round of it by way of the device."""
        began = time.perf_counter()
        await self._drop_page_cache()

        async def compare(request: Request, place: torch.Tensor, source: str) -> None:
            got, volume = place.numpy(), request.volume
            check = functools.partial(self._pattern.check, path=volume.file.path, source=source)
            await call_in_thread(lambda: check(got, volume.index, request.offset))

        lane = traffic.once(lambda request: traffic.check_file(request, functools.partial(compare, request)))
        await run_pass([lane], Limit(len(traffic.requests)), self._stop)
        lane = traffic.once(lambda request: traffic.check_device(request, functools.partial(compare, request)))
        await run_pass([lane], Limit(min(lane.depth, len(traffic.requests))), self._stop)
        self._check_seconds = time.perf_counter() - began
        self._verified.add(traffic.point)

    async def _repeat(self, traffics: Sequence[Traffic]) -> dict[tuple[Route, int], list[Sample]]:
        """Measure everything in turn, again and again, within the time budget."""
        samples: dict[tuple[Route, int], list[Sample]] = {
            (route, index): [] for route in ROUTES for index in range(len(traffics))
        }
        repeats = self._settings.num_repeats
        units = sum(route.weight for route in ROUTES) * len(traffics)
        seconds = max(0.0, self._seconds_left()) / (units * repeats)
        for repeat in range(repeats):
            if repeat and self._seconds_left() < 0:
                self._warn(
                    f"only {repeat} of {repeats} repeats fitted into the time: a larger --time gives steadier figures"
                )
                break
            for key, sample in (await self._round(traffics, seconds, name=f"{repeat + 1} of {repeats}")).items():
                samples[key].append(sample)
        return samples

    async def _round(
        self, traffics: Sequence[Traffic], seconds: float, *, name: str
    ) -> dict[tuple[Route, int], Sample]:
        """Every route at every point once, each for about ``seconds`` times its weight."""
        samples = {}
        for index, traffic in enumerate(traffics):
            for route in ROUTES:
                self._display.step(f"{route.name}, {traffic.point}, {name}")
                if route.reads:
                    await self._drop_page_cache()
                limit = Limit(len(traffic.requests), seconds * route.weight)
                finish = self._sync if route.writes else None
                samples[route, index] = await run_pass(traffic.lanes(route), limit, self._stop, finish)
        return samples

    async def _warn_of_page_cache(self, volume: Volume) -> None:
        await drop_page_cache([volume])
        if await still_cached(volume, self._tiers.share_bytes):
            end = "and some of it cannot be dropped: reads come from memory"
        else:
            end = "though it is dropped before each pass that reads; it costs copies and CPU time"
        self._warn(f"{volume.path}: no direct I/O here, the page cache is in the way, {end}")

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        self._display.warn(message)

    async def _sync(self) -> None:
        await sync(self._tiers.volumes)

    async def _drop_page_cache(self) -> None:
        await drop_page_cache(self._tiers.volumes)

    def _seconds_left(self) -> float:
        """What is left of the time budget when the last check will have been done."""
        return self._settings.budget_seconds - self._check_seconds - (time.perf_counter() - self._began)

    def _result(self, route: Route, traffic: Traffic, samples: Sequence[Sample]) -> Result:
        tiers = self._tiers
        names = sorted({volume.choice.name for volume in tiers.volumes})
        return Result(
            route=route,
            backend="+".join(names) if route.uses_files else tiers.device.copies,
            point=traffic.point,
            depth=traffic.depth(route),
            size_bytes=tiers.size_bytes,
            samples=samples,
            verified=traffic.point in self._verified,
        )
