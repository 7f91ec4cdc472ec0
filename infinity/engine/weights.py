"""Whole values of parameters that are away: reading them one at a time, and state dicts that stream.

``engine.state_dict()`` is a mapping with the names of ``module.state_dict()`` that reads each tensor when it is asked
for, at full precision (master weights where there are any); iterating over its items holds one tensor at a time.
``module.state_dict()`` works as on any module, in the precision that computes, and holds everything.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.engine.deferred import deferred_from
from infinity.engine.filled import filled
from infinity.engine.formats import FormatOf
from infinity.engine.states import StateFormatOf, exact_states
from infinity.engine.substep import PartState
from infinity.engine.tape import bare
from infinity.engine.unit import PARAM, Part, Slot, state_kind
from infinity.errors import ModelError
from infinity.store.loop import LoopThread
from infinity.store.pool import Lease
from infinity.store.store import TieredStore

_OWNER = "reader"

T = TypeVar("T")


class WeightReader:
    """Copies of parameters, wherever they are.

    Args:
        loop: the loop thread.
        store: the shards.
        parts: all parts.
        format_of: how the weights of each part are stored.
        state_format_of: how its optimizer states are.
        settled: returns when no step is under way.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        parts: Sequence[Part],
        *,
        format_of: FormatOf,
        state_format_of: StateFormatOf = exact_states,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._store = store
        self._format_of = format_of
        self._state_format_of = state_format_of
        self._settled = settled
        self._places: dict[nn.Parameter, tuple[Part, Slot]] = {
            slot.param: (part, slot) for part in parts for slot in part.slots
        }

    def __contains__(self, param: object) -> bool:
        return param in self._places

    def read(self, param: nn.Parameter, *, full: bool) -> torch.Tensor:
        """A copy of a parameter on the CPU, of its true shape.

        Args:
            param: a parameter of the model.
            full: the value that is stepped (fp32 master weights where there are any), not the one that computes.

        Raises:
            StorageError: its shard could not be read.
        """
        part, slot = self._places[param]
        self._settled()
        shelf = PartShelf(self._loop, self._store, part)
        if full:
            return self.join(slot, self._format_of(part).read(part, slot, shelf))
        return self.join(slot, shelf.look(PARAM, lambda shard: slot.view(shard.view(part.compute_dtype)).clone()))

    def full_dtype(self, param: nn.Parameter) -> torch.dtype:
        """The dtype that a parameter has at full precision."""
        part, _ = self._places[param]
        return part.step_dtype if part.stepped else part.compute_dtype

    def deferred(self, param: nn.Parameter) -> torch.Tensor:
        """A deferred tensor of a parameter at full precision, which is read when its values are wanted."""
        read = functools.partial(self.read, param, full=True)
        return deferred_from(param.shape, self.full_dtype(param), read)

    def join(self, slot: Slot, piece: torch.Tensor) -> torch.Tensor:
        """All of a value of a slot's parameter, of which this rank has ``piece``; the same on all ranks."""
        return piece

    def read_state(self, param: nn.Parameter, state_of: Callable[[Part], PartState]) -> dict[str, Any]:
        """A copy of the optimizer's state of a parameter, on the CPU; empty before its first step.

        Args:
            param: a parameter of the model.
            state_of: what the optimizer knows of a part.

        Raises:
            StorageError: a shard could not be read.
        """
        self._settled()
        part, slot = self._places[param]
        return self._read_state(part, slot, state_of(part))

    def _read_state(self, part: Part, slot: Slot, state: PartState) -> dict[str, Any]:
        position = part.slots.index(slot)
        small = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in state.small.get(position, {}).items()
        }
        shelf = PartShelf(self._loop, self._store, part)
        shards = {
            name: shelf.look(
                state_kind(name), functools.partial(self._state_format_of(part, dtype).copy, part, position)
            )
            for name, (dtype, positions) in state.shards.items()
            if position in positions
        }
        return {**small, **shards}


class PartShelf:
    """A part's shards, seen from the training thread: one is pinned at a time.

    Args:
        loop: the loop thread.
        store: the shards.
        part: whose.
    """

    def __init__(self, loop: LoopThread, store: TieredStore, part: Part) -> None:
        self._loop = loop
        self._store = store
        self._part = part

    def __contains__(self, kind: str) -> bool:
        return self._part.key(kind) in self._store

    def look(self, kind: str, take: Callable[[torch.Tensor], T]) -> T:
        """What ``take`` makes of a shard: ``uint8``, its own memory; pinned only meanwhile.

        Raises:
            StorageError: it could not be read.
        """
        key = self._part.key(kind)

        def release(fetched: concurrent.futures.Future[Lease]) -> None:
            if not fetched.cancelled() and fetched.exception() is None:
                self._loop.call_soon(lambda: self._store.release(key, owner=_OWNER))

        fetched = self._loop.submit(self._store.fetch(key, owner=_OWNER))
        try:
            shard = self._loop.wait(fetched).tensor
            with torch.inference_mode(False):  # what is taken may be used in training
                return take(shard)
        finally:
            fetched.add_done_callback(release)  # also when the wait was interrupted


@dataclass(frozen=True, slots=True)
class _Derived:
    """An entry that code of the user's computes from parameters of a module; ``prefix``: of its names."""

    module: nn.Module
    prefix: str


