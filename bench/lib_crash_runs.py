"""Short runs of training for ``crash_states.py``: what they do, and what their weights are after each step.

A run is a list of words: ``step``, ``commit``, ``rollback 2`` (steps ago), ``restart`` (another engine goes on).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.engine import Engine
from infinity.engine.initialize import initialize

KIB = 1 << 10
WIDTH = 24


@dataclass(frozen=True, slots=True)
class Run:
    """What is run.

    Attributes:
        name: of the run.
        words: what it does.
        num_directories: NVMe paths.
        settings: of ``Config``.
    """

    name: str
    words: tuple[str, ...]
    num_directories: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


RUNS = (
    Run("every step", ("step",) * 3, 1, {"durability": 1}),
    Run(
        "rollback, restart",
        ("step", "step", "step", "rollback 1", "step", "restart", "step", "step"),
        2,
        {"durability": 1, "retained_commits": 2, "max_grad_norm": 0.1},
    ),
    Run(
        "every second step, accumulation",
        ("step", "step", "step", "restart", "step", "step", "step", "step"),
        1,
        {"durability": 2, "accumulation_steps": 2, "precision": "bf16"},
    ),
    Run(
        "commits asked for",
        ("step", "commit", "step", "rollback 1", "step", "step", "commit", "restart", "commit", "step", "commit"),
        2,
        {"durability": "checkpoint", "retained_commits": 2, "precision": "bf16", "optimizer_states": "int8"},
    ),
)


class Net(nn.Module):
    """Blocks with a residual, dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(torch.relu(layer(x)))
        normed: torch.Tensor = self.norm(x)
        return normed


State = dict[str, Any]


class Trainer:
    """An engine, and what is trained with it.

    Args:
        paths: its NVMe directories.
        run: says how.
        seed: of the first weights, and of all randomness where there is no commit.
    """

    def __init__(self, paths: Sequence[Path], run: Run, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = Net()
        self.config = Config(
            device="cpu", hbm=64 * KIB, ram=96 * KIB, nvme=tuple(paths), nvme_weights=(1.0,) * len(paths),
            resume="auto", io_backend="threads", io_num_threads=2, **run.settings,
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.engine: Engine = initialize(model, optimizer, self.config)
        self._scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.engine.track("scheduler", self._scheduler)

    def step(self) -> None:
        for _ in range(self.config.accumulation_steps or 1):
            loss = self.engine(torch.randn(4, WIDTH)).float().square().mean() * torch.rand(())
            self.engine.backward(loss)
        self.engine.step()
        self._scheduler.step()

    def state(self) -> State:
        """Everything that a run is to have again."""
        optimizer: Any = self.engine.optimizer
        return {
            "weights": {name: value.clone() for name, value in self.engine.state_dict().items()},
            "optimizer": {
                f"{index}.{name}": value.clone() if isinstance(value, torch.Tensor) else value
                for index, state in optimizer.state_dict()["state"].items()
                for name, value in state.items()
            },
            "scheduler": dict(self._scheduler.state_dict()),
            "random": torch.get_rng_state(),
        }


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
    return bool(one == other)


def resume(run: Run, paths: Sequence[Path], states: dict[int, State], step: int | None) -> str:
    """Go on with a run, for one step.

    Args:
        run: which.
        paths: where a crash has left it.
        states: what there was after each number of steps.
        step: that of the commit that is there.

    Returns:
        What is wrong; empty where nothing is.
    """
    trainer = Trainer(paths, run, seed=0 if step is None else 5)
    with trainer.engine:
        if trainer.engine.num_steps != (step or 0) or not same(trainer.state(), states[step or 0]):
            return f"resumed at step {trainer.engine.num_steps}, as it never was; expected step {step}"
        trainer.step()
        after = states.get(trainer.engine.num_steps)
        if after is not None and not same(trainer.state(), after):
            return f"step {trainer.engine.num_steps} after a resume came out otherwise"
    return ""


def play(run: Run, paths: Sequence[Path], states: dict[int, State] | None = None) -> None:
    """Do what a run does.

    Args:
        run: what.
        paths: its NVMe directories, which exist.
        states: gets what there is after each number of steps.
    """
    trainer = Trainer(paths, run)
    for word in run.words:
        if states is not None:
            _note(trainer, states)
        if word == "step":
            trainer.step()
        elif word == "commit":
            trainer.engine.commit()
        elif word.startswith("rollback"):
            trainer.engine.rollback(steps=int(word.split()[1]))
        else:
            trainer.engine.close()
            trainer = Trainer(paths, run, seed=1)
    if states is not None:
        _note(trainer, states)
    trainer.engine.close()


def _note(trainer: Trainer, states: dict[int, State]) -> None:
    now = trainer.state()
    known = states.setdefault(trainer.engine.num_steps, now)
    assert same(known, now), f"step {trainer.engine.num_steps} came out otherwise when it was taken again"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
