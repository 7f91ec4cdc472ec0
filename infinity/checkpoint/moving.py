"""How far a command is that moves many bytes: on a terminal one line that lives, elsewhere nothing until the end."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from infinity.console.formats import format_bytes
from infinity.console.output import is_plain


class Moving:
    """Bytes that are on their way; a context manager.

    Args:
        console: where a person looks.
        what: is done with them.
        total_bytes: how many there will be.

    Attributes:
        num_bytes: how many have been moved.
    """

    def __init__(self, console: Console, what: str, total_bytes: int) -> None:
        self.num_bytes = 0
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            refresh_per_second=5,
            disable=is_plain(console),
        )
        self._task = self._progress.add_task(what, total=total_bytes)
        self._begun = self._ended = time.perf_counter()

    def __enter__(self) -> Moving:
        self._begun = time.perf_counter()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended = time.perf_counter()
        self._progress.stop()

    def moved(self, num_bytes: int) -> None:
        """So many more."""
        self.num_bytes += num_bytes
        self._progress.update(self._task, advance=num_bytes)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self._ended - self._begun

    def __str__(self) -> str:
        return format_moved(self.num_bytes, self.seconds)


def format_moved(num_bytes: int, seconds: float) -> str:
    """How much, how long, how fast."""
    return f"{format_bytes(num_bytes)} in {seconds:.1f} s, {num_bytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"
