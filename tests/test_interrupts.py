"""An interrupt or a fault at any point of a forward and backward: the steps after it are as if it had never been."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
import parity_models as models
from accidents import momentum
from infinity import StorageError
from infinity.io.backend import Priority
from infinity.store.loop import LoopThread
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey
from parity import Parity, Tiered, Trainer, assert_same, build
from parity_models import GPT


def good_steps(trainer: Trainer) -> list[torch.Tensor]:
    trainer.model.eval()  # no dropout: what is interrupted must not draw random numbers
    losses = []
    for seed in range(2):
        loss = trainer.model(*models.tokens(seed))
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.detach())
    return losses


def four_good_steps(trainer: Trainer) -> list[torch.Tensor]:
    return good_steps(trainer) + good_steps(trainer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_interrupt_at_any_wait(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches a wait for the store when its operation has ended; the next steps are as if it had never been."""
    case = Parity(GPT, momentum, four_good_steps, precision)
    waits = itertools.count()
    interrupted_at = -1
    real_wait = LoopThread.wait

    def wait(loop: LoopThread, future: concurrent.futures.Future[Any]) -> Any:
        result = real_wait(loop, future)
        if next(waits) == interrupted_at:
            raise KeyboardInterrupt
        return result

    model, optimizer = build(GPT, momentum)
    with infinity.initialize(model, optimizer, case.blockwise(tmp_path)) as engine:
        trainer = Tiered(engine, optimizer)
        losses = good_steps(trainer)
        with monkeypatch.context() as patch:
            patch.setattr(LoopThread, "wait", wait)
            complete = False
            while not complete:
                interrupted_at, waits = interrupted_at + 3, itertools.count()
                try:
                    for seed in (7, 8):
                        trainer.backward(trainer.model(*models.tokens(seed)))
                    complete = True
                except KeyboardInterrupt:
                    pass
                waits = itertools.count(interrupted_at + 1)
                trainer.zero_grad()
        assert interrupted_at > 20
        losses += good_steps(trainer)
        assert_same(losses, case.expected.returned, "losses")
        assert_same(dict(engine.state_dict()), case.expected.weights, "weights")


class FaultyReads:
    """Fails reads of NVMe from some point on, prefetches too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_reads = 0
        self.fail_from: float = math.inf
        real_read = NvmeTier.read

        async def read(
            tier: NvmeTier, key: ShardKey, target: memoryview, *, priority: Priority = Priority.DEMAND
        ) -> None:
            self.num_reads += 1
            if self.num_reads >= self.fail_from:
                raise StorageError(f"read of {key} failed on purpose", path="nowhere")
            await real_read(tier, key, target, priority=priority)

        monkeypatch.setattr(NvmeTier, "read", read)

    def fail_after(self, num_reads: int) -> None:
        self.fail_from = self.num_reads + num_reads + 1


def test_a_failed_read_at_any_point_of_forward_and_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Parity(GPT, momentum, four_good_steps)
    faults = FaultyReads(monkeypatch)
    model, optimizer = build(GPT, momentum)
    failures = []
    with infinity.initialize(model, optimizer, case.smallest(tmp_path)) as engine:
        trainer = Tiered(engine, optimizer)
        losses = good_steps(trainer)
        for num_good in range(0, 24, 2):
            faults.fail_after(num_good)
            try:
                trainer.backward(trainer.model(*models.tokens(7)))
            except StorageError as error:
                failures.append(str(error))
            faults.fail_from = math.inf
            trainer.zero_grad()
        losses += good_steps(trainer)
        weights = dict(engine.state_dict())
    assert len(failures) > 5
    assert all("failed on purpose" in failure for failure in failures)
    assert_same(losses, case.expected.returned, "losses")
    assert_same(weights, case.expected.weights, "weights")
