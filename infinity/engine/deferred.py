"""Deferred initialisation: build a model without memory for its large tensors, make their values later, one by one.

Inside ``deferred_init()`` a dispatch mode sees every operator. One that would make a large tensor yields a meta tensor
instead and is recorded; so is every operator on such a *deferred* tensor. ``materialize`` replays what made a tensor.

Guarantees:

* Values are bitwise those of plain construction from the same RNG state, in whatever order, however often and whenever
  they are made; so is the RNG state that construction leaves. Random operators really run during construction, on
  memory freed at once, because nothing else advances every generator exactly; the state before is recorded.
* Construction holds one large tensor at a time; so does ``materialize``, plus what the recorded operators read. Code
  that looks at values (``item``, ``bool``, ``tolist``, ``numpy``) gets them, at the price of a replay; the buffers of
  the last look stay until the next, so that a rejection loop (``trunc_normal_``) costs one replay per turn.
* What cannot be done right is refused with a ``ModelError``.

How: the record is a graph of operators. A tensor appears in it as a view (offset, sizes, strides) of a *slot*, which
stands for one storage, so views and in-place operators need no special treatment. An operator points to those that last
wrote the slots it reads. Replaying the needed ones in their first order, with one buffer per slot, meets each slot with
the contents it had then: no copies for operators that change what others read. An operator that overwrites a whole slot
unread points to nothing earlier, so the first initialisation under a second one is never replayed, and is freed.

Ownership: the end of the graph hangs on the meta *storage* (PyTorch keeps a storage's Python object as long as the
storage lives). Once the last tensor on it is gone, because the engine swapped or dropped it, so is its record. There is
no registry to clear, and no weak reference to a tensor, which ``swap_tensors`` would refuse.

Limits. In-place changes after the context cannot be recorded: those through the tensor itself show in its version
counter and are refused, those through ``.data`` do not show. Large real tensors that recorded operators read are kept,
not copied; if they change first, ``materialize`` refuses. ``numpy()`` gives a read-only copy. ``.cpu()`` and
``.to(device)`` always copy. ``device="meta"`` means deferred: inside C++ it is how helpers get beside a tensor.

Rejected: a tensor subclass (leaks into every isinstance and hook of the engine); CPU tensors with an empty storage (a
kernel called after the context would crash); one log for the whole model (replays too much, is cleared by hand);
skipping generators ahead by arithmetic (depends on kernel, strides and vector length).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from infinity.errors import ModelError

_KEY = "_infinity_deferred"
_META = torch.device("meta")
_ORDER = itertools.count()
_aten = torch.ops.aten

_UNREAD = frozenset(
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


@contextlib.contextmanager
def deferred_init(*, threshold_bytes: int = 64 * 1024) -> Iterator[None]:
    """Construct modules without memory for their large tensors.

    Inside, tensors of at least ``threshold_bytes`` come out as meta tensors whose values ``materialize`` makes later;
    smaller ones are real. Initialise and convert the model inside as well: what is done to it afterwards is not
    recorded. The context applies to the calling thread, and may be nested.

    Args:
        threshold_bytes: bytes from which on a tensor is deferred.

    Raises:
        ModelError: construction does something that cannot be recorded; the message names it and says what to do.
    """
    with _Recorder(threshold_bytes) as recorder, _Facade(recorder):
        yield


def is_deferred(tensor: Tensor) -> bool:
    """Whether ``materialize`` can make the values of ``tensor``: it came from ``deferred_init``."""
    with torch._C.DisableTorchFunction():
        return _cell(tensor) is not None


def materialize(tensor: Tensor) -> Tensor:
    """Make the values of a deferred tensor.

    Neither the global RNG state nor ``tensor`` changes: call it again, in any order, inside the context or after.

    Args:
        tensor: made inside ``deferred_init``; any shape and dtype, a view too.

    Returns:
        A CPU tensor of the same shape, strides and dtype, in memory of its own, without gradient.

    Raises:
        ModelError: ``tensor`` has no record (it is real, or a plain meta tensor), or was changed after the context.
    """
    with _bare(), torch.inference_mode(False), torch.no_grad(), _no_autocast():
        cell = _cell(tensor)
        if cell is None:
            _refuse_unknown(tensor)
        slot = cell.slot
        if tensor.untyped_storage().nbytes() != slot.nbytes:
            raise ModelError(
                f"materialize: the deferred {_describe(tensor)} was resized from {slot.nbytes} bytes of storage to "
                f"{tensor.untyped_storage().nbytes()}; construct it with its final size"
            )
        if not tensor.is_inference() and tensor._version > cell.version:
            raise ModelError(
                f"materialize: the deferred {_describe(tensor)} was changed in place after deferred_init() had ended, "
                "which cannot be recorded; initialise the model inside the context"
            )
        return _own(_View.of(tensor, slot), _Bench().contents(slot, cell.last))


def _own(view: _View, storage: torch.UntypedStorage) -> Tensor:
    """The part of ``storage`` that ``view`` spans, as a CPU tensor on memory of its own."""
    if view.num_elements * view.dtype.itemsize == storage.nbytes() and storage.device.type == "cpu":
        return view.on(storage)
    flat = torch.empty(0, dtype=view.dtype, device=storage.device)
    flat.set_(storage, view.offset, (view.num_elements,), (1,))
    own = torch.empty(view.num_elements, dtype=view.dtype).copy_(flat)
    return replace(view, offset=0).on(own.untyped_storage())


def _describe(tensor: Tensor) -> str:
    return f"tensor of shape {tuple(tensor.shape)}, {tensor.dtype}"


def _refuse_unknown(tensor: Tensor) -> NoReturn:
    if tensor.device.type == "meta":
        raise ModelError(
            f"materialize: expected a tensor from infinity.deferred_init(), got a plain meta {_describe(tensor)} "
            "of which no initialisation was recorded. Construct the model under infinity.deferred_init() instead of "
            'torch.device("meta"), and initialise and convert it inside; or give it real values first'
        )
    raise ModelError(
        f"materialize: expected a deferred tensor, got a real {_describe(tensor)} on {tensor.device}; "
        "it has its values already (ask is_deferred first)"
    )


class _Heap:
    """Gives back what large buffers leave behind.

    glibc keeps freed blocks of up to 32 MiB for reuse. A small allocation that takes a bite of one makes it too small
    for the next buffer of its size, so construction would leave one hole per tensor: all the memory after all.
    """

    TRIM_BYTES = 16 << 20

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._used_bytes = 0

    def make_room(self) -> None:
        """Return the pages of freed buffers to the system, if there may be many."""
        if self._used_bytes >= self.TRIM_BYTES and self._trim is not None:
            self._used_bytes = 0
            self._trim(0)

    def use(self, nbytes: int) -> None:
        """Count a buffer that lives for a short while."""
        self._used_bytes += nbytes


_heap = _Heap()


@contextlib.contextmanager
def _bare() -> Iterator[None]:
    """Run operators as PyTorch itself would, whatever modes are on."""
    with torch._C.DisableTorchFunction(), no_dispatch():
        yield


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device_type in _autocast_types():
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def _autocast_types() -> list[str]:
    return [device_type for device_type in ("cpu", "cuda", "xpu", "mps") if torch.is_autocast_enabled(device_type)]


# --- the record -------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Slot:
    """Stands for one storage: ``nbytes`` of memory on ``device`` in plain construction; ``cell`` dies with it."""

    nbytes: int
    device: torch.device
    cell: weakref.ref[_Cell]


class _Cell:
    """What hangs on a deferred meta storage: the growing end of its record.

    Attributes:
        slot: its identity in the record.
        last: the operator that last wrote it.
        version: the highest version counter that a tensor on this storage may have reached inside the context.
    """

    def __init__(self, storage: torch.UntypedStorage, device: torch.device, last: _Op) -> None:
        self.slot = _Slot(storage.nbytes(), device, weakref.ref(self))
        self.last = last
        self.version = 0
        vars(storage)[_KEY] = self

    def saw(self, version: int) -> None:
        self.version = max(self.version, version)


def _cell(tensor: Tensor) -> _Cell | None:
    if tensor.device.type != "meta" or tensor.layout != torch.strided:
        return None
    cell = vars(tensor.untyped_storage()).get(_KEY)
    assert cell is None or isinstance(cell, _Cell)
    return cell


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor in the record: where it lies in its slot (``offset`` and ``stride`` in elements)."""

    slot: _Slot
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor, slot: _Slot) -> _View:
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
class _Borrowed:
    """A large real tensor that a recorded operator reads: kept, not copied."""

    owner: Tensor
    alias: Tensor
    version: int

    def value(self) -> Tensor:
        if _version(self.owner) != self.version:
            raise ModelError(
                f"materialize: a real {_describe(self.owner)} from which a deferred tensor is initialised was changed "
                "since; materialize before changing it, or initialise from a copy"
            )
        return self.alias


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class _Seed:
    """The generator of a random operator and its state before; ``named``: the operator has a ``generator`` argument."""

    generator: torch.Generator
    state: Tensor
    named: bool

    def call(self, op: _Op, args: Any, kwargs: Any, *, live: bool) -> Any:
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
class _Op:
    """One recorded operator; tensors in ``args`` and ``kwargs`` are ``_View``, ``_Borrowed`` or small copies.

    Attributes:
        seed: of a random operator.
        blind: no deferred value decides what it draws.
        reads: each slot whose contents matter, with the operator that had last written it.
        writes: the slots it changed or made.
        touches: every slot among its arguments and outputs.
        outputs: the tensors it made, by position in its flattened result.
        default_dtype: the global default where the result depends on it, else ``None``.
        order: when it ran, among all.
    """

    func: OpOverload[..., Any]
    args: Any
    kwargs: dict[str, Any]
    seed: _Seed | None
    blind: bool
    reads: dict[_Slot, _Op]
    writes: set[_Slot]
    touches: set[_Slot]
    outputs: dict[int, _View] = field(default_factory=dict)
    default_dtype: torch.dtype | None = None
    order: int = field(default_factory=lambda: next(_ORDER))


