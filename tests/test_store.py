"""TieredStore: shards by key over host memory and NVMe, on a fake backend and on real files."""

from __future__ import annotations

import asyncio
import errno
import math
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_residency import spin
from fakes_store import FakeOpener
from infinity.errors import BudgetError, EngineStateError, StorageError
from infinity.io.backend import IOStatistics, Priority
from infinity.io.memory import PAGE_BYTES, allocate
from infinity.io.open import open_backend
from infinity.store.nvme import NvmeTier, OpenBackend
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore

PAGE = PAGE_BYTES
A, B, C, D, E = (ShardKey(unit, 0, "master") for unit in range(5))
KEYS = [A, B, C, D, E]


class Stage:
    """A store of a few pages over an NVMe tier; keys are needed in the order of their units unless told."""

    def __init__(self, store: TieredStore, opener: OpenBackend, distances: dict[ShardKey, float]) -> None:
        self.store = store
        self.opener = opener
        self.distances = distances

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
    headroom_pages: int = 0,
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
        headroom_bytes=headroom_pages * PAGE,
        poison=poison,
    )
    try:
        yield Stage(store, opener, distances)
    finally:
        if isinstance(opener, FakeOpener):
            opener.gate.set()
        await store.aclose()
    statistics = store.host.pool.statistics()
    assert (statistics.leased_bytes, statistics.cached_bytes, statistics.num_leases) == (0, 0, 0)
    assert path is None or is_empty(path)
    assert set(threading.enumerate()) <= threads


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


def failing(action: str) -> Callable[[str, Path], BaseException | None]:
    def fault(operation: str, path: Path) -> BaseException | None:
        return StorageError(f"{action} failed", path=path, errno=errno.EIO) if operation == action else None

    return fault


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


async def test_nothing_is_written_ahead_while_all_shards_fit(tmp_path: Path) -> None:
    """They fit as long as half of the headroom is free."""
    async with stage(tmp_path, 5, headroom_pages=4) as s:
        for number, key in enumerate(KEYS[:3]):
            await s.put(key, number + 1)
            await spin()
        assert s.transfers == []
        await s.put(D, 4)
        await spin()
        assert s.transfers == [("write", Priority.BACKGROUND)] * 3, "one page is free; three more are to be clean"
        assert [s.store.is_dirty(key) for key in KEYS[:4]] == [True, False, False, False]
        await s.store.delete(D)
        await s.put(B, 5)
        await spin()
        assert len(s.transfers) == 3, "they fit again"
        assert [await s.read(key) for key in KEYS[:3]] == [1, 5, 3]


async def test_no_write_ahead_where_there_is_nothing_below() -> None:
    async with stage(None, 2, headroom_pages=2) as s:
        await s.put(A, 1)
        await s.put(B, 2)
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
        async with stage(path, ram_pages, headroom_pages=data.draw(st.integers(0, 3), label="headroom_pages")) as s:
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
                        s.store.prefetch(key)
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
