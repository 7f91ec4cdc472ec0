"""``Lab``: opens cells and times single passes in them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from infinity.bench.figures import Row
from infinity.bench.passes import Limit, Sample, run_pass
from infinity.bench.routes import Route, Traffic
from infinity.bench.sizing import MAX_REQUEST_BYTES
from infinity.bench.sweep import Cell
from infinity.bench.tiers import Tiers
from infinity.bench.volumes import Channel, Volume, open_channel
from infinity.config import BackendName
from infinity.console.interrupt import StopRequest
from infinity.io.memory import PAGE_BYTES
from infinity.io.open import Choice
from infinity.store.volumes import OpenBackend


class Lab:
    """Traffic of all cells over open tiers.

    Args:
        tiers: the tiers.
        stop: ends a pass after the requests in flight.
        open_backend: opens the I/O backend of one directory.

    Attributes:
        choices: of each backend that was opened, for each directory why.
    """

    def __init__(self, tiers: Tiers, stop: StopRequest, open_backend: OpenBackend) -> None:
        self.choices: dict[BackendName, list[Choice]] = {}
        self._tiers = tiers
        self._stop = stop
        self._open_backend = open_backend
        self._traffics: dict[Cell, Traffic] = {}
        self._largest_request_bytes = MAX_REQUEST_BYTES

    @contextlib.asynccontextmanager
    async def open(self, cell: Cell) -> AsyncIterator[Channel]:
        """The files, opened for a cell.

        Raises:
            DirectoryError: the backend does not work in a directory.
            StorageError: any other failure of a system call.
        """
        async with open_channel(self._tiers.volumes, cell.backend, cell.point, self._open_backend) as channel:
            self.choices.setdefault(cell.backend, channel.choices)
            yield channel

    def traffic(self, cell: Cell) -> Traffic:
        """The requests of a cell, which go on where they stopped."""
        if cell not in self._traffics:
            self._traffics[cell] = Traffic(self._tiers, cell.point, self._largest_request_bytes)
        return self._traffics[cell]

    def cut(self, share_bytes: int, largest_request_bytes: int) -> None:
        """From now on use so much of each file, in requests of at most so many bytes."""
        self._tiers.share_bytes = share_bytes
        self._largest_request_bytes = max(PAGE_BYTES, min(MAX_REQUEST_BYTES, largest_request_bytes))
        self._traffics.clear()

    async def time(
        self, channel: Channel, cell: Cell, route: Route, seconds: float, volumes: Sequence[Volume] | None = None
    ) -> Sample:
        """One timed pass; its latencies are those of blocks.

        Args:
            channel: the cell, open.
            cell: the cell.
            route: one of ``FILE_ROUTES``.
            seconds: how long requests are begun.
            volumes: whose files; ``None``: of all.

        Raises:
            InterruptedRunError: stop was asked; nothing is in flight.
            StorageError: a request failed; nothing is in flight.
        """
        if route.reads:
            await channel.drop_page_cache()
        before = channel.latency()
        lanes = self.traffic(cell).lanes(channel, route, volumes)
        sample = await run_pass(lanes, Limit(seconds), self._stop, channel.sync if route.writes else None)
        sample.latency = channel.latency().since(before)
        return sample

    def row(self, cell: Cell, route: Route, volume: Volume | None = None) -> Row:
        """What a pass measures; in one directory alone, or in all."""
        tiers = self._tiers
        return Row(
            route=route.name,
            backend=cell.backend,
            block_bytes=cell.point.block_bytes,
            queue_depth=cell.point.depth,
            size_bytes=tiers.size_bytes if volume is None else tiers.share_bytes,
            verified=True,  # else an error had ended the run
            path=None if volume is None else str(volume.path),
        )
