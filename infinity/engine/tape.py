"""The record of deferred initialisation: a graph of operators over storages, and its replay.

What it guarantees and why it looks like this stands at the head of ``deferred.py``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from infinity.errors import ModelError
from infinity.io.memory import HEAP

_KEY = "_infinity_deferred"
META = torch.device("meta")
_ORDER = itertools.count()
_aten = torch.ops.aten

UNREAD = frozenset(
    {
        # In place: every element of the first argument is overwritten, none is read.
        *(_aten.copy_, _aten.fill_, _aten.zero_, _aten.normal_, _aten.uniform_, _aten.random_, _aten.bernoulli_),
        *(_aten.exponential_, _aten.geometric_, _aten.log_normal_, _aten.cauchy_),
        # Only shape, dtype and device of the first argument matter.
        *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like),
        *(_aten.randint_like, _aten.new_empty, _aten.new_empty_strided, _aten.new_zeros, _aten.new_ones),
        *(_aten.new_full,),
    }
)
"""Operators that do not depend on the values of their first argument."""


def describe(tensor: Tensor) -> str:
    """A tensor for an error message."""
    return f"tensor of shape {tuple(tensor.shape)}, {tensor.dtype}"


def is_dense(tensor: Tensor) -> bool:
    """Whether a storage, an offset and strides say all about it."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


@contextlib.contextmanager
def bare() -> Iterator[None]:
    """Run operators as PyTorch itself would, whatever modes are on."""
    with torch._C.DisableTorchFunction(), no_dispatch():
        yield


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Run operators as they were recorded."""
    with contextlib.ExitStack() as stack:
        for device_type in autocast_types():
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def autocast_types() -> list[str]:
    """The device types whose operators autocast changes now."""
    return [device_type for device_type in ("cpu", "cuda", "xpu", "mps") if torch.is_autocast_enabled(device_type)]


@dataclass(eq=False, slots=True)
class Slot:
    """Stands for one storage: ``nbytes`` of memory on ``device`` in plain construction; ``cell`` dies with it."""

    nbytes: int
    device: torch.device
    cell: weakref.ref[Cell]


class Cell:
    """What hangs on a deferred meta storage: the growing end of its record.

    Attributes:
        slot: its identity in the record.
        last: the operator that last wrote it.
        version: the highest version counter that a tensor on this storage may have reached inside the context.
    """

    def __init__(self, storage: torch.UntypedStorage, device: torch.device, last: Op) -> None:
        self.slot = Slot(storage.nbytes(), device, weakref.ref(self))
        self.last = last
        self.version = 0
        vars(storage)[_KEY] = self

    def saw(self, version: int) -> None:
        """Count a recorded change in place."""
        self.version = max(self.version, version)


def cell_of(tensor: Tensor) -> Cell | None:
    """The record of a tensor's storage, or ``None``."""
    if tensor.device.type != "meta" or tensor.layout != torch.strided:
        return None
    cell = vars(tensor.untyped_storage()).get(_KEY)
    assert cell is None or isinstance(cell, Cell)
    return cell


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in the record: where it lies in its slot (``offset`` and ``stride`` in elements)."""

    slot: Slot
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor, slot: Slot) -> View:
        """How ``tensor`` lies in its storage."""
        size, stride, offset = tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        return cls(slot, tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg())

    @property
    def num_elements(self) -> int:
        """How many elements of memory it spans."""
        if 0 in self.size:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))

    def covers_slot(self) -> bool:
        """Whether writing every element writes every byte of the slot."""
        return math.prod(self.size) * self.dtype.itemsize == self.slot.nbytes == self.num_elements * self.dtype.itemsize

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, on memory that has the slot's bytes."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = torch._neg_view(tensor) if self.neg else tensor
        return tensor.conj() if self.conj else tensor


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A large real tensor that a recorded operator reads: kept, not copied."""

    owner: Tensor
    alias: Tensor
    version: int

    def value(self) -> Tensor:
        """The tensor, if it has not changed since."""
        if version_of(self.owner) != self.version:
            raise ModelError(
                f"materialize: a real {describe(self.owner)} from which a deferred tensor is initialised was changed "
                "since; materialize before changing it, or initialise from a copy"
            )
        return self.alias


