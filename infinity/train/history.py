"""What a run has recorded, step by step, and how figures are written for a person."""

from __future__ import annotations

from dataclasses import dataclass, field

from infinity.trace import StepStats

RECENT_STEPS = 10
"""How many of the last steps tell the present pace."""


@dataclass(slots=True)
class History:
    """The figures of all steps so far.

    Attributes:
        tokens_per_step: how many tokens one step trains on.
        losses: mean training loss of each step, in nats per token.
        step_seconds: wall time of each step, evaluation not included.
        step_stats: what the engine reported of each step; empty without infinity.
        eval_steps: after how many steps each held-out loss was taken.
        eval_losses: mean held-out loss then, in nats per token.
    """

    tokens_per_step: int
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_stats: list[StepStats] = field(default_factory=list)
    eval_steps: list[int] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return len(self.losses)

    def tokens_per_second(self, num_recent: int | None = None) -> float:
        """Throughput of the last ``num_recent`` steps, or of all; 0 before the first."""
        seconds = self.step_seconds[-num_recent:] if num_recent else self.step_seconds
        return self.tokens_per_step * len(seconds) / sum(seconds) if seconds else 0.0

    def eta_seconds(self, num_steps: int) -> float:
        """How long the rest of ``num_steps`` steps will take at the recent pace; 0 before the first."""
        recent = self.step_seconds[-RECENT_STEPS:]
        return (num_steps - self.num_steps) * sum(recent) / len(recent) if recent else 0.0


def format_bytes(num_bytes: float) -> str:
    """Bytes in decimal units (MB = 1e6, GB = 1e9), to three digits or so."""
    unit, size = _unit_of(num_bytes)
    return f"{_round(num_bytes / size)} {unit}"


def format_share(num_bytes: float, of_bytes: float) -> str:
    """``used/budget``, both in the unit of the budget."""
    unit, size = _unit_of(of_bytes)
    return f"{_round(num_bytes / size)}/{_round(of_bytes / size)} {unit}"


def _unit_of(num_bytes: float) -> tuple[str, float]:
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next(((unit, size) for unit, size in units if num_bytes >= size), ("B", 1.0))


def _round(value: float) -> str:
    return f"{value:.{0 if value >= 100 or value == int(value) else 1}f}"


def format_seconds(seconds: float) -> str:
    """A duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
