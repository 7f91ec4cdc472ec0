"""Debug mode: released memory is NaN, so that a read after release shows; and everything is as right as without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from accidents import ACCIDENTS, Accident, between_good_steps, two_groups
from infinity import Config
from infinity.engine.gathering import Gatherer
from infinity.engine.saved import SavedTensors
from infinity.store.pool import BufferPool
from parity import ENOUGH, Parity, Trainer
from parity import tiny_scale as tiny_scale
from parity_models import GPT, WIDTH


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(batches: Callable[[int], tuple[torch.Tensor, ...]]) -> Callable[[Trainer], list[torch.Tensor]]:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for step in range(2):
            for micro in range(2):
                loss = trainer.model(*batches(2 * step + micro))
                trainer.backward(loss)
                losses.append(loss.detach())
            trainer.step()
        return losses

    return script


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]]]] = {
    "gpt": (GPT, models.tokens),
    "reentrant": (lambda: GPT(models.reentrant), models.tokens),
    "non-reentrant": (lambda: GPT(models.non_reentrant, models.non_reentrant), models.tokens),
    "segments": (models.SegmentedGPT, models.tokens),
    "borrowing": (lambda: models.BorrowingGPT(models.non_reentrant), models.tokens),
    "cnn": (models.CNN, models.images),
    "lstm": (models.Recurrent, models.tokens),
    "encoder-decoder": (models.EncoderDecoder, models.tokens),
    "outputs": (models.Outputs, models.vectors),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_parity_with_every_released_byte_nan(name: str, precision: str, tmp_path: Path) -> None:
    make_model, batches = CASES[name]
    case = Parity(make_model, momentum, train(batches), precision)
    case.check(case.blockwise(tmp_path, debug=True))
    case.check(case.half(tmp_path, debug=True))


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_accidents_with_every_released_byte_nan(accident: Accident, tmp_path: Path) -> None:
    case = Parity(GPT, two_groups, between_good_steps(accident))
    case.check(case.smallest(tmp_path, debug=True))


class Chain(nn.Sequential):
    """Units of one size, so that the memory of one is used for another."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


@pytest.fixture(params=[False, True])
def debug(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def gradient_of_input(tmp_path: Path, *, debug: bool) -> torch.Tensor:
    """The gradient of the input, which depends on every weight that backward reads."""
    torch.manual_seed(0)
    # Units of different sizes: the memory of the first leaves for the third, and is nobody's when backward reads it.
    model = nn.Sequential(nn.Linear(WIDTH, 300), nn.Linear(300, 40), nn.Linear(40, WIDTH))
    config = Config(**{**ENOUGH, "hbm": 64 << 10, "nvme": tmp_path, "debug": debug, "units": ["Linear"], "prefetch": 0})
    (x,) = models.vectors(0)
    x.requires_grad_()
    with infinity.initialize(model, momentum(model), config) as engine:
        loss = engine(x).square().sum()
        assert loss.isfinite()
        loss.backward()
    assert x.grad is not None
    return x.grad


def test_a_read_after_release_is_seen_as_nan_in_debug_mode_only(
    debug: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken on purpose: autograd keeps the gathered memory itself, as it would without our saved-tensor hooks."""
    assert gradient_of_input(tmp_path, debug=debug).isfinite().all()
    monkeypatch.setattr(SavedTensors, "_pack", lambda self, tensor: tensor)
    monkeypatch.setattr(SavedTensors, "_unpack", lambda self, packed: packed)
    assert bool(gradient_of_input(tmp_path, debug=debug).isnan().any()) is debug


def test_a_view_kept_beyond_the_forward_reads_as_nan_in_debug_mode_only(debug: bool, tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any) -> None:
        kept.append(module.get_parameter("0.weight").detach().view(-1))

    model = Chain()
    with infinity.initialize(model, momentum(model), Config(**ENOUGH, nvme=tmp_path, debug=debug)) as engine:
        first = model.get_submodule("0")
        first.register_forward_pre_hook(keep)
        with torch.no_grad():
            engine(*models.vectors(0))
        weight = engine.state_dict()["0.0.weight"].view(-1)
        assert torch.equal(kept[0], weight), "it is still resident"
        engine.backward(engine(*models.vectors(0)).sum())
        engine.step()  # a step drops what is gathered
        engine.synchronize()
        assert bool(kept[0].isnan().all()) is debug


def test_placeholders_read_as_nan_in_either_mode(debug: bool, tmp_path: Path) -> None:
    model = Chain()
    with infinity.initialize(model, momentum(model), Config(**ENOUGH, nvme=tmp_path, debug=debug)):
        for param in model.parameters():
            assert param.isnan().all()
            assert param.untyped_storage().nbytes() == param.element_size()


def test_poison_is_on_everywhere_or_nowhere(debug: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned: list[str] = []
    real = BufferPool._fill_with_nan

    def fill(self: Any, *args: Any) -> None:
        poisoned.append("block")
        real(*args)

    monkeypatch.setattr(BufferPool, "_fill_with_nan", fill)
    model = Chain()
    with infinity.initialize(model, momentum(model), Config(**ENOUGH, nvme=tmp_path, debug=debug)) as engine:
        engine.backward(engine(*models.vectors(0)).sum())
        engine.step()
    assert bool(poisoned) is debug


def test_hooks_left_out_on_purpose_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose: units that are not gathered compute with placeholders, and the loss says so."""
    monkeypatch.setattr(Gatherer, "bind", lambda self, unit: None)
    monkeypatch.setattr(Gatherer, "release_idle", lambda self, units: None)
    model = Chain()
    with infinity.initialize(model, momentum(model), Config(**ENOUGH, nvme=tmp_path)) as engine:
        assert engine(*models.vectors(0)).isnan().all()
