"""The device tier: units gathered from shards, in an arena of host memory or through it onto an accelerator."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from fakes_residency import spin
from fakes_store import FakeOpener
from infinity.errors import BudgetError, EngineStateError, StorageError
from infinity.io.backend import Priority
from infinity.io.memory import PAGE_BYTES
from infinity.store import device as module
from infinity.store.device import AcceleratorDevice, ArenaDevice, DeviceTier, Piece
from infinity.store.nvme import NvmeTier
from infinity.store.residency import State
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore

PAGE = PAGE_BYTES
MakeDevice = Callable[[int, TieredStore, Callable[[int], float]], DeviceTier]


def arena(num_bytes: int, store: TieredStore, distance: Callable[[int], float]) -> DeviceTier:
    return ArenaDevice(num_bytes, store, distance=distance, poison=True)


class Stage:
    """Units of two shards, of one and two pages, filled with their own numbers; needed in their order unless told."""

    def __init__(self, store: TieredStore, device: DeviceTier, opener: FakeOpener, distances: dict[int, float]) -> None:
        self.store = store
        self.device = device
        self.opener = opener
        self.distances = distances

    async def fill(self, num_units: int) -> None:
        for unit in range(num_units):
            await self.write(unit, 10 * unit)
            pieces = [Piece(ShardKey(unit, 0, "p"), 0, PAGE), Piece(ShardKey(unit, 1, "p"), PAGE, 3 * PAGE)]
            self.device.register(unit, 3 * PAGE, pieces)
        await self.store.flush()

    async def write(self, unit: int, value: int) -> None:
        for part in range(2):
            key = ShardKey(unit, part, "p")
            lease = await self.store.put(key, (part + 1) * PAGE, owner="optimizer")
            lease.tensor.fill_(value + part)
            self.store.release(key, owner="optimizer", dirty=True)

    async def gather(self, unit: int, *, owner: str = "training") -> torch.Tensor:
        buffer = await self.device.gather(unit, owner=owner)
        assert len(buffer) == 3 * PAGE
        return buffer

    def release(self, unit: int, *, owner: str = "training") -> None:
        self.device.release(unit, owner=owner, after=self.device.compute_event())

    def resident(self) -> list[int]:
        return [unit for unit in range(8) if unit in self.device.residency]

    def reads(self) -> list[Priority | None]:
        """The priorities of the reads so far."""
        return [priority for action, priority, _ in self.opener.backends[0].log if action == "read"]


def values_of(buffer: torch.Tensor) -> tuple[int, int]:
    first, second = buffer[:PAGE].cpu().unique().tolist(), buffer[PAGE:].cpu().unique().tolist()
    (a,), (b,) = first, second
    return a, b


@asynccontextmanager
async def stage(
    path: Path, *, device_pages: int = 6, ram_pages: int = 2, make: MakeDevice = arena, num_units: int = 4
) -> AsyncIterator[Stage]:
    """By default two units fit into the device, and no unit into host memory."""
    opener = FakeOpener()
    nvme = await NvmeTier.open(
        [path],
        capacity_bytes=64 * PAGE,
        backend_name="threads",
        num_threads=1,
        block_bytes=1 << 20,
        open_backend=opener,
    )
    distances = {unit: float(unit) for unit in range(8)}
    store = TieredStore(ram_pages * PAGE, nvme, distance=lambda key: math.inf, poison=True)
    device = make(device_pages * PAGE, store, lambda unit: distances[unit])
    try:
        made = Stage(store, device, opener, distances)
        await made.fill(num_units)
        yield made
    finally:
        opener.faults = lambda operation, path: None
        opener.gate.set()
        await device.aclose()
        await device.aclose()
        await store.aclose()
    for pool in (device.pool, store.host.pool):
        statistics = pool.statistics()
        assert (statistics.leased_bytes, statistics.cached_bytes, statistics.num_leases) == (0, 0, 0)


# The arena


async def test_a_unit_is_gathered_from_its_shards_wherever_they_are(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        assert values_of(await s.gather(1)) == (10, 11)
        assert values_of(await s.gather(3)) == (30, 31)
        lease = await s.store.fetch(ShardKey(2, 0, "p"), owner="optimizer", update=True)
        lease.tensor.fill_(99)
        s.store.release(ShardKey(2, 0, "p"), owner="optimizer", dirty=True)
        s.release(3)
        assert values_of(await s.gather(2)) == (99, 21), "one shard from memory, newer than on NVMe"
        assert s.device.usage().used_bytes == 6 * PAGE


async def test_a_gathered_unit_starts_on_a_page_and_stays_until_room_is_needed(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        buffer = await s.gather(0)
        assert buffer.data_ptr() % PAGE == 0
        s.release(0)
        num_reads = len(s.reads())
        again = await s.gather(0)
        assert again.data_ptr() == buffer.data_ptr()
        assert len(s.reads()) == num_reads
        assert s.device.residency.statistics.num_hits == 1


async def test_the_unit_needed_last_makes_room(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        for unit in (0, 1):
            await s.gather(unit)
            s.release(unit)
        s.distances[0] = 7.0
        stale = await s.gather(0)
        s.release(0)
        await s.gather(2)
        assert s.resident() == [1, 2]
        assert stale.view(torch.float32).isnan().all() or stale.eq(20).any(), "poisoned, or the next unit's"


async def test_prefetches_are_bounded_by_the_device_and_read_behind_demands(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.gather(3)
        demands = s.reads()
        assert s.device.prefetch(0)
        assert not s.device.prefetch(1), "nothing may leave for it"
        await s.device.residency.settle()
        assert set(demands) == {Priority.DEMAND}
        assert set(s.reads()[len(demands) :]) == {Priority.PREFETCH}
        s.release(3)
        assert s.device.prefetch(1), "unit 3 is needed later"
        await s.device.residency.settle()
        assert s.resident() == [0, 1]
        assert values_of(await s.gather(1)) == (10, 11)


async def test_an_invalidated_unit_is_gathered_anew(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.gather(1)
        s.release(1)
        await s.write(1, 50)
        assert values_of(await s.gather(1)) == (10, 11), "it was not told"
        s.release(1)
        await s.device.invalidate(1)
        assert values_of(await s.gather(1)) == (50, 51)


async def test_units_that_cannot_be_used_together_are_refused(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.gather(0)
        await s.gather(1)
        with pytest.raises(BudgetError, match=rf"hbm budget of {6 * PAGE} bytes.*at least {9 * PAGE} bytes"):
            await s.gather(2)
        s.release(0)
        assert values_of(await s.gather(2)) == (20, 21)


async def test_a_unit_whose_shard_cannot_be_read_is_not_resident(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        num_reads = 0

        def fault(operation: str, path: Path) -> BaseException | None:
            nonlocal num_reads
            num_reads += operation == "read"
            return StorageError("no", path=path, errno=errno.EIO) if operation == "read" and num_reads == 2 else None

        s.opener.faults = fault
        with pytest.raises(StorageError, match="read of unit 1 part 1 p"):
            await s.gather(1)
        assert s.resident() == []
        assert s.device.usage().used_bytes == 0
        assert values_of(await s.gather(1)) == (10, 11)


async def test_a_cancelled_gather_does_not_stop_the_fill(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        s.opener.gate.clear()
        gathering = asyncio.create_task(s.gather(1))
        await spin()
        gathering.cancel()
        await spin()
        assert gathering.cancelled()
        assert s.device.residency.state_of(1) is State.FILLING
        s.opener.gate.set()
        await s.device.residency.settle()
        await s.device.invalidate(1)  # nobody holds it


async def test_closing_waits_for_transfers_into_the_device(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        s.opener.gate.clear()
        gathering = asyncio.create_task(s.gather(1))
        await spin()
        closing = asyncio.create_task(s.device.aclose())
        await spin()
        assert not closing.done()
        assert s.device.usage().used_bytes == 3 * PAGE
        s.opener.gate.set()
        await closing
        with pytest.raises(EngineStateError, match="closing"):
            await gathering
        with pytest.raises(EngineStateError, match="hbm tier is closed"):
            await s.gather(2)


async def test_a_unit_of_no_shards_is_empty_memory(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        s.device.register(7, 0, [])
        assert len(await s.device.gather(7, owner="training")) == 0


# An accelerator whose stream goes on only when the test says so


@dataclass
class Accelerator:
    """Stands in for torch's streams and events, on host memory."""

    waited: list[object] = field(default_factory=list)
    current: list[object] = field(default_factory=list)
    pending: list[Event] = field(default_factory=list)
    automatic: bool = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no event happen until the end of the context."""
        self.automatic = False
        try:
            yield
        finally:
            self.automatic = True
            for event in self.pending:
                event.happened = True
            self.pending.clear()


class Event:
    accelerator: Accelerator

    def __init__(self, device: torch.device) -> None:
        self.happened = False
        self.stream: object = None

    def record(self, stream: object) -> None:
        self.stream = stream
        self.happened = self.accelerator.automatic
        self.accelerator.pending.append(self)

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    made = Accelerator()

    class Stream:
        def __init__(self, device: torch.device) -> None: ...

        def wait_event(self, event: object) -> None:
            made.waited.append(event)

    Event.accelerator = made
    monkeypatch.setattr(module, "_POLL_SECONDS", 0)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "set_stream", made.current.append)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "compute")
    return made


def upload(num_bytes: int, store: TieredStore, distance: Callable[[int], float]) -> DeviceTier:
    return AcceleratorDevice(torch.device("cpu"), num_bytes, store, distance=distance)


async def test_shards_are_uploaded_through_host_memory(tmp_path: Path, accelerator: Accelerator) -> None:
    async with stage(tmp_path, make=upload) as s:
        assert values_of(await s.gather(1)) == (10, 11)
        assert s.store.host.usage().used_bytes <= 2 * PAGE
        assert accelerator.waited == []


async def test_memory_and_copies_belong_to_the_tiers_own_stream(tmp_path: Path, accelerator: Accelerator) -> None:
    async with stage(tmp_path, make=upload) as s:
        s.device._allocate(PAGE)
        assert len(accelerator.current) == 1
        await s.gather(1)
        assert len(accelerator.current) > 2
        assert len(set(accelerator.current)) == 1


async def test_a_shard_stays_in_host_memory_until_its_copy_has_happened(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    async with stage(tmp_path, make=upload) as s:
        with accelerator.held():
            gathering = asyncio.create_task(s.gather(1))
            await spin()
            assert len(accelerator.pending) == 1
            with pytest.raises(AssertionError, match="in use"):
                await s.store.delete(ShardKey(1, 0, "p"))
        assert values_of(await gathering) == (10, 11)
        await s.store.delete(ShardKey(1, 0, "p"))


async def test_closing_waits_for_the_copy_in_flight(tmp_path: Path, accelerator: Accelerator) -> None:
    async with stage(tmp_path, make=upload) as s:
        with accelerator.held():
            gathering = asyncio.create_task(s.gather(1))
            await spin()
            assert len(accelerator.pending) == 1
            closing = asyncio.create_task(s.device.aclose())
            await spin()
            assert not closing.done()
        await closing
        with pytest.raises(EngineStateError):
            await gathering
        await s.store.delete(ShardKey(1, 0, "p"))  # nobody holds it


async def test_uploads_side_by_side_share_the_room_for_one(tmp_path: Path, accelerator: Accelerator) -> None:
    """One that waits for host memory counts on the other to release: this is no case for ``BudgetError``."""
    async with stage(tmp_path, make=upload) as s:
        with accelerator.held():
            gathering = [asyncio.create_task(s.gather(unit, owner=f"owner {unit}")) for unit in (1, 2)]
            await spin()
            assert len(accelerator.pending) == 2
        with accelerator.held():
            await spin()  # the uploads look again: one goes on, the other has no room
            assert not any(task.done() for task in gathering)
        assert [values_of(await task) for task in gathering] == [(10, 11), (20, 21)]


async def test_an_upload_waits_for_the_work_that_still_reads_the_memory(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    async with stage(tmp_path, make=upload, device_pages=3) as s:
        await s.gather(0)
        event = s.device.compute_event()
        assert isinstance(event, Event)
        assert event.stream == "compute"
        s.device.release(0, owner="training", after=event)
        assert values_of(await s.gather(1)) == (10, 11)
        assert accelerator.waited == [event]


async def test_uploads_ahead_of_need_read_behind_demands(tmp_path: Path, accelerator: Accelerator) -> None:
    async with stage(tmp_path, make=upload) as s:
        assert s.device.prefetch(0)
        await s.device.residency.settle()
        assert set(s.reads()) == {Priority.PREFETCH}
        await s.gather(1)
        assert s.reads()[-1] is Priority.DEMAND


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator; there is none here")
async def test_units_on_an_accelerator_are_whole_under_reuse(tmp_path: Path) -> None:
    """Kernels read each unit while the next is uploaded into memory that was just released."""

    def cuda(num_bytes: int, store: TieredStore, distance: Callable[[int], float]) -> DeviceTier:
        return AcceleratorDevice(torch.device("cuda", 0), num_bytes, store, distance=distance)

    async with stage(tmp_path, make=cuda, device_pages=3) as s:
        sums = []
        for turn in range(40):
            unit = turn % 4
            buffer = await s.gather(unit)
            busy = torch.ones(1 << 22, device="cuda")
            for _ in range(8):
                busy = busy * 1.0001
            sums.append((unit, buffer.sum(dtype=torch.int64)))
            s.release(unit)
            await s.device.invalidate(unit)
        for unit, total in sums:
            assert int(total) == (10 * unit + 2 * (10 * unit + 1)) * PAGE
