"""TieredStore: shards by key over host memory and NVMe, on a fake backend and on real files."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_residency import spin
from fakes_store import FakeOpener
from fakes_tiered import KEYS, PAGE, A, B, C, D, failing, is_empty, stage
from infinity.errors import BudgetError, EngineStateError, StorageError
from infinity.io.backend import IOStatistics, Priority
from infinity.io.memory import allocate
from infinity.io.open import open_backend
from infinity.store.optimum import Touch
from infinity.store.shard import ShardKey
from infinity.store.store import Traffic
from infinity.store.volumes import OpenBackend


@pytest.fixture(params=["fake", "real"])
def opener(request: pytest.FixtureRequest) -> OpenBackend:
    return FakeOpener() if request.param == "fake" else open_backend


# Values


async def test_shards_that_do_not_fit_in_memory_come_back(tmp_path: Path, opener: OpenBackend) -> None:
    async with stage(tmp_path, 3, opener=opener) as s:
        sizes = dict(zip(KEYS, (1, 3, 2, 1, 2), strict=True))
        for number, key in enumerate(KEYS):
            await s.put(key, number + 1, sizes[key])
        for number, key in enumerate(KEYS):
            assert await s.fetch(key) == number + 1
            assert await s.read(key) == number + 1
            assert s.store.num_bytes(key) == sizes[key] * PAGE
        lease = await s.store.fetch(B, owner="me", update=True)
        lease.tensor.add_(40)
        s.store.release(B, owner="me", dirty=True)
        assert s.store.is_dirty(B)
        await s.put(D, 50)
        await s.store.flush()
        assert not any(s.store.is_dirty(key) for key in KEYS)
        assert [await s.read(key) for key in KEYS] == [1, 42, 3, 50, 5]
        assert s.store.statistics().written_bytes >= 9 * PAGE


async def test_without_nvme_everything_stays_in_memory() -> None:
    async with stage(None, 3) as s:
        for number, key in enumerate(KEYS[:3]):
            await s.put(key, number + 1)
        await s.store.flush()
        assert [await s.read(key) for key in KEYS[:3]] == [1, 2, 3]
        assert s.store.is_dirty(A)
        assert s.store.statistics() == IOStatistics()
        assert s.store.nvme is None
        with pytest.raises(BudgetError, match=rf"unit 0 part 0 master.*at least {4 * PAGE} bytes"):
            await s.put(D, 4)
        assert D not in s.store
        await s.store.delete(A)
        await s.put(D, 4)
        assert await s.fetch(D) == 4


async def test_a_shard_larger_than_memory_is_refused_and_leaves_everyone_alone(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        await s.put(A, 1)
        with pytest.raises(BudgetError, match="ram budget of"):
            await s.put(B, 2, num_pages=3)
        assert B not in s.store
        assert s.resident() == [A]
        assert s.transfers == []


async def test_an_unknown_shard_is_refused_by_name(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        for call in (s.store.num_bytes, s.store.prefetch):
            with pytest.raises(EngineStateError, match="no shard unit 1 part 0 master"):
                call(B)
        with pytest.raises(EngineStateError, match="no shard"):
            await s.store.fetch(B, owner="me")
        with pytest.raises(EngineStateError, match="no shard"):
            await s.store.read(B, allocate(PAGE), priority=Priority.DEMAND, owner="me")
        await s.store.delete(B)


async def test_a_put_voids_what_was_before(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        await s.put(A, 1)
        await s.store.flush()
        (await s.store.put(A, PAGE, owner="me")).tensor.fill_(99)
        s.store.release(A, owner="me")
        for call in (s.fetch, s.read):
            with pytest.raises(EngineStateError, match="holds no value"):
                await call(A)
        await s.put(A, 2)
        assert await s.fetch(A) == 2


async def test_a_put_that_finds_no_room_leaves_the_value(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        await s.put(A, 1)
        await s.put(B, 2)
        await s.put(C, 3)
        await s.put(D, 4)
        await s.store.fetch(C, owner="me")
        await s.store.fetch(D, owner="me")
        with pytest.raises(BudgetError):
            await s.store.put(A, PAGE, owner="me")
        s.store.release(C, owner="me")
        s.store.release(D, owner="me")
        assert await s.fetch(A) == 1


async def test_a_shard_keeps_its_size_for_life(tmp_path: Path) -> None:
    async with stage(tmp_path, 4) as s:
        await s.put(A, 1)
        with pytest.raises(AssertionError, match="changed its size"):
            await s.store.put(A, 2 * PAGE, owner="me")


async def test_a_deleted_shard_is_forgotten_and_its_room_on_nvme_waits_for_it(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as s:
        assert s.store.nvme is not None
        await s.put(A, 1)
        await s.put(B, 2)  # A is written to make room
        used = s.store.nvme.usage().used_bytes
        await s.store.delete(A)
        assert A not in s.store
        with pytest.raises(EngineStateError, match="no shard"):
            await s.fetch(A)
        await s.store.delete(A)
        await s.put(A, 3)
        await s.store.flush()
        assert await s.read(A) == 3
        assert s.store.nvme.usage().used_bytes == used + PAGE, "B's extent, and the one A had"


# Counting


async def test_traffic_says_by_unit_and_kind_what_was_asked_for_and_what_moved(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        await s.put(A, 1)
        await s.put(B, 2, num_pages=2)  # A is written to make room
        assert s.store.traffic() == {(0, "master"): Traffic(0, 0, PAGE)}
        assert s.store.resident_bytes == 2 * PAGE
        await s.fetch(B)
        assert await s.read(A) == 1
        assert s.store.traffic()[0, "master"] == Traffic(PAGE, PAGE, PAGE)
        assert s.store.traffic()[1, "master"].asked_bytes == 2 * PAGE
        await s.store.host.residency.quiesce()
        moved = s.store.statistics()
        total = [sum(each) for each in zip(*s.store.traffic().values(), strict=True)]
        assert total[1:] == [moved.read_bytes, moved.written_bytes]


async def test_a_failed_transfer_is_not_counted(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as s:
        await s.put(A, 1)
        s.fake.faults = failing("write")
        with pytest.raises(StorageError):
            await s.store.flush()
        assert s.store.traffic() == {}


async def test_uses_are_recorded_as_the_optimum_wants_them(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        await s.put(A, 1)
        s.store.start_recording()
        await s.put(B, 2, num_pages=2)
        await s.fetch(B)
        await s.store.fetch(B, owner="me", update=True)
        s.store.release(B, owner="me", dirty=True)
        await s.read(A)
        await s.store.delete(A)
        await s.store.delete(A)
        assert s.store.stop_recording() == [
            Touch(B, 2 * PAGE, reads=False, writes=True),
            Touch(B, 2 * PAGE, reads=True, writes=False),
            Touch(B, 2 * PAGE, reads=True, writes=True),
            Touch(A, PAGE, reads=True, writes=False, passes=True),
            Touch(A, PAGE, reads=False, writes=False),
        ]
        await s.fetch(B)
        assert s.store.stop_recording() == []


# Closing


async def test_closing_ends_what_is_under_way(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as s:
        await s.put(A, 1)
        await s.put(B, 2)
        s.fake.gate.clear()
        fetching = asyncio.create_task(s.store.fetch(A, owner="me"))
        await spin()
        closing = asyncio.create_task(s.store.aclose())
        await spin()
        assert not closing.done()
        s.fake.gate.set()
        await closing
        with pytest.raises(EngineStateError):
            await fetching
        with pytest.raises(EngineStateError, match="closed"):
            await s.store.fetch(B, owner="me")
        s.store.release(B, owner="me")


async def test_a_cancelled_close_still_leaves_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as s:
        await s.put(A, 1)
        await s.put(B, 2)
        s.fake.gate.clear()
        s.distances[A] = 0.0
        s.store.prefetch(A)
        fetching = asyncio.create_task(s.store.fetch(A, owner="me"))
        await spin()
        closing = asyncio.create_task(s.store.aclose())
        await spin()
        closing.cancel()
        await spin()
        assert not closing.done()
        s.fake.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(EngineStateError):
            await fetching
        assert is_empty(tmp_path)


# Anything


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_store_is_a_dictionary(data: st.DataObject) -> None:
    """Under random calls, with reads and writes that fail now and then."""

    async def scenario(path: Path) -> None:
        ram_pages = data.draw(st.integers(2, 6), label="ram_pages")
        async with stage(path, ram_pages) as s:
            sizes = {key: data.draw(st.integers(1, 2), label=f"pages of {key}") for key in KEYS}
            values: dict[ShardKey, int] = {}
            for value in range(1, data.draw(st.integers(1, 25), label="calls") + 1):
                key = data.draw(st.sampled_from(KEYS), label="key")
                action = data.draw(st.sampled_from(ACTIONS), label="action")
                fails = data.draw(st.sampled_from([None, None, None, "read", "write"]), label="fails")
                s.fake.faults = failing(fails) if fails else lambda operation, path: None
                try:
                    if action == "put":
                        await s.put(key, value, sizes[key])
                        values[key] = value
                    elif action == "delete":
                        await s.store.delete(key)
                        values.pop(key, None)
                    elif action == "flush":
                        await s.store.flush()
                    elif action == "order":
                        s.distances.update(
                            zip(KEYS, data.draw(st.permutations([0.0, 1.0, 2.0, 3.0, 4.0])), strict=True)
                        )
                    elif key not in values:
                        with pytest.raises(EngineStateError):
                            await s.fetch(key)
                    elif action == "fetch":
                        assert await s.fetch(key) == values[key]
                    elif action == "read":
                        assert await s.read(key) == values[key]
                    elif action == "prefetch":
                        s.store.prefetch(key, displace=data.draw(st.booleans(), label="displace"))
                        await spin(data.draw(st.integers(0, 3), label="turns"))
                except StorageError:
                    assert s.fake.backends[0].statistics().num_errors > 0
                assert s.store.host.pool.statistics().leased_bytes <= ram_pages * PAGE
            s.fake.faults = lambda operation, path: None
            assert {key for key in KEYS if key in s.store} == set(values)
            assert {key: await s.read(key) for key in values} == values

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(scenario(Path(name)))


ACTIONS = ["put", "put", "delete", "flush", "order", "fetch", "fetch", "read", "read", "prefetch", "prefetch"]


# Going past host memory, and for good


async def test_a_shard_read_past_host_memory_leaves_it_as_it_was(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        for number, key in enumerate((A, B, C)):
            await s.put(key, number)
        target = allocate(PAGE)
        for number, key in enumerate((A, B, C)):
            resident = {other: other in s.store.host.residency for other in (A, B, C)}
            await s.store.read_past(key, target, priority=Priority.DEMAND, owner="me")
            assert set(target.tolist()) == {number}
            assert resident == {other: other in s.store.host.residency for other in (A, B, C)}
        with pytest.raises(EngineStateError, match="no shard"):
            await s.store.read_past(D, target, priority=Priority.DEMAND, owner="me")


async def test_a_forgotten_shard_leaves_its_room_on_nvme_to_others(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as s:
        assert s.store.nvme is not None
        await s.put(A, 1)
        await s.put(B, 2)
        used = s.store.nvme.usage().used_bytes
        await s.store.forget(A)
        assert A not in s.store
        assert s.store.nvme.usage().used_bytes == used - PAGE
        await s.store.forget(B)  # never written
        await s.store.forget(C)
        assert s.store.resident_bytes == 0


# Held and put back


async def test_what_is_on_nvme_is_held_for_nothing_and_put_back(tmp_path: Path, opener: OpenBackend) -> None:
    async with stage(tmp_path, 2, opener=opener) as s:
        await s.put(A, 1)
        assert s.store.hold_clean(A) is None, "newer in memory"
        await s.store.flush()
        written = s.store.statistics().written_bytes
        held = s.store.hold_clean(A)
        assert held is not None
        assert s.store.statistics().written_bytes == written
        await s.put(A, 2)
        await s.store.flush()
        await s.put(A, 3)
        assert await s.read(A) == 3
        await s.store.put_back(A, held)
        assert not s.store.is_dirty(A)
        assert await s.read(A) == 1
        assert s.store.nvme is not None
        assert s.store.nvme.usage().used_bytes == PAGE


async def test_a_held_shard_comes_back_when_it_is_gone_unchanged_or_written_elsewhere(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as s:
        assert s.store.hold_clean(A) is None, "not there"
        for key, value in ((A, 1), (B, 2), (C, 3)):
            await s.put(key, value)
        await s.store.flush()
        held = {key: s.store.hold_clean(key) for key in (A, B, C)}
        await s.store.forget(A)
        await s.put(B, 20)
        await s.store.flush()
        await s.store.delete(B)
        for key, version in held.items():
            assert version is not None
            await s.store.put_back(key, version)
        assert [await s.read(key) for key in (A, B, C)] == [1, 2, 3]
        assert s.store.nvme is not None
        assert s.store.nvme.usage().used_bytes == 3 * PAGE


async def test_without_nvme_nothing_is_held() -> None:
    async with stage(None, 2) as s:
        await s.put(A, 1)
        assert s.store.hold_clean(A) is None
