"""Runs of the benchmark in a directory of the test's, over the real file system or over faulty system calls."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from fakes_io import supports_direct
from infinity.bench.results import Report
from infinity.bench.run import run
from infinity.bench.settings import BenchSettings
from infinity.config import BackendName
from infinity.console.interrupt import StopRequest
from infinity.io.backend import Backend
from infinity.io.open import Choice
from infinity.io.syscalls import Syscalls
from infinity.io.threads import ThreadBackend
from infinity.store.volumes import OpenBackend

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POINTS = "64KiBx4,256KiBx2"


class Harness:
    """Runs in a directory, and keeps what was printed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.printed = io.StringIO()
        self.stop = StopRequest()

    def run(
        self,
        syscalls: Syscalls | None = None,
        *,
        open_backend: OpenBackend | None = None,
        terminal: bool = False,
        **flags: Any,
    ) -> Report:
        """Measure a megabyte with worker threads; ``syscalls``: what they call, in place of the real ones."""
        defaults: dict[str, Any] = {
            "nvme": [self.directory],
            "size": MIB,
            "repeats": 2,
            "time": 5,
            "points": tuple(POINTS.split(",")),
            "device": "cpu",
            "io_backend": "threads",
        }
        settings = BenchSettings(**defaults | flags)
        console = Console(file=self.printed, width=100, force_terminal=terminal)
        with self.stop:
            report = run(
                settings, console, self.stop, open_backend=open_backend or opener(syscalls if syscalls else Syscalls())
            )
        assert report is not None
        return report


def opener(syscalls: Syscalls, *, direct: bool = True) -> OpenBackend:
    """Opens worker threads whatever is asked for."""

    async def open_backend(
        name: BackendName, directory: Path, *, num_threads: int, block_bytes: int
    ) -> tuple[Backend, Choice]:
        is_direct = direct and supports_direct(directory)
        backend = ThreadBackend(num_threads, block_bytes, is_direct, syscalls)
        return backend, Choice("threads", is_direct, (f"{name}: chosen by the test",))

    return open_backend


def environment() -> dict[str, str]:
    """Of a process that runs the commands of this checkout."""
    root = str(Path(__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
