"""Ten architectures of ``transformers`` through ``InfinityTrainer``: losses, norms and weights are ``Trainer``'s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs Hugging Face transformers, which the extra 'test' installs")

import families_hf
import parity_models as models
from trainers import both, quiet, same, told, weights

__all__ = ["quiet"]

_BATCH_OF = {"ViT": ("pixel_values", models.images)}
_NAMES = ("GPT2", "Llama", "Qwen2", "Gemma2", "Bert", "T5", "ViT", "Mixtral", "Mamba", "OPT")
_LOSSES = ["loss"] * 3 + ["eval_loss", "train_loss"]


def _data(name: str) -> list[dict[str, torch.Tensor]]:
    key, batches = _BATCH_OF.get(name, ("input_ids", models.tokens))
    rows = [row for seed in range(4) for row in batches(seed)[0]]
    labels = [torch.tensor(number % 5) for number in range(len(rows))] if name == "ViT" else rows
    return [{key: row, "labels": label} for row, label in zip(rows, labels, strict=True)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", _NAMES)
def test_the_numbers_are_those_of_the_plain_trainer(name: str, tmp_path: Path) -> None:
    family: Any = families_hf.FAMILIES[name]
    settings = {
        "gradient_accumulation_steps": 2, "max_steps": 3, "max_grad_norm": 0.1, "lr_scheduler_type": "cosine",
        "eval_strategy": "steps", "eval_steps": 3,
    }  # fmt: skip
    plain, ours = both(
        family.make_model,
        tmp_path,
        data=_data(name),
        config={"hbm": "1MiB", "ram": "4MiB", "nvme": str(tmp_path)},
        **settings,
    )
    with ours.engine:
        assert [name for entry in told(plain) for name in entry if "loss" in name] == _LOSSES
        assert told(ours) == told(plain)
        assert same(weights(ours), weights(plain))
