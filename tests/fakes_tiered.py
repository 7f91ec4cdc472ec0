"""A store of a few pages over NVMe, for tests; and a fault for its backend."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from fakes_store import FakeOpener
from infinity.errors import StorageError
from infinity.io.backend import Priority
from infinity.io.memory import PAGE_BYTES, allocate
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore
from infinity.store.volumes import OpenBackend

PAGE = PAGE_BYTES
A, B, C, D, E = (ShardKey(unit, 0, "master") for unit in range(5))
KEYS = [A, B, C, D, E]


class Stage:
    """A store of a few pages over an NVMe tier; keys are needed in the order of their units unless told."""

    def __init__(self, store: TieredStore, opener: OpenBackend, distances: dict[ShardKey, float]) -> None:
        self.store = store
        self.opener = opener
        self.distances = distances
        self.num_told = 0

    def count_room(self) -> None:
        self.num_told += 1

    async def put(self, key: ShardKey, value: int, num_pages: int = 1) -> None:
        lease = await self.store.put(key, num_pages * PAGE, owner="me")
        lease.tensor.fill_(value)
        self.store.release(key, owner="me", dirty=True)

    async def fetch(self, key: ShardKey) -> int:
        lease = await self.store.fetch(key, owner="me")
        try:
            return value_of(lease.tensor)
        finally:
            self.store.release(key, owner="me")

    async def read(self, key: ShardKey, priority: Priority = Priority.DEMAND) -> int:
        target = allocate(self.store.num_bytes(key))
        await self.store.read(key, target, priority=priority, owner="me")
        return value_of(target)

    def resident(self) -> list[ShardKey]:
        return [key for key in KEYS if key in self.store.host.residency]

    @property
    def fake(self) -> FakeOpener:
        assert isinstance(self.opener, FakeOpener)
        return self.opener

    @property
    def transfers(self) -> list[tuple[str, Priority | None]]:
        """The reads and writes of the fake backend so far."""
        return [(action, priority) for action, priority, _ in self.fake.backends[0].log if action in ("read", "write")]


def value_of(tensor: torch.Tensor) -> int:
    values = tensor.numpy()
    assert (values == values[0]).all()
    return int(values[0])


def is_empty(path: Path) -> bool:
    return list(path.iterdir()) == []


@asynccontextmanager
async def stage(
    path: Path | None,
    ram_pages: int,
    *,
    opener: OpenBackend | None = None,
    poison: bool = False,
) -> AsyncIterator[Stage]:
    """A store; below it NVMe in ``path``, if given. Leaves nothing."""
    threads = set(threading.enumerate())
    opener = opener or FakeOpener()
    distances = {key: float(key.unit) for key in KEYS}
    nvme = None
    if path is not None:
        nvme = await NvmeTier.open(
            [path],
            capacity_bytes=32 * PAGE,
            backend_name="threads",
            num_threads=2,
            block_bytes=1 << 20,
            open_backend=opener,
        )
    store = TieredStore(
        ram_pages * PAGE,
        nvme,
        distance=lambda key: distances.get(key, math.inf),
        on_room=lambda: made.count_room(),
        poison=poison,
    )
    made = Stage(store, opener, distances)
    try:
        yield made
    finally:
        if isinstance(opener, FakeOpener):
            opener.gate.set()
        await store.aclose()
    statistics = store.host.pool.statistics()
    assert (statistics.leased_bytes, statistics.cached_bytes, statistics.num_leases) == (0, 0, 0)
    assert path is None or is_empty(path)
    assert set(threading.enumerate()) <= threads


def failing(action: str) -> Callable[[str, Path], BaseException | None]:
    def fault(operation: str, path: Path) -> BaseException | None:
        return StorageError(f"{action} failed", path=path, errno=errno.EIO) if operation == action else None

    return fault
