"""``optimizer.pt``: the optimizer's state dict as ``torch.save`` writes it, streamed.

Users give what ``torch.load(path, weights_only=True, mmap=True)`` makes of it to ``load_state_dict`` of an optimizer.
PyTorch itself writes the file first, of fake tensors and with room for their values
(``torch.serialization.skip_data``), and tells where each of them is to be; then the values come as they are read. The
zip format's checksums of these records stay zero, which PyTorch does not look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from infinity.engine.pieces import Pieces
from infinity.engine.stored_state import StoredState
from infinity.engine.tensor_files import OutputFile, bytes_of
from infinity.engine.unit import Slot
from infinity.errors import StorageError, storage_error

OPTIMIZER_NAME = "optimizer.pt"

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
        with FakeTensorMode() as mode:
            fakes = [_fake(leaf) for leaf in leaves]
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(pytree.tree_unflatten(fakes, structure), path)
            with mode:
                placed = pytree.tree_leaves(torch.load(path, weights_only=True))
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else OSError(None, str(error))
            raise storage_error(f"writing the optimizer's state ({error})", cause, path=path) from error
        offsets: dict[torch.Tensor | _Large, int] = {}
        for leaf, fake in zip(leaves, placed, strict=True):
            if isinstance(leaf, (torch.Tensor, _Large)):
                offset = getattr(fake.untyped_storage(), "_checkpoint_offset", None)
                if offset is None:
                    raise StorageError("this version of PyTorch does not tell where values are to be", path=path)
                offsets[leaf] = offset
        return offsets

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


def _fake(leaf: Any) -> Any:
    if isinstance(leaf, _Large):
        return torch.empty_strided(leaf.slot.shape, leaf.slot.stride, dtype=leaf.dtype)
    if isinstance(leaf, torch.Tensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype)
    return leaf


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
