"""What is seen while a run goes on: on a terminal a few lines that live, elsewhere plain ones now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from infinity.console.formats import format_seconds, format_share
from infinity.console.interrupt import StopRequest
from infinity.trace import TierUsage
from infinity.train.history import RECENT_STEPS, History
from infinity.train.report import format_waits

_SECONDS_BETWEEN_LINES = 5.0


def status_lines(history: History, usage: Mapping[str, TierUsage], *, num_steps: int) -> list[str]:
    """The state of a run: how far it is; what the tiers hold and NVMe moves; where the time of the last step went.

    Args:
        history: the steps done.
        usage: the tiers, by name; empty without infinity.
        num_steps: how many steps the run has in all.
    """
    parts = [f"step {history.num_steps}/{num_steps}"]
    if history.losses:
        parts.append(f"loss {history.losses[-1]:.4f}")
    if history.grad_norms:
        parts.append(f"gradient norm {history.grad_norms[-1]:.3f}")
    if history.eval_losses:
        parts.append(f"held-out {history.eval_losses[-1]:.4f}")
    if history.losses:
        parts.append(f"{history.tokens_per_second(RECENT_STEPS):.0f} tokens/s")
        parts.append(f"ETA {format_seconds(history.eta_seconds(num_steps))}")
    tiers = [
        f"{name} {format_share(tier.used_bytes, tier.budget_bytes)}"
        for name, tier in usage.items()
        if tier.budget_bytes
    ]
    times: list[str] = []
    if history.step_stats:
        last = history.step_stats[-1]
        seconds = max(last.seconds, 1e-9)
        times += [f"computing {last.compute_seconds / seconds:.0%}", f"waiting {format_waits([last])}"]
        if last.nvme_read_bytes or last.nvme_written_bytes:
            read, written = (moved / seconds / 1e9 for moved in (last.nvme_read_bytes, last.nvme_written_bytes))
            tiers.append(f"nvme read {read:.2f} + write {written:.2f} GB/s")
            times.append(f"NVMe {last.overlap_share:.0%} under compute")
        times.append(f"{last.achieved:.0%} of the roofline")
    return [" · ".join(line) for line in (parts, tiers, times) if line]


class Display:
    """Shows a run on a console; a context manager.

    On a terminal they are redrawn a few times per second by rich's own thread, from what ``update`` was last given.
    """

    def __init__(
        self, console: Console, *, num_steps: int, stop: StopRequest, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._num_steps = num_steps
        self._stop = stop
        self._clock = clock
        self._lines = ["starting"]
        self._num_evaluations = 0
        self._next_line_at = -float("inf")
        self._live = Live(console=console, get_renderable=self._render, transient=True) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, message: str) -> None:
        """Print one line that stays."""
        self._console.print(message, soft_wrap=True, markup=False, highlight=False)

    def show(self, table: Table) -> None:
        """Print a table that stays."""
        self._console.print(table)

    def update(self, history: History, usage: Mapping[str, TierUsage]) -> None:
        """Show a step or an evaluation that has just ended."""
        self._lines = status_lines(history, usage, num_steps=self._num_steps)
        if self._live is not None:
            return
        evaluated = len(history.eval_losses) > self._num_evaluations
        finished = history.num_steps in {1, self._num_steps}
        if evaluated or finished or self._stop or self._clock() >= self._next_line_at:
            self.say("\n  ".join(self._lines))
            self._num_evaluations = len(history.eval_losses)
            self._next_line_at = self._clock() + _SECONDS_BETWEEN_LINES

    def _render(self) -> Text:
        stopping = " · stopping after this step (again: at once)" if self._stop else ""
        first, *others = self._lines
        return Text("\n".join([first + stopping, *others]), style="cyan")
