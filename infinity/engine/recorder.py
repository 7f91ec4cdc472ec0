"""The dispatch mode of deferred initialisation: which operators are recorded, and how.

What it guarantees and why it looks like this stands at the head of ``deferred.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from infinity.engine.tape import (
    META,
    UNREAD,
    Bench,
    Borrowed,
    Cell,
    Op,
    Seed,
    Slot,
    View,
    bare,
    cell_of,
    is_dense,
    version_of,
)
from infinity.errors import ModelError
from infinity.io.memory import HEAP

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
        self.beside_deferred = self.device == META
        self.tensors = _tensors(given)
        self.mutated = _tensors([v for p, v in self.bound if p.alias_info is not None and p.alias_info.is_write])
        self.deferred = [tensor for tensor in self.tensors if cell_of(tensor) is not None]
        if self.beside_deferred:  # C++ code that makes a helper where a deferred tensor is, as ``w[0] = 1`` does
            self.device = self.kwargs["device"] = next(map(_place, self.deferred), torch.device("cpu"))

    def on_meta(self) -> Any:
        """The result on meta tensors, for its shapes; ``_UNKNOWN`` if they depend on values or are not implemented."""
        args, kwargs = tree_map(_as_meta, (self.args, self.kwargs))
        for name, value in (("device", META), ("generator", None), ("pin_memory", False)):
            if kwargs.get(name) is not None:
                kwargs[name] = value
        try:
            result = self.func(*args, **kwargs)
        except RuntimeError:  # a call that is wrong says so better when it runs for real
            return _UNKNOWN
        return result if all(map(is_dense, _tensors(result))) else _UNKNOWN

    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags or _takes_generator(self.func)

    def place(self) -> torch.device:
        """Where plain construction would put a new result."""
        if self.device is not None:
            return torch.empty(0, device=self.device).device  # with its index
        places = [_place(tensor) for tensor in sorted(self.tensors, key=lambda tensor: tensor.dim() == 0)]
        return places[0] if places else torch.get_default_device()

    def record(self, threshold_bytes: int) -> Op:
        """The operator for the record, its outputs still to be added. The generator's state is taken now."""
        func = self.func
        kwargs = dict(self.kwargs)
        seed = None
        if self.is_random():
            generator = kwargs.pop("generator", None) or _default_generator(self.place())
            func = _with_generator(func)
            seed = Seed(generator, generator.get_state(), _takes_generator(func))
        views: dict[int, View] = {}
        reads: dict[Slot, Op] = {}
        writes: set[Slot] = set()
        blind = True
        for index, (parameter, value) in enumerate(self.bound):
            unread = parameter.is_out or (index == 0 and func.overloadpacket in UNREAD)
            for tensor in _tensors(value):
                cell = cell_of(tensor)
                if cell is None:
                    continue
                view = views[id(tensor)] = View.of(tensor, cell.slot)
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
            return Borrowed(leaf, leaf.detach(), version_of(leaf))

        args, kwargs = tree_map(record, (self.args, kwargs))
        return Op(func, args, kwargs, seed, blind, reads, writes, {view.slot for view in views.values()})

    def refuse(self, why: str) -> NoReturn:
        raise ModelError(
            f"deferred_init: {self.func} cannot be recorded: {why}. Build that part of the model outside the context"
        )


