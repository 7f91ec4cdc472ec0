"""How the weights of a part are stored, as one contract with an object for each way.

``Whole``: the parameters themselves are stepped (``fp32``, and whatever the optimizer does not hold).
``Master``: fp32 master weights are stepped, and the parameters are their rounding. The least arithmetic.
Planes (``planar.py``): parameters and residuals, from which the fp32 weights are made for a step. Two bytes less to
    write for each parameter and step, so this is for what is written to NVMe.

A format says which shards there are and what a step needs of memory (the budgets ask), and hands out a part's weights:
``create`` for their first values, ``open`` for a step, ``read`` for a copy of one parameter. In all of them what is
stepped is the same to the bit and the parameters are what rounding it gives, so which one serves is a matter of speed.

A step goes through a part one *run* of parameters at a time: what it has to make of them (weights, states, gradients in
a wider dtype) then takes memory for the largest run only. A run is a parameter, or several small ones, since a call of
an optimizer costs the same however few it steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from infinity.engine.unit import MASTER, PARAM, Part, Slot
from infinity.io.memory import PAGE_BYTES, round_up
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore

T = TypeVar("T")

_RUN_ELEMENTS = 1 << 20

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs arithmetic off the loop; it has ended when the await ends."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive parameters of a part, whose weights are in memory at the same time.

    Attributes:
        positions: the slots.
        start: the element of the part at which it begins.
        stop: where it ends.
    """

    positions: range
    start: int
    stop: int

    def view(self, slot: Slot, weights: torch.Tensor) -> torch.Tensor:
        """A slot's parameter in the run's weights."""
        return weights.as_strided(slot.shape, slot.stride, weights.storage_offset() + slot.offset - self.start)


def runs_of(part: Part) -> tuple[Run, ...]:
    """A part's parameters, each in a run of its own unless several are small together."""
    runs: list[Run] = []
    for position, slot in enumerate(part.slots):
        stop = slot.offset + slot.num_elements
        if runs and stop - runs[-1].start <= _RUN_ELEMENTS:
            last = runs.pop()
            runs.append(Run(range(last.positions.start, position + 1), last.start, stop))
        else:
            runs.append(Run(range(position, position + 1), slot.offset, stop))
    return tuple(runs)


def scratch_bytes(parts: Iterable[Part]) -> int:
    """What the largest run of any of the parts takes in fp32, in whole pages."""
    largest = max((run.stop - run.start for part in parts if part.stepped for run in runs_of(part)), default=0)
    return max(round_up(torch.float32.itemsize * largest, PAGE_BYTES), PAGE_BYTES)


def flat_of(slot: Slot, value: torch.Tensor) -> torch.Tensor:
    """A slot's value as its elements lie in memory: fp32, on the CPU, contiguous; a view where it can be."""
    if value.dtype == torch.float32 and value.device.type == "cpu" and value.stride() == slot.stride:
        return value.as_strided((slot.num_elements,), (1,))
    flat = torch.empty(slot.num_elements, dtype=torch.float32)
    flat.as_strided(slot.shape, slot.stride).copy_(value)
    return flat


class Pins:
    """The shards of one part that one owner has pinned in host memory. Belongs to the loop thread.

    Attributes:
        part: whose.
        shards: ``uint8`` tensors by kind.
    """

    def __init__(self, store: TieredStore, part: Part, owner: str) -> None:
        self.part = part
        self.shards: dict[str, torch.Tensor] = {}
        self._store = store
        self._owner = owner

    def __contains__(self, kind: str) -> bool:
        """Whether the part has such a shard, pinned or not."""
        return self.part.key(kind) in self._store

    async def fetch(self, kind: str) -> None:
        """Pin a shard, to change its bytes.

        Raises:
            StorageError: it could not be read, or what must leave not be written.
        """
        lease = await self._store.fetch(self.part.key(kind), owner=self._owner, update=True)
        self.shards[kind] = lease.tensor

    async def put(self, kind: str, num_bytes: int) -> None:
        """Pin memory for a shard of which all bytes will be written.

        Raises:
            StorageError: what must leave could not be written.
        """
        lease = await self._store.put(self.part.key(kind), num_bytes, owner=self._owner)
        self.shards[kind] = lease.tensor

    def release(self, kind: str, *, dirty: bool) -> None:
        """Unpin one."""
        del self.shards[kind]
        self._store.release(self.part.key(kind), owner=self._owner, dirty=dirty)

    def release_all(self, *, dirty: bool) -> None:
        """Unpin what is pinned."""
        for kind in list(self.shards):
            self.release(kind, dirty=dirty)

    async def discard(self, kind: str) -> None:
        """Unpin one and delete it, unwritten."""
        self.release(kind, dirty=False)
        await self._store.delete(self.part.key(kind))


