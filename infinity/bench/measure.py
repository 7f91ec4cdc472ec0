"""What is done with open tiers: look for the best settings, check them, then time every route in them, several times.

What makes the figures worth trusting
    * The bytes are right. Each setting, before it is first timed, writes new contents into a part of the files and
      reads them back through itself; the chosen ones do so with all of the files, and all is read once more after all
      timed writes. Every byte is compared. A lost, stale or misplaced block is an error.
    * The bytes reached the device, as far as it says so: a pass that writes ends with ``fdatasync``, in the measured
      time. Where I/O goes through the page cache, the cache is dropped before each pass that reads, and the report says
      that it is in the way.
    * Blocks are first written before the clock runs, since first writes into fresh extents are slower than all later
      ones; memory is touched; each setting has moved its checked bytes before it is timed.
    * Settings and routes are measured in turn, then all again, the other way round: a disk whose pace drifts by the
      minute drifts for all.
    * The time that one pass may take follows from the whole budget; each moves at least one round of requests.
    * The traffic is the engine's: large requests, cut into blocks by the I/O backend, enough of them outstanding that
      every worker has a block. Latency is that of a block.

Rejected: the files' size alone to end a pass (a slow disk takes hours, a fast one too little to measure); timing reads
together with their comparison (that measures the comparison); a fresh file for each setting (measures allocation);
keeping all backends of a sweep open (hundreds of threads and descriptors; opening one costs milliseconds).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from infinity.bench.contents import Contents
from infinity.bench.figures import Figures, Row, in_order
from infinity.bench.lab import Lab
from infinity.bench.memory import MemoryRoute, memory_routes
from infinity.bench.passes import ALL, Limit, run_pass, run_work
from infinity.bench.peer import Peer
from infinity.bench.progress import Display
from infinity.bench.results import GB, Result
from infinity.bench.routes import (
    BOTH,
    DEVICE_ROUTES,
    FILE_ROUTES,
    READ,
    ROUTE_NAMES,
    WRITE,
    DeviceTraffic,
    Route,
    Traffic,
)
from infinity.bench.settings import BenchSettings, Point
from infinity.bench.sweep import DIRECTIONS, Cell, Figure, Sweep, grid
from infinity.bench.tiers import Tiers
from infinity.bench.volumes import Channel
from infinity.config import BackendName
from infinity.console.formats import format_bytes
from infinity.console.interrupt import StopRequest
from infinity.errors import DirectoryError
from infinity.io.open import Choice
from infinity.store.volumes import OpenBackend

_FIRST_WRITE_FRACTION = 1 / 16
"""Of the time budget: what is not written by then is left out, unless ``--size`` was given."""

_SWEEP_FRACTION = 0.45
"""Of the time that is left when the sweep begins."""

_COARSE_FRACTION = 0.6
"""Of the sweep's time: the coarse part ends by then."""

_NUM_SWEEP_PASSES = 250
"""A pass of the sweep takes this part of the time budget, within the limits below."""

_SWEEP_PASS_SECONDS = (0.03, 0.25)
_MEMORY_WEIGHT = 0.25
"""Memory shows its pace sooner than files: its part of the time of one pass."""


