"""The training thread lent to the optimizer: who computes, in which state, and what signals and closing do to it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import infinity
import parity_models as models
from accidents import momentum
from infinity.engine import resources
from infinity.engine.lent import LentThread
from infinity.engine.worker import OptimizerThread
from infinity.io.tasks import call_in_executor
from infinity.store.loop import LoopThread
from parity import Parity, Tiered, Trainer, assert_same, build
from parity_models import GPT


@pytest.fixture
def worker() -> Iterator[LentThread]:
    with LentThread() as made:
        yield made


@pytest.fixture
def loop(worker: LentThread) -> Iterator[LoopThread]:
    made = LoopThread()
    made.waiter = worker
    yield made
    made.close()


def test_calls_wait_until_a_thread_is_lent_and_run_on_it(worker: LentThread) -> None:
    futures = [worker.submit(lambda given: (threading.current_thread(), given), index) for index in range(3)]
    assert worker.has_calls
    assert not any(future.done() for future in futures)
    worker.lend()
    assert [future.result() for future in futures] == [(threading.current_thread(), index) for index in range(3)]
    assert not worker.has_calls


def test_whoever_waits_for_the_loop_lends_its_thread(worker: LentThread, loop: LoopThread) -> None:
    async def compute() -> list[threading.Thread]:
        return [await call_in_executor(worker, threading.current_thread) for _ in range(3)]

    assert set(loop.run(compute())) == {threading.current_thread()}


def test_while_one_thread_makes_a_call_another_waits(worker: LentThread) -> None:
    begun, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        begun.set()
        go_on.wait()
        order.append("first")

    one, two = worker.submit(first), worker.submit(order.append, "second")
    other = threading.Thread(target=worker.lend)
    other.start()
    begun.wait()
    worker.wait(two, 0.01)
    assert order == []
    go_on.set()
    worker.wait(two, 5.0)
    other.join()
    assert one.done()
    assert order == ["first", "second"]


class Recording(TorchDispatchMode):
    """Notes every operator that it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
        torch.empty(1).device.type,
        torch._C._len_torch_dispatch_stack(),
    )


def test_a_call_finds_the_state_of_a_thread_of_its_own(worker: LentThread) -> None:
    expected = state()
    before = torch.get_num_threads()
    recording = Recording()
    future = worker.submit(state)
    try:
        with (
            torch.inference_mode(),
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.device("meta"),
            recording,
        ):
            torch.set_num_threads(before + 1)
            outside = state()
            del recording.seen[:]
            worker.lend()
            assert recording.seen == []
            assert state() == outside
    finally:
        torch.set_num_threads(before)
    assert future.result() == expected != outside


def test_an_interrupt_comes_after_the_call(worker: LentThread) -> None:
    def interrupted() -> str:
        signal.raise_signal(signal.SIGINT)
        return "whole"

    one, two = worker.submit(interrupted), worker.submit(int)
    with pytest.raises(KeyboardInterrupt):
        worker.lend()
    assert one.result() == "whole"
    assert not two.done()
    worker.lend()
    assert two.result() == 0


def test_an_interrupt_in_a_wait_for_the_loop_lets_the_operation_end(worker: LentThread, loop: LoopThread) -> None:
    ends: list[str] = []

    async def compute() -> None:
        await call_in_executor(worker, signal.raise_signal, signal.SIGINT)
        await call_in_executor(worker, ends.append, "second call")

    with pytest.raises(KeyboardInterrupt):
        loop.run(compute())
    assert ends == ["second call"]


def test_handlers_are_the_users_again(worker: LentThread) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        handler = signal.getsignal(signal.SIGUSR1)
        worker.submit(signal.raise_signal, signal.SIGUSR1)
        worker.lend()
        assert came == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_no_calls_of_its_parent(worker: LentThread) -> None:
    worker.submit(os._exit, 7)
    child = os.fork()
    if child == 0:
        worker.lend()
        worker.shutdown()
        os._exit(int(worker.has_calls))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.shutdown(wait=False, cancel_futures=True)


