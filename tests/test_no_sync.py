"""``engine.no_sync()``: backwards that only add up."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
import parity_models as models
from infinity import EngineStateError
from infinity.engine.gradients import GradientSink
from parity import Parity, Tiered, Trainer, build, tiny_scale
from parity_models import GPT
from test_clipping import adamw

__all__ = ["tiny_scale"]


@pytest.mark.parametrize("accumulation_steps", [None, 1])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_numbers_are_those_of_plain_pytorch_with_another_number_of_backwards_in_each_step(
    precision: str, accumulation_steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early: list[int] = []
    began: set[bool] = set()
    take_final = GradientSink.take_final

    def note(sink: GradientSink, unit: Any) -> Any:
        taken = take_final(sink, unit)
        early.append(len(taken))
        return taken

    monkeypatch.setattr(GradientSink, "take_final", note)

    def script(trainer: Trainer) -> list[torch.Tensor]:
        seen = []
        for step, num_before in enumerate((2, 0, 1, 3)):
            inside = trainer.engine.no_sync() if isinstance(trainer, Tiered) else contextlib.nullcontext()
            with inside:
                for micro in range(num_before):
                    early.clear()
                    trainer.backward(trainer.model(*models.tokens(10 * step + micro)))
                    assert sum(early) == 0
            early.clear()
            loss = trainer.model(*models.tokens(10 * step + 9))
            trainer.backward(loss)
            begins = isinstance(trainer, Tiered) and trainer.engine._gradients.backwards.num_in_step == 1
            assert bool(sum(early)) == begins
            began.add(begins)
            trainer.step()
            seen.append(loss.detach())
        return seen

    case = Parity(GPT, adamw, script, precision)
    for budgets in ("smallest", "half", "resident"):
        case.check(getattr(case, budgets)(tmp_path, accumulation_steps=accumulation_steps))
    assert (True in began) == (accumulation_steps == 1 and precision != "fp16")


def test_norms_are_taken_once_in_a_step(tmp_path: Path) -> None:
    model, optimizer = build(GPT, adamw)
    config = infinity.Config(device="cpu", hbm="4MiB", ram="4MiB", max_grad_norm=1.0, accumulation_steps=1)
    with infinity.initialize(model, optimizer, config) as engine:
        with engine.no_sync():
            engine.backward(engine(*models.tokens(0)))
        assert not engine._gradients._norms._norms
        engine.backward(engine(*models.tokens(1)))
        assert engine._gradients._norms._norms
        engine.step()
        assert engine.grad_norm is not None


def test_a_step_inside_is_refused_and_one_after_it_is_not(tmp_path: Path) -> None:
    model, optimizer = build(GPT, adamw)
    config = infinity.Config(device="cpu", hbm="4MiB", ram="4MiB", nvme=tmp_path, accumulation_steps=1)
    with infinity.initialize(model, optimizer, config) as engine:
        with engine.no_sync():
            engine.backward(engine(*models.tokens(0)))
            with pytest.raises(EngineStateError, match=r"step\(\) was called inside engine\.no_sync\(\)"):
                engine.step()
        with pytest.raises(ZeroDivisionError), engine.no_sync():
            raise ZeroDivisionError
        engine.backward(engine(*models.tokens(1)))
        engine.step()
    with pytest.raises(EngineStateError, match="closed"):
        engine.no_sync()
