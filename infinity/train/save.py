"""Final weights as one safetensors file, written tensor by tensor: never more of them in memory than one.

``safetensors`` itself wants all tensors at once. The format is small: the length of the header in eight bytes, a JSON
header with each tensor's type, shape and place, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from infinity.console.output import check_output
from infinity.errors import ConfigError, StorageError, storage_error

_ITEM_BYTES = 4
_HEADER_ALIGNMENT = 8


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


def save_weights(path: Path, weights: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> int:
    """Write ``weights`` in fp32; a file that was there is replaced only once the new one is complete and durable.

    Args:
        path: the file; its directory must exist.
        weights: each is fetched once, in the order of ``shapes``.
        shapes: the shape of each.

    Returns:
        The size of the file in bytes.

    Raises:
        StorageError: writing failed; what was written is removed.
    """
    unfinished = _unfinished(path)
    try:
        with unfinished.open("xb") as file:
            file.write(_header(shapes))
            for name, shape in shapes.items():
                tensor = weights[name].detach().to(device="cpu", dtype=torch.float32).contiguous()
                assert tensor.shape == shape
                file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        unfinished.replace(path)
    except StorageError:  # of the weights' own tier
        raise
    except OSError as error:
        raise storage_error("writing the weights for --save", error, path=path) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return size_bytes


def _unfinished(path: Path) -> Path:
    """Where weights are written before they take the place of ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}.unfinished")


def _header(shapes: Mapping[str, torch.Size]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _ITEM_BYTES * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _HEADER_ALIGNMENT)
    return len(header).to_bytes(8, "little") + header
