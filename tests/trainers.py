"""Runs of ``transformers.Trainer``, plain and with the engine, on data that is made up: what both must agree on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from infinity.integrations.transformers import InfinityTrainer

VOCAB = 32
BUDGETS: dict[str, Any] = {"hbm": "1MiB", "ram": "16MiB"}
_MEASURED = ("runtime", "per_second", "preparation_time")


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """What transformers warns of is not what these tests are about; other test files read it."""
    logging: Any = transformers.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def gpt2(seed: int = 0, dropout: float = 0.1) -> Any:
    """A small one, with dropout and tied embeddings."""
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    torch.manual_seed(seed)
    make: Any = GPT2LMHeadModel
    return make(config)


def texts(count: int = 16, length: int = 8) -> list[dict[str, torch.Tensor]]:
    """So many examples for a language model."""
    made = []
    for index in range(count):
        tokens = torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(index))
        made.append({"input_ids": tokens, "labels": tokens})
    return made


def arguments(directory: Path, **fields: Any) -> TrainingArguments:
    """Small batches, every step logged, nothing saved."""
    defaults: dict[str, Any] = {
        "use_cpu": True, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "max_steps": 4,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(directory), **{**defaults, **fields})


def told(trainer: Trainer) -> list[dict[str, Any]]:
    """What a trainer has logged, without what was measured."""
    return [
        {key: value for key, value in entry.items() if not key.endswith(_MEASURED)}
        for entry in trainer.state.log_history
    ]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Those of its model."""
    model: Any = trainer.model
    state = trainer.engine.state_dict() if isinstance(trainer, InfinityTrainer) else model.state_dict()
    return {name: value.clone() for name, value in state.items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts are, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def both(
    model: Any,
    directory: Path,
    *,
    config: dict[str, Any] | None = None,
    data: Sequence[Any] | None = None,
    **fields: Any,
) -> tuple[Trainer, InfinityTrainer]:
    """A plain trainer and one with the engine, of equal models, having trained; the caller closes the second.

    Args:
        model: makes it.
        directory: of outputs.
        config: the engine's.
        data: to train on.
        fields: of the arguments, or of the trainers where they have them.
    """
    given = {name: fields.pop(name) for name in list(fields) if name in _OF_TRAINERS}
    data = texts() if data is None else data
    given = {"train_dataset": data, "eval_dataset": data[:6], **given}
    plain = Trainer(_new(model), arguments(directory / "plain", **fields), **given)
    plain.train()
    ours = InfinityTrainer(
        _new(model), arguments(directory / "ours", **fields), infinity_config=config or BUDGETS, **given
    )
    try:
        ours.train()
    except BaseException:
        ours.close()
        raise
    return plain, ours


_OF_TRAINERS = {"callbacks", "compute_loss_func", "compute_metrics", "data_collator", "eval_dataset"}


def _new(model: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = model()
    return made