class Measurement:
    """One run over open tiers.

    Args:
        settings: what to measure.
        tiers: the tiers.
        display: told what goes on.
        stop: ends the run after the requests in flight.
        open_backend: opens the I/O backend of one directory.
        peer: measured beside ours in the last rounds, if any.
        began: ``time.perf_counter()`` when the time budget began to run.

    Attributes:
        warnings: what was found that may make the figures misleading.
    """

    def __init__(
        self,
        settings: BenchSettings,
        tiers: Tiers,
        display: Display,
        stop: StopRequest,
        *,
        open_backend: OpenBackend,
        peer: Peer | None,
        began: float,
    ) -> None:
        self.warnings: list[str] = []
        self._settings = settings
        self._tiers = tiers
        self._display = display
        self._stop = stop
        self._lab = Lab(tiers, stop, open_backend)
        self._peer = peer
        self._began = began
        self._contents = Contents(tiers, stop)
        self._device_traffic = DeviceTraffic(tiers)
        self._swept, self._final = Figures(), Figures()
        self._works = memory_routes(tiers.source, tiers.landing)
        self._sweep: Sweep | None = None
        self._cells: list[Cell] = []
        self._is_slow = False
        self._refusals: list[str] = []
        self._peer_seconds = 0.0
        fastest, slowest = _SWEEP_PASS_SECONDS
        self._sweep_pass_seconds = min(slowest, max(fastest, settings.budget_seconds / _NUM_SWEEP_PASSES))

    async def run(self) -> list[Result]:
        """Write, look for the best settings, check and measure.

        Returns:
            The results, routes in the order in which they are shown; of a route, those in the chosen settings first.

        Raises:
            InterruptedRunError: ``stop`` was asked.
            MismatchError: what came back is not what was written.
            DirectoryError: no I/O backend works in every directory.
            StorageError: a transfer failed.
        """
        self._display.stage("writing and checking")
        backends = await self._write_first()
        if self._settings.points:
            cells = [Cell(backend, point) for point in self._settings.points for backend in backends]
        else:
            cells = await self._find_cells(backends)
        self._cells = cells
        self._display.stage(f"checking the chosen {'setting' if len(cells) == 1 else f'{len(cells)} settings'}")
        for cell in cells:
            self._display.step(f"checking {cell}")
            async with self._lab.open(cell) as channel:
                await self._contents.verify_all(channel, self._lab.traffic(cell))
        for work in self._works:  # a first time imports and compiles: not out of the time of the passes
            await run_work(work.name, work.start, 0.0, self._stop)
        self._display.stage(
            f"measuring all routes in {', '.join(map(str, cells))}, up to {self._settings.num_repeats} times"
        )
        await self._repeat(cells)
        self._display.stage("checking what the timed passes wrote")
        async with self._lab.open(cells[0]) as channel:
            await self._contents.check_all(channel, self._lab.traffic(cells[0]))
        return in_order(self._final, self._swept, (*ROUTE_NAMES, *(work.name for work in self._works)))

    def choices(self) -> list[Choice]:
        """For each directory the backend of the first chosen setting, and what became of all that were tried."""
        return [
            Choice(
                choice.name,
                choice.direct,
                (
                    *(reason for choices in self._lab.choices.values() for reason in choices[index].reasons),
                    *self._refusals,
                ),
            )
            for index, choice in enumerate(self._lab.choices[self._cells[0].backend])
        ]

    # Before anything is timed.

    async def _write_first(self) -> list[BackendName]:
        """Make the files' blocks with the first backend that works, and find out which others do."""
        working: list[BackendName] = []
        refusal: DirectoryError | None = None
        await self._contents.make()
        for backend in self._settings.backends:
            point = self._settings.points[0] if self._settings.points else grid(self._tiers.share_bytes)[-1]
            cell = Cell(backend, point)
            try:
                async with self._lab.open(cell) as channel:
                    if not working:
                        await self._write_blocks(channel, self._lab.traffic(cell))
                    working.append(backend)
            except DirectoryError as error:
                self._refusals.append(f"{backend}: {error.message}")
                refusal = error
        if not working:
            assert refusal is not None
            raise refusal
        return working

    async def _write_blocks(self, channel: Channel, traffic: Traffic) -> None:
        """The first write, of what this disk can write in a fraction of the time."""
        share_bytes = self._tiers.share_bytes
        await channel.preallocate(share_bytes)
        limit = ALL
        if self._settings.size is None:
            least_bytes = max((point.round_bytes for point in self._settings.points), default=0)
            num_requests = -(-least_bytes // traffic.request_bytes)
            limit = Limit(self._settings.budget_seconds * _FIRST_WRITE_FRACTION, num_requests, together=False)
        sample = await run_pass(traffic.write_window(channel, 0, share_bytes), limit, self._stop, channel.sync)
        least_written_bytes = min(share_bytes, min(sample.num_requests) * traffic.request_bytes)
        self._lab.cut(least_written_bytes, int(least_written_bytes / sample.seconds * self._sweep_pass_seconds / 2))
        if least_written_bytes < share_bytes:
            self._is_slow = True
            self._display.say(
                f"{format_bytes(self._tiers.size_bytes)} are measured with: more would take too long to write here "
                "(--size decides otherwise)"
            )
        if not channel.direct:
            await self._warn_of_page_cache(channel)

    async def _warn_of_page_cache(self, channel: Channel) -> None:
        await channel.drop_page_cache()
        cached = await channel.still_cached(self._tiers.share_bytes)
        for volume, choice in zip(channel.volumes, channel.choices, strict=True):
            if volume in cached:
                end = "and some of it cannot be dropped: reads come from memory"
            else:
                end = "though it is dropped before each pass that reads; it costs copies and CPU time"
            if not choice.direct:
                self._warn(f"{volume.path}: no direct I/O here, the page cache is in the way, {end}")

    # The sweep.

    async def _find_cells(self, backends: Sequence[BackendName]) -> list[Cell]:
        """Sweep until the time for it is over; the chosen cells, the one to train with first."""
        self._sweep = sweep = Sweep(backends, grid(self._tiers.share_bytes))
        began = self._seconds_gone()
        ends = began + max(0.0, self._settings.budget_seconds - began) * _SWEEP_FRACTION
        coarse_ends = began + (ends - began) * _COARSE_FRACTION
        self._display.stage(f"looking for the best of {', '.join(backends)}, block sizes and queue depths")
        for cell in sweep.anchors():
            await self._visit(sweep, cell)
        cells = sweep.coarse()
        num_visited = 0
        for cell in (*cells, *reversed(cells)):
            if self._seconds_gone() > coarse_ends:
                break
            await self._visit(sweep, cell)
            num_visited += 1
        if num_visited < len(cells):
            self._display.say(
                f"{len(cells) - num_visited} of {len(cells)} coarse settings did not fit into the time (--time)"
            )
        while self._seconds_gone() < ends:
            for cell in sweep.refine():
                await self._visit(sweep, cell)
                if self._seconds_gone() > ends:
                    break
        self._display.say(self._best_words(sweep))
        few = self._settings.quick or self._is_slow
        return sweep.finalists(2 if few else 4)

    async def _visit(self, sweep: Sweep, cell: Cell) -> None:
        """Check a cell if it is new, then time it in both directions."""
        async with self._lab.open(cell) as channel:
            if cell not in sweep.cells:
                self._display.step(f"checking {cell}")
                await self._contents.verify_window(channel, self._lab.traffic(cell))
            self._display.step(f"trying {cell}")
            for direction, route in zip(DIRECTIONS, (READ, WRITE), strict=True):
                sample = await self._lab.time(channel, cell, route, self._sweep_pass_seconds)
                self._swept.add(self._lab.row(cell, route), sample)
                run = sample.as_run()
                figure = Figure(run.num_bytes / run.seconds / GB, run.cpu_seconds / run.num_bytes * GB)
                sweep.add(cell, direction, figure)
        self._display.best(self._best_words(sweep))

    @staticmethod
    def _best_words(sweep: Sweep) -> str:
        best = {direction: sweep.best(direction) for direction in DIRECTIONS}
        figures = (f"{name} {sweep.gb_s(cell, name):.2f} GB/s ({cell})" for name, cell in best.items())
        return "best so far: " + ", ".join(figures)

    # All routes in the chosen cells.

    async def _repeat(self, cells: Sequence[Cell]) -> None:
        """Measure everything in turn, again and again, within the time budget."""
        repeats, volumes = self._settings.num_repeats, self._tiers.volumes
        num_passes = len(cells) * len(FILE_ROUTES) + (2 * len(volumes) if len(volumes) > 1 else 0)
        units = num_passes + (len(DEVICE_ROUTES) + len(self._works)) * _MEMORY_WEIGHT
        seconds = max(0.0, self._seconds_left()) / (units * repeats)
        for repeat in range(repeats):
            if repeat and self._seconds_left() < 0:
                self._warn(
                    f"only {repeat} of {repeats} repeats fitted into the time: a larger --time gives steadier figures"
                )
                break
            name = f"{repeat + 1} of {repeats}"
            await self._measure_peer(cells, seconds, name)
            for cell in cells if repeat % 2 == 0 else cells[::-1]:
                await self._measure_cell(cell, seconds, name, each_alone=cell == cells[0] and len(volumes) > 1)
            await self._measure_device(seconds * _MEMORY_WEIGHT, name)
            for work in self._works:
                await self._measure_memory(work, seconds * _MEMORY_WEIGHT, name)

    async def _measure_cell(self, cell: Cell, seconds: float, name: str, *, each_alone: bool) -> None:
        """All routes to and from files; each directory alone as well."""
        async with self._lab.open(cell) as channel:
            for route in FILE_ROUTES:
                self._display.step(f"{route.name}, {cell}, {name}")
                self._final.add(self._lab.row(cell, route), await self._lab.time(channel, cell, route, seconds))
            for volume in self._tiers.volumes if each_alone else ():
                for route in (READ, WRITE):
                    self._display.step(f"{route.name}, {volume.path} alone, {cell}, {name}")
                    sample = await self._lab.time(channel, cell, route, seconds, [volume])
                    self._final.add(self._lab.row(cell, route, volume), sample)

    async def _measure_device(self, seconds: float, name: str) -> None:
        traffic, device = self._device_traffic, self._tiers.device
        for route in DEVICE_ROUTES:
            self._display.step(f"{route.name}, {name}")
            sample = await run_pass(traffic.lanes(route), Limit(seconds), self._stop)
            size_bytes = device.memory.numel()
            row = Row(route.name, device.copier, traffic.copy_bytes, traffic.depth, size_bytes, verified=True)
            self._final.add(row, sample)

    async def _measure_memory(self, work: MemoryRoute, seconds: float, name: str) -> None:
        self._display.step(f"{work.name}, {name}")
        sample = await run_work(work.name, work.start, seconds, self._stop)
        self._final.add(Row(work.name, work.words, work.piece_bytes, 1, work.size_bytes), sample)

    async def _measure_peer(self, cells: Sequence[Cell], seconds: float, name: str) -> None:
        """The peer overwrites the files; what belongs there is put back before ours go on."""
        if self._peer is None:
            return
        began = self._seconds_gone()
        for volume in self._tiers.volumes:
            path = str(volume.path) if len(self._tiers.volumes) > 1 else None
            for route, points in self._peer_points(cells).items():
                for point in points:
                    self._display.step(f"{self._peer.name}: {route.name}, {point}, {name}")
                    for row, run in await self._peer.measure(
                        volume.file, route.name, point, self._tiers.share_bytes, seconds, self._stop
                    ):
                        self._final.add_peer(row.at(path), run, run.latency)
        async with self._lab.open(cells[0]) as channel:
            await self._contents.restore(channel, self._lab.traffic(cells[0]))
        self._peer_seconds += self._seconds_gone() - began
        self._display.extend(self._seconds_gone() - began)
        for warning in self._peer.new_warnings():
            self._warn(warning)

    def _peer_points(self, cells: Sequence[Cell]) -> dict[Route, list[Point]]:
        """Where ours is fastest of what is measured in the same rounds; all points that were asked for."""
        if self._sweep is None:
            return {route: list(dict.fromkeys(cell.point for cell in cells)) for route in (READ, WRITE, BOTH)}
        sweep = self._sweep
        read, write = (max(cells, key=lambda cell: sweep.gb_s(cell, name)) for name in DIRECTIONS)
        return {READ: [read.point], WRITE: [write.point], BOTH: [cells[0].point]}

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        self._display.warn(message)

    def _seconds_gone(self) -> float:
        return time.perf_counter() - self._began

    def _seconds_left(self) -> float:
        """What is left of our own time when the last check will have been done."""
        own_seconds = self._seconds_gone() - self._peer_seconds
        return self._settings.budget_seconds - self._contents.check_seconds - own_seconds
