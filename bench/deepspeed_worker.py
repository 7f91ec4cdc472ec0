"""Trains with DeepSpeed on request: the process behind a row of ``compare_deepspeed.py``, in DeepSpeed's environment.

    python bench/deepspeed_worker.py --build
    python bench/deepspeed_worker.py '{"shape": {...}, "work": [1, 32], "deepspeed": {...}, "rendezvous": "FILE"}'
    (without "rendezvous" it is one of the ranks that the environment names)

The first builds what DeepSpeed compiles at its first use. The second trains the model of ``infinity.train`` from the
weights that the other ways of training start from; requests are those of ``infinity_worker.py``.

Its figures of memory begin at the first step: that it holds the whole model once at the start is not held against it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lib_work import LEARNING_RATE, Work, batches
from lib_worker import peak_rss_bytes, reset_peak_rss, serve
from torch.utils.checkpoint import checkpoint

from infinity.train import model as gpt
from infinity.train.model import GPT, GPTShape


def build() -> None:
    """Compile the operations that NVMe offload and the CPU's optimizer and collectives use."""
    get_accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator
    for name in ("AsyncIOBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "ShareMemCommBuilder"):
        begun = time.perf_counter()
        builder = get_accelerator().create_op_builder(name)
        if not builder.is_compatible(verbose=True):
            raise SystemExit(f"DeepSpeed says that {name} cannot be built here")
        builder.load()
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)


class Training:
    """One model in training, made at ``start``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._work = Work(*settings["work"])
        self._shape = GPTShape(**settings["shape"])

    def start(self) -> dict[str, Any]:
        """Make the model; what it is."""
        deepspeed = importlib.import_module("deepspeed")
        begun = time.perf_counter()
        # Its parameters in recycled buffers give wrong gradients where checkpoints are not reentrant.
        gpt.checkpoint = functools.partial(checkpoint, use_reentrant=True)  # type: ignore[attr-defined]
        if "rendezvous" in self._settings:
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # what its launcher sets
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{self._settings['rendezvous']}", rank=0, world_size=1
            )
        else:
            torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        deepspeed.init_distributed("gloo")
        torch.manual_seed(0)
        model = GPT(self._shape)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        config = self._settings["deepspeed"] | {
            "train_micro_batch_size_per_gpu": self._work.batch_size,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": self._settings.get("precision", "bf16") == "bf16"},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LEARNING_RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
            },
        }
        self._engine = deepspeed.initialize(model=model, config=config)[0]
        self._batches = batches(self._work, self._shape.vocab_size, seed=rank)
        document = {
            "rank": rank,
            "parameters": num_parameters,
            "start_seconds": time.perf_counter() - begun,
            "start_rss_bytes": peak_rss_bytes(),
            "optimizer": type(self._engine.optimizer.optimizer).__name__,
        }
        reset_peak_rss()
        return document

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train, or write a checkpoint (``save``: where); what that took."""
        if "save" in request:
            return self._save(Path(request["save"]))
        seconds, losses = [], []
        for tokens, targets in itertools.islice(self._batches, request["steps"]):
            begun = time.perf_counter()
            loss = self._engine(tokens, targets)
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begun)
        return {"seconds": seconds[request["settling"] :], "losses": losses, "peak_rss_bytes": peak_rss_bytes()}

    def _save(self, directory: Path) -> dict[str, Any]:
        begun = time.perf_counter()
        self._engine.save_checkpoint(str(directory))
        os.sync()
        seconds = time.perf_counter() - begun
        num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        shutil.rmtree(directory)
        return {"seconds": seconds, "bytes": num_bytes}


def main() -> None:
    if sys.argv[1] == "--build":
        build()
        return
    training = Training(json.loads(sys.argv[1]))
    serve(training.start, training.answer)


if __name__ == "__main__":
    main()
