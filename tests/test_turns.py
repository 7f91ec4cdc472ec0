"""What micro-batches that take turns share beside parameters: settings of the process, the model itself, the baton."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import EngineStateError
from infinity.engine.relay import Relay
from infinity.errors import MicroBatchError
from parity import Parity, Trainer, build, tiny_scale

__all__ = ["tiny_scale"]

WIDTH = 16


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.norm(self.first(x).tanh())
        return y


class Net(nn.Module):
    """Blocks that change buffers, under a context of the process, and recomputed if so asked."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH), without_mkldnn(), warnings.catch_warnings():
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
                self.seen.append((torch.backends.cuda.flash_sdp_enabled(), torch._C._get_mkldnn_enabled()))
        return x.square().mean()


def batches() -> list[torch.Tensor]:
    return [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[infinity.Engine]:
    case = Parity(Net, sgd, lambda trainer: None)
    model, optimizer = build(Net, sgd)
    config = case.blockwise(tmp_path, accumulation="vertical")
    with infinity.initialize(model, optimizer, config) as engine:
        yield engine


def settings() -> list[Any]:
    return [
        torch.backends.cuda.flash_sdp_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_default_dtype(),
        warnings.filters,
    ]


def test_settings_of_the_process_go_along_and_come_back(tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        seen = []
        for _ in range(2):
            seen += trainer.accumulate(batches(), lambda batch: trainer.model(batch))
            trainer.step()
        assert isinstance(trainer.model, Net)
        assert set(trainer.model.seen) == {(False, False)}
        return seen

    before = settings()
    case = Parity(Net, sgd, script)
    engine = case.check(case.blockwise(tmp_path, accumulation="vertical"))
    assert engine.last_accumulation is not None
    assert engine.last_accumulation.schedule == "vertical"
    assert all(one is other or one == other for one, other in zip(settings(), before, strict=True))


def functional(engine: infinity.Engine, batch: torch.Tensor) -> torch.Tensor:
    bias = torch.ones(WIDTH)
    return torch.func.functional_call(engine.module, {"blocks.0.first.bias": bias}, (batch,))  # type: ignore[no-any-return]


def evaluated(engine: infinity.Engine, batch: torch.Tensor) -> torch.Tensor:
    engine.module.eval()
    try:
        return engine(batch)  # type: ignore[no-any-return]
    finally:
        engine.module.train()


def frozen(engine: infinity.Engine, batch: torch.Tensor) -> torch.Tensor:
    block = engine.module.get_submodule("blocks.0").requires_grad_(False)
    try:
        return engine(batch)  # type: ignore[no-any-return]
    finally:
        block.requires_grad_(True)


CHANGES: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "functional": (functional, r"module blocks\.0\.first has other parameters for the time being"),
    "evaluated": (evaluated, r"module model was switched between train\(\) and eval\(\)"),
    "frozen": (frozen, r"module blocks\.0\.\S+ has a parameter whose requires_grad was changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_another_for_one_of_them_is_refused(change: str, engine: infinity.Engine) -> None:
    compute, message = CHANGES[change]
    before = {name: value.clone() for name, value in engine.state_dict().items() if "norm" not in name}
    with pytest.raises(MicroBatchError, match=message) as error:
        engine.accumulate(batches(), functools.partial(compute, engine))
    assert "accumulation='horizontal'" in str(error.value)
    assert all(torch.equal(engine.state_dict()[name], value) for name, value in before.items())
    assert engine.module.training
    engine.accumulate(batches(), engine)
    engine.step()


@pytest.mark.parametrize("by", ["engine", "model"])
def test_buffers_that_a_recomputation_changes_are_refused(by: str, tmp_path: Path) -> None:
    def make() -> Net:
        return Net(recompute=by == "model")

    case = Parity(make, sgd, lambda trainer: None)
    model, optimizer = build(make, sgd)
    config = case.blockwise(tmp_path, accumulation="vertical", recompute=by == "engine")
    with infinity.initialize(model, optimizer, config) as engine:
        with pytest.raises(MicroBatchError, match=r"a buffer .* was changed when a block was recomputed"):
            engine.accumulate(batches(), engine)
        engine.module.eval()  # none changes now
        engine.accumulate(batches(), engine)
        engine.step()


def test_no_sync_inside_is_refused_and_steps_go_on(engine: infinity.Engine) -> None:
    def inside(batch: torch.Tensor) -> torch.Tensor:
        with engine.no_sync():
            return engine(batch)  # type: ignore[no-any-return]

    with pytest.raises(MicroBatchError, match=r"no_sync\(\) was called inside the compute_loss"):
        engine.accumulate(batches(), inside)
    engine.accumulate(batches(), engine)
    engine.step()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_is_no_failure_passes_as_it_is(kind: type[BaseException], engine: infinity.Engine) -> None:
    def leave(batch: torch.Tensor) -> torch.Tensor:
        raise kind

    with pytest.raises(kind):
        engine.accumulate(batches(), leave)
    engine.accumulate(batches(), engine)
    engine.step()


def test_a_signal_while_threads_are_started_ends_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> None:
        pass

    relay = Relay(3, pause=nothing, resume=nothing, end_lap=nothing)
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        if len(started) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        relay.run(nothing)
    assert len(started) == 3
    assert not any(thread.is_alive() for thread in started)


def test_what_failed_before_any_thread_runs_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay(2, pause=lambda n: None, resume=lambda n: None, end_lap=lambda: None)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Relay, "_start", fail)
    with pytest.raises(ZeroDivisionError):
        relay.run(lambda number: None)


def test_a_program_that_is_interrupted_in_it_ends() -> None:
    script = """
        import signal, threading, torch, infinity
        from torch import nn
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        config = infinity.Config(device="cpu", hbm="1MiB", ram="1MiB", accumulation="vertical")
        start = threading.Thread.start
        def interrupted(thread):
            start(thread)
            if "micro-batch-1" in thread.name:
                signal.raise_signal(signal.SIGINT)
        engine = infinity.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
        threading.Thread.start = interrupted
        try:
            engine.accumulate([torch.ones(2, 8)] * 3, lambda x: model(x).sum())
        except KeyboardInterrupt:
            print("interrupted")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "interrupted\n"


def test_the_name_of_the_error_is_public() -> None:
    assert issubclass(MicroBatchError, infinity.InfinityError)
    assert not issubclass(EngineStateError, MicroBatchError)


@pytest.mark.parametrize("given", [None, {"a": 1}, "text"])
def test_what_is_no_collection_of_micro_batches_is_refused(given: Any, engine: infinity.Engine) -> None:
    with pytest.raises(infinity.ModelError, match=r"accumulate\(\): expected micro-batches one by one, got a "):
        engine.accumulate(given, engine)
