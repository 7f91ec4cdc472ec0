"""Where the optimizer computes: as many threads as training has, and nobody else's setting is changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from infinity.engine import worker
from infinity.engine.lent import LentThread
from infinity.engine.worker import OptimizerThread, ThreadCounts, Worker


@pytest.fixture(autouse=True)
def same_setting_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


MakeWorker = Callable[[], Worker]


@pytest.fixture(params=[OptimizerThread, LentThread])
def make(request: pytest.FixtureRequest) -> MakeWorker:
    made: MakeWorker = request.param
    return made


@pytest.fixture
def thread(make: MakeWorker) -> Iterator[Worker]:
    with make() as made:
        yield made


def result(worker: Worker, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call comes to."""
    return outcome(worker, worker.submit(function, *args, **kwargs))


def outcome(worker: Worker, future: Future[Any]) -> Any:
    while not future.done():
        worker.wait(future, 1.0)
    return future.result()


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


def test_calls_run_one_by_one_in_order(thread: Worker) -> None:
    order: list[int] = []
    futures = [thread.submit(order.append, index) for index in range(3)]
    outcome(thread, futures[-1])
    assert order == [0, 1, 2]


def test_its_own_thread_has_a_name() -> None:
    with OptimizerThread() as thread:
        assert result(thread, lambda: threading.current_thread().name).startswith("infinity-optimizer")


def test_it_serves_an_event_loop(thread: Worker) -> None:
    async def run() -> int:
        job = asyncio.get_running_loop().run_in_executor(thread, torch.get_num_threads)
        thread.lend()
        return await job

    torch.set_num_threads(3)
    thread.follow_caller()
    assert asyncio.run(run()) == 3


def test_a_failure_is_raised_by_the_future_and_the_next_call_runs(thread: Worker) -> None:
    with pytest.raises(ZeroDivisionError):
        result(thread, lambda: 1 // 0)
    assert result(thread, int, "ff", base=16) == 255


def test_after_shutdown_nothing_is_taken(thread: Worker) -> None:
    thread.shutdown()
    with pytest.raises(RuntimeError):
        thread.submit(int)


def test_it_begins_with_the_setting_of_its_maker(make: MakeWorker) -> None:
    torch.set_num_threads(3)
    with make() as thread:
        torch.set_num_threads(2)
        assert result(thread, torch.get_num_threads) == 3


def test_it_follows_a_setting_made_after_it_has_computed(thread: Worker) -> None:
    for num_threads in (3, 1, 2):
        torch.set_num_threads(num_threads)
        thread.follow_caller()
        assert result(thread, torch.get_num_threads) == num_threads


def test_what_was_submitted_before_keeps_the_setting_of_its_time(thread: Worker) -> None:
    held = threading.Event()
    torch.set_num_threads(3)
    thread.follow_caller()
    thread.submit(held.wait, 10.0)
    before = thread.submit(torch.get_num_threads)
    torch.set_num_threads(2)
    thread.follow_caller()
    after = thread.submit(torch.get_num_threads)
    held.set()
    assert (outcome(thread, before), outcome(thread, after)) == (3, 2)


def test_a_setting_of_another_thread_reaches_neither_it_nor_training(make: MakeWorker) -> None:
    """As when ``DataLoader`` pins memory: its thread sets 1, and every thread started later begins with that."""
    torch.set_num_threads(3)
    before = ThreadCounts.of_caller()
    elsewhere(lambda: torch.set_num_threads(1))
    assert elsewhere(torch.get_num_threads) == 1
    with make() as thread:
        assert result(thread, ThreadCounts.of_caller) == before
        assert elsewhere(torch.get_num_threads) == 1
    assert ThreadCounts.of_caller() == before


def test_what_torch_itself_says_of_the_thread(thread: Worker) -> None:
    torch.set_num_threads(3)
    expected = torch.__config__.parallel_info()
    elsewhere(lambda: torch.set_num_threads(1))
    assert elsewhere(torch.__config__.parallel_info) != expected
    thread.follow_caller()
    assert result(thread, torch.__config__.parallel_info) == expected


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
def test_an_optimizer_with_reductions_gives_the_bits_of_plain_pytorch(num_threads: int, make: MakeWorker) -> None:
    torch.set_num_threads(num_threads)
    expected = weights_after(MeanOptimizer, lambda step: step())
    elsewhere(lambda: torch.set_num_threads(5))
    with make() as thread:
        torch.set_num_threads(4)
        assert torch.equal(weights_after(MeanOptimizer, lambda step: result(thread, step)), expected)


def test_with_another_number_of_threads_its_bits_are_others() -> None:
    """What the rule is for: were this not so, the test above could not fail."""
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(weights_after(MeanOptimizer, lambda step: step()))
    assert not all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "SGD", "RMSprop"])
def test_torchs_own_optimizers_give_the_bits_of_plain_pytorch(name: str, make: MakeWorker) -> None:
    torch.set_num_threads(2)
    optimizer = getattr(torch.optim, name)
    expected = weights_after(lambda params: optimizer(params, lr=0.01), lambda step: step())
    with make() as thread:
        given = weights_after(lambda params: optimizer(params, lr=0.01), lambda step: result(thread, step))
    assert torch.equal(given, expected)
