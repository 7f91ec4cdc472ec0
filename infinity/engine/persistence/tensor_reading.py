"""``deferred_weights``: weights in safetensors files as deferred tensors, read one by one when their values are wanted.

A tensor is read from its file into memory of its own, and what the system has cached of it is dropped: files that are
mapped would count as memory of the process until the system takes it back. Nothing of a file is kept open.

Every file is checked when it is found: that its header is one, names places inside the file, and all of it is there.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from infinity.engine.deferred import deferred_from
from infinity.engine.persistence.importing import read_index
from infinity.engine.persistence.tensor_files import DTYPES, INDEX_NAME
from infinity.errors import StorageError, system_errors
from infinity.io.memory import as_bytes
from infinity.io.paths import user_path

SINGLE_NAME = "model.safetensors"

_DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()} | {
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
_WINDOW_BYTES = 32 << 20
"""How much of a file is in the system's cache at a time."""


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        path: of the file.
        name: what it is called there.
        dtype: of its elements.
        shape: its sizes.
        offset: where its bytes begin.
        stamp: tells whether the file is the one that was found.
    """

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    stamp: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Its values, on memory of their own.

        Raises:
            StorageError: the file is not there any more, is not what it was, or cannot be read.
        """
        flat = torch.empty(self.num_bytes, dtype=torch.uint8)
        with system_errors(f"reading tensor {self.name}", self.path):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _stamp(os.fstat(descriptor)) != self.stamp:
                    raise StorageError(
                        f"tensor {self.name}: the file has changed since the model was loaded from it; load it again",
                        path=self.path,
                    )
                if flat.numel():
                    self._fill(descriptor, as_bytes(flat))
            finally:
                os.close(descriptor)
        return flat.view(self.dtype).view(self.shape)

    def deferred(self) -> torch.Tensor:
        """A deferred tensor of these values."""
        return deferred_from(self.shape, self.dtype, self.read)

    def _fill(self, descriptor: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            got = os.preadv(descriptor, [memory[done : done + _WINDOW_BYTES]], self.offset + done)
            if not got:
                raise StorageError(
                    f"tensor {self.name}: the file has become shorter",
                    path=self.path,
                    offset=self.offset,
                    expected_bytes=len(memory),
                    got_bytes=done,
                )
            os.posix_fadvise(descriptor, self.offset + done, got, os.POSIX_FADV_DONTNEED)
            done += got


def deferred_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Weights by name as deferred tensors, whose values are read when the engine stores them.

    For ``model.load_state_dict(infinity.deferred_weights(path))`` inside ``infinity.deferred_init()``, which reads no
    large values; what is done to the tensors there (another dtype, a part of one) is done when their values are read.

    Args:
        path: a safetensors file; a directory that holds ``model.safetensors``, or several files and their index; or
            such an index.

    Raises:
        ConfigError: that is no path.
        StorageError: there is no such file, it is none of these, or is damaged.
    """
    given = user_path(path, "deferred_weights")
    if given.is_dir():
        found = next((given / name for name in (INDEX_NAME, SINGLE_NAME) if (given / name).exists()), None)
        if found is None:
            raise StorageError(f"no weights are here: expected {INDEX_NAME} or {SINGLE_NAME}", path=given)
        given = found
    stored = find_tensors(given)
    return {name: tensor.deferred() for name, tensor in stored.items()}


def find_tensors(path: Path, *, aliases: bool = True) -> dict[str, StoredTensor]:
    """The tensors in a safetensors file, or in all those that an index names.

    Args:
        path: of the file or the index.
        aliases: with further names of tied ones, as ``safetensors.torch.save_model`` keeps them.

    Raises:
        StorageError: a file is missing or damaged, or a tensor is not where the index says.
    """
    if not path.name.endswith(".json"):
        return dict(_tensors_of(path, aliases=aliases))
    file_of = read_index(path)
    found: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(file_of.values()):
        if not file.is_file():
            raise StorageError(f"a file that {path.name} names is missing", path=file)
        found |= {
            name: stored for name, stored in _tensors_of(file, aliases=aliases) if file_of.get(name, file) == file
        }
    for name, file in file_of.items():
        if name not in found:
            raise StorageError(f"tensor {name} is not where {path.name} says", path=file)
    return found


def _tensors_of(path: Path, *, aliases: bool) -> Iterator[tuple[str, StoredTensor]]:
    header, data, stamp = _read_header(path)
    metadata = header.pop("__metadata__", None) or {}
    for name, entry in header.items():
        dtype = _DTYPE_OF.get(str(entry["dtype"]))
        if dtype is None:
            raise StorageError(f"tensor {name}: PyTorch has no dtype for {entry['dtype']!r}", path=path)
        yield name, StoredTensor(path, name, dtype, tuple(entry["shape"]), data + entry["data_offsets"][0], stamp)
    if aliases:
        places = dict(_tensors_of(path, aliases=False)) if metadata.keys() - {"format"} else {}
        for alias, name in metadata.items():
            if name in places and alias not in places:
                yield alias, places[name]


def _read_header(path: Path) -> tuple[dict[str, Any], int, tuple[int, ...]]:
    """What the header of a file says, where the tensors begin, and what tells that it is this file.

    The library checks the header, and that the file has the size that follows from it.
    """
    with system_errors("reading weights", path):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, ValueError) as error:
            raise StorageError(f"not a whole safetensors file: {error}", path=path) from error
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(num_bytes))
            stamp = _stamp(os.fstat(file.fileno()))
    return header, 8 + num_bytes, stamp


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
