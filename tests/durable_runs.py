"""A small training run with everything in it that a commit must bring back, under any configuration."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import infinity

NUM_FEATURES, NUM_CLASSES = 24, 5


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.ReLU(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.BatchNorm1d(NUM_FEATURES), nn.Linear(NUM_FEATURES, NUM_CLASSES))


class Loader:
    """Batches by number, drawn from Python's and numpy's generators; knows how many it has given out."""

    def __init__(self) -> None:
        self.num_given = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            seed = 1000 + self.num_given
            self.num_given += 1
            generator = torch.Generator().manual_seed(seed)
            inputs = torch.randn(8, NUM_FEATURES, generator=generator) * (1 + random.random())
            targets = torch.randint(NUM_CLASSES, (8,), generator=generator)
            yield inputs + float(np.random.normal()) * 0.01, targets

    def state_dict(self) -> dict[str, Any]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_given = state["num_given"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decay = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


@dataclass
class Outcome:
    """What a run has left.

    Attributes:
        losses: of each step, by the number of the step, from 1.
        weights: at the end, at full precision, buffers included.
        optimizer: its state dict at the end.
        commits: what the engine said of its newest commit at the end.
    """

    losses: dict[int, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    commit: infinity.CommitInfo | None = None


class Run:
    """A run under the engine.

    Args:
        path: an NVMe directory, several, or none.
        make_optimizer: from the model.
        config: over the defaults here.
    """

    def __init__(
        self,
        path: Path | list[Path] | None,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        **config: Any,
    ) -> None:
        random.seed(5)
        np.random.seed(5)
        model = make_model()
        settings: dict[str, Any] = {"device": "cpu", "hbm": "1MiB", "ram": "1MiB", "nvme": path or ()}
        self.engine = infinity.initialize(model, make_optimizer(model), infinity.Config(**{**settings, **config}))
        self.loader = Loader()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.engine.optimizer, 2, gamma=0.7)
        self.engine.track("loader", self.loader)
        self.engine.track("scheduler", self.scheduler)
        self.outcome = Outcome()

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.engine(inputs).float(), targets)
        self.engine.backward(loss)
        self.engine.step()
        self.scheduler.step()
        self.outcome.losses[self.engine.num_steps] = loss.item()

    def until(self, num_steps: int) -> None:
        """Train until so many steps have been taken."""
        if self.engine.num_steps >= num_steps:
            return
        for batch in self.loader:
            self.step(batch)
            if self.engine.num_steps >= num_steps:
                break

    def end(self) -> Outcome:
        """Read what there is, and close."""
        engine = self.engine
        self.outcome.weights = {name: value.clone() for name, value in engine.state_dict().items()}
        self.outcome.optimizer = engine.optimizer.state_dict()
        engine.close()
        self.outcome.commit = engine.last_commit
        return self.outcome


def trained(path: Path | list[Path] | None, num_steps: int, **config: Any) -> Outcome:
    """A run from wherever it begins to ``num_steps``."""
    run = Run(path, **config)
    run.until(num_steps)
    return run.end()


def assert_same(one: Outcome, other: Outcome, *, steps: range) -> None:
    """The same bits: losses of these steps, weights, buffers, optimizer states."""
    assert [one.losses[step] for step in steps] == [other.losses[step] for step in steps]
    assert_same_end(one, other)


def assert_same_end(one: Outcome, other: Outcome) -> None:
    """The same bits at the end."""
    assert list(one.weights) == list(other.weights)
    for name, value in one.weights.items():
        assert torch.equal(value, other.weights[name]), name
    assert one.optimizer["param_groups"] == other.optimizer["param_groups"]
    assert one.optimizer["state"].keys() == other.optimizer["state"].keys()
    for index, state in one.optimizer["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.optimizer["state"][index][name])), name


def files_in(path: Path) -> list[str]:
    """Names below a directory, sorted; numbers and random parts as ``*``."""
    names = []
    for each in sorted(path.rglob("*")):
        parts = [_plain(part) for part in each.relative_to(path).parts]
        names.append("/".join(parts))
    return sorted(names)


def _plain(name: str) -> str:
    for prefix in ("shards-", "commit-"):
        if name.startswith(prefix):
            return f"{prefix}*{Path(name).suffix}"
    return name


STATE_FILES = [
    "infinity-state-rank0",
    *(f"infinity-state-rank0/{name}" for name in ("commit-*.json", "commit-*.safetensors", "lock", "owner.json")),
    "infinity-state-rank0/shards-*.bin",
]
"""What one commit leaves below an NVMe directory."""
