"""What is seen while the benchmark runs: on a terminal one line that lives, elsewhere a plain line per stage."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Display:
    """Shows how far the benchmark is; a context manager.

    Args:
        console: where a person looks.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=5,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("opening", total=None)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, message: str, style: str | None = None) -> None:
        """Print one line that stays."""
        self._console.print(message, style=style, soft_wrap=True, markup=False, highlight=False)

    def warn(self, message: str) -> None:
        """Print what may make the figures misleading."""
        self.say(f"warning: {message}", style="yellow")

    def stage(self, name: str) -> None:
        """A stage begins: it gets a line of its own where nothing is redrawn."""
        self._progress.update(self._task, description=name)
        if not self._console.is_terminal:
            self.say(name)

    def expect(self, num_steps: int) -> None:
        """So many steps are to come in all."""
        self._progress.update(self._task, total=num_steps)

    def step(self, name: str) -> None:
        """The next step begins."""
        self._progress.update(self._task, description=name, advance=1)
