"""The optimizer's thread: as many threads as training has, whoever sets what, and nobody else's setting changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from infinity.engine import worker
from infinity.engine.worker import OptimizerThread, ThreadCounts


@pytest.fixture(autouse=True)
def same_setting_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def thread() -> Iterator[OptimizerThread]:
    with OptimizerThread() as made:
        yield made


def elsewhere(call: Callable[[], Any]) -> Any:
    """The result of a call on a thread of its own."""
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.append(call()))
    other.start()
    other.join()
    return results[0]


class MeanOptimizer(torch.optim.Optimizer):
    """Moves by the mean of the gradient, whose bits depend on how many threads it is computed with."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never called with one
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad.mean())


def weights_after(
    make: Callable[[Any], torch.optim.Optimizer], run: Callable[[Callable[[], Any]], Any]
) -> torch.Tensor:
    """Parameters after three steps, each of them run by ``run``."""
    generator = torch.Generator().manual_seed(3)
    param = torch.nn.Parameter(torch.randn(701, 1003, generator=generator))
    optimizer = make([param])
    for _ in range(3):
        param.grad = torch.randn(param.shape, generator=generator)
        run(optimizer.step)
    return param.detach()


def test_calls_run_one_by_one_on_one_named_thread(thread: OptimizerThread) -> None:
    futures = [thread.submit(lambda given: (threading.current_thread().name, given), index) for index in range(3)]
    name = futures[0].result()[0]
    assert name.startswith("infinity-optimizer")
    assert [future.result() for future in futures] == [(name, 0), (name, 1), (name, 2)]


def test_it_serves_an_event_loop(thread: OptimizerThread) -> None:
    async def run() -> int:
        return await asyncio.get_running_loop().run_in_executor(thread, torch.get_num_threads)

    torch.set_num_threads(3)
    thread.follow_caller()
    assert asyncio.run(run()) == 3


def test_a_failure_is_raised_by_the_future_and_the_next_call_runs(thread: OptimizerThread) -> None:
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result()
    assert thread.submit(int, "ff", base=16).result() == 255


def test_after_shutdown_nothing_is_taken(thread: OptimizerThread) -> None:
    thread.shutdown()
    with pytest.raises(RuntimeError):
        thread.submit(int)


def test_it_begins_with_the_setting_of_its_maker() -> None:
    torch.set_num_threads(3)
    with OptimizerThread() as thread:
        assert thread.submit(torch.get_num_threads).result() == 3


def test_it_follows_a_setting_made_after_it_has_computed(thread: OptimizerThread) -> None:
    for num_threads in (3, 1, 2):
        torch.set_num_threads(num_threads)
        thread.follow_caller()
        assert thread.submit(torch.get_num_threads).result() == num_threads


def test_what_was_submitted_before_keeps_the_setting_of_its_time(thread: OptimizerThread) -> None:
    held = threading.Event()
    torch.set_num_threads(3)
    thread.follow_caller()
    thread.submit(held.wait)
    before = thread.submit(torch.get_num_threads)
    torch.set_num_threads(2)
    thread.follow_caller()
    after = thread.submit(torch.get_num_threads)
    held.set()
    assert (before.result(), after.result()) == (3, 2)


def test_a_setting_of_another_thread_reaches_neither_it_nor_training() -> None:
    """As when ``DataLoader`` pins memory: its thread sets 1, and every thread started later begins with that."""
    torch.set_num_threads(3)
    before = ThreadCounts.of_caller()
    elsewhere(lambda: torch.set_num_threads(1))
    assert elsewhere(torch.get_num_threads) == 1
    with OptimizerThread() as thread:
        assert thread.submit(ThreadCounts.of_caller).result() == before
        assert elsewhere(torch.get_num_threads) == 1
    assert ThreadCounts.of_caller() == before


def test_what_torch_itself_says_of_the_thread(thread: OptimizerThread) -> None:
    torch.set_num_threads(3)
    expected = torch.__config__.parallel_info()
    elsewhere(lambda: torch.set_num_threads(1))
    assert elsewhere(torch.__config__.parallel_info) != expected
    thread.follow_caller()
    assert thread.submit(torch.__config__.parallel_info).result() == expected


def test_a_torch_without_openmp_is_told_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_runtime", lambda name: None)
    counts = ThreadCounts(5, None)

    def after() -> ThreadCounts:
        counts.apply()
        return ThreadCounts.of_caller()

    assert elsewhere(after) == counts


def test_the_runtimes_of_torch_are_found() -> None:
    info = torch.__config__.parallel_info()
    assert (worker._runtime("omp_set_num_threads") is not None) == ("omp_get_max_threads" in info)
    assert worker._runtime("MKL_Set_Num_Threads_Local") is None or "mkl_get_max_threads" in info


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_an_optimizer_with_reductions_gives_the_bits_of_plain_pytorch(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    expected = weights_after(MeanOptimizer, lambda step: step())
    elsewhere(lambda: torch.set_num_threads(5))
    with OptimizerThread() as thread:
        assert torch.equal(weights_after(MeanOptimizer, lambda step: thread.submit(step).result()), expected)


def test_with_another_number_of_threads_its_bits_are_others() -> None:
    """What the rule is for: were this not so, the test above could not fail."""
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(weights_after(MeanOptimizer, lambda step: step()))
    assert not all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "SGD", "RMSprop"])
def test_torchs_own_optimizers_give_the_bits_of_plain_pytorch(name: str) -> None:
    torch.set_num_threads(2)
    make = getattr(torch.optim, name)
    expected = weights_after(lambda params: make(params, lr=0.01), lambda step: step())
    with OptimizerThread() as thread:
        given = weights_after(lambda params: make(params, lr=0.01), lambda step: thread.submit(step).result())
    assert torch.equal(given, expected)
