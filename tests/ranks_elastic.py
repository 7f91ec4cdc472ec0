"""A job in which a checkpoint of some ranks is taken over by others, and saved again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity import Config
from ranks_harness import Rank

WIDTH = 48


class Net(nn.Module):
    """A model whose parameters are cut at odd places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(19, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.tokens(batch)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (x @ self.tokens.weight.T).square().mean()  # type: ignore[no-any-return]


def pass_on(rank: Rank, *, stage: int, precision: str, source: str | None, target: str) -> dict[str, Any]:
    """A job: load ``source``, or train two steps, and save ``target``; what the state is, on every rank."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    nvme = rank.directory / Path(target).name
    nvme.mkdir(exist_ok=True)
    fields: dict[str, Any] = {"device": "cpu", "hbm": "1MiB", "ram": "4MiB", "nvme": nvme, "precision": precision}
    with infinity.initialize(model, optimizer, Config(stage=stage, ranks_timeout_seconds=20.0, **fields)) as engine:
        if source is not None:
            engine.load_checkpoint(source)
        else:
            for step in range(2):
                engine.backward(engine(torch.arange(19 + step) % 19))
                engine.step()
        engine.save_checkpoint(target)
        digest = hashlib.sha256()
        for name, value in engine.state_dict().items():
            digest.update(name.encode() + value.contiguous().numpy().tobytes())
        states = engine.optimizer.state_dict()["state"]
        for index, state in sorted(states.items()):
            for name, value in sorted(state.items()):
                digest.update(f"{index} {name}".encode() + value.contiguous().numpy().tobytes())
        return {"digest": digest.hexdigest(), "num_steps": engine.num_steps, "num_states": len(states)}
