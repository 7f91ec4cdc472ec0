"""Trainers in processes of their own: ranks, and one that is killed; forked from one that has imported it all."""

from __future__ import annotations

import os
import signal
import socket
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from infinity.integrations.transformers import InfinityTrainer
from trainers import BUDGETS, arguments, gpt2, same, texts, told, weights

_TIMEOUT_SECONDS = 150.0


def run(job: Callable[..., None], *jobs_args: tuple[Any, ...]) -> list[int | None]:
    """Run a job in as many processes at a time as there are arguments for.

    Args:
        job: a function of a module.
        jobs_args: for each process, what it is called with.

    Returns:
        Their exit codes, minus the signal where one was killed; ``None``: it did not end.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes = [context.Process(target=job, args=args, daemon=True) for args in jobs_args]
    for process in processes:
        process.start()
    try:
        codes = []
        for process in processes:
            process.join(_TIMEOUT_SECONDS)
            codes.append(process.exitcode)
        return codes
    finally:
        for process in processes:
            process.kill()
            process.join()


def free_port() -> int:
    """A port for ranks to meet at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Dies(TrainerCallback):
    """``kill -9`` after the fifth step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(root: Path, fields: dict[str, Any], config: dict[str, Any]) -> None:
    """Train with some arguments into ``root / "out"``, until it is killed."""
    torch.set_num_threads(1)
    data: Any = texts()
    args = arguments(root / "out", **fields)
    InfinityTrainer(gpt2(), args, train_dataset=data, callbacks=[Dies()], infinity_config=config).train()


def train_as_rank(rank: int, num_ranks: int, port: int, root: Path) -> None:
    """One rank of plain training, and of the same under the engine, from the beginning and from a checkpoint."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "No device id is provided")  # what a barrier of transformers says on CPUs
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    plain = _rank_trainer(Trainer, root)
    plain.train()
    for checkpoint in (None, str(root / "InfinityTrainer" / "checkpoint-2")):
        config = {**BUDGETS, "nvme": str(root), "ram": "4MiB"}
        trainer = _rank_trainer(InfinityTrainer, root, seed=0 if checkpoint is None else 7, infinity_config=config)
        trainer.train(resume_from_checkpoint=checkpoint)
        state = weights(trainer)
        assert same(state, weights(plain))
        for entry, wanted in zip(told(trainer)[:4], told(plain)[:4], strict=True):
            norms = [each.pop("grad_norm", 1.0) for each in (entry, wanted)]  # of slices, and so rounded otherwise
            assert entry == wanted, (entry, wanted)
            assert abs(norms[0] - norms[1]) < 1e-6, norms
        trainer.save_model(str(root / "model"))
        trainer.close()
    if rank == 0:
        torch.save(state, root / "state.pt")
    torch.distributed.destroy_process_group()


def _rank_trainer(kind: type[Any], root: Path, seed: int = 0, **more: Any) -> Any:
    data: Any = texts()
    fields: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 2, "max_steps": 3, "ddp_backend": "gloo", "max_grad_norm": 0.0,
        "eval_strategy": "steps", "eval_steps": 3, "ddp_find_unused_parameters": False,
    }  # fmt: skip
    args = arguments(root / kind.__name__, **fields)
    return kind(gpt2(seed, dropout=0.0), args, train_dataset=data, eval_dataset=data[:6], **more)
