"""Parameters and buffers that stay in fp32 by the patterns of their names, beside others in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from infinity import Config, ConfigError
from parity import Parity, Trainer, build, tiny_scale
from parity_models import GPT
from test_clipping import adamw, clipped

__all__ = ["tiny_scale"]

SCALER = {"init_scale": 2.0**13, "growth_interval": 2}


class Routed(nn.Module):
    """A router in fp32 chooses how two experts in 16 bits are mixed; a batch norm in fp32 follows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(2))
        self.router = nn.Linear(models.WIDTH, 2)
        self.norm = nn.BatchNorm1d(models.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x.float()).softmax(-1).to(x.dtype)
        mixed = sum(share[:, None] * expert(x) for share, expert in zip(shares.unbind(-1), self.experts, strict=True))
        assert isinstance(mixed, torch.Tensor)
        y: torch.Tensor = self.norm(mixed.float())
        return y.square().mean()


@pytest.mark.parametrize("num_backwards", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("make_model", "batches", "patterns"),
    [
        (GPT, models.tokens, ("*norm*",)),
        (GPT, models.tokens, ("blocks.0.norm.*", "blocks.1.mlp.0.[wb]*")),
        (Routed, models.vectors, ("router.*", "norm.*")),
    ],
    ids=["norms", "some", "routed"],
)
def test_training_is_that_of_plain_pytorch(
    make_model: Any, batches: Any, patterns: tuple[str, ...], precision: str, num_backwards: int, tmp_path: Path
) -> None:
    script = clipped(0.5, num_backwards=num_backwards, batches=batches)
    case = Parity(make_model, adamw, script, precision, SCALER, patterns)
    scaling = {"initial_loss_scale": 2.0**13, "loss_scale_window": 2}
    for budgets in ("smallest", "blockwise", "half", "resident"):
        engine = case.check(getattr(case, budgets)(tmp_path, **scaling))
        kept = {name for name, each in engine.module.named_parameters() if each.dtype == torch.float32}
        assert kept
        assert len(kept) < len(list(engine.module.parameters()))


def test_a_pattern_without_a_match_is_refused(tmp_path: Path) -> None:
    model, optimizer = build(GPT, adamw)
    config = Config(device="cpu", hbm="1MiB", ram="8MiB", precision="bf16", keep_fp32=("*norm*", "*rooter*"))
    with pytest.raises(ConfigError, match=r"keep_fp32: no parameter or buffer of the GPT has a name like '\*rooter\*'"):
        infinity.initialize(model, optimizer, config)


@pytest.mark.parametrize("value", ["", ["a", " "], 3])
def test_patterns_that_are_none_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="keep_fp32"):
        Config(keep_fp32=value)


def test_one_pattern_may_stand_alone() -> None:
    assert Config(keep_fp32="*norm*").keep_fp32 == ("*norm*",)


class Steep(nn.Module):
    """Gradients in fp32 so large that their squares overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(models.WIDTH, 2)
        self.narrow = nn.Linear(models.WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.wide(x.float()).mean() * 1e20 + self.narrow(x).float().mean()
        return loss


@pytest.mark.parametrize("clips", [True, False])
def test_large_gradients_in_fp32_are_no_overflow(clips: bool, tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            trainer.backward(trainer.model(*models.vectors(step)))
            if clips:
                seen.append(trainer.clip(0.5))
            trainer.step()
        return seen

    case = Parity(Steep, lambda m: torch.optim.SGD(m.parameters(), lr=1e-22), script, "fp16", SCALER, ("wide.*",))
    engine = case.check(case.half(tmp_path, initial_loss_scale=2.0**13, loss_scale_window=2))
    assert engine.num_skipped_steps == 0
    assert not clips or case.expected.returned[0].isinf()
