"""A residency over a tier whose transfers end only when the test says so, and how."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.errors import StorageError
from infinity.io.backend import Priority
from infinity.io.memory import PAGE_BYTES, allocate
from infinity.store.pool import BufferPool, Lease, PoolStatistics
from infinity.store.residency import Residency

GARBAGE = 0xAB


def stamp(tensor: torch.Tensor, version: int) -> None:
    """Make a lease's bytes say their version, all over."""
    tensor.fill_(version)


def version_of(tensor: torch.Tensor) -> int | None:
    """The version that all bytes agree on, or ``None``."""
    values = tensor.numpy()
    return int(values[0]) if (values == values[0]).all() else None


@dataclass(eq=False)
class Transfer:
    """One that is under way."""

    action: str
    key: str
    priority: Priority
    end: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def succeed(self) -> None:
        self.end.set_result(None)

    def fail(self) -> StorageError:
        error = StorageError(f"{self.action} of {self.key} failed", path="fake")
        self.end.set_exception(error)
        return error


class Below:
    """The tier below: versions by key, moved by transfers that wait to be told to end.

    Attributes:
        stored: the version of each key.
        in_flight: transfers under way, oldest first.
        log: all transfers that have begun, as (action, key).
        faults: what a residency did wrong, found by the transfers.
        expected: the version that a spill must find; ``None`` where a key has no content to spill.
        automatic: end every transfer well, at once.
    """

    def __init__(self, keys: str = "", *, automatic: bool = False) -> None:
        self.stored: dict[str, int] = dict.fromkeys(keys, 1)
        self.in_flight: list[Transfer] = []
        self.log: list[tuple[str, str]] = []
        self.faults: list[str] = []
        self.expected: dict[str, int | None] | None = None
        self.automatic = automatic

    async def fill(self, key: str, lease: Lease, priority: Priority) -> None:
        lease.tensor.fill_(GARBAGE)
        await self._pass(Transfer("fill", key, priority))
        stamp(lease.tensor, self.stored[key])

    async def spill(self, key: str, lease: Lease, priority: Priority) -> None:
        before = self._check(key, lease)
        await self._pass(Transfer("spill", key, priority))
        after = self._check(key, lease)
        if before != after:
            self.faults.append(f"{key} changed from {before} to {after} while it was written")
        if after is not None:
            self.stored[key] = after

    def _check(self, key: str, lease: Lease) -> int | None:
        found = version_of(lease.tensor)
        if self.expected is not None and found != self.expected[key]:
            self.faults.append(f"{key} is written with {found}, expected {self.expected[key]}")
        return found

    async def _pass(self, transfer: Transfer) -> None:
        self.log.append((transfer.action, transfer.key))
        if any(other.key == transfer.key for other in self.in_flight):
            self.faults.append(f"two transfers of {transfer.key} at the same time")
        if self.automatic:
            return
        self.in_flight.append(transfer)
        cancelled = False
        while not transfer.end.done():  # a submitted transfer ends before its call does, as in real backends
            try:
                await asyncio.wait([transfer.end])
            except asyncio.CancelledError:
                cancelled = True
        self.in_flight.remove(transfer)
        if cancelled:
            transfer.end.exception()
            raise asyncio.CancelledError
        transfer.end.result()

    def only(self, action: str, key: str) -> Transfer:
        """The one transfer of ``key`` that is under way."""
        (found,) = [each for each in self.in_flight if (each.action, each.key) == (action, key)]
        return found


def make_pool(num_pages: int) -> BufferPool:
    return BufferPool("test", num_pages * PAGE_BYTES, lambda size: allocate(size, populate=False), poison=True)


async def spin(num_turns: int = 30) -> None:
    """Let the loop run what is ready."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run, turn by turn, until the condition holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


class World:
    """A residency of a few pages over a fake tier; keys are letters, needed in alphabetical order unless told."""

    def __init__(self, num_pages: int, keys: str, *, automatic: bool) -> None:
        self.pool = make_pool(num_pages)
        self.below = Below(keys, automatic=automatic)
        self.distances: dict[str, float] = {key: float(index) for index, key in enumerate(keys)}
        self.num_told = 0
        self.residency: Residency[str] = Residency(
            self.pool,
            distance=lambda key: self.distances.get(key, math.inf),
            fill=self.below.fill,
            spill=self.below.spill,
            room=self._count_room,
        )

    def _count_room(self) -> None:
        self.num_told += 1

    async def hold(self, key: str, *, num_pages: int = 1, owner: str = "me", update: bool = False) -> None:
        """Fetch, letting the fill end well."""
        task = self.start(self.residency.fetch(key, num_pages * PAGE_BYTES, owner=owner, update=update))
        await spin()
        for transfer in self.below.in_flight.copy():
            if transfer.key == key:
                transfer.succeed()
        await task

    async def keep(self, keys: str, *, dirty: bool = False) -> None:
        """Make keys resident and let them go."""
        for key in keys:
            await self.hold(key, update=dirty)
            self.residency.release(key, owner="me", dirty=dirty)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(coroutine)

    def fetch(self, key: str, *, num_pages: int = 1, owner: str = "me", update: bool = False) -> asyncio.Task[Any]:
        return self.start(self.residency.fetch(key, num_pages * PAGE_BYTES, owner=owner, update=update))

    def resident(self) -> str:
        return "".join(sorted(key for key in self.below.stored if key in self.residency))

    def writing(self) -> str:
        return "".join(sorted(each.key for each in self.below.in_flight if each.action == "spill"))

    async def close(self) -> None:
        """Let everything end well, and look whether everything was given back."""
        self.below.automatic = True
        closing = self.start(self.residency.close())
        await spin(2)
        for transfer in self.below.in_flight.copy():
            transfer.succeed()
        await closing
        assert_all_given_back(self.pool)
        assert self.below.faults == []


@asynccontextmanager
async def world(num_pages: int, keys: str = "abcdefgh", *, automatic: bool = False) -> AsyncIterator[World]:
    made = World(num_pages, keys, automatic=automatic)
    try:
        yield made
    finally:
        await made.close()


def assert_all_given_back(pool: BufferPool) -> None:
    statistics = pool.statistics()
    assert (statistics.leased_bytes, statistics.num_leases) == (0, 0)
    pool.close()
    assert pool.statistics() == PoolStatistics(
        statistics.budget_bytes, 0, 0, statistics.peak_bytes, 0, statistics.num_maps
    )
