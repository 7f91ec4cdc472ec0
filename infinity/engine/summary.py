"""``Summary``: what a model's state takes on this rank, and what it leaves of each budget."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.budget import Plan
from infinity.engine.traffic import DIVIDED, state_of


@dataclass(frozen=True, slots=True)
class TierSummary:
    """What one tier is for. All in bytes.

    Attributes:
        budget: the most that it may hold; ``None`` for NVMe, which holds what it must.
        needed: without so much nothing can be trained.
        holds: what it will hold of the model, when it has all that it has room for.
        remains: of the budget, beyond that; for NVMe what is free on the disks, whose files have their size already.
    """

    budget: int | None
    needed: int
    holds: int
    remains: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A model on this rank, before training.

    Attributes:
        num_parameters: elements of all parameters, of all ranks together.
        num_ranks: how many train it.
        stage: ``Config.stage``; 0 where there is but one rank.
        kept: bytes on this rank by kind of state, in host memory and on NVMe together.
        tiers: by name: ``"device"``, ``"host"``, and ``"nvme"`` where there is one.
    """

    num_parameters: int
    num_ranks: int
    stage: int
    kept: Mapping[str, int]
    tiers: Mapping[str, TierSummary]

    @property
    def divided(self) -> Sequence[str]:
        """The kinds of state of which this rank has a slice."""
        return DIVIDED[self.stage]

    def is_slice(self, kind: str) -> bool:
        """Whether this rank keeps only its slice of a kind of state: of parameters also where it has them whole too."""
        return kind in self.divided or (kind == "parameters" and self.stage > 0)


def summarize(plan: Plan, model: nn.Module, config: Config, device: torch.device) -> Summary:
    """Sum up a plan.

    Args:
        plan: of this rank.
        model: the user's model.
        config: the budgets.
        device: where it trains.
    """
    slicing = plan.slicing
    own, whole = (state_of(parts, plan.format_of, plan.state_format_of) for parts in (plan.parts, plan.whole_parts))
    sizes = {
        "parameters": own.params,
        "gathered parameters": whole.params if slicing.keeps_gathered else 0,
        "master weights": own.masters,
        "optimizer states": own.states,
        "gradients": own.grads if slicing.cuts_gradients else whole.grads,
    }
    kept = {kind: size for kind, size in sizes.items() if size}
    total = sum(kept.values())
    gathered = min(sum(unit.num_bytes for unit in plan.units), config.hbm)
    in_host = min(total, config.ram)
    tiers = {
        "device": TierSummary(config.hbm, plan.smallest_hbm(model)[0], gathered, config.hbm - gathered),
        "host": TierSummary(config.ram, plan.needs(model, config, device)[1], in_host, config.ram - in_host),
    }
    if config.nvme:
        tiers["nvme"] = TierSummary(None, total - in_host, total - in_host, _free_bytes(config.nvme))
    return Summary(
        num_parameters=sum(slot.num_elements for part in plan.whole_parts for slot in part.slots),
        num_ranks=slicing.num_ranks,
        stage=slicing.stage if slicing.num_ranks > 1 else 0,
        kept=kept,
        tiers=tiers,
    )


def _free_bytes(paths: Sequence[Path]) -> int:
    """What is free on the disks of those directories that are there, together."""
    free = {path.stat().st_dev: os.statvfs(path) for path in paths if path.exists()}
    return sum(disk.f_bavail * disk.f_frsize for disk in free.values())
