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

A value may also come from a source: ``deferred_from`` makes a deferred tensor that something else reads, a file for
example. Its record begins with that, so whatever is done to it, casts and the merging of several included, is done when
the values are wanted.

Limits. In-place changes after the context cannot be recorded: those through the tensor itself show in its version
counter and are refused, those through ``.data`` do not show. Large real tensors that recorded operators read are kept,
not copied; if they change first, ``materialize`` refuses. ``numpy()`` gives a read-only copy. ``device="meta"`` means
deferred: inside C++ it is how helpers get beside a tensor.

Rejected: a tensor subclass (leaks into every isinstance and hook of the engine); CPU tensors with an empty storage (a
kernel called after the context would crash); one log for the whole model (replays too much, is cleared by hand);
skipping generators ahead by arithmetic (depends on kernel, strides and vector length).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from infinity.engine.recorder import Recorder
from infinity.engine.tape import (
    META,
    Bench,
    Cell,
    Op,
    Slot,
    View,
    autocast_types,
    bare,
    cell_of,
    describe,
    no_autocast,
    version_of,
)
from infinity.errors import ModelError


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
    with Recorder(threshold_bytes) as recorder, _Facade(recorder):
        yield


@contextlib.contextmanager
def beside_meta(*, threshold_bytes: int = 64 * 1024) -> Iterator[None]:
    """As ``deferred_init``, for code that knows meta tensors: what it asks for on the meta device is a plain one.

    Args:
        threshold_bytes: bytes from which on a tensor on another device is deferred.

    Raises:
        ModelError: as for ``deferred_init``.
    """
    with Recorder(threshold_bytes) as recorder, _Facade(recorder, plain_meta=True):
        yield


