"""A checkpoint of Lightning's under the engine: a directory.

    epoch=0-step=100.ckpt/
      lightning.ckpt      what Lightning keeps (loops, callbacks, schedulers, hyper-parameters), without any weight
      state-5f3a91c2/     what ``engine.save_checkpoint`` writes: weights, optimizer states, random states
      weights-5f3a91c2/   instead of it, where only weights were asked for: safetensors files

``lightning.ckpt`` is written last, and names the directory that belongs to it; with it, the checkpoint is whole. So one
that is overwritten is the old one or the new one at any time. Nothing that is read is run.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.engine.engine import Engine
from infinity.engine.persistence.importing import open_weights
from infinity.engine.persistence.joined import open_checkpoint
from infinity.errors import ConfigError, DirectoryError, StorageError, system_errors
from infinity.io.paths import user_path

_LIGHTNING = "lightning.ckpt"
_STATE = "state"
_WEIGHTS = "weights"
_PART = re.compile(rf"({_STATE}|{_WEIGHTS})-[0-9a-f]{{8}}")
_EXTRA_STATE = "_extra_state"  # what safetensors have no word for
KEY = "infinity"


def place_of(path: object, what: str) -> Path:
    """A path of a checkpoint as Lightning gives it.

    Args:
        path: what came.
        what: is to have it, for the message.

    Raises:
        ConfigError: it is none, or elsewhere than on a file system.
    """
    if "://" in str(path):
        raise ConfigError(f"{what}: expected a path on a file system, as the engine writes checkpoints, got {path}")
    return user_path(path, what)


def is_ours(path: Path) -> bool:
    """Whether a checkpoint is one of the engine's, and not a file of Lightning's."""
    return (path / _LIGHTNING).is_file()


def save(
    engine: Engine,
    path: Path,
    checkpoint: Mapping[str, Any],
    *,
    weights_only: bool,
    is_first: bool,
    agree: Callable[[str], str],
) -> None:
    """Write a checkpoint; one that is there is replaced once this one is whole. All ranks call this.

    Args:
        engine: whose state.
        path: of the directory; it is made.
        checkpoint: Lightning's part.
        weights_only: leave out what training needs to go on.
        is_first: whether this is the rank that writes Lightning's part.
        agree: returns what the first rank gives it, and waits for all.

    Raises:
        DirectoryError: something else is at ``path``.
        InfinityError: see ``Engine.save_checkpoint`` and ``Engine.export_safetensors``; what was at ``path`` stays.
    """
    if path.exists() and not is_ours(path) and not _is_begun(path):
        raise DirectoryError("expected nothing or an older checkpoint of the engine's there; it stays", path=path)
    name = agree(f"{_WEIGHTS if weights_only else _STATE}-{secrets.token_hex(4)}")
    with system_errors("making the directory of a checkpoint", path):
        path.mkdir(parents=True, exist_ok=True)
    if weights_only:
        engine.export_safetensors(path / name)
    else:
        engine.save_checkpoint(path / name, leave_gradients_out=True)
    state = engine.state_dict()
    extra = {name: state[name] for name in state if name.endswith(_EXTRA_STATE)}
    if is_first:
        with system_errors("writing a checkpoint", path):
            _write({**checkpoint, "state_dict": {**checkpoint["state_dict"], **extra}, KEY: name}, path / _LIGHTNING)
            for other in path.iterdir():
                if _PART.fullmatch(other.name) and other.name != name:
                    shutil.rmtree(other)
    agree("")


def remove(path: Path) -> None:
    """Remove a checkpoint that ``save`` has made, or a link to one; what else is in its directory stays.

    Raises:
        DirectoryError: it is another's.
        StorageError: it could not be removed.
    """
    with system_errors("removing a checkpoint", path):
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            if not is_ours(path):
                raise DirectoryError("expected a checkpoint of the engine's; it was left as it is", path=path)
            (path / _LIGHTNING).unlink()  # first: one that is half removed is not taken for whole
            for part in path.iterdir():
                if _PART.fullmatch(part.name):
                    shutil.rmtree(part)
            if not any(path.iterdir()):
                path.rmdir()


def read(path: Path) -> dict[str, Any]:
    """Lightning's part of a checkpoint, or a file of Lightning's own.

    Raises:
        StorageError: there is none, it is not whole, or holds what only running code could read.
    """
    if path.is_dir() and not is_ours(path):
        raise StorageError(
            f"expected a checkpoint: there is no {_LIGHTNING} in it, or it was not written to its end", path=path
        )
    file = path / _LIGHTNING if path.is_dir() else path
    if not file.is_file():
        raise StorageError("expected a checkpoint; nothing is there", path=path)
    try:
        loaded = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # PyTorch has no type of its own for what is wrong with a file
        raise StorageError(
            "not a checkpoint of Lightning that can be read without running code in it; if save_hyperparameters() has "
            "put objects of classes there, leave them out (ignore=[...]), or name the classes to "
            f"torch.serialization.add_safe_globals() if you trust the file. PyTorch says: {error}",
            path=file,
        ) from error
    if not isinstance(loaded, dict):
        raise StorageError(f"not a checkpoint of Lightning: it holds a {type(loaded).__name__}", path=file)
    return loaded


@contextlib.contextmanager
def open_values(path: Path, checkpoint: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A context with the model's state by name, each value read when it is asked for.

    Args:
        path: of the checkpoint.
        checkpoint: what ``read`` returned of it.

    Raises:
        StorageError: it is not whole, or could not be read.
    """
    own = checkpoint.get("state_dict", {})
    if KEY not in checkpoint:
        yield own
        return
    part = _part_of(path, checkpoint)
    if part.name.startswith(_STATE):
        with open_checkpoint(part) as stored:
            yield stored.weights
    else:
        yield ChainMap(dict(own), open_weights(part))  # type: ignore[arg-type]  # it is only read


def load(engine: Engine, path: Path, checkpoint: Mapping[str, Any], *, whole: bool, strict: bool) -> None:
    """Give the engine the state of a checkpoint.

    Args:
        engine: whose state is to change.
        path: of the checkpoint.
        checkpoint: what ``read`` returned of it.
        whole: optimizer and random states too, if the engine has written them.
        strict: refuse one with other names than the model's.

    Raises:
        ModelError: it is of another model or optimizer.
        StorageError: it could not be read.
    """
    if whole and holds_state(checkpoint):
        engine.load_checkpoint(_part_of(path, checkpoint))
    else:
        with open_values(path, checkpoint) as values:
            engine.load_state_dict(values, strict=strict)


def holds_state(checkpoint: Mapping[str, Any]) -> bool:
    """Whether the engine has written optimizer states beside it."""
    return str(checkpoint.get(KEY, "")).startswith(_STATE)


def _part_of(path: Path, checkpoint: Mapping[str, Any]) -> Path:
    name = checkpoint[KEY]
    if not isinstance(name, str) or not _PART.fullmatch(name):
        raise StorageError(f"not a checkpoint of the engine's: {name!r} is no directory of one", path=path)
    return path / name


def _is_begun(path: Path) -> bool:
    """Whether there is only what a ``save`` that was cut off has left."""
    return path.is_dir() and all(
        _PART.fullmatch(each.name) or each.name.startswith(_LIGHTNING) for each in path.iterdir()
    )


def _write(checkpoint: Mapping[str, Any], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    for directory in (path.parent, path.parent.parent):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
