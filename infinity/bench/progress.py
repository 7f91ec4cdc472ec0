"""What is seen while the benchmark runs: on a terminal one line that lives, elsewhere a plain line per stage."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from infinity.console.formats import format_seconds
from infinity.console.output import is_plain


class _TimeLeft(ProgressColumn):
    """Of the time that the benchmark means to take."""

    def render(self, task: Task) -> Text:
        """The time, or that the last passes are running."""
        left = (task.total or 0.0) - (time.perf_counter() - task.fields["began"])
        return Text(f"{format_seconds(left)} left" if left > 0 else "nearly done", style="cyan")


class Display:
    """Shows how far the benchmark is; a context manager.

    Args:
        console: where a person looks.
        began: ``time.perf_counter()`` when the time began to run.
        budget_seconds: how long it is meant to take.
    """

    def __init__(self, console: Console, *, began: float, budget_seconds: float) -> None:
        self._console = console
        self._began = began
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            _TimeLeft(),
            TextColumn("{task.fields[best]}", markup=False, style="green"),
            console=console,
            transient=True,
            refresh_per_second=5,
            disable=is_plain(console),
        )
        self._task = self._progress.add_task("opening", total=budget_seconds, best="", began=began)

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
        self.step(name)
        if is_plain(self._console):
            self.say(name)

    def step(self, name: str) -> None:
        """What is measured now."""
        self._progress.update(self._task, description=name, completed=time.perf_counter() - self._began)

    def best(self, words: str) -> None:
        """The best that was found so far; a line of its own where nothing is redrawn."""
        self._progress.update(self._task, best=words)

    def extend(self, seconds: float) -> None:
        """It will take so much longer than was meant."""
        self._progress.update(self._task, total=(self._progress.tasks[0].total or 0.0) + seconds)
