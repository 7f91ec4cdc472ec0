"""Autocast regions, around forward alone or around backward too: the numbers of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import parity_models as models
from parity import Parity, Trainer, tiny_scale
from parity_models import GPT, non_reentrant, reentrant

__all__ = ["tiny_scale"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def autocast(dtype: torch.dtype, batches: Any, *, around_backward: bool) -> Callable[[Trainer], list[torch.Tensor]]:
    """Two forwards in one region share its casts of the weights; the next step's region must not."""

    def script(trainer: Trainer) -> list[torch.Tensor]:
        seen = []
        for step in range(4):
            with torch.autocast("cpu", dtype=dtype):
                loss = trainer.model(*batches(step)) + trainer.model(*batches(step + 50))
                if around_backward:
                    trainer.backward(loss)
            if not around_backward:
                trainer.backward(loss)
            seen += [loss.detach(), trainer.clip(0.5)]
            trainer.step()
        return seen

    return script


@pytest.mark.parametrize("around_backward", [False, True])
@pytest.mark.parametrize(
    ("make_model", "batches", "dtype"),
    [
        (GPT, models.tokens, torch.bfloat16), (GPT, models.tokens, torch.float16),
        (lambda: GPT(non_reentrant), models.tokens, torch.bfloat16),
        (lambda: GPT(reentrant), models.tokens, torch.bfloat16),
        (models.BorrowingGPT, models.tokens, torch.bfloat16), (models.CNN, models.images, torch.bfloat16),
        (models.EncoderDecoder, models.tokens, torch.bfloat16), (models.Recurrent, models.tokens, torch.bfloat16),
    ],
    ids=["gpt", "fp16", "non_reentrant", "reentrant", "borrowing", "cnn", "encoder-decoder", "lstm"],
)  # fmt: skip
def test_autocast(make_model: Any, batches: Any, dtype: torch.dtype, around_backward: bool, tmp_path: Path) -> None:
    case = Parity(make_model, adamw, autocast(dtype, batches, around_backward=around_backward))
    case.check(case.blockwise(tmp_path))
    case.check(case.half(tmp_path))
