"""Training with the engine gives the numbers of ordinary PyTorch, bit by bit, and gives everything back."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from rich.console import Console

from infinity.config import Config
from infinity.console.interrupt import StopRequest
from infinity.train.report import RunReport
from infinity.train.run import run
from infinity.train.settings import TrainSettings
from infinity.train.trainer import Trainer, make_trainer

KIB = 1 << 10


pytestmark = pytest.mark.usefixtures("one_thread")


def train(config: Config, **flags: Any) -> RunReport:
    defaults = {"layers": 4, "hidden": 64, "heads": 2, "seq": 16, "batch": 2, "steps": 3, "eval_every": 2, "lr": 1e-2}
    settings = TrainSettings(**{**defaults, "data_limit": "20KiB", **flags})
    with StopRequest() as stop:
        return run(settings, config, Console(file=io.StringIO()), stop)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("accumulate", "recompute"), [(1, False), (3, False), (1, True)])
def test_losses_and_weights_are_those_of_plain_pytorch(
    precision: str, accumulate: int, recompute: bool, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"accumulate": accumulate}
    plain_file, tiered_file = tmp_path / "plain.safetensors", tmp_path / "tiered.safetensors"
    budgets = Config(hbm=600 * KIB, ram=1000 * KIB, nvme=tmp_path / "nvme", precision=precision, recompute=recompute)
    tiered = train(budgets, save=tiered_file, **flags)
    plain = train(Config(precision=precision, recompute=recompute), save=plain_file, plain=True, **flags)
    assert tiered.history.losses == plain.history.losses
    assert tiered.history.eval_losses == plain.history.eval_losses
    assert plain_file.read_bytes() == tiered_file.read_bytes()
    assert tiered.state_bytes > budgets.hbm + budgets.ram
    assert tiered.as_document()["peak"]["device"] <= budgets.hbm
    assert tiered.as_document()["peak"]["host"] <= budgets.ram
    assert sum(tiered.as_document()["nvme"]["read_bytes"]) > 0
    assert not (tmp_path / "nvme").exists()


def test_activations_that_are_recomputed_or_on_nvme_change_no_loss(tmp_path: Path) -> None:
    flags = {"batch": 8, "seq": 32}
    plain = train(Config(), plain=True, **flags)
    for recompute in (False, True):
        fields = {"nvme": tmp_path / "nvme", "activation_bytes": "8MiB", "recompute": recompute}
        tiered = train(Config(hbm=600 * KIB, ram=1000 * KIB, **fields), **flags)
        assert tiered.history.losses == plain.history.losses
        assert tiered.usage["activations"].peak_bytes > 0


def test_without_nvme_where_memory_is_enough() -> None:
    tiered, plain = train(Config(ram="64MiB")), train(Config(), plain=True)
    assert tiered.history.losses == plain.history.losses
    assert len(tiered.unit_names) >= 4
    assert tiered.num_parameters == plain.num_parameters


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_an_accelerator_losses_are_those_of_plain_pytorch(precision: str, tmp_path: Path) -> None:
    budgets = Config(device="cuda", hbm=600 * KIB, ram=2000 * KIB, nvme=tmp_path / "nvme", precision=precision)
    tiered, plain = train(budgets), train(Config(device="cuda", precision=precision), plain=True)
    assert tiered.history.losses == plain.history.losses
    assert tiered.history.eval_losses == plain.history.eval_losses


def test_a_second_signal_in_the_middle_of_forward_gives_everything_back(tmp_path: Path) -> None:
    engines: list[Trainer] = []

    def make_and_interrupt(settings: TrainSettings, config: Config, device: torch.device) -> Trainer:
        engine = make_trainer(settings, config, device)
        engines.append(engine)

        def interrupt(*_: object) -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        engine.module.get_submodule("blocks.2.mlp_in").register_forward_hook(interrupt)
        return engine

    settings = TrainSettings(layers=4, hidden=64, heads=2, seq=16, batch=2, eval_every=0, data_limit="20KiB")
    config = Config(hbm=600 * KIB, ram=1000 * KIB, nvme=tmp_path / "nvme")
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        run(settings, config, Console(file=io.StringIO()), stop, make_trainer=make_and_interrupt)
    assert len(engines) == 1
    assert not (tmp_path / "nvme").exists()


def test_saved_weights_of_an_interrupted_run_are_those_of_its_last_step(tmp_path: Path) -> None:
    two_steps, stopped = tmp_path / "two.safetensors", tmp_path / "stopped.safetensors"
    config = Config(ram="64MiB")
    train(config, steps=2, eval_every=0, save=two_steps)
    num_forwards = 0

    def make_and_interrupt(settings: TrainSettings, config: Config, device: torch.device) -> Trainer:
        engine = make_trainer(settings, config, device)

        def interrupt(*_: object) -> None:
            nonlocal num_forwards
            num_forwards += 1
            if num_forwards == 2:
                signal.raise_signal(signal.SIGINT)

        engine.module.register_forward_hook(interrupt)
        return engine

    settings = TrainSettings(
        layers=4, hidden=64, heads=2, seq=16, batch=2, steps=99, eval_every=0, lr=1e-2, data_limit="20KiB", save=stopped
    )
    with StopRequest() as stop:
        run(settings, config, Console(file=io.StringIO()), stop, make_trainer=make_and_interrupt)
    assert stop.exit_code == 130
    first, second = safetensors.torch.load_file(two_steps), safetensors.torch.load_file(stopped)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
