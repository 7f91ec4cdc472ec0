"""``TieredStore``: shards by key, over host memory and NVMe.

A shard has one size for life and, at any time, one truth: the resident copy if there is one, else the extent on NVMe.
``put`` makes a shard's bytes void and hands out memory to write them anew; ``fetch`` pins its bytes in host memory;
``read`` copies them out without pinning. Who reads, changes or discards one key at a time is the caller's order of
calls: the engine never lets a gather and an optimizer step of one unit overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from infinity.errors import EngineStateError
from infinity.io.backend import IOStatistics, Priority
from infinity.io.memory import as_bytes
from infinity.io.numa import ANYWHERE, Placement
from infinity.store.host import HostTier
from infinity.store.nvme import NvmeTier
from infinity.store.optimum import Touch
from infinity.store.pool import Lease
from infinity.store.residency import State
from infinity.store.shard import ShardKey
from infinity.store.versions import Held, Version


class Traffic(NamedTuple):
    """What became of one kind of shard of one unit since the start.

    Attributes:
        asked_bytes: those that ``fetch`` and ``read`` gave out, wherever they were.
        read_bytes: those read from NVMe.
        written_bytes: those written to NVMe.
    """

    asked_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class TieredStore:
    """All shards of one rank.

    Coroutines and methods belong to the loop thread; ``statistics``, ``traffic`` and ``resident_bytes`` to any.

    Args:
        ram_bytes: the host tier's hard budget.
        nvme: the tier below, owned by the store from now on; ``None`` to keep everything in host memory.
        distance: how far away a shard's next use is (``AccessOrder.distance``).
        on_room: told, once per turn of the loop at most, that a prefetch which found no room may find some now.
        pin: register host memory with the accelerator's runtime.
        poison: fill released memory with NaN.
        placement: on which node host memory is to be.
    """

    def __init__(
        self,
        ram_bytes: int,
        nvme: NvmeTier | None,
        *,
        distance: Callable[[ShardKey], float],
        on_room: Callable[[], None] = lambda: None,
        pin: bool = False,
        poison: bool = False,
        placement: Placement = ANYWHERE,
    ) -> None:
        self._nvme = nvme
        self._sizes: dict[ShardKey, int] = {}
        self._on_nvme: set[ShardKey] = set()
        self._traffic: dict[tuple[int, str], Traffic] = {}
        self._touches: list[Touch] | None = None
        self.host = HostTier(
            ram_bytes,
            distance=distance,
            fill=self._fill,
            spill=None if nvme is None else self._spill,
            on_room=on_room,
            pin=pin,
            poison=poison,
            placement=placement,
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
        self._sizes[key] = num_bytes
        self._on_nvme.discard(key)
        self._touch(key, num_bytes, writes=True)
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
        num_bytes = self.num_bytes(key)
        lease = await self.host.residency.fetch(key, num_bytes, owner=owner, update=update, priority=priority)
        self._touch(key, num_bytes, reads=True, writes=update)
        return lease

    def prefetch(self, key: ShardKey, *, displace: bool = True, priority: Priority = Priority.PREFETCH) -> bool:
        """Start to bring a shard in if nobody loses by it; never waits. Whether it is resident or on its way.

        With ``displace`` it may take the place of shards that are clean and needed later; else only free memory.
        """
        return self.host.residency.prefetch(key, self.num_bytes(key), displace=displace, priority=priority)

    def prepare(self, key: ShardKey, num_bytes: int) -> bool:
        """Take memory ahead for a shard that will be ``put`` soon, if nobody loses by it. Whether it has memory."""
        return self.host.residency.prepare(key, num_bytes)

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
        stays = self.prefetch(key, priority=priority)
        await self._copy_out(key, target, priority=priority, owner=owner, from_host=stays)

    async def read_past(self, key: ShardKey, target: torch.Tensor, *, priority: Priority, owner: str) -> None:
        """Copy a shard into ``target`` as ``read`` does, but bring nothing into host memory for it.

        Raises:
            EngineStateError: there is no such shard.
            StorageError: reading failed.
        """
        is_resident = key in self.host.residency
        await self._copy_out(key, target, priority=priority, owner=owner, from_host=is_resident)

    async def delete(self, key: ShardKey) -> None:
        """Forget a shard. Its extent stays allocated for its next ``put``."""
        await self.host.residency.discard(key)
        num_bytes = self._sizes.pop(key, None)
        if num_bytes is not None:
            self._touch(key, num_bytes)
        self._on_nvme.discard(key)

    async def forget(self, key: ShardKey) -> None:
        """Forget a shard that will not come again: its extent is free for others."""
        await self.delete(key)
        if self._nvme is not None:
            self._nvme.delete(key)

    async def flush(self) -> None:
        """Write every dirty shard to NVMe and make it durable; nothing where there is no NVMe.

        Raises:
            StorageError: a write failed; its shard stays dirty and readable.
        """
        await self.host.residency.flush()
        if self._nvme is not None:
            await self._nvme.flush()

    async def hold(self, keys: Collection[ShardKey]) -> Held:
        """Have shards on NVMe as they are now, and keep these bytes there until ``versions.let_go``.

        Nobody changes them meanwhile. They are written, not yet durable.

        Raises:
            StorageError: a write failed; its shard stays dirty and readable.
        """
        assert self._nvme is not None
        await self.host.residency.flush(frozenset(keys).__contains__)
        return self._nvme.versions.hold(keys)

    async def restore(self, held: Held) -> None:
        """Give shards the bytes that were held; all others are forgotten. Nobody uses any."""
        assert self._nvme is not None
        for key in list(self._sizes):
            await self.host.residency.discard(key)
        self._nvme.versions.restore(held)
        self._sizes = {key: version.num_bytes for key, version in held.items()}
        self._on_nvme = set(held)

    def hold_clean(self, key: ShardKey) -> Version | None:
        """Keep a shard's bytes on NVMe until ``put_back`` or ``versions.let_go``, if they are there; nothing moves."""
        if self._nvme is None or key not in self._on_nvme or self.is_dirty(key):
            return None
        return self._nvme.versions.hold([key])[key]

    async def put_back(self, key: ShardKey, version: Version) -> None:
        """Give a shard, which may be gone, the bytes that ``hold_clean`` has kept. Nobody uses it."""
        assert self._nvme is not None
        await self.host.residency.discard(key)
        self._nvme.versions.put_back(key, version)  # in the same turn of the loop: nobody has begun to read in between
        self._sizes[key] = version.num_bytes
        self._on_nvme.add(key)

    def is_dirty(self, key: ShardKey) -> bool:
        """Whether the resident copy is newer than NVMe's."""
        return self.host.residency.state_of(key) in (State.DIRTY, State.WRITING)

    def statistics(self) -> IOStatistics:
        """What NVMe has moved; zeros where there is none."""
        return IOStatistics() if self._nvme is None else self._nvme.statistics()

    def traffic(self) -> dict[tuple[int, str], Traffic]:
        """What has been asked for and moved since the start, by unit and kind of shard."""
        return self._traffic.copy()

    @property
    def resident_bytes(self) -> int:
        """Host memory in use: shards that are there or on their way, and room made for some."""
        return self.host.usage().used_bytes

    def start_recording(self) -> None:
        """Begin to record each use of a shard, for ``stop_recording``."""
        self._touches = []

    def stop_recording(self) -> list[Touch]:
        """The uses since ``start_recording``, in order: what ``optimum.least_moved`` needs of one cycle."""
        touches, self._touches = self._touches, None
        return touches or []

    async def aclose(self) -> None:
        """Join what moves, give all memory back, and close the tier below. Closing twice is harmless."""
        try:
            await self.host.aclose()
        finally:
            if self._nvme is not None:
                await self._nvme.aclose()

    async def _fill(self, key: ShardKey, lease: Lease, priority: Priority) -> None:
        await self._read_nvme(key, lease.tensor, priority)

    async def _copy_out(
        self, key: ShardKey, target: torch.Tensor, *, priority: Priority, owner: str, from_host: bool
    ) -> None:
        num_bytes = self.num_bytes(key)
        if from_host:
            lease = await self.host.residency.fetch(key, num_bytes, owner=owner)
            try:
                await self.host.copy(lease.tensor, target)
            finally:
                self.release(key, owner=owner)
        else:
            await self._read_nvme(key, target, priority)
        self._touch(key, num_bytes, reads=True, passes=True)

    async def _read_nvme(self, key: ShardKey, target: torch.Tensor, priority: Priority) -> None:
        if self._nvme is None or key not in self._on_nvme:
            raise EngineStateError(f"shard {key} holds no value: it was put but never released dirty")
        await self._nvme.read(key, as_bytes(target), priority=priority)
        self._count(key, read_bytes=target.nbytes)

    async def _spill(self, key: ShardKey, lease: Lease, priority: Priority) -> None:
        assert self._nvme is not None
        await self._nvme.write(key, as_bytes(lease.tensor), priority=priority)
        self._on_nvme.add(key)
        self._count(key, written_bytes=lease.tensor.nbytes)

    def _touch(
        self, key: ShardKey, num_bytes: int, *, reads: bool = False, writes: bool = False, passes: bool = False
    ) -> None:
        if reads:
            self._count(key, asked_bytes=num_bytes)
        if self._touches is not None:
            self._touches.append(Touch(key, num_bytes, reads, writes, passes))

    def _count(self, key: ShardKey, *, asked_bytes: int = 0, read_bytes: int = 0, written_bytes: int = 0) -> None:
        """Add up, in one assignment: other threads may copy the counters at any time."""
        before = self._traffic.get((key.unit, key.kind), Traffic())
        self._traffic[key.unit, key.kind] = Traffic(
            before.asked_bytes + asked_bytes, before.read_bytes + read_bytes, before.written_bytes + written_bytes
        )
