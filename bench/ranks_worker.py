"""One rank that trains with infinity or FSDP2 on request: a process behind the figures of ``ranks.py``.

    python bench/ranks_worker.py '{"shape": {...}, "work": [2, 64], "kind": "infinity", "config": {...}}'

Requests: ``{"steps": N, "settling": M}`` trains, of which the first M are not counted, as ``infinity_worker.py`` does;
``{"bytes": {...}, "config": {...}}`` trains another model with another configuration, and counts what it moves.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from lib_training import make_engine
from lib_work import LEARNING_RATE, Work, batches
from lib_worker import peak_rss_bytes, serve
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from infinity.config import Config
from infinity.engine.engine import Engine
from infinity.engine.traffic import state_of
from infinity.train.model import GPT, GPTShape

COUNTED_STEPS = 3


class Fsdp:
    """A model under FSDP2, with the methods of ``infinity.Engine`` that training needs."""

    def __init__(self, shape: GPTShape, num_ranks: int) -> None:
        torch.manual_seed(0)
        self._module = GPT(shape)
        mesh = init_device_mesh("cpu", (num_ranks,))
        for block in self._module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self._module, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._module.parameters(), lr=LEARNING_RATE, fused=True)

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._module(tokens, targets)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward."""
        loss.backward()

    def step(self) -> None:
        """Step and drop the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()


class Training:
    """One rank of one model in training, made at ``start``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._work = Work(*settings["work"])
        self._shape = GPTShape(**settings["shape"])
        self._rank, self._num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def start(self) -> dict[str, Any]:
        """Make the model; who this is."""
        dist.init_process_group("gloo")
        kind = self._settings["kind"]
        if kind == "infinity":
            self._trainer: Engine | Fsdp = make_engine(self._shape, Config(**self._settings["config"]))
        elif kind == "fsdp":
            self._trainer = Fsdp(self._shape, self._num_ranks)
        self._batches = batches(self._work, self._shape.vocab_size, seed=self._rank)
        return {"rank": self._rank}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train, or count; what came out."""
        if "bytes" in request:
            return self._count(request["config"], **request["bytes"])
        seconds, losses = [], []
        before = time.perf_counter()
        for tokens, targets in itertools.islice(self._batches, request["steps"]):
            loss = self._trainer(tokens, targets)
            self._trainer.backward(loss)
            self._trainer.step()
            losses.append(loss.item())
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
        return {"seconds": seconds[request["settling"] :], "losses": losses, "peak_rss_bytes": peak_rss_bytes()}

    def _count(self, fields: dict[str, Any], *, num_backwards: int, in_no_sync: int) -> dict[str, Any]:
        """What a step moves and the rank keeps, and what the whole model has of each kind of state."""
        with make_engine(self._shape, Config(**fields)) as engine:
            plan = engine._plan
            sent: list[dict[str, int]] = []
            read, written = [], []
            for _ in range(1 + COUNTED_STEPS):
                before = engine.collective_bytes()
                for number in range(num_backwards):
                    tokens, targets = next(self._batches)
                    if number < in_no_sync:
                        with engine.no_sync():
                            engine.backward(engine(tokens, targets))
                    else:
                        engine.backward(engine(tokens, targets))
                engine.step()
                engine.synchronize()
                sent.append({kind: size - before.get(kind, 0) for kind, size in engine.collective_bytes().items()})
                assert engine.last_step is not None
                read.append(engine.last_step.nvme_read_bytes)
                written.append(engine.last_step.nvme_written_bytes)
            return {
                "sent": sent[1:],
                "nvme_read": read[1:],
                "nvme_written": written[1:],
                "kept": dict(engine.summary().kept),
                "state": asdict(state_of(plan.whole_parts, plan.format_of, plan.state_format_of)),
            }

    def close(self) -> None:
        """Give everything back."""
        trainer = getattr(self, "_trainer", None)
        if isinstance(trainer, Engine):
            trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    training = Training(json.loads(sys.argv[1]))
    try:
        serve(training.start, training.answer)
    finally:
        training.close()


if __name__ == "__main__":
    main()