class _Bench:
    """Where recorded operators run: one buffer per slot, each holding what its slot held after one operator.

    Args:
        keep: keep the buffers of living storages until the next evaluation, which then goes on from them.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._buffers: dict[_Slot, torch.UntypedStorage] = {}
        self._states: dict[_Slot, _Op] = {}

    def contents(self, slot: _Slot, op: _Op) -> torch.UntypedStorage:
        """The bytes of ``slot`` after ``op``."""
        self._bring({slot: op})
        return self._buffers[slot]

    def inspect(self, op: _Op) -> Any:
        """Run a new operator for real, drawing from the live generator, and return its real result."""
        try:
            self._bring(op.reads)
            return self.run(op, live=True)
        except BaseException:
            self._drop(list(self._buffers))  # may be half changed
            raise

    def slot_of(self, tensor: Tensor) -> _Slot | None:
        """The slot in whose buffer ``tensor`` lies."""
        if not _is_dense(tensor):
            return None
        address = tensor.untyped_storage()._cdata
        return next((slot for slot, buffer in self._buffers.items() if buffer._cdata == address), None)

    def _bring(self, wanted: Mapping[_Slot, _Op]) -> None:
        plan = self._plan(wanted)
        last_use = {slot: op for op in plan for slot in op.touches}
        self._drop(self._buffers.keys() - last_use.keys() - wanted.keys())
        for op in plan:
            self.run(op)
            used = {slot for slot in op.touches if last_use[slot] is op} - wanted.keys()
            self._drop(slot for slot in used if not (self._keep and slot.cell()))

    def _plan(self, wanted: Mapping[_Slot, _Op]) -> list[_Op]:
        """The operators still to run, in order, so that every wanted slot is as after its operator."""
        needed: set[_Op] = set()
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

    def run(self, op: _Op, *, live: bool = False) -> Any:
        """Run one operator on the buffers as they are; ``live``: draw from the generator itself."""
        _heap.make_room()
        _heap.use(sum(slot.nbytes for slot in op.writes))
        inputs: set[int] = set()

        def real(leaf: Any) -> Any:
            if isinstance(leaf, _View):
                leaf = leaf.on(self._buffer(leaf.slot))
            elif isinstance(leaf, _Borrowed):
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

    def _store(self, output: Tensor, view: _View, inputs: set[int]) -> None:
        storage = output.untyped_storage()
        if (
            storage._cdata not in inputs
            and storage.nbytes() == view.slot.nbytes
            and _View.of(output, view.slot) == view
            and view.slot not in self._buffers
        ):
            self._buffers[view.slot] = storage
        else:  # strides other than the meta kernel's, part of a larger buffer, or an alias of an input
            view.on(self._buffer(view.slot)).copy_(output)

    def _buffer(self, slot: _Slot) -> torch.UntypedStorage:
        if slot not in self._buffers:
            self._buffers[slot] = torch.empty(slot.nbytes, dtype=torch.uint8, device=slot.device).untyped_storage()
        return self._buffers[slot]

    def _drop(self, slots: Iterable[_Slot]) -> None:
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


# --- recording --------------------------------------------------------------------------------------------------------


_UNKNOWN = object()
_UNRECORDED_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})


class _Call:
    """One operator call as the dispatcher delivers it, with what its schema says about it."""

    def __init__(self, func: OpOverload[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
        parameters = func._schema.arguments
        self.func = func
        self.args = args
        self.kwargs = dict(kwargs)
        names = [parameter.name for parameter in parameters]
        if "generator" in names[: len(args)]:  # given by position: name it, so that it can be replaced
            index = names.index("generator")
            self.args = args[:index]
            self.kwargs.update(zip(names[index:], args[index:], strict=False))
        given = dict(zip(names, self.args, strict=False)) | self.kwargs
        self.bound = [(parameter, given[parameter.name]) for parameter in parameters if parameter.name in given]
        self.device: torch.device | None = given.get("device")
        self.beside_deferred = self.device == _META
        self.tensors = _tensors(given)
        self.mutated = _tensors([v for p, v in self.bound if p.alias_info is not None and p.alias_info.is_write])
        self.deferred = [tensor for tensor in self.tensors if _cell(tensor) is not None]
        if self.beside_deferred:  # C++ code that makes a helper where a deferred tensor is, as ``w[0] = 1`` does
            self.device = self.kwargs["device"] = next(map(_place, self.deferred), torch.device("cpu"))

    def on_meta(self) -> Any:
        """The result on meta tensors, for its shapes; ``_UNKNOWN`` if they depend on values or are not implemented."""
        args, kwargs = tree_map(_as_meta, (self.args, self.kwargs))
        for name, value in (("device", _META), ("generator", None), ("pin_memory", False)):
            if kwargs.get(name) is not None:
                kwargs[name] = value
        try:
            result = self.func(*args, **kwargs)
        except RuntimeError:  # a call that is wrong says so better when it runs for real
            return _UNKNOWN
        return result if all(map(_is_dense, _tensors(result))) else _UNKNOWN

    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags or _takes_generator(self.func)

    def place(self) -> torch.device:
        """Where plain construction would put a new result."""
        if self.device is not None:
            return torch.empty(0, device=self.device).device  # with its index
        places = [_place(tensor) for tensor in sorted(self.tensors, key=lambda tensor: tensor.dim() == 0)]
        return places[0] if places else torch.get_default_device()

    def record(self, threshold_bytes: int) -> _Op:
        """The operator for the record, its outputs still to be added. The generator's state is taken now."""
        func = self.func
        kwargs = dict(self.kwargs)
        seed = None
        if self.is_random():
            generator = kwargs.pop("generator", None) or _default_generator(self.place())
            func = _with_generator(func)
            seed = _Seed(generator, generator.get_state(), _takes_generator(func))
        views: dict[int, _View] = {}
        reads: dict[_Slot, _Op] = {}
        writes: set[_Slot] = set()
        blind = True
        for index, (parameter, value) in enumerate(self.bound):
            unread = parameter.is_out or (index == 0 and func.overloadpacket in _UNREAD)
            for tensor in _tensors(value):
                cell = _cell(tensor)
                if cell is None:
                    continue
                view = views[id(tensor)] = _View.of(tensor, cell.slot)
                blind = blind and unread
                is_mutated = any(tensor is mutated for mutated in self.mutated)
                if is_mutated:
                    writes.add(cell.slot)
                if not unread or (is_mutated and not view.covers_slot()):
                    reads[cell.slot] = cell.last

        def record(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in views:
                return views[id(leaf)]
            if any(leaf is mutated for mutated in self.mutated):
                return leaf
            if leaf.untyped_storage().nbytes() < threshold_bytes:
                return leaf.detach().clone()
            return _Borrowed(leaf, leaf.detach(), _version(leaf))

        args, kwargs = tree_map(record, (self.args, kwargs))
        return _Op(func, args, kwargs, seed, blind, reads, writes, {view.slot for view in views.values()})

    def refuse(self, why: str) -> NoReturn:
        raise ModelError(
            f"deferred_init: {self.func} cannot be recorded: {why}. Build that part of the model outside the context"
        )


class _Recorder(TorchDispatchMode):
    """Sees every operator below autograd; makes large results deferred and records what is done to them."""

    def __init__(self, threshold_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._threshold_bytes = threshold_bytes
        self._bench = _Bench(keep=True)
        self.autocast_types: list[str] = []  # where autocast is on; hidden from here, so the facade tells

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with _bare():
            call = _Call(func, args, kwargs or {})
            result = self._on_deferred(call) if call.deferred else self._on_real(call)
        return func(*args, **(kwargs or {})) if result is NotImplemented else result

    def _on_real(self, call: _Call) -> Any:
        """A call on real tensors or none: it runs, but a large new result is deferred. ``NotImplemented``: not ours."""
        strange = any(tensor.is_meta or _is_wrapper(tensor) for tensor in call.tensors)
        if call.mutated or strange:
            return NotImplemented
        is_random = call.is_random()
        result = _UNKNOWN
        if call.device is not None and not is_random:  # a factory: learn the size without the memory
            result = call.on_meta()
            if result is not _UNKNOWN and not self._large(call, result):
                return NotImplemented
        op = call.record(self._threshold_bytes) if is_random else None  # the generator's state is that before
        if result is _UNKNOWN:
            _heap.make_room()
            result = call.func(*call.args, **call.kwargs)
        new = self._large(call, result)
        return self._commit(call, op or call.record(self._threshold_bytes), result, new) if new else result

    def _on_deferred(self, call: _Call) -> Any:
        """A call that involves deferred tensors: shapes now and values later, or both now if it depends on values."""
        into_real = any(_cell(tensor) is None for tensor in call.mutated)
        self._check(call, into_real)
        if torch.Tag.inplace_view in call.func.tags:
            return self._change_view(call)
        op = call.record(self._threshold_bytes)
        looks = into_real or torch.Tag.data_dependent_output in call.func.tags
        result = _UNKNOWN if looks else call.on_meta()
        if result is _UNKNOWN:
            result = tree_map(lambda leaf: self._off_bench(call, leaf), self._bench.inspect(op))
            if into_real:
                return result
            new = self._large(call, result)
        else:
            if op.seed is not None:  # only to advance the generator
                _Bench().run(op, live=True) if op.blind else self._bench.inspect(op)
            leaves = enumerate(tree_leaves(result))
            new = {i: leaf for i, leaf in leaves if isinstance(leaf, Tensor) and _cell(leaf) is None}
        return self._commit(call, op, result, new) if new or call.mutated else result

    def _check(self, call: _Call, into_real: bool) -> None:
        if call.func.namespace in _UNRECORDED_NAMESPACES:
            call.refuse("it communicates with other ranks")
        for wrapper in filter(_is_wrapper, call.tensors):
            call.refuse(f"it mixes a deferred tensor with a {type(wrapper).__name__}")
        if any(tensor.is_meta and _cell(tensor) is None for tensor in call.tensors):
            call.refuse("it mixes a deferred tensor with a plain meta tensor, which has no values")
        name, kind = call.func.name(), call.place().type
        cast = torch._C._dispatch_has_kernel_for_dispatch_key
        if kind in self.autocast_types and cast(name, f"Autocast{kind.upper()}"):
            call.refuse("torch.autocast is on, and PyTorch does not apply it to tensors without values")
        if into_real and (torch.Tag.inplace_view in call.func.tags or any(map(_cell, call.mutated))):
            call.refuse("it changes real and deferred tensors together")

    def _change_view(self, call: _Call) -> Any:
        """An operator that changes how a tensor lies on its storage; the record reads that from the tensor itself."""
        if len(call.deferred) != len(call.tensors):
            call.refuse("it puts a deferred tensor on the memory of a real one")
        result = call.func(*call.args, **call.kwargs)
        for tensor in call.mutated:
            cell = _cell(tensor)
            if cell is None or tensor.untyped_storage().nbytes() != cell.slot.nbytes:
                call.refuse("it changes the storage of a deferred tensor")
            cell.saw(_version(tensor) + 1)
        return result

    def _off_bench(self, call: _Call, leaf: Any) -> Any:
        """A leaf of a real result; where it is the tensor that the operator changed, that is the deferred one."""
        slot = self._bench.slot_of(leaf) if isinstance(leaf, Tensor) else None
        if slot is None:
            return leaf
        changed = [tensor for tensor in call.mutated if _slot(tensor) is slot]
        if not changed:
            call.refuse("its result is a view, and it is not implemented for meta tensors")
        return changed[0]

    def _large(self, call: _Call, result: Any) -> dict[int, Tensor]:
        """The tensors in ``result`` that are new memory and large enough to be deferred, by position."""
        threshold_bytes = 0 if call.beside_deferred else self._threshold_bytes
        old = {tensor.untyped_storage()._cdata for tensor in call.tensors if _is_dense(tensor)}
        return {
            position: leaf
            for position, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor)
            and _is_dense(leaf)
            and leaf.untyped_storage().nbytes() >= threshold_bytes
            and leaf.untyped_storage()._cdata not in old
        }

    def _commit(self, call: _Call, op: _Op, result: Any, new: dict[int, Tensor]) -> Any:
        """Put ``op`` on the record of what it made (``new``) and changed; returns ``result`` as the caller gets it."""
        leaves, spec = tree_flatten(result)
        for position, leaf in new.items():
            leaves[position] = meta = _as_meta(leaf)
            place = call.place() if leaf.is_meta else leaf.device
            _heap.use(0 if leaf.is_meta else leaf.untyped_storage().nbytes())
            cell = _cell(meta) or _Cell(meta.untyped_storage(), place, op)
            op.outputs[position] = _View.of(meta, cell.slot)
            op.writes.add(cell.slot)
        for tensor in call.mutated:
            changed = _cell(tensor)
            assert changed is not None
            changed.last = op
            changed.saw(_version(tensor) + 1)  # counted when this call returns
        op.touches |= op.writes
        self._pin_default_dtype(call, op)
        return tree_unflatten(leaves, spec)

    def _pin_default_dtype(self, call: _Call, op: _Op) -> None:
        """Factories and integer arithmetic (``arange(3) / 2``) depend on the default dtype, maybe another at replay."""
        dtypes = {tensor.dtype for tensor in call.tensors}
        made = [view.dtype for view in op.outputs.values() if view.dtype.is_floating_point or view.dtype.is_complex]
        if not made or any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
            return
        if not dtypes and any(parameter.name == "dtype" for parameter in op.func._schema.arguments):
            op.kwargs["dtype"] = made[0]
        else:
            op.default_dtype = torch.get_default_dtype()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _slot(tensor: Tensor) -> _Slot | None:
    cell = _cell(tensor)
    return None if cell is None else cell.slot


def _place(tensor: Tensor) -> torch.device:
    slot = _slot(tensor)
    return tensor.device if slot is None else slot.device


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether operators mean something else for it (``DTensor``, ``FakeTensor``)."""
    return type(tensor).__torch_dispatch__ != Tensor.__torch_dispatch__


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def _as_meta(leaf: Any) -> Any:
    """A real tensor's shape on the meta device; anything else as it is."""
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=_META)


