"""The device tier: gathered units in device memory under a hard budget.

Two tiers behind one contract. ``ArenaDevice`` serves the CPU: its memory is host memory, so NVMe reads go straight into
the gathered buffer. ``AcceleratorDevice`` serves everything else: shards pass through pinned host memory and are copied
on a stream of the tier's own, and a released unit carries the compute stream's event with it.

The tier knows a unit as a number, a size and the shards that fill it; what the bytes mean is the engine's affair.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import torch

from infinity.io.backend import Priority
from infinity.io.memory import allocate
from infinity.io.numa import ANYWHERE, Placement
from infinity.io.tasks import gather_all
from infinity.store.pool import BufferPool, Lease, StreamEvent
from infinity.store.residency import Residency
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore
from infinity.trace import TierUsage

_OWNER = "device"
_POLL_SECONDS = 0.0002


class Piece(NamedTuple):
    """A shard's place in a gathered unit: bytes ``start`` to ``stop``."""

    key: ShardKey
    start: int
    stop: int


class DeviceTier(ABC):
    """Gathered units. Everything but ``usage`` and ``compute_event`` belongs to the loop thread.

    Args:
        budget_bytes: the hard bound.
        store: where the shards come from.
        distance: how far away a unit's next gather is.
        poison: fill released memory with NaN.

    Attributes:
        complete: called with a unit and its memory when its pieces are there; ends when all of it is.
    """

    def __init__(
        self, budget_bytes: int, store: TieredStore, *, distance: Callable[[int], float], poison: bool = False
    ) -> None:
        self._store = store
        self.complete: Callable[[int, torch.Tensor], Awaitable[None]] | None = None
        self._units: dict[int, tuple[int, Sequence[Piece]]] = {}
        self.pool = BufferPool("hbm", budget_bytes, self._allocate, poison=poison)
        self.residency: Residency[int] = Residency(self.pool, distance=distance, fill=self._fill_whole)

    def register(self, unit: int, num_bytes: int, pieces: Sequence[Piece]) -> None:
        """Say what a unit consists of, and where its bytes are from now on."""
        self._units[unit] = (num_bytes, tuple(pieces))

    async def gather(self, unit: int, *, owner: str) -> torch.Tensor:
        """Pin a unit's bytes in device memory: ``uint8``, shape ``(num_bytes,)``.

        Raises:
            BudgetError: it does not fit beside what its owner holds.
            StorageError: a shard could not be read.
        """
        return (await self.residency.fetch(unit, self._units[unit][0], owner=owner)).tensor

    def prefetch(self, unit: int) -> bool:
        """Start to gather a unit if nobody loses by it; never waits. Whether it is resident or on its way."""
        return self.residency.prefetch(unit, self._units[unit][0])

    def release(self, unit: int, *, owner: str, after: StreamEvent | None) -> None:
        """Unpin a unit; ``after`` is the last work that reads it."""
        self.residency.release(unit, owner=owner, after=after)

    async def invalidate(self, unit: int) -> None:
        """Drop a unit whose shards are about to change."""
        await self.residency.discard(unit)

    async def invalidate_all(self) -> None:
        """Drop all units."""
        for unit in self._units:
            await self.residency.discard(unit)

    def usage(self) -> TierUsage:
        """Bytes leased now, at most, and allowed."""
        return self.pool.usage()

    async def aclose(self) -> None:
        """Join what moves and give the memory back. Closing twice is harmless."""
        try:
            await self.residency.close()
        finally:
            self.pool.close()

    @abstractmethod
    def compute_event(self) -> StreamEvent | None:
        """An event after all work on the calling thread's current stream; ``None`` where work is synchronous."""

    @abstractmethod
    def _allocate(self, num_bytes: int) -> torch.Tensor: ...

    async def _fill_whole(self, unit: int, lease: Lease, priority: Priority) -> None:
        await self._fill(unit, lease, priority)
        if self.complete is not None:
            await self.complete(unit, lease.tensor)

    @abstractmethod
    async def _fill(self, unit: int, lease: Lease, priority: Priority) -> None: ...


class ArenaDevice(DeviceTier):
    """The CPU's device tier: bounded host memory.

    Args:
        budget_bytes: as for ``DeviceTier``; ``store``, ``distance`` and ``poison`` too.
        placement: on which node its memory is to be.
    """

    def __init__(
        self,
        budget_bytes: int,
        store: TieredStore,
        *,
        distance: Callable[[int], float],
        poison: bool = False,
        placement: Placement = ANYWHERE,
    ) -> None:
        self._placement = placement
        super().__init__(budget_bytes, store, distance=distance, poison=poison)

    def compute_event(self) -> StreamEvent | None:
        """Nothing: CPU kernels have ended when their call returns."""
        return None

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return allocate(num_bytes, populate=False, placement=self._placement)

    async def _fill(self, unit: int, lease: Lease, priority: Priority) -> None:
        target = lease.tensor
        await gather_all(
            self._store.read(piece.key, target[piece.start : piece.stop], priority=priority, owner=_OWNER)
            for piece in self._units[unit][1]
        )


class AcceleratorDevice(DeviceTier):
    """Any accelerator that ``torch.accelerator`` names.

    Args:
        device: the accelerator.
        budget_bytes: as for ``DeviceTier``; ``store``, ``distance`` and ``poison`` too.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        store: TieredStore,
        *,
        distance: Callable[[int], float],
        poison: bool = False,
    ) -> None:
        self._device = device
        self._stream = torch.Stream(device=device)
        super().__init__(budget_bytes, store, distance=distance, poison=poison)

    def compute_event(self) -> StreamEvent | None:
        """An event on the calling thread's current stream."""
        event = torch.Event(device=self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        # From this stream's share of the caching allocator: another stream may not have done with what it freed.
        torch.accelerator.set_stream(self._stream)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    async def _fill(self, unit: int, lease: Lease, priority: Priority) -> None:
        if lease.after is not None:
            assert isinstance(lease.after, torch.Event)
            self._stream.wait_event(lease.after)
        # One shard at a time: while it waits for host memory, an upload holds none (see pool.py). And each upload is an
        # owner of its own: one that waits can count on the others to release.
        owner = f"{_OWNER} {unit}"
        for piece in self._units[unit][1]:
            host = await self._store.fetch(piece.key, owner=owner, priority=priority)
            try:
                torch.accelerator.set_stream(self._stream)
                lease.tensor[piece.start : piece.stop].copy_(host.tensor, non_blocking=True)
                event = torch.Event(device=self._device)
                event.record(self._stream)
                await self._happened(event)
            finally:
                self._store.release(piece.key, owner=owner)

    @staticmethod
    async def _happened(event: torch.Event) -> None:
        """Wait for the copy even when cancelled: it reads host memory until then."""
        cancelled: asyncio.CancelledError | None = None
        while not event.query():
            try:
                await asyncio.sleep(_POLL_SECONDS)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