def deferred_from(shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> Tensor:
    """A deferred tensor, on the CPU, whose values come from elsewhere.

    Args:
        shape: of the tensor.
        dtype: of its elements.
        read: makes a dense CPU tensor of that shape and dtype, on memory that nobody else has; called each time when
            the values are wanted.
    """
    with bare():
        tensor = torch.empty(tuple(shape), dtype=dtype, device=META)
        op = Op(read, (), {}, None, blind=True, reads={}, writes=set(), touches=set())
        slot = Cell(tensor.untyped_storage(), torch.device("cpu"), op).slot
        op.outputs[0] = View.of(tensor, slot)
        op.writes.add(slot)
        op.touches.add(slot)
    return tensor


def is_deferred(tensor: Tensor) -> bool:
    """Whether ``materialize`` can make the values of ``tensor``: it came from ``deferred_init``."""
    with torch._C.DisableTorchFunction():
        return cell_of(tensor) is not None


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
    return _replay(tensor, Bench())


class Materializer:
    """``materialize`` for one tensor after the other: what several in a row are parts of, as tiles are, is made once.

    It holds that in memory until the next tensor that is no part of it.
    """

    def __init__(self) -> None:
        self._bench = Bench()

    def __call__(self, tensor: Tensor) -> Tensor:
        """As ``materialize``."""
        value = _replay(tensor, self._bench)
        with bare():
            if value.nbytes == tensor.untyped_storage().nbytes():
                self._bench = Bench()
        return value


def _replay(tensor: Tensor, bench: Bench) -> Tensor:
    """The values of a deferred tensor, made on ``bench``."""
    with bare(), torch.inference_mode(False), torch.no_grad(), no_autocast():
        cell = cell_of(tensor)
        if cell is None:
            _refuse_unknown(tensor)
        slot = cell.slot
        if tensor.untyped_storage().nbytes() != slot.nbytes:
            raise ModelError(
                f"materialize: the deferred {describe(tensor)} was resized from {slot.nbytes} bytes of storage to "
                f"{tensor.untyped_storage().nbytes()}; construct it with its final size"
            )
        if not tensor.is_inference() and tensor._version > cell.version:
            raise ModelError(
                f"materialize: the deferred {describe(tensor)} was changed in place after deferred_init() had ended, "
                "which cannot be recorded; initialise the model inside the context"
            )
        return _own(View.of(tensor, slot), bench.contents(slot, cell.last))


def _own(view: View, storage: torch.UntypedStorage) -> Tensor:
    """The part of ``storage`` that ``view`` spans, as a CPU tensor on memory of its own."""
    if view.num_elements * view.dtype.itemsize == storage.nbytes() and storage.device.type == "cpu":
        return view.on(storage)
    flat = torch.empty(0, dtype=view.dtype, device=storage.device)
    flat.set_(storage, view.offset, (view.num_elements,), (1,))
    own = torch.empty(view.num_elements, dtype=view.dtype).copy_(flat)
    return replace(view, offset=0).on(own.untyped_storage())


def _refuse_unknown(tensor: Tensor) -> NoReturn:
    if tensor.device.type == "meta":
        raise ModelError(
            f"materialize: expected a tensor from infinity.deferred_init(), got a plain meta {describe(tensor)} "
            "of which no initialisation was recorded. Construct the model under infinity.deferred_init() instead of "
            'torch.device("meta"), and initialise and convert it inside; or give it real values first'
        )
    raise ModelError(
        f"materialize: expected a deferred tensor, got a real {describe(tensor)} on {tensor.device}; "
        "it has its values already (ask is_deferred first)"
    )


_ANSWERS: dict[str, Callable[[Slot], object]] = {
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

    Args:
        recorder: is told where autocast is on.
        plain_meta: what is asked for on the meta device is no deferred tensor.
    """

    def __init__(self, recorder: Recorder, *, plain_meta: bool = False) -> None:
        super().__init__()
        self._recorder = recorder
        self._plain_meta = plain_meta

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._plain_meta and _is_meta(kwargs.get("device")):
            with bare():
                return func(*args, **kwargs)
        self._recorder.autocast_types = autocast_types()
        name = getattr(func, "__name__", "")
        if name in {"__get__", "__set__"}:
            name = f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name}"
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if tensor is not None and name == "data.__set__":
            return self._set_data(tensor, args[1])
        cell = None if tensor is None else cell_of(tensor)
        if tensor is None or cell is None:
            return func(*args, **kwargs)
        if name in _ANSWERS:
            return _ANSWERS[name](cell.slot)
        if name in _REFUSED:
            raise ModelError(
                f"deferred_init: {name}() needs the memory of a deferred {describe(tensor)}, which has none yet; "
                "do that outside deferred_init(), on real tensors"
            )
        if name in _ON_EMPTY:
            return func(torch.empty(0, dtype=tensor.dtype, device=cell.slot.device), *args[1:], **kwargs)
        if name in _INDEXED and len(args) > 1:
            return func(tensor, _index(args[1], cell.slot.device), *args[2:], **kwargs)
        if name in {"to", "cpu"}:
            as_it_is = _stays(name, cell.slot.device, args[1:], kwargs)
            if as_it_is is not None:  # what is there already is not copied, as elsewhere
                return Tensor.to(tensor, **{"dtype": tensor.dtype, **as_it_is})
        if name in _ON_VALUES:
            value = materialize(tensor).requires_grad_(tensor.requires_grad)
            result = func(value, *args[1:], **kwargs)
            if isinstance(result, numpy.ndarray):
                result.flags.writeable = False  # what is written to it would be lost
            return result
        return func(*args, **kwargs)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        if (cell_of(tensor) is None) != (cell_of(value) is None):
            kinds = [f"{'a real' if cell_of(x) is None else 'the deferred'} {describe(x)}" for x in (value, tensor)]
            raise ModelError(
                f"deferred_init: expected tensor.data = value to join two deferred or two real tensors, got {kinds[0]} "
                f"as the data of {kinds[1]}; use tensor.copy_(value), or do it outside deferred_init()"
            )
        tensor.data = value
        cell = cell_of(tensor)
        if cell is not None:
            cell.saw(version_of(tensor))


def _is_meta(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "meta"


def _stays(name: str, place: torch.device, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What ``cpu`` or ``to`` asks for beside a device, if that is where the tensor is; ``None``: it is another."""
    if name == "cpu":
        return {} if place.type == "cpu" else None
    named = dict(kwargs)
    positional = ("device", "dtype") if args and isinstance(args[0], (str, torch.device)) else ("dtype",)
    named |= dict(zip((*positional, "non_blocking", "copy"), args, strict=False))
    device = named.pop("device", None)
    is_dtype = named.get("dtype") is None or isinstance(named["dtype"], torch.dtype)
    if device is None or torch.device(device) != place or not is_dtype or len(args) > len(positional) + 2:
        return None
    named.pop("non_blocking", None)
    return named


def _index(index: Any, device: torch.device) -> Any:
    """``index`` with its lists as tensors, which PyTorch would otherwise make on the meta device, without values."""
    if isinstance(index, tuple):
        return tuple(_index(part, device) for part in index)
    if not isinstance(index, list) or not all(isinstance(leaf, int) for leaf in tree_leaves(index)):
        return index
    return torch.tensor(index, device=device) if index else torch.empty(0, dtype=torch.long, device=device)
