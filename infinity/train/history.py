"""What a run has recorded, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from infinity.trace import StepStats, UnitStats

_KEPT = ("losses", "grad_norms", "step_seconds", "eval_steps", "eval_losses")

RECENT_STEPS = 10
"""How many of the last steps tell the present pace."""


@dataclass(slots=True)
class History:
    """The figures of all steps so far.

    Attributes:
        tokens_per_step: how many tokens one step trains on.
        losses: mean training loss of each step, in nats per token.
        grad_norms: norm of each step's gradients before they were clipped; empty without ``max_grad_norm``.
        step_seconds: wall time of each step, evaluation not included.
        step_stats: what the engine reported of each step, units left out; empty without infinity.
        unit_stats: what it reported of each unit, all steps together.
        eval_steps: after how many steps each held-out loss was taken.
        eval_losses: mean held-out loss then, in nats per token.
        diverged_at: the step after which a loss was NaN or infinite, which ends a run; ``None`` if none was.
    """

    tokens_per_step: int
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_stats: list[StepStats] = field(default_factory=list)
    unit_stats: dict[str, UnitStats] = field(default_factory=dict)
    eval_steps: list[int] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)
    diverged_at: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """What goes along with commits: the figures that a table or a document shows of each step."""
        return {name: list(getattr(self, name)) for name in _KEPT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the steps of a run before."""
        for name in _KEPT:
            setattr(self, name, list(state[name]))

    def note_stats(self, stats: StepStats) -> None:
        """Keep what the engine reported of a step. Of units only sums: a long run of a deep model has many."""
        for name, unit in stats.units.items():
            self.unit_stats[name] = self.unit_stats[name] + unit if name in self.unit_stats else unit
        self.step_stats.append(replace(stats, units={}))

    def note_divergence(self) -> None:
        """Look at the latest losses, and remember the present step if one of them is NaN or infinite."""
        if not all(math.isfinite(loss) for loss in (*self.losses[-1:], *self.eval_losses[-1:])):
            self.diverged_at = self.num_steps

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