def version_of(tensor: Tensor) -> int:
    """Its version counter; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class Seed:
    """The generator of a random operator and its state before; ``named``: the operator has a ``generator`` argument."""

    generator: torch.Generator
    state: Tensor
    named: bool

    def call(self, op: Op, args: Any, kwargs: Any, *, live: bool) -> Any:
        """Run ``op``, drawing from the generator itself (``live``) or, from another, what was drawn then."""
        func = op.func
        if self.named:
            generator = self.generator
            if not live:
                generator = torch.Generator(generator.device)
                generator.set_state(self.state)
            return func(*args, **kwargs, generator=generator)
        if live:
            return func(*args, **kwargs)
        present = self.generator.get_state()
        try:
            self.generator.set_state(self.state)
            return func(*args, **kwargs)
        finally:
            self.generator.set_state(present)


@dataclass(eq=False, slots=True)
class Op:
    """One recorded operator; tensors in ``args`` and ``kwargs`` are ``View``, ``Borrowed`` or small copies.

    Attributes:
        func: an operator of PyTorch's; or what reads a tensor from where its values are.
        seed: of a random operator.
        blind: no deferred value decides what it draws.
        reads: each slot whose contents matter, with the operator that had last written it.
        writes: the slots it changed or made.
        touches: every slot among its arguments and outputs.
        outputs: the tensors it made, by position in its flattened result.
        default_dtype: the global default where the result depends on it, else ``None``.
        order: when it ran, among all.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    seed: Seed | None
    blind: bool
    reads: dict[Slot, Op]
    writes: set[Slot]
    touches: set[Slot]
    outputs: dict[int, View] = field(default_factory=dict)
    default_dtype: torch.dtype | None = None
    order: int = field(default_factory=lambda: next(_ORDER))


class Bench:
    """Where recorded operators run: one buffer per slot, each holding what its slot held after one operator.

    Args:
        keep: keep the buffers of living storages until the next evaluation, which then goes on from them.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._buffers: dict[Slot, torch.UntypedStorage] = {}
        self._states: dict[Slot, Op] = {}

    def contents(self, slot: Slot, op: Op) -> torch.UntypedStorage:
        """The bytes of ``slot`` after ``op``."""
        self._bring({slot: op})
        return self._buffers[slot]

    def inspect(self, op: Op) -> Any:
        """Run a new operator for real, drawing from the live generator, and return its real result."""
        try:
            self._bring(op.reads)
            return self.run(op, live=True)
        except BaseException:
            self._drop(list(self._buffers))  # may be half changed
            raise

    def slot_of(self, tensor: Tensor) -> Slot | None:
        """The slot in whose buffer ``tensor`` lies."""
        if not is_dense(tensor):
            return None
        address = tensor.untyped_storage()._cdata
        return next((slot for slot, buffer in self._buffers.items() if buffer._cdata == address), None)

    def _bring(self, wanted: Mapping[Slot, Op]) -> None:
        plan = self._plan(wanted)
        last_use = {slot: op for op in plan for slot in op.touches}
        self._drop(self._buffers.keys() - last_use.keys() - wanted.keys())
        for op in plan:
            self.run(op)
            used = {slot for slot in op.touches if last_use[slot] is op} - wanted.keys()
            self._drop(slot for slot in used if not (self._keep and slot.cell()))

    def _plan(self, wanted: Mapping[Slot, Op]) -> list[Op]:
        """The operators still to run, in order, so that every wanted slot is as after its operator."""
        needed: set[Op] = set()
        queue = list(wanted.items())
        while queue:
            slot, op = queue.pop()
            if op not in needed and self._states.get(slot) is not op:
                needed.add(op)
                queue.extend(op.reads.items())
        if any(slot in self._states and op.order <= self._states[slot].order for op in needed for slot in op.writes):
            self._drop(list(self._buffers))  # a buffer is ahead of what one of them must meet
            return self._plan(wanted)
        return sorted(needed, key=lambda op: op.order)

    def run(self, op: Op, *, live: bool = False) -> Any:
        """Run one operator on the buffers as they are; ``live``: draw from the generator itself."""
        HEAP.make_room()
        HEAP.use(sum(slot.nbytes for slot in op.writes))
        inputs: set[int] = set()

        def real(leaf: Any) -> Any:
            if isinstance(leaf, View):
                leaf = leaf.on(self._buffer(leaf.slot))
            elif isinstance(leaf, Borrowed):
                leaf = leaf.value()
            if isinstance(leaf, Tensor):
                inputs.add(leaf.untyped_storage()._cdata)
            return leaf

        args, kwargs = tree_map(real, (op.args, op.kwargs))
        with _default_dtype(op.default_dtype):
            result = op.seed.call(op, args, kwargs, live=live) if op.seed else op.func(*args, **kwargs)
        leaves = tree_leaves(result)
        for position, view in op.outputs.items():
            self._store(leaves[position], view, inputs)
        self._states.update(dict.fromkeys(op.writes, op))
        return result

    def _store(self, output: Tensor, view: View, inputs: set[int]) -> None:
        storage = output.untyped_storage()
        if (
            storage._cdata not in inputs
            and storage.nbytes() == view.slot.nbytes
            and View.of(output, view.slot) == view
            and view.slot not in self._buffers
        ):
            self._buffers[view.slot] = storage
        else:  # strides other than the meta kernel's, part of a larger buffer, or an alias of an input
            view.on(self._buffer(view.slot)).copy_(output)

    def _buffer(self, slot: Slot) -> torch.UntypedStorage:
        if slot not in self._buffers:
            self._buffers[slot] = torch.empty(slot.nbytes, dtype=torch.uint8, device=slot.device).untyped_storage()
        return self._buffers[slot]

    def _drop(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self._buffers.pop(slot, None)
            self._states.pop(slot, None)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    present = torch.get_default_dtype()
    if dtype is None or dtype == present:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(present)
