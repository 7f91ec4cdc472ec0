"""Jobs in which ranks part: one takes another way, fails or is killed, and the others must be told, soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity import Config, RanksError
from ranks_harness import Rank

WIDTH = 64
BAD_STEP = 2


class Fork(nn.Module):
    """Two blocks, of which a forward runs one, between two that it always runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, way: str, between: Callable[[], None]) -> torch.Tensor:
        x = self.first(x)
        between()
        x = self.right(x) if way == "right" else self.left(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: backward_hook(gradient))
        return self.last(x).square().mean()  # type: ignore[no-any-return]


def nothing() -> None:
    """Happens."""


def backward_hook(gradient: torch.Tensor) -> None:
    """Runs in the middle of backward."""
    during_backward()


during_backward: Callable[[], None] = nothing
during_step: Callable[[], None] = nothing


class Stepping(torch.optim.SGD):
    """Something may happen in its step."""

    def step(self, closure: Any = None) -> Any:
        during_step()
        return super().step(closure)


def made(rank: Rank, stage: int, **fields: Any) -> infinity.Engine:
    """An engine of the model, with the values of rank 0."""
    torch.manual_seed(rank.index)
    model = Fork()
    settings: dict[str, Any] = {"device": "cpu", "hbm": "1MiB", "ram": "8MiB", "nvme": rank.directory}
    settings |= {"stage": stage, "units": ("Sequential",), "ranks_timeout_seconds": 20.0}
    config = Config(**{**settings, **fields})
    return infinity.initialize(model, Stepping(model.parameters(), lr=0.1), config)


def batch(rank: Rank, step: int) -> torch.Tensor:
    """A rank's."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank.index))


def part_ways(rank: Rank, *, stage: int, where: str, timeout_seconds: float = 20.0) -> dict[str, Any]:
    """A job: in step ``BAD_STEP`` the last rank does something else than the others; what each is told."""
    with made(rank, stage, ranks_timeout_seconds=timeout_seconds) as engine:
        for step in range(BAD_STEP):
            engine.backward(engine(batch(rank, step), "left", nothing))
            engine.step()
        engine.synchronize()
        began = time.monotonic()
        try:
            _part(rank, engine, where)
        except RanksError as error:
            return {"error": str(error), "seconds": time.monotonic() - began}
    return {"error": "", "seconds": time.monotonic() - began}


def _part(rank: Rank, engine: infinity.Engine, where: str) -> None:
    is_other = rank.index == rank.num_ranks - 1
    loss = engine(batch(rank, BAD_STEP), "right" if is_other and where == "forward" else "left", nothing)
    engine.backward(loss)
    if is_other and where == "backward":
        engine.backward(engine(batch(rank, BAD_STEP), "left", nothing))
    engine.step()
    if is_other and where == "state_dict":
        dict(engine.state_dict())
    engine.backward(engine(batch(rank, BAD_STEP), "left", nothing))
    engine.step()
    engine.synchronize()


def step_otherwise(rank: Rank, *, stage: int, how: str) -> dict[str, Any]:
    """A job: in step ``BAD_STEP`` the last rank steps with another rate, or not at all; what each is told."""
    is_other = rank.index == rank.num_ranks - 1
    with made(rank, stage) as engine:
        try:
            for step in range(BAD_STEP + 3):
                engine.backward(engine(batch(rank, step), "left", nothing))
                if is_other and step == BAD_STEP:
                    if how == "skip":
                        engine.zero_grad()
                        continue
                    engine.optimizer.param_groups[0]["lr"] /= 2
                engine.step()
        except RanksError as error:
            return {"error": str(error), "num_steps": engine.num_steps}
    return {"error": "", "num_steps": -1}


def load_own(rank: Rank, *, stage: int) -> dict[str, Any]:
    """A job: each rank loads values of its own; what all have then, and whether they are those of rank 0."""
    with made(rank, stage) as engine:
        torch.manual_seed(100 + rank.index)
        engine.load_state_dict(Fork().state_dict())
        torch.manual_seed(100)
        first = Fork().state_dict()
        return {"same": all(torch.equal(value, first[name]) for name, value in engine.state_dict().items())}


def live_twice(rank: Rank) -> dict[str, Any]:
    """A job: one engine is left by an exception on one rank, which the others are told of; another goes on."""
    error = ""
    try:
        with made(rank, 3) as engine:
            engine.backward(engine(batch(rank, 0), "left", nothing))
            engine.step()
            if rank.index == 1:
                raise ZeroDivisionError
            engine.backward(engine(batch(rank, 1), "left", nothing))
            engine.step()
    except ZeroDivisionError:
        pass
    except RanksError as caught:
        error = str(caught)
    with made(rank, 2) as engine:
        loss = engine(batch(rank, 0), "left", nothing)
        engine.backward(loss)
        engine.step()
    return {"error": error, "loss": float(loss.detach())}


def train_side_by_side(rank: Rank) -> dict[str, Any]:
    """A job: every two ranks train a model of their own, in one directory."""
    dist.init_process_group("gloo")
    groups = [dist.new_group([start, start + 1]) for start in range(0, rank.num_ranks, 2)]
    torch.manual_seed(rank.index)
    model = Fork()
    config = Config(device="cpu", hbm="1MiB", ram="8MiB", nvme=rank.directory, ranks_timeout_seconds=20.0)
    group = groups[rank.index // 2]
    with infinity.initialize(model, Stepping(model.parameters(), lr=0.1), config, process_group=group) as engine:
        engine.backward(engine(batch(rank, 0), "left", nothing))
        engine.step()
        weights = {name: value for name, value in engine.state_dict().items() if name == "first.0.weight"}
    dist.destroy_process_group()
    return weights


def die(rank: Rank, *, dead: int, stage: int, phase: str, how: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A job: in step ``BAD_STEP`` the rank ``dead`` raises an exception or is killed; what the others are told."""
    global during_backward, during_step
    end = _raise if how == "raise" else _be_killed
    with made(rank, stage, **fields) as engine:
        for step in range(BAD_STEP + 3):
            is_now = rank.index == dead and step == BAD_STEP
            began = time.monotonic()
            during_backward = end if is_now and phase == "backward" else nothing
            during_step = end if is_now and phase == "step" else nothing
            try:
                loss = engine(batch(rank, step), "left", end if is_now and phase == "forward" else nothing)
                engine.backward(loss)
                engine.step()
                if is_now and phase == "between":
                    end()
            except RanksError as error:
                return {"error": str(error), "seconds": time.monotonic() - began, "step": step}
    return {"error": "", "seconds": 0.0, "step": -1}


def _raise() -> None:
    raise ZeroDivisionError("of the rank that fails")


def _be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
