"""Gradients of several backwards summed in their own dtype, as PyTorch does on ``param.grad``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
import parity_models as models
from infinity import EngineStateError
from infinity.engine.unit import GRAD, GRAD_SUM
from parity import Parity, Trainer, build, tiny_scale
from parity_models import GPT, non_reentrant, reentrant
from test_clipping import adamw, clipped

__all__ = ["tiny_scale"]

SCALING = {"initial_loss_scale": 2.0**13, "loss_scale_window": 2}
SCALER = {"init_scale": 2.0**13, "growth_interval": 2}


@pytest.mark.parametrize("max_norm", [0.3, None])
@pytest.mark.parametrize("num_backwards", [1, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sums_are_those_of_plain_pytorch(
    precision: str, num_backwards: int, max_norm: float | None, tmp_path: Path
) -> None:
    def unclipped(trainer: Trainer) -> list[torch.Tensor]:
        seen = []
        for step in range(3):
            for micro in range(num_backwards):
                loss = trainer.model(*models.tokens(10 * step + micro))
                trainer.backward(loss)
                seen.append(loss.detach())
            trainer.step()
        return seen

    script = unclipped if max_norm is None else clipped(max_norm, num_backwards=num_backwards)
    case = Parity(GPT, adamw, script, precision, SCALER, accumulation_dtype="same")
    for budgets in ("smallest", "half", "resident"):
        early = {"accumulation_steps": num_backwards} if max_norm is None else {}
        engine = case.check(getattr(case, budgets)(tmp_path, **SCALING, **early))
        assert not any(GRAD_SUM in engine._plan.shard_bytes(part) for part in engine._parts)
        assert any(GRAD in engine._plan.shard_bytes(part) for part in engine._parts)


def test_it_changes_sums_in_16_bits() -> None:
    def script(trainer: Trainer) -> None:
        for micro in range(3):
            trainer.backward(trainer.model(*models.tokens(micro)))
        trainer.step()

    same, wide = (Parity(GPT, adamw, script, "bf16", accumulation_dtype=dtype) for dtype in ("same", "fp32"))
    pairs = zip(same.expected.weights.values(), wide.expected.weights.values(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("outer", [reentrant, non_reentrant])
def test_two_gradients_of_a_parameter_in_one_backward_are_added_as_pytorch_adds_them(
    outer: Any, tmp_path: Path
) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        for micro in range(2):
            trainer.backward(trainer.model(*models.tokens(micro)))
        trainer.step()
        return []

    case = Parity(lambda: GPT(outer=outer), adamw, script, "bf16", accumulation_dtype="same")
    case.check(case.half(tmp_path))


def test_a_gradient_that_comes_after_clipping_is_refused(tmp_path: Path) -> None:
    model, optimizer = build(GPT, adamw)
    config = infinity.Config(
        device="cpu", hbm="4MiB", ram="4MiB", nvme=tmp_path, precision="bf16", accumulation_dtype="same"
    )
    with infinity.initialize(model, optimizer, config) as engine:
        engine.backward(engine(*models.tokens(0)))
        engine.clip_grad_norm_(1e-3)
        with pytest.raises(EngineStateError, match=r"after clipping, when sums are in torch\.bfloat16"):
            engine.backward(engine(*models.tokens(1)))
        engine.zero_grad()
        engine.backward(engine(*models.tokens(0)))
        engine.step()
