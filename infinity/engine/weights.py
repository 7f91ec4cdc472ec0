"""Whole values of parameters that are away: reading them one at a time, and state dicts that stream.

``engine.state_dict()`` is a mapping with the names of ``module.state_dict()`` that reads each tensor when it is asked
for, at full precision (master weights where there are any); iterating over its items holds one tensor at a time.
``module.state_dict()`` works as on any module, in the precision that computes, and holds everything.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from infinity.engine.formats import FormatOf
from infinity.engine.states import StateFormatOf, exact_states
from infinity.engine.substep import PartState
from infinity.engine.unit import PARAM, Part, Slot, state_kind
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
            return self._format_of(part).read(part, slot, shelf)
        return shelf.look(PARAM, lambda shard: slot.view(shard.view(part.compute_dtype)).clone())

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
        position, state = part.slots.index(slot), state_of(part)
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
            return take(self._loop.wait(fetched).tensor)
        finally:
            fetched.add_done_callback(release)  # also when the wait was interrupted


class StreamingStateDict(Mapping[str, Any]):
    """A model's state by name, each value read when it is asked for.

    Parameters come as copies on the CPU at full precision, buffers as they are. ``dict(state)`` holds everything.
    """

    def __init__(self, entries: Mapping[str, Any], reader: WeightReader) -> None:
        self._entries = dict(entries)
        self._reader = reader

    def __getitem__(self, name: str) -> Any:
        value = self._entries[name]
        if isinstance(value, nn.Parameter) and value in self._reader:
            return self._reader.read(value, full=True)
        return value.detach() if isinstance(value, torch.Tensor) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def hook_state_dicts(model: nn.Module, reader: WeightReader) -> list[Any]:
    """Make ``state_dict()`` of the model and of each of its modules give true values; returns the hooks' handles."""

    def fill_in(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
        for name, param in module._parameters.items():
            # With keep_vars=True the parameter itself is asked for, and stands there.
            if param is not None and param in reader and state.get(prefix + name) is not param:
                state[prefix + name] = reader.read(param, full=False)

    owners = [m for m in model.modules() if any(param is not None for param in m._parameters.values())]
    return [module.register_state_dict_post_hook(fill_in) for module in owners]
