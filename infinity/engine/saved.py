"""Saved tensors: what autograd keeps for backward, while the memory it would keep goes to another unit.

Autograd would keep a gathered buffer through the tensors it saves, and would read them after the buffer has been used
for something else. While a forward runs, ``saved_tensors_hooks`` turn each saved tensor whose storage is a gathered
buffer (a weight, or a view such as its transpose) into a *handle*: unit, offset, size and stride. At backward the
handle is unpacked from wherever the unit is gathered by then, gathering it first if need be. Everything else goes on to
the hooks in force before (an activation checkpoint's, a user's), so nesting works.

Two things that PyTorch does for saved tensors it leaves to whoever hooks them, and so are done here:

* a tensor changed in place between forward and backward is an error, and not another gradient;
* a backward that will itself be differentiated (``create_graph=True``) saves tensors while no forward runs, so it gets
  copies of the weights, which live as long as its graph does.

A small weight (a norm's, a bias) is always unpacked as a copy, because a node unpacks one tensor after another: an
activation that comes next may be recomputed first, and the units of that should not need room beside this one's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from infinity.engine import hookstack
from infinity.engine.hookstack import Hooks, Unpack
from infinity.engine.unit import Unit
from infinity.errors import EngineStateError

_SMALL_BYTES = 64 << 10


@dataclass(frozen=True, eq=False)
class _Handle:
    """A saved tensor that lies in a unit's gathered buffer; ``offset`` in elements from the buffer's start.

    Its unit knows it as long as it lives: as long as a backward may still read the unit.
    """

    unit: Unit
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


class Kept(Protocol):
    """Any other saved tensor, wherever it is."""

    def unpack(self) -> torch.Tensor:
        """The tensor.

        Raises:
            EngineStateError: it was changed in place.
        """


class Keeper(Protocol):
    """Keeps saved tensors that are no weights."""

    def keep(self, tensor: torch.Tensor, unit: Unit | None) -> Kept:
        """Take a tensor that is saved after ``unit`` was gathered; ``None`` before the first."""


class InPlace(NamedTuple):
    """A saved tensor that stays where it is, with its version counter at the time."""

    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        """See ``Kept``."""
        refuse_change(self.tensor, self.version, self.tensor.shape)
        return self.tensor


class KeepInPlace:
    """Leaves saved tensors where they are, as PyTorch does."""

    def keep(self, tensor: torch.Tensor, unit: Unit | None) -> Kept:
        """See ``Keeper``."""
        # Not the tensor itself: a saved output would keep its own node alive for ever.
        return InPlace(tensor.detach(), tensor._version)


def refuse_change(tensor: torch.Tensor, version: int, shape: torch.Size) -> None:
    """Refuse a saved tensor of ``shape`` whose version counter, which ``tensor`` shares, has gone on.

    Raises:
        EngineStateError: it has.
    """
    if tensor._version != version:
        raise EngineStateError(
            f"a tensor of shape {tuple(shape)} that backward needs was changed in place after forward had used it: it "
            f"is at version {tensor._version}, expected {version}; change a copy"
        )


class _Outer(NamedTuple):
    """A saved tensor that hooks outside ours have packed."""

    unpack: Unpack
    packed: Any


class SavedTensors:
    """The saved-tensor hooks of one engine.

    Args:
        hold: makes a unit gathered; if ``reads``, keeps it so while the node that runs now does.
        keeper: keeps what is no weight and belongs to no hooks outside.

    Attributes:
        outer: the hooks that were in force before each of ours, in the passage that runs.
    """

    def __init__(self, hold: Callable[[Unit, bool], None], keeper: Keeper | None = None) -> None:
        self._hold = hold
        self._keeper = keeper or KeepInPlace()
        self._latest: Unit | None = None
        self._gathered: dict[int, Unit] = {}  # by address of the gathered buffer
        self.outer: list[Hooks | None] = []

    def add(self, unit: Unit) -> None:
        """A unit has been gathered."""
        assert unit.buffer is not None
        self._latest = unit
        self._gathered[unit.buffer.untyped_storage().data_ptr()] = unit

    def remove(self, unit: Unit) -> None:
        """A unit is about to be released."""
        assert unit.buffer is not None
        del self._gathered[unit.buffer.untyped_storage().data_ptr()]

    @property
    def gathered(self) -> list[Unit]:
        """Every gathered unit."""
        return list(self._gathered.values())

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """The gathered unit in whose memory a tensor lies."""
        if tensor.layout is not torch.strided:
            return None
        try:
            address = tensor.untyped_storage().data_ptr()
        except NotImplementedError:  # a batched tensor of torch.vmap has no storage of its own
            return None
        return self._gathered.get(address)

    def push(self) -> bool:
        """Put the hooks in force; ``False`` if they are already the innermost."""
        own = self._pack, self._unpack
        outer = hookstack.hooks_below(own)
        if outer is not None and outer[0] == self._pack:
            return False
        hookstack.push(own)
        self.outer.append(outer)
        return True

    def pop(self) -> None:
        """Undo a ``push`` that was done."""
        self.outer.pop()
        hookstack.pop()

    def clear(self) -> None:
        """Undo every ``push``, and forget every unit."""
        while self.outer:
            self.pop()
        self._gathered.clear()

    def _pack(self, tensor: torch.Tensor) -> Any:
        unit = self.unit_of(tensor)
        if unit is not None and unit.buffer is not None:
            base = int(unit.buffer.storage_offset()) // tensor.element_size()
            offset = int(tensor.storage_offset()) - base
            conj, neg = tensor.is_conj(), tensor.is_neg()
            handle = _Handle(unit, unit.version, tensor.dtype, tensor.size(), tensor.stride(), offset, conj, neg)
            unit.handles.add(handle)
            return handle
        outer = self.outer[-1] if self.outer else None
        if outer is not None:
            pack, unpack = outer
            return _Outer(unpack, pack(tensor))
        return self._keeper.keep(tensor, self._latest)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Handle):
            return self._unpack_handle(packed)
        if isinstance(packed, _Outer):
            return packed.unpack(packed.packed)
        tensor: torch.Tensor = packed.unpack()
        return tensor

    def _unpack_handle(self, handle: _Handle) -> torch.Tensor:
        unit = handle.unit
        if unit.version != handle.version:
            raise EngineStateError(
                f"unit {unit.name}: backward needs the parameters as they were in its forward, but an optimizer step "
                "has changed them since; run backward before step()"
            )
        copies = torch.is_grad_enabled() or handle.size.numel() * handle.dtype.itemsize <= _SMALL_BYTES
        self._hold(unit, not copies)
        assert unit.buffer is not None
        flat = unit.buffer.view(handle.dtype)
        tensor = flat.as_strided(handle.size, handle.stride, flat.storage_offset() + handle.offset)
        tensor = torch._neg_view(tensor) if handle.neg else tensor
        tensor = tensor.conj() if handle.conj else tensor
        return tensor.clone() if copies else tensor
