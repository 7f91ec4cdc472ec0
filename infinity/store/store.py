"""``TieredStore``: shards by key, over host memory and NVMe.

A shard has one size for life and, at any time, one truth: the resident copy if there is one, else the extent on NVMe.
``put`` makes a shard's bytes void and hands out memory to write them anew; ``fetch`` pins its bytes in host memory;
``read`` copies them out without pinning. Who reads, changes or discards one key at a time is the caller's order of
calls: the engine never lets a gather and an optimizer step of one unit overlap.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.errors import EngineStateError
from infinity.io.backend import IOStatistics, Priority
from infinity.io.memory import as_bytes
from infinity.store.host import HostTier
from infinity.store.nvme import NvmeTier
from infinity.store.pool import Lease
from infinity.store.residency import State
from infinity.store.shard import ShardKey


class TieredStore:
    """All shards of one rank. Coroutines and methods belong to the loop thread, ``statistics`` apart.

    Args:
        ram_bytes: the host tier's hard budget.
        nvme: the tier below, owned by the store from now on; ``None`` to keep everything in host memory.
        distance: how far away a shard's next use is (``AccessOrder.distance``).
        headroom_bytes: how much host memory to keep free or clean by writing ahead of need, once the shards that exist
            leave less than half of it free; while they all fit, nothing is written.
        pin: register host memory with the accelerator's runtime.
        poison: fill released memory with NaN.
    """

    def __init__(
        self,
        ram_bytes: int,
        nvme: NvmeTier | None,
        *,
        distance: Callable[[ShardKey], float],
        headroom_bytes: int,
        pin: bool = False,
        poison: bool = False,
    ) -> None:
        self._nvme = nvme
        self._ram_bytes = ram_bytes
        self._headroom_bytes = headroom_bytes
        self._live_bytes = 0
        self._sizes: dict[ShardKey, int] = {}
        self._on_nvme: set[ShardKey] = set()
        self.host = HostTier(
            ram_bytes,
            distance=distance,
            fill=self._fill,
            spill=None if nvme is None else self._spill,
            headroom_bytes=self._headroom,
            pin=pin,
            poison=poison,
        )

    @property
    def nvme(self) -> NvmeTier | None:
        """The tier below, or ``None``."""
        return self._nvme

    def __contains__(self, key: ShardKey) -> bool:
        return key in self._sizes

    def num_bytes(self, key: ShardKey) -> int:
        """The size of a shard.

        Raises:
            EngineStateError: there is no such shard.
        """
        try:
            return self._sizes[key]
        except KeyError:
            raise EngineStateError(f"the store holds no shard {key}") from None

    async def put(self, key: ShardKey, num_bytes: int, *, owner: str) -> Lease:
        """Pin memory for a new version of ``key``; the caller writes all of it, then releases it dirty.

        Args:
            key: the shard; it need not exist.
            num_bytes: its size, a multiple of 4096 and the same for life.
            owner: who pins it.

        Raises:
            BudgetError: no room can ever be made.
            StorageError: what must leave to make room could not be written.
        """
        assert self._sizes.get(key, num_bytes) == num_bytes, f"{key} changed its size"
        lease = await self.host.residency.reserve(key, num_bytes, owner=owner)
        if key not in self._sizes:
            self._sizes[key] = num_bytes
            self._live_bytes += num_bytes
        self._on_nvme.discard(key)
        return lease

    async def fetch(
        self, key: ShardKey, *, owner: str, update: bool = False, priority: Priority = Priority.DEMAND
    ) -> Lease:
        """Pin a shard's bytes in host memory; with ``update`` the caller may change them and release them dirty.

        Raises:
            EngineStateError: there is no such shard.
            BudgetError: no room can ever be made.
            StorageError: reading it, or writing what must leave, failed.
        """
        return await self.host.residency.fetch(key, self.num_bytes(key), owner=owner, update=update, priority=priority)

    def prefetch(self, key: ShardKey, *, priority: Priority = Priority.PREFETCH) -> bool:
        """Start to bring a shard in if nobody loses by it; never waits. Whether it is resident or on its way."""
        return self.host.residency.prefetch(key, self.num_bytes(key), priority=priority)

    def release(self, key: ShardKey, *, owner: str, dirty: bool = False) -> None:
        """Unpin a shard; ``dirty`` says that its bytes changed."""
        self.host.residency.release(key, owner=owner, dirty=dirty)

    async def read(self, key: ShardKey, target: torch.Tensor, *, priority: Priority, owner: str) -> None:
        """Copy a shard into ``target`` (host, ``uint8``, page aligned, the shard's size).

        From the resident copy if there is one or if keeping one costs nobody anything sooner; else straight from NVMe,
        without a detour through host memory.

        Raises:
            EngineStateError: there is no such shard.
            StorageError: reading failed.
        """
        if self.prefetch(key, priority=priority):
            lease = await self.fetch(key, owner=owner)
            try:
                await self.host.copy(lease.tensor, target)
            finally:
                self.release(key, owner=owner)
        else:
            await self._read_nvme(key, target, priority)

    async def delete(self, key: ShardKey) -> None:
        """Forget a shard. Its extent stays allocated for its next ``put``."""
        await self.host.residency.discard(key)
        self._live_bytes -= self._sizes.pop(key, 0)
        self._on_nvme.discard(key)

    async def flush(self) -> None:
        """Write every dirty shard to NVMe and make it durable; nothing where there is no NVMe.

        Raises:
            StorageError: a write failed; its shard stays dirty and readable.
        """
        await self.host.residency.flush()
        if self._nvme is not None:
            await self._nvme.flush()

    def is_dirty(self, key: ShardKey) -> bool:
        """Whether the resident copy is newer than NVMe's."""
        return self.host.residency.state_of(key) in (State.DIRTY, State.WRITING)

    def statistics(self) -> IOStatistics:
        """What NVMe has moved; zeros where there is none."""
        return IOStatistics() if self._nvme is None else self._nvme.statistics()

    async def aclose(self) -> None:
        """Join what moves, give all memory back, and close the tier below. Closing twice is harmless."""
        try:
            await self.host.aclose()
        finally:
            if self._nvme is not None:
                await self._nvme.aclose()

    def _headroom(self) -> int:
        return self._headroom_bytes if self._live_bytes + self._headroom_bytes // 2 > self._ram_bytes else 0

    async def _fill(self, key: ShardKey, lease: Lease, priority: Priority) -> None:
        await self._read_nvme(key, lease.tensor, priority)

    async def _read_nvme(self, key: ShardKey, target: torch.Tensor, priority: Priority) -> None:
        if self._nvme is None or key not in self._on_nvme:
            raise EngineStateError(f"shard {key} holds no value: it was put but never released dirty")
        await self._nvme.read(key, as_bytes(target), priority=priority)

    async def _spill(self, key: ShardKey, lease: Lease) -> None:
        assert self._nvme is not None
        await self._nvme.write(key, as_bytes(lease.tensor), priority=Priority.BACKGROUND)
        self._on_nvme.add(key)
