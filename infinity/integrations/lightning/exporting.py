"""``export_checkpoint``: from a checkpoint of the engine's to a file that Lightning reads alone."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from infinity.errors import DirectoryError, StorageError, system_errors
from infinity.integrations.lightning import checkpoints


def export_checkpoint(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write a checkpoint of ``InfinityStrategy`` as one file, as other strategies write them.

    It is for ``MyModule.load_from_checkpoint(path)``, and for ``trainer.test(ckpt_path=...)`` with any strategy. The
    weights are at full precision, and in memory together while they are written. Optimizer states stay behind.

    Args:
        source: the directory that ``ModelCheckpoint`` or ``trainer.save_checkpoint`` has written.
        path: of the file.

    Returns:
        ``path``.

    Raises:
        DirectoryError: something is at ``path``.
        StorageError: the checkpoint could not be read, or the file not written.
    """
    place, out = checkpoints.place_of(source, "export_checkpoint"), checkpoints.place_of(path, "export_checkpoint")
    if out.exists():
        raise DirectoryError("export_checkpoint: expected a path where nothing is; it was left as it is", path=out)
    if not checkpoints.is_ours(place):
        raise StorageError("export_checkpoint: expected a directory that InfinityStrategy has written", path=place)
    checkpoint = checkpoints.read(place)
    with checkpoints.open_values(place, checkpoint) as values:
        checkpoint["state_dict"] = dict(values)
    for name in ("optimizer_states", "lr_schedulers", checkpoints.KEY):
        checkpoint.pop(name, None)
    partial = out.with_name(out.name + ".partial")
    with system_errors("writing a checkpoint", out):
        torch.save(checkpoint, partial)
        partial.replace(out)
    return out
