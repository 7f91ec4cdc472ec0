"""Gradients that users set between backward and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
import parity_models as models
from infinity import EngineStateError, ModelError
from parity import Parity, Plain, Tiered, Trainer, build, same_bits, tiny_scale
from parity_models import GPT
from test_clipping import adamw

__all__ = ["tiny_scale"]


def value_for(param: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 0.01


def set_grad(trainer: Trainer, index: int, value: torch.Tensor) -> None:
    param = list(trainer.model.parameters())[index]
    if isinstance(trainer, Plain):
        trainer._unscale()
        trainer.masters.get(param, param).grad = value
    else:
        assert isinstance(trainer, Tiered)
        trainer.engine.values.set_grad(param, value)
        got = trainer.engine.values.grad(param)
        assert got is not None
        assert same_bits(got, value)


@pytest.mark.parametrize("budgets", ["smallest", "half", "resident"])
@pytest.mark.parametrize(
    ("precision", "num_backwards"),
    [("fp32", 0), ("fp32", 1), ("fp32", 2), ("bf16", 0), ("bf16", 1), ("bf16", 2), ("fp16", 1), ("fp16", 2)],
)
def test_they_are_those_that_are_stepped(precision: str, num_backwards: int, budgets: str, tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        seen = []
        for step in range(3):
            for micro in range(num_backwards):
                trainer.backward(trainer.model(*models.tokens(10 * step + micro)))
            for index, param in enumerate(trainer.model.parameters()):
                if index % 3 == step:
                    set_grad(trainer, index, value_for(param, index))
            if num_backwards:
                seen.append(trainer.clip(0.1))
            trainer.step()
        return seen

    case = Parity(GPT, adamw, script, precision, {"init_scale": 1024.0})
    case.check(getattr(case, budgets)(tmp_path, initial_loss_scale=1024.0))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_later_backwards_are_added(precision: str, tmp_path: Path) -> None:
    def script(trainer: Trainer) -> None:
        for index, param in enumerate(trainer.model.parameters()):
            set_grad(trainer, index, value_for(param, index))
        trainer.backward(trainer.model(*models.tokens(0)))
        trainer.step()

    case = Parity(GPT, adamw, script, precision)
    case.check(case.half(tmp_path))


def test_a_gradient_that_is_not_finite_is_seen_after_clipping_too(tmp_path: Path) -> None:
    model, optimizer = build(GPT, adamw)
    config = infinity.Config(device="cpu", hbm="4MiB", ram="4MiB", nvme=tmp_path, precision="fp16")
    with infinity.initialize(model, optimizer, config) as engine:
        engine.backward(engine(*models.tokens(0)))
        engine.clip_grad_norm_(1.0)
        param = engine.module.get_parameter("tokens.weight")
        engine.values.set_grad(param, torch.full(param.shape, torch.inf))
        engine.step()
        assert engine.num_skipped_steps == 1


def test_what_cannot_be_a_gradient_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = build(GPT, adamw)
    config = infinity.Config(device="cpu", hbm="4MiB", ram="4MiB", nvme=tmp_path)
    with infinity.initialize(model, optimizer, config) as engine:
        param = engine.module.get_parameter("tokens.weight")
        wrong: list[Any] = [None, 1.0, torch.ones(2), torch.ones(param.shape, device="meta")]
        for value in wrong:
            with pytest.raises(ModelError, match=r"gradient of parameter tokens\.weight: expected a tensor of shape"):
                engine.values.set_grad(param, value)
        assert engine.values.grad(param) is None


def test_it_is_refused_once_the_step_has_begun_under_backward(tmp_path: Path) -> None:
    model, optimizer = build(GPT, adamw)
    config = infinity.Config(device="cpu", hbm="4MiB", ram="4MiB", nvme=tmp_path, accumulation_steps=1)
    with infinity.initialize(model, optimizer, config) as engine:
        engine.backward(engine(*models.tokens(0)))
        param = engine.module.get_parameter("tokens.weight")
        with pytest.raises(EngineStateError, match="the optimizer step has begun under backward"):
            engine.values.set_grad(param, torch.ones(param.shape))
        engine.step()


def test_that_of_a_parameter_that_nobody_steps_stands_on_it(tmp_path: Path) -> None:
    model, _ = build(GPT, adamw)
    optimizer = torch.optim.SGD([model.get_parameter("norm.weight")], lr=0.1)
    config = infinity.Config(device="cpu", hbm="4MiB", ram="4MiB", nvme=tmp_path)
    with infinity.initialize(model, optimizer, config) as engine:
        param = engine.module.get_parameter("tokens.weight")
        engine.values.set_grad(param, torch.ones(param.shape))
        assert param.grad is not None
        assert param.grad.eq(1).all()
