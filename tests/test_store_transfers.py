"""TieredStore: what is read past host memory, what is written when, and cancelled or failed transfers."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from fakes_residency import spin
from fakes_tiered import KEYS, PAGE, A, B, C, failing, stage, value_of
from infinity.errors import StorageError
from infinity.io.backend import Priority
from infinity.io.memory import allocate

# Reading past host memory


async def test_a_read_keeps_the_shard_where_that_costs_nobody_anything(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        for number, key in enumerate(KEYS[:3]):
            await s.put(key, number + 1)
        await s.store.flush()
        assert s.resident() == [A, C]
        s.distances[A], s.distances[B] = 9.0, 0.0
        assert await s.read(B) == 2
        assert s.resident() == [B, C], "A is needed later"
        assert s.transfers[-1] == ("read", Priority.DEMAND)
        num_transfers = len(s.transfers)
        assert await s.read(B) == 2
        assert len(s.transfers) == num_transfers


@pytest.mark.parametrize("priority", list(Priority))
async def test_a_read_goes_past_memory_where_it_would_cost(tmp_path: Path, priority: Priority) -> None:
    async with stage(tmp_path, 2) as s:
        for number, key in enumerate(KEYS[:3]):
            await s.put(key, number + 1)
        await s.store.flush()
        assert s.resident() == [A, C]
        s.distances[B] = 9.0
        assert await s.read(B, priority) == 2
        assert s.resident() == [A, C]
        assert s.transfers[-1] == ("read", priority)


async def test_a_read_of_more_than_memory_holds_goes_past_it(tmp_path: Path) -> None:
    """It was put when memory was free, and now is in nobody's way."""
    async with stage(tmp_path, 3) as s:
        await s.put(A, 1, num_pages=3)
        await s.put(B, 2)
        await s.store.fetch(B, owner="other")
        assert await s.read(A) == 1
        assert s.resident() == [B]
        s.store.release(B, owner="other")