def _takes_generator(func: OpOverload[..., Any]) -> bool:
    return any(parameter.name == "generator" for parameter in func._schema.arguments)


@functools.cache
def _with_generator(func: OpOverload[..., Any]) -> OpOverload[..., Any]:
    """The overload of the same operator that also takes a generator, if there is one (``randn``); else ``func``."""

    def others(overload: OpOverload[..., Any]) -> list[str]:
        return [parameter.name for parameter in overload._schema.arguments if parameter.name != "generator"]

    overloads = [getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads()]
    twins = [overload for overload in overloads if _takes_generator(overload) and others(overload) == others(func)]
    return func if _takes_generator(func) or not twins else twins[0]


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generator = torch.get_device_module(device).default_generators[device.index]
    assert isinstance(generator, torch.Generator)
    return generator


# --- what Python sees of a deferred tensor ----------------------------------------------------------------------------


_ANSWERS: dict[str, Callable[[_Slot], object]] = {
    "is_meta.__get__": lambda slot: False,
    "is_cpu.__get__": lambda slot: slot.device.type == "cpu",
    "device.__get__": lambda slot: slot.device,
}
_ON_VALUES = frozenset({"tolist", "numpy", "__array__"})
_ON_EMPTY = frozenset({"new", "new_tensor"})  # use dtype and device only
_INDEXED = frozenset({"__getitem__", "__setitem__"})
_REFUSED = frozenset(
    # The storages are what pickling asks for.
    {"data_ptr", "share_memory_", "__dlpack__", "storage", "_typed_storage", "untyped_storage"}
)


