"""``RunReport``: a finished run's figures, as a table for a person and as one JSON document."""

from __future__ import annotations

import math
import re
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from infinity.config import Config
from infinity.console.formats import format_bytes, format_share
from infinity.trace import StepStats, TierUsage
from infinity.train.foretold import Foretold
from infinity.train.history import History
from infinity.train.ranks import Ranks
from infinity.train.settings import TrainSettings
from infinity.train.trainer import Trainer

_CAUSES = {"read": "disk", "room": "memory", "optimizer": "optimizer", "commit": "commits"}
"""What a person calls the causes of waits."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """Everything that is known of a run once it has ended.

    Attributes:
        num_parameters: elements of the model's parameters.
        state_bytes: parameters, master weights, gradients and optimizer states together.
        num_skipped_steps: steps that changed nothing, because a gradient had overflowed in fp16.
        unit_names: what the engine gathers together; empty without infinity.
        usage: the tiers, by name; empty without infinity.
        history: the figures of each step.
        peak_rss_bytes: most resident memory that the process ever had.
        peak_accelerator_bytes: most memory that torch's allocator ever held on the accelerator.
        stopped_by: name of the signal that ended the run early, or ``None``.
        saved: where the weights were written, or ``None``.
        settings: the command's flags.
        config: the engine's configuration.
        commit: the last one, or ``None``.
        ranks: of each rank, what differs between them; see ``rank_documents``.
        transport: the way between ranks, in words.
        foretold: what a plan says of a step, at the speeds of this run; in words why there is none, or ``None``.
    """

    num_parameters: int
    state_bytes: int
    num_skipped_steps: int
    unit_names: Sequence[str]
    usage: Mapping[str, TierUsage]
    history: History
    peak_rss_bytes: int
    peak_accelerator_bytes: int
    stopped_by: str | None
    saved: Path | None
    settings: TrainSettings
    config: Config
    commit: Mapping[str, Any] | None = None
    ranks: Sequence[Mapping[str, Any]] = ()
    transport: str = ""
    foretold: Foretold | str | None = None

    def as_document(self) -> dict[str, Any]:
        """The figures as JSON holds them: bytes and seconds; losses of steps and evaluations exactly as computed."""
        history, stats = self.history, self.history.step_stats
        peaks = {name: self.usage[name].peak_bytes if name in self.usage else 0 for name in ("device", "host", "nvme")}
        return {
            "params": self.num_parameters,
            "state_bytes": self.state_bytes,
            "losses": [_or_none(loss) for loss in history.losses],
            "num_skipped_steps": self.num_skipped_steps,
            "grad_norms": [_or_none(norm) for norm in history.grad_norms],
            "eval_losses": [_or_none(loss) for loss in history.eval_losses],
            "eval_steps": history.eval_steps,
            "step_seconds": history.step_seconds,
            "tokens_per_second": history.tokens_per_second(),
            "peak": {**peaks, "rss": self.peak_rss_bytes, "accelerator": self.peak_accelerator_bytes},
            "nvme": {
                "read_bytes": [step.nvme_read_bytes for step in stats] or [0] * history.num_steps,
                "written_bytes": [step.nvme_written_bytes for step in stats] or [0] * history.num_steps,
            },
            "stalls": {
                cause: sum(step.stalls.get(cause, 0.0) for step in stats)
                for cause in dict.fromkeys(cause for step in stats for cause in step.stalls)
            },
            "steps": [_without(step.as_dict(), "units") for step in stats],
            "by_unit": {name: asdict(unit) for name, unit in history.unit_stats.items()},
            "stall_seconds": sum(step.stall_seconds for step in stats),
            "optimizer_seconds": sum(step.optimizer_seconds for step in stats),
            "units": list(self.unit_names),
            "stopped_by": self.stopped_by,
            "diverged_at_step": history.diverged_at,
            "saved": None if self.saved is None else str(self.saved),
            "commit": self.commit,
            "ranks": list(self.ranks),
            "transport": self.transport or None,
            "foretold": asdict(self.foretold) if isinstance(self.foretold, Foretold) else self.foretold,
            "config": self.config.model_dump(mode="json"),
            "settings": self.settings.model_dump(mode="json", by_alias=True),
            "torch": torch.__version__,
        }

    def as_table(self) -> Table:
        """The figures for a person."""
        history = self.history
        table = Table(title="infinity train" + (" (plain PyTorch)" if self.settings.plain else ""), show_header=False)
        table.add_row("parameters", f"{self.num_parameters:,}")
        of_rank = f" on rank 0 of {len(self.ranks)}" if len(self.ranks) > 1 else ""
        table.add_row("training state", format_bytes(self.state_bytes) + of_rank)
        table.add_row("steps", f"{history.num_steps} of {self.settings.num_steps}")
        if self.num_skipped_steps:
            table.add_row("skipped steps", f"{self.num_skipped_steps}, in which a gradient overflowed")
        if history.diverged_at is not None:
            table.add_row("diverged", f"at step {history.diverged_at}")
        for name, losses in (
            ("loss", history.losses), ("held-out loss", history.eval_losses), ("gradient norm", history.grad_norms),
        ):  # fmt: skip
            if losses:
                table.add_row(name, f"{losses[0]:.4f} → {losses[-1]:.4f}")
        if history.step_seconds:
            table.add_row("speed", f"{history.tokens_per_second():.0f} tokens/s")
            table.add_row("median step", f"{statistics.median(history.step_seconds):.3f} s")
        for name, tier in self.usage.items():
            if tier.budget_bytes:
                table.add_row(f"{name} peak", format_share(tier.peak_bytes, tier.budget_bytes))
        table.add_row(
            "process peak (RSS)", _of_ranks(self.peak_rss_bytes, [rank["peak"]["rss"] for rank in self.ranks])
        )
        if self.peak_accelerator_bytes:
            table.add_row("accelerator peak", format_bytes(self.peak_accelerator_bytes))
        self._add_engine_rows(table)
        if len(self.ranks) > 1:
            table.add_row("ranks", f"{len(self.ranks)}, {self.transport}; speed is of all, other figures are of rank 0")
            sent = sum(self.ranks[0]["collective_bytes"].values()) / max(history.num_steps, 1)
            table.add_row("sent to other ranks", f"{format_bytes(sent)} per step")
        if self.foretold is not None:
            table.add_row("planned step", str(self.foretold))
        table.caption = "MB = 1e6 bytes, GB = 1e9 bytes"
        return table

    def _add_engine_rows(self, table: Table) -> None:
        stats = self.history.step_stats
        if not stats:
            return
        seconds = sum(step.seconds for step in stats)
        for name, route, moved in (
            ("NVMe read", "nvme_read", [step.nvme_read_bytes for step in stats]),
            ("NVMe written", "nvme_write", [step.nvme_written_bytes for step in stats]),
        ):
            text = f"{format_bytes(sum(moved) / len(moved))} per step"
            if routes := [step.routes[route] for step in stats if route in step.routes]:
                busy_seconds = sum(each.busy_seconds for each in routes)
                rate = sum(each.moved_bytes for each in routes) / max(busy_seconds, 1e-9) / 1e9
                text += f" at {rate:.2f} GB/s, busy {busy_seconds / seconds:.0%} of the time"
            table.add_row(name, text)
        if commit_seconds := sum(step.commit_seconds for step in stats):
            num_bytes = sum(step.commit_bytes for step in stats)
            table.add_row("commits", f"{format_bytes(num_bytes)} written in {commit_seconds:.2f} s, beside training")
        if any(step.nvme_read_bytes or step.nvme_written_bytes for step in stats):
            overlap = statistics.median(step.overlap_share for step in stats)
            table.add_row("NVMe under compute", f"{overlap:.0%} of its busy time")
        table.add_row("computing", f"{sum(step.compute_seconds for step in stats) / seconds:.1%} of the time")
        table.add_row("waiting", format_waits(stats, digits=1))
        if (longest := self._longest_wait()) is not None:
            table.add_row("waited longest for", longest)
        achieved = statistics.median(step.achieved for step in stats)
        least_seconds = statistics.median(step.roofline_seconds for step in stats)
        table.add_row("roofline", f"{achieved:.0%} achieved (median step; at least {least_seconds:.3f} s)")

    def _longest_wait(self) -> str | None:
        """Which unit was waited for longest, if for any."""
        waits = {name: sum(unit.stalls.values()) for name, unit in self.history.unit_stats.items()}
        name = max(waits, key=waits.__getitem__, default="")
        return f"{name}, {waits[name] / len(self.history.step_stats):.3f} s per step" if waits.get(name) else None


def rank_documents(
    ranks: Ranks, trainer: Trainer, history: History, rss_bytes: int, accelerator_bytes: int
) -> list[dict[str, Any]]:
    """What differs between ranks, of each: where it ran, what its tiers held and moved, how long its steps took."""
    stats, usage = history.step_stats, trainer.usage()
    own = {
        "rank": ranks.rank,
        "host": ranks.host,
        "local_rank": ranks.local_rank,
        "state_bytes": trainer.state_bytes,
        "step_seconds": history.step_seconds,
        "peak": {
            **{name: tier.peak_bytes for name, tier in usage.items()},
            "rss": rss_bytes,
            "accelerator": accelerator_bytes,
        },
        "nvme": {
            "read_bytes": [step.nvme_read_bytes for step in stats],
            "written_bytes": [step.nvme_written_bytes for step in stats],
        },
        "stall_seconds": sum(step.stall_seconds for step in stats),
        "optimizer_seconds": sum(step.optimizer_seconds for step in stats),
        "collective_bytes": dict(trainer.collective_bytes()),
    }
    documents: list[dict[str, Any]] = ranks.exchange(own, "telling each other the figures of the run")
    return documents


def _of_ranks(own: int, all_of_them: Sequence[int]) -> str:
    """Bytes of rank 0, and the most of any rank where there are several."""
    most = f", at most {format_bytes(max(all_of_them))} of any rank" if len(all_of_them) > 1 else ""
    return format_bytes(own) + most


def format_waits(stats: Sequence[StepStats], *, digits: int = 0) -> str:
    """How much of the time of some steps the training thread waited, and for what; causes that show in the figure."""
    seconds = max(sum(step.seconds for step in stats), 1e-9)
    shares = {cause: sum(step.stalls.get(cause, 0.0) for step in stats) / seconds for cause in _CAUSES}
    texts = {cause: f"{share:.{digits}%}" for cause, share in shares.items()}
    causes = [f"{_CAUSES[cause]} {texts[cause]}" for cause in _CAUSES if texts[cause] != f"{0:.{digits}%}"]
    return f"{sum(shares.values()):.{digits}%}" + (f" ({', '.join(causes)})" if causes else "")


def peak_rss_bytes() -> int:
    """The most resident memory that this process ever had.

    Linux's VmHWM where there is one: ``getrusage`` also counts what the parent had at the fork.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    match = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def peak_accelerator_bytes(device: torch.device) -> int:
    """The most memory that torch's allocator ever held on ``device``; 0 for the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _without(figures: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in figures.items() if key != name}


def _or_none(loss: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return loss if math.isfinite(loss) else None