class Scratch:
    """Memory in which each step makes what it does not keep, leased under a key like a shard's, so that budgets hold.

    There is one of each kind for all parts, and it stays prepared from one step to the next unless somebody needs the
    room sooner: else what is read ahead would fill it in between, only to leave again when the next step takes it.
    Belongs to the loop thread.

    Args:
        store: whose host memory it is.
        kind: which.
        num_bytes: its size, the same for all parts.
        owner: who pins it.
    """

    def __init__(self, store: TieredStore, kind: str, num_bytes: int, owner: str) -> None:
        self._store = store
        self._key = ShardKey(0, 0, kind)
        self._num_bytes = num_bytes
        self._owner = owner
        self._memory: torch.Tensor | None = None

    @property
    def memory(self) -> torch.Tensor:
        """``uint8``, shape ``(num_bytes,)``, from ``take`` to ``give_back``."""
        assert self._memory is not None, "scratch memory used while it is not taken"
        return self._memory

    async def take(self) -> None:
        """Pin it.

        Raises:
            StorageError: what must leave could not be written.
        """
        self._memory = (await self._store.put(self._key, self._num_bytes, owner=self._owner)).tensor

    def give_back(self) -> None:
        """Unpin it, if it is pinned; its bytes are void."""
        if self._memory is not None:
            self._memory = None
            self._store.release(self._key, owner=self._owner)
            self._store.prepare(self._key, self._num_bytes)


class OpenWeights(ABC):
    """A part's weights while they change.

    ``pin``, ``widen`` and ``release`` belong to the loop; ``read`` and ``write`` compute, on one thread at a time.
    After ``pin``, each run is read, changed and written, in order; at last, whatever happened, comes ``release``.

    Attributes:
        runs: what is read and written at a time.
    """

    runs: Sequence[Run]

    @property
    @abstractmethod
    def memory(self) -> Iterable[torch.Tensor]:
        """All that is pinned."""

    @abstractmethod
    async def pin(self) -> None:
        """Bring into memory what is read, and take memory for what is written.

        Raises:
            StorageError: a shard could not be read, or what must leave not be written.
        """

    @abstractmethod
    def read(self, run: Run) -> torch.Tensor:
        """The weights of a run, to be changed in place: the step dtype, shape ``(run.stop - run.start,)``."""

    @abstractmethod
    def write(self, run: Run, weights: torch.Tensor) -> bool:
        """Store the weights of a run. False: they do not fit before ``widen``; then call this again."""

    async def widen(self, compute: Compute) -> None:
        """Make room for weights that do not fit.

        Raises:
            StorageError: what must leave could not be written.
        """
        raise AssertionError("weights always fit")

    @abstractmethod
    async def release(self, *, changed: bool) -> None:
        """Unpin everything; ``changed``: all runs were written."""


class NewWeights(ABC):
    """A part's weights while they get their first values; used like ``OpenWeights``, slot by slot in order."""

    @abstractmethod
    async def pin(self) -> None:
        """Take memory.

        Raises:
            StorageError: what must leave could not be written.
        """

    @abstractmethod
    def write(self, position: int, value: torch.Tensor) -> bool:
        """Store the value of a slot: its shape, any dtype. False: it does not fit before ``widen``; then call again."""

    async def widen(self, compute: Compute) -> None:
        """Make room for values that do not fit.

        Raises:
            StorageError: what must leave could not be written.
        """
        raise AssertionError("values always fit")

    @abstractmethod
    async def release(self, *, changed: bool) -> None:
        """Unpin everything; ``changed``: all slots were written."""


class Shelf(Protocol):
    """A part's shards as a reader sees them."""

    def __contains__(self, kind: str) -> bool:
        """Whether there is a shard of this kind."""
        ...

    def look(self, kind: str, take: Callable[[torch.Tensor], T]) -> T:
        """What ``take`` makes of a shard's bytes, which are pinned as long as it runs."""
        ...