class _Facade(TorchFunctionMode):
    """What is asked of a tensor without an operator: a deferred one answers as the real one would.

    Much code skips meta tensors, above all ``torch.nn.init``, or makes helpers on ``tensor.device``.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._recorder.autocast_types = _autocast_types()
        name = getattr(func, "__name__", "")
        if name in {"__get__", "__set__"}:
            name = f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name}"
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if tensor is not None and name == "data.__set__":
            return self._set_data(tensor, args[1])
        cell = None if tensor is None else _cell(tensor)
        if tensor is None or cell is None:
            return func(*args, **kwargs)
        if name in _ANSWERS:
            return _ANSWERS[name](cell.slot)
        if name in _REFUSED:
            raise ModelError(
                f"deferred_init: {name}() needs the memory of a deferred {_describe(tensor)}, which has none yet; "
                "do that outside deferred_init(), on real tensors"
            )
        if name in _ON_EMPTY:
            return func(torch.empty(0, dtype=tensor.dtype, device=cell.slot.device), *args[1:], **kwargs)
        if name in _INDEXED and len(args) > 1:
            return func(tensor, _index(args[1], cell.slot.device), *args[2:], **kwargs)
        if name in _ON_VALUES:
            value = materialize(tensor).requires_grad_(tensor.requires_grad)
            result = func(value, *args[1:], **kwargs)
            if isinstance(result, numpy.ndarray):
                result.flags.writeable = False  # what is written to it would be lost
            return result
        return func(*args, **kwargs)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        if (_cell(tensor) is None) != (_cell(value) is None):
            kinds = [f"{'a real' if _cell(x) is None else 'the deferred'} {_describe(x)}" for x in (value, tensor)]
            raise ModelError(
                f"deferred_init: expected tensor.data = value to join two deferred or two real tensors, got {kinds[0]} "
                f"as the data of {kinds[1]}; use tensor.copy_(value), or do it outside deferred_init()"
            )
        tensor.data = value
        cell = _cell(tensor)
        if cell is not None:
            cell.saw(_version(tensor))


def _index(index: Any, device: torch.device) -> Any:
    """``index`` with its lists as tensors, which PyTorch would otherwise make on the meta device, without values."""
    if isinstance(index, tuple):
        return tuple(_index(part, device) for part in index)
    if not isinstance(index, list) or not all(isinstance(leaf, int) for leaf in tree_leaves(index)):
        return index
    return torch.tensor(index, device=device) if index else torch.empty(0, dtype=torch.long, device=device)
