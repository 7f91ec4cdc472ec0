"""fio beside ours: the same file, block size and queue depth, in the same rounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from infinity.bench.figures import Row
from infinity.bench.fio import Fio, FioEngineError, FioHugePagesError, FioRun
from infinity.bench.passes import InterruptedRunError
from infinity.bench.settings import Point
from infinity.console.interrupt import StopRequest
from infinity.io.completion import call_in_thread

_ENGINES = ("io_uring", "libaio")
_LEAST_SECONDS = 0.25


class Peer:
    """fio, with each engine, and with each kind of buffer; what the system refuses is left out from then on.

    Args:
        fio: the program.
    """

    def __init__(self, fio: Fio) -> None:
        self.name = fio.version
        self._fio = fio
        self._variants = [(engine, huge_pages) for engine in _ENGINES for huge_pages in (True, False)]
        self._warnings: dict[str, bool] = {}

    def new_warnings(self) -> Iterator[str]:
        """What was refused since the last call; the same words once."""
        for warning in [warning for warning, is_new in self._warnings.items() if is_new]:
            self._warnings[warning] = False
            yield warning

    async def measure(
        self, file: Path, route: str, point: Point, share_bytes: int, seconds: float, stop: StopRequest
    ) -> list[tuple[Row, FioRun]]:
        """One run of each variant.

        Args:
            file: written before; its contents are overwritten.
            route: name of a route between NVMe and host memory.
            point: block size and queue depth.
            share_bytes: how much of the file to use.
            seconds: how long each run takes; a quarter of a second at least.
            stop: ends this after the run in progress.

        Raises:
            InterruptedRunError: ``stop`` was asked.
            FioError: fio failed.
        """
        runs = []
        for engine, huge_pages in tuple(self._variants):
            if stop:
                raise InterruptedRunError
            try:
                run = await call_in_thread(
                    lambda engine=engine, huge_pages=huge_pages: self._fio.run(  # type: ignore[misc]
                        file,
                        route,
                        block_bytes=point.block_bytes,
                        queue_depth=point.depth,
                        engine=engine,
                        huge_pages=huge_pages,
                        size_bytes=share_bytes // point.block_bytes * point.block_bytes,
                        seconds=max(seconds, _LEAST_SECONDS),
                    ),
                    on_cancel=self._fio.kill,
                )
            except (FioEngineError, FioHugePagesError) as error:
                self._variants.remove((engine, huge_pages))
                self._warnings.setdefault(f"left out: {error}", True)
                continue
            name = f"fio {engine}{', huge pages' if huge_pages else ''}"
            row = Row(route, name, point.block_bytes, point.depth, share_bytes, reference=True)
            runs.append((row, run))
        return runs