class Recorder(TorchDispatchMode):
    """Sees every operator below autograd; makes large results deferred and records what is done to them."""

    def __init__(self, threshold_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._threshold_bytes = threshold_bytes
        self._bench = Bench(keep=True)
        self.autocast_types: list[str] = []  # where autocast is on; hidden from here, so the facade tells

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with bare():
            call = _Call(func, args, kwargs or {})
            result = self._on_deferred(call) if call.deferred else self._on_real(call)
        return func(*args, **(kwargs or {})) if result is NotImplemented else result

    def _on_real(self, call: _Call) -> Any:
        """A call on real tensors or none: it runs, but a large new result is deferred. ``NotImplemented``: not ours."""
        only_shapes = (
            call.device is not None and call.func.overloadpacket in UNREAD
        )  # ``empty_like(meta, device="cpu")``
        strange = any((tensor.is_meta and not only_shapes) or _is_wrapper(tensor) for tensor in call.tensors)
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
            HEAP.make_room()
            result = call.func(*call.args, **call.kwargs)
        new = self._large(call, result)
        return self._commit(call, op or call.record(self._threshold_bytes), result, new) if new else result

    def _on_deferred(self, call: _Call) -> Any:
        """A call that involves deferred tensors: shapes now and values later, or both now if it depends on values."""
        into_real = any(cell_of(tensor) is None for tensor in call.mutated)
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
                Bench().run(op, live=True) if op.blind else self._bench.inspect(op)
            leaves = enumerate(tree_leaves(result))
            new = {i: leaf for i, leaf in leaves if isinstance(leaf, Tensor) and cell_of(leaf) is None}
        return self._commit(call, op, result, new) if new or call.mutated else result

    def _check(self, call: _Call, into_real: bool) -> None:
        if call.func.namespace in _UNRECORDED_NAMESPACES:
            call.refuse("it communicates with other ranks")
        for wrapper in filter(_is_wrapper, call.tensors):
            call.refuse(f"it mixes a deferred tensor with a {type(wrapper).__name__}")
        if any(tensor.is_meta and cell_of(tensor) is None for tensor in call.tensors):
            call.refuse("it mixes a deferred tensor with a plain meta tensor, which has no values")
        name, kind = call.func.name(), call.place().type
        cast = torch._C._dispatch_has_kernel_for_dispatch_key
        if kind in self.autocast_types and cast(name, f"Autocast{kind.upper()}"):
            call.refuse("torch.autocast is on, and PyTorch does not apply it to tensors without values")
        if into_real and (torch.Tag.inplace_view in call.func.tags or any(map(cell_of, call.mutated))):
            call.refuse("it changes real and deferred tensors together")

    def _change_view(self, call: _Call) -> Any:
        """An operator that changes how a tensor lies on its storage; the record reads that from the tensor itself."""
        if len(call.deferred) != len(call.tensors):
            call.refuse("it puts a deferred tensor on the memory of a real one")
        result = call.func(*call.args, **call.kwargs)
        for tensor in call.mutated:
            cell = cell_of(tensor)
            if cell is None or tensor.untyped_storage().nbytes() != cell.slot.nbytes:
                call.refuse("it changes the storage of a deferred tensor")
            cell.saw(version_of(tensor) + 1)
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
        old = {tensor.untyped_storage()._cdata for tensor in call.tensors if is_dense(tensor)}
        return {
            position: leaf
            for position, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor)
            and is_dense(leaf)
            and leaf.untyped_storage().nbytes() >= threshold_bytes
            and leaf.untyped_storage()._cdata not in old
        }

    def _commit(self, call: _Call, op: Op, result: Any, new: dict[int, Tensor]) -> Any:
        """Put ``op`` on the record of what it made (``new``) and changed; returns ``result`` as the caller gets it."""
        leaves, spec = tree_flatten(result)
        for position, leaf in new.items():
            leaves[position] = meta = _as_meta(leaf)
            place = call.place() if leaf.is_meta else leaf.device
            HEAP.use(0 if leaf.is_meta else leaf.untyped_storage().nbytes())
            cell = cell_of(meta) or Cell(meta.untyped_storage(), place, op)
            op.outputs[position] = View.of(meta, cell.slot)
            op.writes.add(cell.slot)
        for tensor in call.mutated:
            changed = cell_of(tensor)
            assert changed is not None
            changed.last = op
            changed.saw(version_of(tensor) + 1)  # counted when this call returns
        op.touches |= op.writes
        self._pin_default_dtype(call, op)
        return tree_unflatten(leaves, spec)

    def _pin_default_dtype(self, call: _Call, op: Op) -> None:
        """Factories and integer arithmetic (``arange(3) / 2``) depend on the default dtype, maybe another at replay."""
        dtypes = {tensor.dtype for tensor in call.tensors}
        made = [view.dtype for view in op.outputs.values() if view.dtype.is_floating_point or view.dtype.is_complex]
        if not made or any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
            return
        if not dtypes and any(parameter.name == "dtype" for parameter in call.func._schema.arguments):
            op.kwargs["dtype"] = made[0]
        else:
            op.default_dtype = torch.get_default_dtype()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _slot(tensor: Tensor) -> Slot | None:
    cell = cell_of(tensor)
    return None if cell is None else cell.slot


def _place(tensor: Tensor) -> torch.device:
    slot = _slot(tensor)
    return tensor.device if slot is None else slot.device


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether operators mean something else for it (``DTensor``, ``FakeTensor``)."""
    return type(tensor).__torch_dispatch__ != Tensor.__torch_dispatch__


def _as_meta(leaf: Any) -> Any:
    """A real tensor's shape on the meta device; anything else as it is."""
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=META)


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
