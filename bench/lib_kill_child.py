"""The training run that ``kill_loop.py`` and ``kill_ranks.py`` kill: what it does in a life, and writes down of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.initialize import initialize

KIB = 1 << 10
WIDTH = 24


@dataclass(frozen=True, slots=True)
class Scenario:
    """How a run trains.

    Attributes:
        precision: as in ``Config``.
        durability: after how many steps a commit is due.
        accumulation: micro-batches of a step.
        num_directories: NVMe paths.
        retained: how many commits are kept.
        backend: of I/O.
        num_ranks: how many ranks train.
        stage: as in ``Config``.
        max_grad_norm: as in ``Config``.
        timeout_seconds: as ``ranks_timeout_seconds`` in ``Config``.
    """

    precision: str
    durability: int
    accumulation: int
    num_directories: int
    retained: int = 1
    backend: str = "threads"
    num_ranks: int = 1
    stage: int = 3
    max_grad_norm: float | None = None
    timeout_seconds: float = 60.0


SCENARIOS = (
    Scenario("fp32", 1, 1, 1),
    Scenario("bf16", 2, 2, 2),
    Scenario("fp32", 2, 2, 3, retained=2),
    Scenario("bf16", 1, 1, 2, backend="auto"),
    Scenario("bf16", 1, 2, 1, retained=3),
    Scenario("fp32", 1, 2, 2),
)


class Net(nn.Module):
    """Blocks with a residual, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.dropout(torch.relu(norm(layer(x))))
        out: torch.Tensor = self.head(x)
        return out


class Loader:
    """Batches in an order drawn anew for each epoch; knows where it is, as a stateful data loader does.

    Args:
        rank: whose batches.
        num_batches: of an epoch.
    """

    def __init__(self, rank: int = 0, num_batches: int = 7) -> None:
        self._num_batches = num_batches
        self._first_seed = 1000 * (rank + 1)
        self._epoch = self._position = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self._position < self._num_batches:
            order = torch.randperm(self._num_batches, generator=torch.Generator().manual_seed(self._epoch))
            generator = torch.Generator().manual_seed(self._first_seed + int(order[self._position]))
            self._position += 1
            x = torch.randn(8, WIDTH, generator=generator)
            yield x, x.sum(dim=1, keepdim=True).sin()
        self._epoch, self._position = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]


def config_of(scenario: Scenario, paths: list[Path], *, durable: bool) -> Config:
    """The engine's configuration; parts that can be cut into slices for several ranks are larger."""
    hbm, ram = 64 * KIB * scenario.num_ranks, (48 + 64 * scenario.num_ranks) * KIB
    return Config(
        device="cpu", hbm=hbm, ram=ram, nvme=tuple(paths), nvme_weights=(1.0,) * len(paths),
        precision=scenario.precision, accumulation_steps=scenario.accumulation, retained_commits=scenario.retained,
        io_backend=scenario.backend, io_num_threads=2, durability=scenario.durability if durable else "off",
        resume="auto" if durable else "never", stage=scenario.stage, max_grad_norm=scenario.max_grad_norm,
        ranks_timeout_seconds=scenario.timeout_seconds,
    )  # fmt: skip


def live(
    scenario: Scenario,
    paths: list[Path],
    num_steps: int,
    diary: Path,
    *,
    durable: bool = True,
    rank: int = 0,
    before_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Train until so many steps are taken, from wherever the run before was; write each loss down, and the end.

    Args:
        scenario: how.
        paths: NVMe directories.
        num_steps: of the whole run.
        diary: a file to which lines are added.
        durable: whether commits are made.
        rank: which one this is.
        before_step: called after each step's backwards with its number.
    """
    torch.set_num_threads(1)
    torch.manual_seed(3 + rank)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = initialize(model, optimizer, config_of(scenario, paths, durable=durable))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    loader = Loader(rank)
    engine.track("scheduler", scheduler)
    engine.track("loader", loader)
    with diary.open("ab", buffering=0) as file, engine:
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        _write(file, {"began": engine.num_steps, "life": life, "pid": os.getpid()})
        losses: list[float] = []
        while engine.num_steps < num_steps:
            for x, y in loader:
                loss = (engine(x).float() - y).square().mean() / scenario.accumulation
                engine.backward(loss)
                losses.append(loss.item())
                if len(losses) == scenario.accumulation:
                    _write(file, {"step": engine.num_steps, "losses": [loss.hex() for loss in losses]})
                    losses.clear()
                    before_step(engine.num_steps)
                    engine.step()
                    scheduler.step()
                    if engine.num_steps == num_steps:
                        break
        _write(file, {"ended": engine.num_steps, "state": _digest(engine)})


def _digest(engine: Any) -> str:
    """Of all weights, buffers and optimizer states."""
    digest = hashlib.sha256()
    state = engine.optimizer.state_dict()["state"]
    tensors = [*engine.state_dict().items(), *((f"{i}.{k}", v) for i in state for k, v in state[i].items())]
    for name, value in sorted(tensors, key=lambda each: each[0]):
        digest.update(name.encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _write(file: Any, entry: dict[str, Any]) -> None:
    file.write(json.dumps(entry).encode() + b"\n")  # one call: a kill leaves whole lines, or half of the last one


def entries(diary: Path) -> list[dict[str, Any]]:
    """What lives have written down; half a line is none."""
    found = []
    for line in diary.read_bytes().split(b"\n") if diary.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def summary(found: list[dict[str, Any]]) -> dict[Any, Any]:
    """Losses by step, as the last life that took it saw them, and the state in the end."""
    return {entry["step"]: entry["losses"] for entry in found if "step" in entry} | {
        key: entry[key] for entry in found if "ended" in entry for key in ("ended", "state")
    }