class StreamingStateDict(Mapping[str, Any]):
    """A model's state by name, each value read when it is asked for.

    Parameters come as copies on the CPU at full precision, buffers as they are. What state-dict hooks and modules' own
    saving compute from parameters is computed when it is asked for, by the whole module whose code does it.
    ``dict(state)`` holds everything.

    Args:
        module: the model.
        reader: reads its parameters.

    Raises:
        ModelError: code of the user's that makes state dicts looks at values; when made.
    """

    def __init__(self, module: nn.Module, reader: WeightReader) -> None:
        self._reader = reader
        self._computed: tuple[_Derived, Mapping[str, Any]] | None = None
        try:
            with bare(), filled(module.modules(), self._shape_of) as made:
                entries = module.state_dict(keep_vars=True)
        except (RuntimeError, NotImplementedError) as error:  # what PyTorch raises for meta tensors
            raise ModelError(
                f"engine.state_dict() of a {type(module).__name__}: a state-dict hook, _save_to_state_dict or "
                "get_extra_state needs the values of parameters to tell which names there are; take "
                f"module.state_dict(), which holds them all: {error}"
            ) from error
        originals = {id(like): param for param, like in made.items()}
        self._metadata = getattr(entries, "_metadata", None)
        self._like = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
        self._entries = {
            name: originals[id(value)]
            if id(value) in originals
            else _derived(module, name)
            if _is_meta(value)
            else value
            for name, value in entries.items()
        }

    def __getitem__(self, name: str) -> Any:
        value = self._entries[name]
        if isinstance(value, _Derived):
            return self._compute(value)[name]
        self._computed = None
        if isinstance(value, nn.Parameter) and value in self._reader:
            return self._reader.read(value, full=True)
        return value.detach() if isinstance(value, torch.Tensor) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def deferred(self) -> dict[str, torch.Tensor]:
        """Deferred tensors of all parameters and what is computed from them, and buffers: values are read when wanted.

        Several names of one parameter have the same tensor.
        """
        found: dict[Any, torch.Tensor] = {}
        result = {}
        for name, like in self._like.items():
            entry = self._entries[name]
            if isinstance(entry, nn.Parameter) and entry in self._reader:
                if entry not in found:
                    found[entry] = self._reader.deferred(entry)
                result[name] = found[entry]
            elif like.is_meta:
                result[name] = deferred_from(like.shape, like.dtype, functools.partial(self._own, name))
            else:
                result[name] = like.detach()
        return result

    def _own(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self[name]
        return value.clone(memory_format=torch.contiguous_format)

    def _shape_of(self, param: nn.Parameter) -> torch.Tensor | None:
        if param not in self._reader:
            return None
        dtype = self._reader.full_dtype(param)
        return torch.empty_like(param, dtype=dtype, device="meta")

    def _compute(self, derived: _Derived) -> Mapping[str, Any]:
        """All entries of the module, computed from values; kept until something else is asked for."""
        if self._computed is None or self._computed[0] != derived:
            self._computed = None

            def read(param: nn.Parameter) -> torch.Tensor | None:
                return self._reader.read(param, full=True) if param in self._reader else None

            with filled(derived.module.modules(), read):
                entries = derived.module.state_dict(prefix=derived.prefix, keep_vars=True)
            detached = {key: each.detach() if isinstance(each, torch.Tensor) else each for key, each in entries.items()}
            self._computed = derived, detached
        return self._computed[1]


def _is_meta(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(value))


def _derived(model: nn.Module, name: str) -> _Derived:
    """The outermost module whose code may have made the entry: what lies inside it takes part."""
    found = model
    path = ""
    for step in name.split(".")[:-1]:
        if _makes_entries(found) or step not in found._modules:
            break
        found, path = found.get_submodule(step), f"{path}{step}."
    return _Derived(found, path)


def _makes_entries(module: nn.Module) -> bool:
    kind = type(module)
    own = any(
        getattr(kind, method) is not getattr(nn.Module, method)
        for method in ("state_dict", "_save_to_state_dict", "get_extra_state")
    )
    return own or bool(module._state_dict_hooks)


class _Saving:
    """Has a module put true values into state dicts, in the precision that computes, before any hook sees them."""

    def __init__(self, module: nn.Module, reader: WeightReader) -> None:
        self._module = module
        self._own = vars(module).get("_save_to_state_dict")
        save = module._save_to_state_dict

        def read(param: nn.Parameter) -> torch.Tensor | None:
            return reader.read(param, full=False) if param in reader else None

        def save_values(destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            # With keep_vars=True the parameter itself is asked for.
            with contextlib.nullcontext() if keep_vars else filled([module], read):
                save(destination, prefix, keep_vars)

        vars(module)["_save_to_state_dict"] = save_values

    def remove(self) -> None:
        """Have it save as before."""
        del vars(self._module)["_save_to_state_dict"]
        if self._own is not None:
            vars(self._module)["_save_to_state_dict"] = self._own


def hook_state_dicts(model: nn.Module, reader: WeightReader) -> list[Any]:
    """Make ``state_dict()`` of the model and of each of its modules give true values; returns the hooks' handles."""
    owners = [m for m in model.modules() if any(param is not None for param in m._parameters.values())]
    return [_Saving(module, reader) for module in owners]
