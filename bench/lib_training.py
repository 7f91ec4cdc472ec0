"""What the training benchmarks share: the work, the runners that do it in turn, and how a step is timed.

A step of an engine does not end where ``step()`` returns: its optimizer goes on under the next forward. So times are
taken between the ends of successive steps, after a step that is not counted: what the first counted one finds still
running, the last one leaves behind. What is left is waited for, untimed, before the next runner's turn.

The optimizer is AdamW in its fused form, unless told otherwise: on processors it takes a fifth of the time of the
default loop over tensors, with the same result, so that nobody who cares for a step's time would do without.

On every kind of machine the same amounts of tokens mean different things (bf16 arithmetic differs a hundredfold between
processors), so work can be chosen by time: ``BlockClock`` times forward and backward of one transformer block.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lib_work import LEARNING_RATE, Batch, Work, work_of_tokens

import infinity
from infinity.config import Config, Precision
from infinity.engine.engine import Engine
from infinity.errors import BudgetError
from infinity.machine.memory import cpu_name
from infinity.train.model import GPT, Block, GPTShape
from infinity.train.plain import PlainTrainer
from infinity.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Sample:
    """One step.

    Attributes:
        seconds: from the end of the step before to the end of this one.
        read_bytes: from NVMe in that time.
        written_bytes: to NVMe in that time.
        figures: what the engine says of it, by name (``StepStats.as_dict``); empty without one.
    """

    seconds: float
    read_bytes: int = 0
    written_bytes: int = 0
    figures: dict[str, Any] = field(default_factory=dict)


class Runner:
    """One way to train, and the losses of all its steps.

    Attributes:
        name: as people read it.
        trainer: what trains.
        losses: one per step, counted or not.
    """

    def __init__(self, name: str, trainer: Trainer) -> None:
        self.name = name
        self.trainer = trainer
        self.losses: list[float] = []

    def train(self, batches: Sequence[Batch], *, num_settling: int = 1) -> list[Sample]:
        """Train a step on each batch and return the figures of all but the first ``num_settling``.

        Afterwards nothing goes on any more.
        """
        samples = []
        before = time.perf_counter()
        for number, (tokens, targets) in enumerate(batches):
            loss = self.trainer(tokens, targets)
            self.trainer.backward(loss)
            self.trainer.step()
            self.losses.append(loss.item())
            now = time.perf_counter()
            if number >= num_settling:
                samples.append(self._sample(now - before))
            before = now
        self.settle()
        return samples

    def settle(self) -> None:
        """Wait until nothing goes on any more."""
        if isinstance(self.trainer, Engine):
            self.trainer.synchronize()

    def _sample(self, seconds: float) -> Sample:
        step = self.trainer.last_step
        if step is None:
            return Sample(seconds)
        return Sample(seconds, step.nvme_read_bytes, step.nvme_written_bytes, step.as_dict())


def make_plain(shape: GPTShape, precision: Precision, *, fused: bool = True, seed: int = 0) -> PlainTrainer:
    """Ordinary PyTorch, all state in memory."""
    torch.manual_seed(seed)
    config, device = Config(device="cpu", precision=precision), torch.device("cpu")
    trainer = PlainTrainer(GPT(shape), learning_rate=LEARNING_RATE, config=config, device=device)
    trainer.optimizer = torch.optim.AdamW(trainer.masters, lr=LEARNING_RATE, fused=fused)
    return trainer


def make_engine(shape: GPTShape, config: Config, *, fused: bool = True, seed: int = 0) -> Engine:
    """The engine, with the same weights and optimizer as ``make_plain``.

    Raises:
        BudgetError: the budgets are too small.
    """
    torch.manual_seed(seed)
    with infinity.deferred_init():
        model = GPT(shape)
    return infinity.initialize(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused), config)


def smallest_budgets(shape: GPTShape, config: Config) -> tuple[int, int]:
    """The least ``hbm`` and ``ram`` that train ``shape`` otherwise as ``config``: as the engine itself refuses less."""
    try:
        make_engine(shape, config.model_copy(update={"hbm": 1, "ram": 1})).close()
    except BudgetError as error:
        told = str(error)
    else:
        raise AssertionError("an engine without memory was not refused")
    match = re.search(r"hbm=(\d+), ram=(\d+) \(bytes\)", told)
    assert match is not None, f"no budgets in: {told}"
    return int(match[1]), int(match[2])


def num_parameters(shape: GPTShape) -> int:
    """Elements of all parameters, shared ones once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(shape).parameters())


class BlockClock:
    """Estimates forward and backward of a model from one block, so that work can be chosen by time."""

    def __init__(self, shape: GPTShape, precision: Precision) -> None:
        self._num_layers = shape.num_layers * (4 / 3 if shape.recompute else 1)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._hidden_size, self._dtype = shape.hidden_size, dtype
        self._block = Block(shape).to(dtype)

    def seconds(self, work: Work, repeats: int = 2) -> float:
        """Forward and backward of all blocks: the best of some, after one for warming up."""
        stream = torch.randn(work.batch_size, work.seq_length, self._hidden_size).to(self._dtype).requires_grad_()
        taken = []
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            self._block(stream).sum().backward()
            taken.append(time.perf_counter() - begun)
        return min(taken[1:]) * self._num_layers

    def work(self, seconds: float, seq_length: int, most_tokens: int) -> Work:
        """The work whose forward and backward take about so long: interpolated between two that are timed."""
        few, many = work_of_tokens(16, seq_length), work_of_tokens(64, seq_length)
        low, high = self.seconds(few), self.seconds(many)
        slope = max(high - low, 1e-9) / (many.num_tokens - few.num_tokens)
        wanted = few.num_tokens + (seconds - low) / slope
        return work_of_tokens(min(max(wanted, 8), most_tokens), seq_length)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