def test_shutdown_makes_the_calls_that_wait_or_cancels_them() -> None:
    made, cancelled = LentThread(), LentThread()
    one, two = made.submit(int), cancelled.submit(int)
    made.shutdown()
    cancelled.shutdown(cancel_futures=True)
    assert one.result() == 0
    assert two.cancelled()
    with pytest.raises(RuntimeError):
        made.submit(int)


def test_closing_the_loop_makes_the_call_that_one_of_its_tasks_waits_for(worker: LentThread, loop: LoopThread) -> None:
    calls: list[int] = []
    waiting = threading.Event()

    async def compute() -> None:
        asyncio.get_running_loop().call_soon(waiting.set)
        await call_in_executor(worker, calls.append, 1)

    future = loop.submit(compute())
    waiting.wait()
    loop.close()
    assert calls == [1]
    assert future.cancelled() or future.exception() is not None


class InterruptedMomentum(torch.optim.SGD):
    """Is interrupted in the middle of one of its steps."""

    steps = itertools.count()
    interrupted_at = -1

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if next(self.steps) == self.interrupted_at:
            signal.raise_signal(signal.SIGINT)


def step(trainer: Trainer, seed: int) -> torch.Tensor:
    loss: torch.Tensor = trainer.model(*models.tokens(seed))
    trainer.backward(loss)
    trainer.step()
    trainer.zero_grad()
    return loss.detach()


def six_steps(trainer: Trainer) -> list[torch.Tensor]:
    trainer.model.eval()  # no dropout: what is interrupted must not draw random numbers
    return [step(trainer, seed) for seed in range(6)]


def num_interrupts_of(call: Callable[[], object]) -> int:
    """Call until it is not interrupted: whatever waits may step a sub-group meanwhile. How often it was."""
    num_interrupts = 0
    while True:
        try:
            call()
        except KeyboardInterrupt:
            num_interrupts += 1
        else:
            return num_interrupts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_interrupt_in_the_middle_of_a_step_loses_nothing(precision: str, tmp_path: Path) -> None:
    """Ctrl-C while a sub-group is stepped is handled when it is whole; what was interrupted is done again."""
    case = Parity(GPT, momentum, six_steps, precision)
    model, _ = build(GPT, momentum)
    optimizer = InterruptedMomentum(model.parameters(), lr=0.05, momentum=0.9)
    with infinity.initialize(model, optimizer, case.blockwise(tmp_path)) as engine:
        trainer: Trainer = Tiered(engine, optimizer)
        model.eval()
        losses = [step(trainer, 0)]
        num_interrupts = 0
        for seed in range(1, 6):
            InterruptedMomentum.steps, InterruptedMomentum.interrupted_at = itertools.count(), seed
            while True:
                try:
                    loss = trainer.model(*models.tokens(seed))
                    trainer.backward(loss)
                    break
                except KeyboardInterrupt:
                    num_interrupts += 1 + num_interrupts_of(trainer.zero_grad)
            try:
                trainer.step()
            except KeyboardInterrupt:
                num_interrupts += 1
            num_interrupts += num_interrupts_of(trainer.zero_grad)
            losses.append(loss.detach())
            InterruptedMomentum.interrupted_at = -1
        assert num_interrupts > 0
        assert_same(losses, case.expected.returned, "losses")
        assert_same(dict(engine.state_dict()), case.expected.weights, "weights")


def test_modes_of_a_forward_do_not_see_the_step_that_runs_under_it(tmp_path: Path) -> None:
    """As those of a selective checkpoint, which count the operators of a forward to replay them."""

    def seen(trainer: Trainer) -> list[str]:
        step(trainer, 0)
        with Recording() as recording:
            step(trainer, 1)
        return [name for name in recording.seen if "lerp" in name or "addcdiv" in name or "adamw" in name]

    model, optimizer = build(GPT, lambda model: torch.optim.AdamW(model.parameters(), fused=True))
    with infinity.initialize(model, optimizer, {"device": "cpu", "ram": "64MiB", "hbm": "16MiB"}) as engine:
        assert seen(Tiered(engine, optimizer)) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_with_a_thread_of_its_own_the_numbers_are_the_same(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an accelerator's training has, here beside a training thread that computes."""
    monkeypatch.setattr(resources, "LentThread", OptimizerThread)
    case = Parity(GPT, momentum, six_steps, precision)
    case.check(case.blockwise(tmp_path))
