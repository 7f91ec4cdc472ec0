"""Tiers without memory and without files: the engine's own store, moving nothing, in virtual time.

What stays where, who leaves and what is written back are the engine's own classes (``store/residency.py``): only where
bytes would be moved or computed, time passes instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from infinity.io.backend import Priority
from infinity.io.tasks import gather_all
from infinity.plan.machine import Machine
from infinity.plan.virtual import Disk, Server
from infinity.store.device import DeviceTier
from infinity.store.host import HostTier
from infinity.store.pool import BufferPool, Lease, StreamEvent
from infinity.store.residency import Residency
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore


def no_memory(num_bytes: int) -> torch.Tensor:
    """A tensor of so many bytes that takes none."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


class Hardware:
    """What takes time: a disk, the processor, and the way to an accelerator and back.

    Args:
        machine: how fast each is.
        block_bytes: the largest block that the disk is given.
    """

    def __init__(self, machine: Machine, *, block_bytes: int) -> None:
        self.machine = machine
        self.disk = Disk(read=machine.read, write=machine.write, mixed=machine.mixed, block_bytes=block_bytes)
        self.processor = Server()
        self.accelerator = Server()
        self.upload = Server()
        self.copier = Server()


@dataclass(slots=True)
class Counters:
    """Bytes moved so far, by route."""

    read: int = 0
    written: int = 0
    to_device: int = 0
    from_device: int = 0


class PhantomStore(TieredStore):
    """Shards of which only the sizes exist.

    Args:
        ram_bytes: the host tier's budget.
        hardware: takes the time.
        has_nvme: whether there is a tier below.
        distance: see ``TieredStore``.
        on_room: see ``TieredStore``.
    """

    def __init__(
        self,
        ram_bytes: int,
        hardware: Hardware,
        *,
        has_nvme: bool,
        distance: Callable[[ShardKey], float],
        on_room: Callable[[], None],
    ) -> None:
        super().__init__(ram_bytes, None, distance=distance, on_room=on_room)
        self.hardware = hardware
        self.counters = Counters()
        self.host = _PhantomHost(
            ram_bytes,
            hardware,
            distance=distance,
            fill=self._fill,
            spill=self._spill if has_nvme else None,
            on_room=on_room,
        )

    def places(self) -> dict[str, dict[str, int]]:
        """Where shards are: bytes by kind in ``"host"`` memory, and those that are on ``"nvme"`` alone."""
        found: dict[str, dict[str, int]] = {"host": {}, "nvme": {}}
        for key, num_bytes in self._sizes.items():
            kinds = found["host" if key in self.host.residency else "nvme"]
            kinds[key.kind] = kinds.get(key.kind, 0) + num_bytes
        return found

    async def _read_nvme(self, key: ShardKey, target: torch.Tensor, priority: Priority) -> None:
        assert key in self._on_nvme, f"{key} is nowhere"
        await self._move(target.nbytes, write=False, priority=priority)
        self.counters.read += target.nbytes
        self._count(key, read_bytes=target.nbytes)

    async def _spill(self, key: ShardKey, lease: Lease, priority: Priority) -> None:
        await self._move(lease.num_bytes, write=True, priority=priority)
        self._on_nvme.add(key)
        self.counters.written += lease.num_bytes
        self._count(key, written_bytes=lease.num_bytes)

    async def _move(self, num_bytes: int, *, write: bool, priority: Priority) -> None:
        hardware = self.hardware
        seconds = hardware.machine.transfer_seconds(num_bytes)
        if seconds:
            await hardware.processor.work(seconds)
        await hardware.disk.move(num_bytes, write=write, priority=priority)
        await asyncio.sleep(hardware.machine.latency_seconds)


class _PhantomHost(HostTier):
    """Host memory of which only the arithmetic exists."""

    def __init__(self, budget_bytes: int, hardware: Hardware, *, on_room: Callable[[], None], **others: Any) -> None:
        super().__init__(budget_bytes, pin=False, poison=False, on_room=on_room, **others)
        self._hardware = hardware
        self.pool = BufferPool("ram", budget_bytes, no_memory)
        self.residency = Residency(
            self.pool, distance=others["distance"], fill=others["fill"], spill=others["spill"], room=on_room
        )

    async def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """The time of a copy."""
        await self._hardware.copier.work(source.nbytes / self._hardware.machine.copy)


class PhantomArena(DeviceTier):
    """The CPU's device tier: as ``ArenaDevice``, pieces come straight from where they are."""

    _OWNER = "device"

    def __init__(self, budget_bytes: int, store: PhantomStore, *, distance: Callable[[int], float]) -> None:
        super().__init__(budget_bytes, store, distance=distance)

    def compute_event(self) -> StreamEvent | None:
        """Nothing."""
        return None

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return no_memory(num_bytes)

    async def _fill(self, unit: int, lease: Lease, priority: Priority) -> None:
        target = lease.tensor
        await gather_all(
            self._store.read(piece.key, target[piece.start : piece.stop], priority=priority, owner=self._OWNER)
            for piece in self._units[unit][1]
        )


class PhantomAccelerator(PhantomArena):
    """An accelerator: as in ``AcceleratorDevice``, pieces pass through host memory one by one."""

    async def _fill(self, unit: int, lease: Lease, priority: Priority) -> None:
        assert isinstance(self._store, PhantomStore)
        hardware, owner = self._store.hardware, f"{self._OWNER} {unit}"
        for piece in self._units[unit][1]:
            await self._store.fetch(piece.key, owner=owner, priority=priority)
            num_bytes = piece.stop - piece.start
            await hardware.upload.work(num_bytes / hardware.machine.to_device)
            self._store.counters.to_device += num_bytes
            self._store.release(piece.key, owner=owner)
