"""``deepspeed.utils.zero_to_fp32``: full-precision weights of a checkpoint that ``engine.save_checkpoint`` made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from infinity.engine.persistence.exporting import Exporter
from infinity.engine.persistence.joined import open_checkpoint
from infinity.errors import ModelError
from infinity.integrations.deepspeed.checkpoints import checkpoint_path


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> dict[str, torch.Tensor]:
    """All weights by name, on the CPU, all of them in memory; ``infinity.open_checkpoint`` reads one at a time.

    Args:
        checkpoint_dir: what ``save_checkpoint`` was given.
        tag: which checkpoint; ``None`` for the latest.

    Raises:
        StorageError: there is none, or it cannot be read.
    """
    with open_checkpoint(checkpoint_path(checkpoint_dir, tag)) as stored:
        return {name: value for name, value in stored.weights.items() if isinstance(value, torch.Tensor)}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load these weights into a plain model, and return it.

    Args:
        model: of the same class, under no engine.
        checkpoint_dir: what ``save_checkpoint`` was given.
        tag: which checkpoint; ``None`` for the latest.
    """
    state: Mapping[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.load_state_dict(state)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int = 5 * 10**9,
    safe_serialization: bool = True,
    tag: str | None = None,
) -> None:
    """Write these weights as safetensors files, within a bounded memory.

    Args:
        checkpoint_dir: what ``save_checkpoint`` was given.
        output_dir: a directory that does not exist, or is empty.
        max_shard_size: bytes of tensors in a file.
        safe_serialization: ``False`` is refused: no pickles are written.
        tag: which checkpoint; ``None`` for the latest.

    Raises:
        ModelError: pickles were asked for.
        StorageError: it could not be read or written; nothing is left.
    """
    if not safe_serialization:
        raise ModelError("safe_serialization=False: pickles are not written; leave it out for safetensors files")
    with open_checkpoint(checkpoint_path(checkpoint_dir, tag)) as stored:
        Exporter(stored, max_file_bytes=max_shard_size).write(Path(output_dir))
