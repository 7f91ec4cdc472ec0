"""``optimizer.pt``: the optimizer's state dict as ``torch.save`` writes it, streamed.

Users give what ``torch.load(path, weights_only=True, mmap=True)`` makes of it to ``load_state_dict`` of an optimizer.
PyTorch itself writes the file first, with room for values and without them (``torch.serialization.skip_data``), of
tensors that all lie in one range of addresses behind which there is no memory. Loaded again, mapped, each tensor tells
by its address where in the file its values are to be; then they come as they are read. The zip format's checksums of
these records stay zero, which PyTorch does not look at.

Rejected: fake tensors, which PyTorch would tell places of (70 MB of code, for as many bytes as the whole export needs).
"""

from __future__ import annotations

import math
import mmap
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from infinity.engine.persistence.pieces import Pieces
from infinity.engine.persistence.stored_state import StoredState
from infinity.engine.persistence.tensor_files import OutputFile, bytes_of
from infinity.engine.unit import Slot
from infinity.errors import StorageError, storage_error

OPTIMIZER_NAME = "optimizer.pt"

_STEP = 16
"""Bytes between the addresses of tensors."""

_LENGTHS_OFFSET = 26
"""In the header of a record of a zip file: the lengths of its name and of what follows that."""

_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)

_BESIDE_BYTES = 4096
"""What a tensor takes in the file beside its values, at most: names, alignment."""


class _Large:
    """Stands for a state that is streamed."""

    def __init__(self, name: str, state: str, slot: Slot, dtype: torch.dtype) -> None:
        self.name = name
        self.state = state
        self.slot = slot
        self.dtype = dtype


class OptimizerFile:
    """The optimizer's state of a commit, to be written.

    Args:
        state: the commit's.

    Raises:
        ModelError: a document in it cannot be read.

    Attributes:
        num_bytes: how large the file will be, at most.
        small_bytes: what of it is in memory at once.
        streamed_bytes: what is streamed.
    """

    def __init__(self, state: StoredState) -> None:
        self._state = state
        lazy = state.optimizer_state_dict
        names = [name for names in state.param_names for name in names]
        self._tree = {
            "state": {index: self._outline(names[index], each) for index, each in lazy["state"].items()},
            "param_groups": [_plain(group) for group in lazy["param_groups"]],
        }
        leaves = pytree.tree_leaves(self._tree)
        small = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        large = [leaf for leaf in leaves if isinstance(leaf, _Large)]
        self.small_bytes = sum(each.numel() * each.element_size() for each in small) + _BESIDE_BYTES * len(leaves)
        self.streamed_bytes = sum(each.slot.num_elements * each.dtype.itemsize for each in large)
        self.num_bytes = self.small_bytes + self.streamed_bytes

    def _outline(self, name: str, lazy: Any) -> dict[str, Any]:
        part, position = self._state.places[name]
        states = self._state.layouts[part.index].states
        large = {
            each: _Large(name, each, part.slots[position], getattr(torch, states[each].dtype))
            for each in lazy.on_demand
        }
        return {**_plain(self._state.small_state(name)), **dict(sorted(large.items()))}

    def write(self, directory: Path, pieces: Pieces, moved: Callable[[int], None]) -> None:
        """Write the file.

        Args:
            directory: where.
            pieces: reads the states.
            moved: told how many bytes have been written, now and then.

        Raises:
            StorageError: something could not be read or written.
        """
        path = directory / OPTIMIZER_NAME
        offsets = self._make(path)
        output = OutputFile(path, 0, is_new=False)
        durable = False
        try:
            for leaf, offset in offsets.items():
                if isinstance(leaf, torch.Tensor):
                    output.write(offset, bytes_of(leaf))
            self._stream(output, {leaf: at for leaf, at in offsets.items() if isinstance(leaf, _Large)}, pieces, moved)
            durable = True
        finally:
            output.close(durable=durable)

    def _make(self, path: Path) -> Mapping[torch.Tensor | _Large, int]:
        """Write all but values; returns where these are to be."""
        leaves, structure = pytree.tree_flatten(self._tree)
        tensors = _without_memory([leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, _Large))])
        outline = [tensors.get(leaf, leaf) if isinstance(leaf, (torch.Tensor, _Large)) else leaf for leaf in leaves]
        try:
            with torch.serialization.skip_data():
                torch.save(pytree.tree_unflatten(outline, structure), path)
            with torch.serialization.set_default_mmap_options(
                mmap.MAP_SHARED
            ):  # else the system may count it as memory
                placed = pytree.tree_leaves(torch.load(path, weights_only=True, mmap=True))
            offsets = _record_offsets(path)
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else OSError(None, str(error))
            raise storage_error(f"writing the optimizer's state ({error})", cause, path=path) from error
        addresses = {
            leaf: tensor.data_ptr()
            for leaf, tensor in zip(leaves, placed, strict=True)
            if isinstance(leaf, (torch.Tensor, _Large)) and tensor.numel()
        }
        start = min(addresses.values(), default=0) - min(offsets, default=0)
        found = {leaf: address - start for leaf, address in addresses.items()}
        if set(found.values()) != set(offsets):
            raise StorageError("this version of PyTorch lays out its files in a way that is not known here", path=path)
        return found

    def _stream(
        self, output: OutputFile, offsets: Mapping[_Large, int], pieces: Pieces, moved: Callable[[int], None]
    ) -> None:
        places = {(leaf.name, leaf.state): offset for leaf, offset in offsets.items()}
        for part, layout in zip(self._state.parts, self._state.layouts, strict=True):
            for state in layout.states:
                for position, start, values in pieces.states(part, state):
                    offset = places.get((part.slots[position].name, state))
                    if offset is not None and values.numel():
                        output.write(offset + start * values.element_size(), bytes_of(values))
                        moved(values.numel() * values.element_size())


def _without_memory(leaves: Sequence[torch.Tensor | _Large]) -> dict[torch.Tensor | _Large, torch.Tensor]:
    """For each leaf a tensor of its size with an address and a storage of its own, and no memory."""
    largest = max((_num_bytes(leaf) for leaf in leaves), default=0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    addresses = mmap.mmap(-1, largest + _STEP * len(leaves) + mmap.PAGESIZE, flags=flags)
    made: dict[torch.Tensor | _Large, torch.Tensor] = {}
    for index, leaf in enumerate(leaves):
        shape, stride = (leaf.slot.shape, leaf.slot.stride) if isinstance(leaf, _Large) else (leaf.shape, None)
        if not math.prod(shape):
            made[leaf] = torch.empty(shape, dtype=leaf.dtype)
            continue
        flat = torch.frombuffer(addresses, dtype=leaf.dtype, count=math.prod(shape), offset=_STEP * index)
        made[leaf] = flat.view(shape) if stride is None else flat.as_strided(shape, stride)
    return made


def _num_bytes(leaf: torch.Tensor | _Large) -> int:
    shape = leaf.slot.shape if isinstance(leaf, _Large) else leaf.shape
    return math.prod(shape) * leaf.dtype.itemsize


def _record_offsets(path: Path) -> list[int]:
    """Where in a file of ``torch.save`` the bytes of its storages begin."""
    offsets = []
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.file_size and record.filename.rpartition("/")[0].endswith("/data"):
                file.seek(record.header_offset + _LENGTHS_OFFSET)
                name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
                offsets.append(record.header_offset + _LENGTHS_OFFSET + 4 + name_bytes + extra_bytes)
    return offsets


def _plain(value: Any) -> Any:
    """A value as ``torch.load(weights_only=True)`` takes it: numpy's as PyTorch's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value
