"""``Plan``: what a step will take, apart from how it is shown.

The document's form is a promise, as that of ``infinity bench``: fields may be added; a change of what is there needs
another ``SCHEMA``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from infinity.engine.summary import Summary
from infinity.plan.machine import Machine

SCHEMA = 1
SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Wear:
    """What training does to a drive that may be written so many bytes in its life.

    Attributes:
        endurance_bytes: as its maker says.
        written_bytes_per_step: what a step writes.
        written_bytes_per_day: at the predicted pace.
        days: of training without a pause until it is worn; ``None``: nothing is written.
        steps: the same in steps.
    """

    endurance_bytes: float
    written_bytes_per_step: int
    written_bytes_per_day: float
    days: float | None
    steps: float | None


def wear_of(endurance_bytes: float, written_bytes: int, step_seconds: float) -> Wear:
    """The wear of a drive.

    Args:
        endurance_bytes: what it may be written in its life.
        written_bytes: what a step writes.
        step_seconds: how long it takes.
    """
    per_day = written_bytes / step_seconds * SECONDS_PER_DAY
    steps = endurance_bytes / written_bytes if written_bytes else None
    return Wear(
        endurance_bytes=endurance_bytes,
        written_bytes_per_step=written_bytes,
        written_bytes_per_day=per_day,
        days=None if steps is None else steps * step_seconds / SECONDS_PER_DAY,
        steps=steps,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """A model within budgets, before anything is made.

    Bytes and seconds are those of one rank.

    Attributes:
        name: of the model.
        summary: what the state takes and what it leaves of each budget: ``engine.summary()``, to the byte.
        smallest: the smallest budgets that can train the model, ``"hbm"`` and ``"ram"``.
        placed: bytes by tier, ``"host"`` and ``"nvme"``, and kind of state, when a step ends. Gradients are those of
            steps that are still on the way. Empty where nothing was simulated.
        moved: bytes of a step by route: ``"nvme read"``, ``"nvme write"``, ``"host to device"``, ``"device to host"``,
            ``"all-gather"``, ``"reduce-scatter"``.
        simulated: whether ``moved`` and ``seconds`` come from steps in virtual time; else from formulas, which say the
            most that is moved.
        peaks: the most that the device and host tiers hold; empty where nothing was simulated.
        seconds: of a step.
        busy: for how long in a step each thing works: ``"compute"``, ``"optimizer"``, ``"disk"``, ``"pcie"``,
            ``"network"``.
        bottleneck: what a step waits for, in a word or three.
        num_tokens: of a step, of one rank.
        tokens_to_hide_disk: from so many tokens per step on, arithmetic takes longer than the disk; 0 without traffic.
        ranks_needed: the fewest ranks on which the model fits these budgets; ``None``: no number that was tried.
        wear: of the drive, where its endurance is known.
        machine: the speeds.
        config: the fields of ``infinity.Config`` that were planned.
    """

    name: str
    summary: Summary
    smallest: Mapping[str, int]
    placed: Mapping[str, Mapping[str, int]]
    moved: Mapping[str, int]
    simulated: bool
    peaks: Mapping[str, int]
    seconds: float
    busy: Mapping[str, float]
    bottleneck: str
    num_tokens: int
    tokens_to_hide_disk: int
    ranks_needed: int | None
    wear: Wear | None
    machine: Machine
    config: Mapping[str, Any]

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.num_tokens * self.summary.num_ranks / self.seconds

    def as_document(self) -> dict[str, Any]:
        """The plan as JSON holds it: bytes, seconds."""
        summary = self.summary
        return {
            "schema": SCHEMA,
            "fits": True,
            "model": {"name": self.name, "params": summary.num_parameters},
            "ranks": summary.num_ranks,
            "stage": summary.stage,
            "kept": dict(summary.kept),
            "tiers": {name: asdict(tier) for name, tier in summary.tiers.items()},
            "smallest": dict(self.smallest),
            "placed": {tier: dict(kinds) for tier, kinds in self.placed.items()},
            "moved": dict(self.moved),
            "simulated": self.simulated,
            "peaks": dict(self.peaks),
            "step": {
                "seconds": self.seconds,
                "bottleneck": self.bottleneck,
                "busy_seconds": dict(self.busy),
                "tokens": self.num_tokens,
                "tokens_per_second": self.tokens_per_second,
            },
            "tokens_to_hide_disk": self.tokens_to_hide_disk,
            "ranks_needed": self.ranks_needed,
            "wear": None if self.wear is None else asdict(self.wear),
            "machine": asdict(self.machine),
            "config": dict(self.config),
        }


def tokens_to_hide(disk_seconds: float, compute_seconds: float, num_tokens: int) -> int:
    """From how many tokens on arithmetic takes longer than the disk, which a step keeps busy whatever its tokens."""
    return math.ceil(disk_seconds / compute_seconds * num_tokens) if compute_seconds > 0 else 0
