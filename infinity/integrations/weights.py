"""Weights of an engine as Hugging Face's libraries read them, in a directory that may hold other files too."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from infinity.engine.engine import Engine
from infinity.errors import system_errors

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def write_weights(engine: Engine, directory: Path, *, max_file_bytes: int = 5 * 10**9, moves: bool = True) -> None:
    """Write the weights into a directory, one tensor in memory at a time; those that were there are replaced.

    All ranks call this; those that do not move return before the files are in their place.

    Args:
        engine: whose.
        directory: made if it is not there.
        max_file_bytes: how many bytes of tensors there are in a file.
        moves: whether this rank is the one that writes.

    Raises:
        RankFailedError: it failed on another rank.
        StorageError: they could not be written.
    """
    replace_weights(directory, functools.partial(engine.export_safetensors, max_file_bytes=max_file_bytes), moves=moves)


def replace_weights(directory: Path, write: Callable[[Path], None], *, moves: bool = True) -> None:
    """Put files into a directory, weights among them, once all of them are written; what it had of weights goes.

    All ranks call this; those that do not move return before the files are in their place.

    Args:
        directory: made if it is not there; other files in it stay.
        write: writes the files into a directory that it makes. All ranks call it, and one of them writes.
        moves: whether this rank is that one.

    Raises:
        RankFailedError: it failed on another rank.
        StorageError: they could not be written.
    """
    made = directory / f".weights-{secrets.token_hex(4)}"
    if moves:
        with system_errors("making the directory of weights", directory):
            directory.mkdir(parents=True, exist_ok=True)
    write(made)
    if moves:
        with system_errors("putting weights in their place", directory):
            new = {file.name for file in made.iterdir()}
            for file in directory.iterdir():
                if _WEIGHTS.fullmatch(file.name) and file.name not in new:
                    file.unlink()
            for name in sorted(new):
                (made / name).replace(directory / name)
            made.rmdir()