class WeightFormat(ABC):
    """One way to store the weights of a part. Sizes are in bytes, by kind of shard."""

    @abstractmethod
    def shards(self, part: Part) -> dict[str, int]:
        """What there is of a part's weights, as a rule."""

    def at_most(self, part: Part) -> dict[str, int]:
        """What there may be."""
        return self.shards(part)

    def in_step(self, part: Part) -> dict[str, int]:
        """What a step of the part holds in host memory, at most."""
        return self.at_most(part)

    @abstractmethod
    def read_by_step(self, part: Part) -> Sequence[str]:
        """The kinds whose bytes a step needs; the others are only written."""

    @abstractmethod
    def open(self, store: TieredStore, part: Part, owner: str) -> OpenWeights:
        """A part's weights, for a step."""

    @abstractmethod
    def create(self, store: TieredStore, part: Part, owner: str) -> NewWeights:
        """A part's weights, for their first values."""

    @abstractmethod
    def read(self, part: Part, slot: Slot, shelf: Shelf) -> torch.Tensor:
        """A copy of one parameter at full precision: the slot's shape and stride, in the dtype that is stepped."""


FormatOf = Callable[[Part], WeightFormat]
"""The format of each part."""


class _Shards(WeightFormat):
    """Weights that are a shard as they are stepped, beside one that is their rounding if that is another."""

    @abstractmethod
    def _kinds(self, part: Part) -> dict[str, torch.dtype]:
        """The shards and their dtypes; the first is what is stepped."""

    def shards(self, part: Part) -> dict[str, int]:
        return {kind: part.num_bytes(dtype) for kind, dtype in self._kinds(part).items()}

    def read_by_step(self, part: Part) -> Sequence[str]:
        return [next(iter(self._kinds(part)))]

    def open(self, store: TieredStore, part: Part, owner: str) -> OpenWeights:
        return _OpenShards(Pins(store, part, owner), self._kinds(part))

    def create(self, store: TieredStore, part: Part, owner: str) -> NewWeights:
        return _NewShards(Pins(store, part, owner), self._kinds(part))

    def read(self, part: Part, slot: Slot, shelf: Shelf) -> torch.Tensor:
        kind, dtype = next(iter(self._kinds(part).items()))
        return shelf.look(kind, lambda shard: slot.view(shard.view(dtype)).clone())


class Whole(_Shards):
    """The parameters themselves are stepped, or nothing is."""

    def _kinds(self, part: Part) -> dict[str, torch.dtype]:
        return {PARAM: part.compute_dtype}


class Master(_Shards):
    """Master weights are stepped, and the parameters are their rounding."""

    def _kinds(self, part: Part) -> dict[str, torch.dtype]:
        return {MASTER: part.step_dtype, PARAM: part.compute_dtype}


class _OpenShards(OpenWeights):
    def __init__(self, pins: Pins, kinds: Mapping[str, torch.dtype]) -> None:
        self._pins = pins
        self._stepped, *self._rounded = self._kinds = dict(kinds)
        self.runs = runs_of(pins.part)

    @property
    def memory(self) -> Iterable[torch.Tensor]:
        return self._pins.shards.values()

    async def pin(self) -> None:
        await self._pins.fetch(self._stepped)
        for kind in self._rounded:
            await self._pins.put(kind, self._pins.part.num_bytes(self._kinds[kind]))

    def read(self, run: Run) -> torch.Tensor:
        return self._pins.shards[self._stepped].view(self._kinds[self._stepped])[run.start : run.stop]

    def write(self, run: Run, weights: torch.Tensor) -> bool:
        for kind in self._rounded:
            flat = self._pins.shards[kind].view(self._kinds[kind])
            for slot in self._pins.part.slots[run.positions.start : run.positions.stop]:
                slot.view(flat).copy_(run.view(slot, weights))
        return True

    async def release(self, *, changed: bool) -> None:
        self._pins.release_all(dirty=changed)


class _NewShards(NewWeights):
    def __init__(self, pins: Pins, kinds: Mapping[str, torch.dtype]) -> None:
        self._pins = pins
        self._kinds = kinds

    async def pin(self) -> None:
        for kind, dtype in self._kinds.items():
            await self._pins.put(kind, self._pins.part.num_bytes(dtype))

    def write(self, position: int, value: torch.Tensor) -> bool:
        for kind, dtype in self._kinds.items():
            self._pins.part.slots[position].view(self._pins.shards[kind].view(dtype)).copy_(value)
        return True

    async def release(self, *, changed: bool) -> None:
        self._pins.release_all(dirty=changed)


def with_masters(part: Part) -> WeightFormat:
    """Master weights for what is stepped in a dtype of its own."""
    return Master() if part.stepped and part.step_dtype != part.compute_dtype else Whole()