async def test_a_read_gives_what_is_newest(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        await s.put(A, 1)
        await s.store.flush()
        await s.put(A, 2)
        assert await s.read(A) == 2
        assert s.store.is_dirty(A)


async def test_a_fetch_reads_with_the_priority_it_is_given(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as s:
        await s.put(A, 1)
        await s.put(B, 2)
        for key, priority in ((A, Priority.PREFETCH), (B, Priority.DEMAND)):
            await s.store.fetch(key, owner="me", priority=priority)
            s.store.release(key, owner="me")
            assert s.transfers[-1] == ("read", priority)
        s.distances[A] = 0.0
        s.distances[B] = 1.0
        assert s.store.prefetch(A)
        await s.store.host.residency.settle()
        assert s.transfers[-1] == ("read", Priority.PREFETCH)


async def test_a_failed_read_names_the_shard_and_costs_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as s:
        await s.put(A, 1)
        await s.put(B, 2)
        await s.store.flush()
        s.fake.faults = failing("read")
        for call in (s.fetch, s.read):
            with pytest.raises(StorageError, match="read of unit 0 part 0 master"):
                await call(A)
        s.distances[A] = 9.0
        await s.put(B, 3)
        with pytest.raises(StorageError, match="read of unit 0 part 0 master"):
            await s.read(A)
        s.fake.faults = lambda operation, path: None
        assert await s.fetch(A) == 1
        assert await s.fetch(B) == 3


async def test_a_cancelled_read_has_done_with_the_target(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as s:
        await s.put(A, 1)
        await s.put(B, 2)
        await s.store.flush()
        s.distances[A] = 9.0
        s.fake.gate.clear()
        target = allocate(PAGE)
        reading = asyncio.create_task(s.store.read(A, target, priority=Priority.DEMAND, owner="me"))
        await spin()
        reading.cancel()
        await spin()
        assert not reading.done(), "the transfer still fills the target"
        s.fake.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        target.fill_(7)
        await spin()
        assert value_of(target) == 7
        assert await s.read(A) == 1


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_copy_holds_its_shard_until_the_thread_has_done(tmp_path: Path, cancelled: bool) -> None:
    async with stage(tmp_path, 2) as s:
        await s.put(A, 1)
        hold = threading.Event()
        s.store.host._copier.submit(hold.wait, 60)
        target = allocate(PAGE)
        reading = asyncio.create_task(s.store.read(A, target, priority=Priority.DEMAND, owner="me"))
        await spin()
        if cancelled:
            reading.cancel()
            await spin()
            reading.cancel()
            await spin()
        assert not reading.done()
        with pytest.raises(AssertionError, match="in use"):
            await s.store.delete(A)
        hold.set()
        if cancelled:
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            await reading
        assert value_of(target) == 1, "the thread copies whole"
        await s.store.delete(A)


async def test_a_copy_that_fails_says_so(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        await s.put(A, 1)
        with pytest.raises(ValueError, match="broadcast"):
            await s.store.read(A, allocate(2 * PAGE), priority=Priority.DEMAND, owner="me")
        assert await s.read(A) == 1


# Writing


async def test_a_flush_writes_and_makes_durable(tmp_path: Path) -> None:
    async with stage(tmp_path, 4) as s:
        await s.put(A, 1)
        await s.put(B, 2)
        await s.store.flush()
        assert [action for action, _, _ in s.fake.backends[0].log[-3:]] == ["write", "write", "fsync"]
        assert {priority for action, priority in s.transfers if action == "write"} == {Priority.BACKGROUND}
        num_transfers = len(s.transfers)
        await s.store.flush()
        assert len(s.transfers) == num_transfers


async def test_a_failed_flush_loses_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    async with stage(tmp_path, 4) as s:
        await s.put(A, 1)
        s.fake.faults = failing("write")
        with pytest.raises(StorageError, match="write of unit 0 part 0 master"):
            await s.store.flush()
        assert s.store.is_dirty(A)
        assert await s.read(A) == 1
        s.fake.faults = failing("fsync")
        with pytest.raises(StorageError, match="flush of the NVMe tier"):
            await s.store.flush()
        s.fake.faults = lambda operation, path: None
        await s.store.flush()
        assert not s.store.is_dirty(A)
        assert await s.read(A) == 1


async def test_what_must_leave_is_written_as_urgently_as_who_wants_its_place(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        await s.put(A, 1)
        await s.put(B, 2)
        await s.put(C, 3)
        assert s.transfers == [("write", Priority.DEMAND)]
        assert s.resident() == [A, C]
        s.distances[B] = -1.0
        assert not s.store.prefetch(B)
        await s.store.host.residency.quiesce()
        assert s.transfers[-1] == ("write", Priority.PREFETCH)
        assert s.store.prefetch(B)
        assert s.resident() == [A, B]


async def test_room_is_prepared_for_what_will_be_put(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        await s.put(B, 2)
        await s.put(C, 3)
        assert not s.store.prepare(A, PAGE)
        await s.store.host.residency.quiesce()
        assert s.store.prepare(A, PAGE)
        assert A not in s.store
        num_transfers = len(s.transfers)
        await s.put(A, 1)
        assert len(s.transfers) == num_transfers
        assert [await s.read(key) for key in (A, B, C)] == [1, 2, 3]


async def test_the_store_tells_of_room(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        await s.put(A, 1)
        await spin()
        told = s.num_told
        await s.store.delete(A)
        await spin()
        assert s.num_told == told + 1


async def test_nothing_is_written_where_there_is_nothing_below() -> None:
    async with stage(None, 2) as s:
        await s.put(A, 1)
        await s.put(B, 2)
        assert not s.store.prepare(C, PAGE)
        await spin()
        assert [await s.fetch(key) for key in (A, B)] == [1, 2]


async def test_released_memory_is_poisoned_in_debug(tmp_path: Path) -> None:
    async with stage(tmp_path, 1, poison=True) as s:
        lease = await s.store.put(A, PAGE, owner="me")
        stale = lease.tensor.view(torch.float32)
        stale.fill_(1.5)
        s.store.release(A, owner="me", dirty=True)
        await s.store.flush()
        assert stale.eq(1.5).all()
        await s.store.delete(A)
        assert stale.isnan().all()
