"""Final weights as one safetensors file, written tensor by tensor: never more of them in memory than one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from infinity.console.output import check_output
from infinity.engine.persistence.tensor_files import Entry, OutputFile, bytes_of, plan_files
from infinity.errors import ConfigError, StorageError, storage_error


def check_save(path: Path) -> None:
    """Refuse, before any work is done, a path at which weights could not be written at the end.

    Raises:
        ConfigError: it says why.
    """
    check_output(path, "--save", replaced=True)
    unfinished = _unfinished(path)
    try:
        unfinished.open("xb").close()
        unfinished.unlink()
    except OSError as error:
        raise ConfigError(
            f"--save: no file can be made in {path.parent} ({error.strerror}); give a path in another directory"
        ) from error


def save_weights(
    path: Path, weights: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], *, writes: bool = True
) -> int:
    """Write ``weights`` in fp32; a file that was there is replaced only once the new one is complete and durable.

    Args:
        path: the file; its directory must exist.
        weights: each is fetched once, in the order of ``shapes``.
        shapes: the shape of each.
        writes: whether this rank is the one that writes; the others only fetch, which all must do together.

    Returns:
        The size of the file in bytes.

    Raises:
        StorageError: writing failed; what was written is removed.
    """
    [planned] = plan_files([Entry(name, torch.float32, tuple(shape)) for name, shape in shapes.items()])
    if not writes:
        for name in shapes:
            weights[name]
        return planned.num_bytes
    unfinished = _unfinished(path)
    try:
        output, is_whole = OutputFile(unfinished, planned.num_bytes), False
        try:
            output.write(0, planned.header)
            for name, shape in shapes.items():
                tensor = weights[name].detach().to(device="cpu", dtype=torch.float32)
                assert tensor.shape == shape
                output.write(planned.places[name], bytes_of(tensor))
            is_whole = True
        finally:
            output.close(durable=is_whole)
        unfinished.replace(path)
    except StorageError:
        raise
    except OSError as error:
        raise storage_error("writing the weights for --save", error, path=path) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return planned.num_bytes


def _unfinished(path: Path) -> Path:
    """Where weights are written before they take the place of ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}.unfinished")
