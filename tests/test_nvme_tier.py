"""NvmeTier: a dictionary of shards that survives faults, cancellation, fragments and full disks, and leaves nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infinity
from fakes_store import FakeOpener
from infinity.errors import (
    BudgetError,
    ConfigError,
    DirectoryError,
    DirectoryInUseError,
    DiskFullError,
    EngineStateError,
    ShortTransferError,
    StorageError,
)
from infinity.io.backend import Priority
from infinity.io.memory import allocate, as_bytes
from infinity.io.open import open_backend
from infinity.store import striping
from infinity.store.directory import JobDirectory, open_directories
from infinity.store.nvme import NvmeTier
from infinity.store.shard import Extent, ExtentAllocator, ShardKey
from infinity.store.striping import STRIPE_BYTES
from infinity.store.volumes import MARGIN_BYTES, OpenBackend
from infinity.trace import TierUsage

PAGE = 4096
A, B, C = ShardKey(3, 0, "master"), ShardKey(3, 1, "state.exp_avg"), ShardKey(4, 0, "param")


def memory(num_bytes: int, fill: int = 0) -> memoryview:
    """Page-aligned memory whose every page starts with its number, and is otherwise full of ``fill``."""
    tensor = allocate(num_bytes)
    tensor.fill_(fill)
    view = as_bytes(tensor)
    for page in range(num_bytes // PAGE):
        view[page * PAGE : page * PAGE + 4] = page.to_bytes(4, "little")
    return view


def make_paths(parent: Path, num_paths: int) -> list[Path]:
    paths = [parent / f"nvme{index}" for index in range(num_paths)]
    for path in paths:
        path.mkdir()
    return paths


def descriptors_below(path: Path) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue
        if target.startswith(str(path)):
            found.append(target)
    return found


def assert_nothing_is_left(parent: Path) -> None:
    assert [path for path in parent.rglob("*") if path.name.startswith("infinity-rank")] == []
    assert descriptors_below(parent) == []


@asynccontextmanager
async def opened(
    parent: Path,
    num_paths: int,
    *,
    capacity_bytes: int,
    open_backend: OpenBackend,
    weights: Sequence[float] | None = None,
) -> AsyncIterator[NvmeTier]:
    tier = await NvmeTier.open(
        make_paths(parent, num_paths),
        capacity_bytes=capacity_bytes,
        backend_name="threads",
        num_threads=2,
        block_bytes=1 << 20,
        weights=weights,
        open_backend=open_backend,
    )
    try:
        yield tier
    finally:
        if isinstance(open_backend, FakeOpener):
            open_backend.gate.set()
        await tier.aclose()
        assert_nothing_is_left(parent)


async def open_failing(paths: Sequence[Path], opener: OpenBackend, capacity_bytes: int = 8 * PAGE) -> NvmeTier:
    return await NvmeTier.open(
        paths,
        capacity_bytes=capacity_bytes,
        backend_name="threads",
        num_threads=1,
        block_bytes=PAGE,
        open_backend=opener,
    )


async def settle(condition: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


@pytest.fixture(params=["fake", "threads"])
def opener(request: pytest.FixtureRequest) -> OpenBackend:
    return open_backend if request.param == "threads" else FakeOpener()


@pytest.fixture(params=[1, 2, 3])
def num_paths(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


# --- names and extents


def test_key_reads_as_words() -> None:
    assert str(ShardKey(unit=3, part=0, kind="master")) == "unit 3 part 0 master"


@settings(max_examples=200, deadline=None)
@given(num_pages=st.integers(0, 24), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_allocator_conserves_every_page(num_pages: int, steps: list[tuple[bool, int]]) -> None:
    allocator = ExtentAllocator(num_pages * PAGE)
    held: list[Extent] = []
    for takes, number in steps:
        holes = allocator.holes
        if takes:
            num_bytes = (number % 12 + 1) * PAGE
            if num_bytes > allocator.free_bytes:
                with pytest.raises(BudgetError, match=f"{num_bytes} bytes does not fit: {allocator.free_bytes} of"):
                    allocator.allocate(num_bytes)
                assert allocator.holes == holes
                continue
            extents = allocator.allocate(num_bytes)
            assert sum(extent.num_bytes for extent in extents) == num_bytes
            large_enough = [hole for hole in holes if hole.num_bytes >= num_bytes]
            if large_enough:
                assert extents == [Extent(large_enough[0].offset, num_bytes)]
            else:
                assert len(extents) > 1
            held.extend(extents)
        elif held:
            allocator.free(held.pop(number % len(held)))
        pages = [page for extent in (*held, *allocator.holes) for page in pages_of(extent)]
        assert sorted(pages) == list(range(num_pages)), "every page is held or free, once"
        assert allocator.used_bytes == sum(extent.num_bytes for extent in held)
        ends = [hole.offset + hole.num_bytes for hole in allocator.holes]
        assert all(end < after.offset for end, after in zip(ends, allocator.holes[1:], strict=False)), "coalesced"
    for extent in held:
        allocator.free(extent)
    assert allocator.holes == ((Extent(0, num_pages * PAGE),) if num_pages else ())


def pages_of(extent: Extent) -> range:
    assert extent.offset % PAGE == extent.num_bytes % PAGE == 0
    return range(extent.offset // PAGE, (extent.offset + extent.num_bytes) // PAGE)


def test_allocator_refuses_what_was_freed_already() -> None:
    allocator = ExtentAllocator(8 * PAGE)
    (extent,) = allocator.allocate(2 * PAGE)
    allocator.free(extent)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(extent)


# --- a dictionary of shards


async def test_round_trip(tmp_path: Path, num_paths: int, opener: OpenBackend) -> None:
    sizes = {A: PAGE, B: num_paths * STRIPE_BYTES + PAGE, C: 3 * PAGE}
    async with opened(tmp_path, num_paths, capacity_bytes=sum(sizes.values()), open_backend=opener) as tier:
        before = tier.statistics()
        for fill, (key, size) in enumerate(sizes.items(), start=1):
            assert key not in tier
            await tier.write(key, memory(size, fill))
            assert key in tier
        await tier.write(B, memory(sizes[B], 99))  # in place: there is no room elsewhere
        await tier.flush()
        for fill, (key, size) in zip((1, 99, 3), sizes.items(), strict=True):
            target = memory(size)
            await tier.read(key, target)
            assert target == memory(size, fill)
        total = sum(sizes.values())
        assert tier.usage() == TierUsage(used_bytes=total, peak_bytes=total, budget_bytes=total)
        tier.delete(A)
        tier.delete(A)
        assert A not in tier
        assert tier.usage() == TierUsage(used_bytes=total - PAGE, peak_bytes=total, budget_bytes=total)
        statistics = tier.statistics()
        assert statistics.read_bytes - before.read_bytes == total
        assert statistics.written_bytes - before.written_bytes == total + sizes[B]
        assert statistics.num_in_flight == 0
        assert [path.parent.name for path in tier.choices] == [f"nvme{index}" for index in range(num_paths)]
        for path in tier.choices:
            assert (path / "shards.bin").stat().st_mode & 0o777 == 0o600


async def test_many_at_once(tmp_path: Path, num_paths: int, opener: OpenBackend) -> None:
    keys = [ShardKey(unit, 0, "master") for unit in range(16)]
    async with opened(tmp_path, num_paths, capacity_bytes=64 * PAGE, open_backend=opener) as tier:
        await asyncio.gather(*(tier.write(key, memory(4 * PAGE, key.unit)) for key in keys))
        targets = [memory(4 * PAGE) for _ in range(32)]
        await asyncio.gather(*(tier.read(keys[i % 16], target) for i, target in enumerate(targets)))
        assert all(target == memory(4 * PAGE, i % 16) for i, target in enumerate(targets))


STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "write", "read", "delete"]), st.integers(0, 6), st.integers(1, 9)),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(
    num_paths=st.integers(1, 3),
    num_pages=st.integers(0, 20),
    stripe_pages=st.integers(1, 20),
    real=st.sampled_from([False, False, False, True]),
    weights=st.none() | st.tuples(*3 * [st.floats(0.01, 100)]),
    steps=STEPS,
)
def test_behaves_like_a_dictionary_with_a_capacity(
    num_paths: int,
    num_pages: int,
    stripe_pages: int,
    real: bool,
    weights: tuple[float, ...] | None,
    steps: list[tuple[str, int, int]],
) -> None:
    async def run(parent: Path) -> None:
        opener = open_backend if real else FakeOpener()
        given = weights[:num_paths] if weights is not None else None
        async with opened(
            parent, num_paths, capacity_bytes=num_pages * PAGE, open_backend=opener, weights=given
        ) as tier:
            await check(tier)
            sizes = [(path / "shards.bin").stat().st_size for path in tier.choices]
            assert sum(sizes) == num_pages * PAGE, "no file has grown"
            total = sum(tier.weights)
            for size, weight in zip(sizes, tier.weights, strict=True):
                assert abs(size / PAGE - num_pages * weight / total) < 1.001

    async def check(tier: NvmeTier) -> None:
        model: dict[ShardKey, memoryview] = {}
        for number, (action, unit, size) in enumerate(steps):
            key = ShardKey(unit, 0, "master")
            others = sum(len(contents) for other, contents in model.items() if other != key)
            if action == "delete":
                tier.delete(key)
                model.pop(key, None)
            elif action == "write" and others + size * PAGE <= num_pages * PAGE:
                model[key] = memory(size * PAGE, number)
                await tier.write(key, model[key])
            elif action == "write":
                with pytest.raises(BudgetError, match=str(key)):
                    await tier.write(key, memory(size * PAGE, number))
            elif key not in model:
                with pytest.raises(StorageError, match=f"{key} is not in the NVMe tier"):
                    await tier.read(key, memory(PAGE))
            for known, contents in model.items():
                target = memory(len(contents))
                await tier.read(known, target)
                assert target == contents
            assert (key in tier) == (key in model)
            assert tier.usage().used_bytes == sum(map(len, model.values()))

    with tempfile.TemporaryDirectory() as parent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(striping, "STRIPE_BYTES", stripe_pages * PAGE)
        asyncio.run(run(Path(parent)))


async def test_fragments_and_uneven_directories_take_what_fits(tmp_path: Path) -> None:
    opener = FakeOpener()
    keys = [ShardKey(unit, 0, "master") for unit in range(12)]
    async with opened(tmp_path, 2, capacity_bytes=12 * PAGE, open_backend=opener) as tier:
        for key in keys:
            await tier.write(key, memory(PAGE, key.unit))  # they alternate between the directories
        for key in keys[0:12:4] + keys[1::2]:
            tier.delete(key)  # three single pages stay in one directory, nothing in the other
        opener.backends[0].log.clear()
        opener.backends[1].log.clear()
        await tier.write(C, memory(9 * PAGE, 77))
        assert opener.backends[1].log == [("write", Priority.BACKGROUND, (6 * PAGE,))]
        assert opener.backends[0].log == [("write", Priority.BACKGROUND, (PAGE, PAGE, PAGE))]
        target = memory(9 * PAGE)
        await tier.read(C, target)
        assert target == memory(9 * PAGE, 77)
        for key in keys[2:12:4]:
            await tier.read(key, target[:PAGE])
            assert target[4] == key.unit


async def test_large_shards_are_striped_and_small_ones_go_where_least_is(tmp_path: Path) -> None:
    opener = FakeOpener()
    async with opened(tmp_path, 3, capacity_bytes=16 << 20, open_backend=opener) as tier:

        def written() -> list[tuple[int, ...]]:
            lengths = [
                tuple(length for operation, _, batch in backend.log if operation == "write" for length in batch)
                for backend in opener.backends
            ]
            for backend in opener.backends:
                backend.log.clear()
            return lengths

        await tier.write(A, memory(3 * STRIPE_BYTES + 2 * PAGE))
        assert written() == [(STRIPE_BYTES + PAGE,), (STRIPE_BYTES + PAGE,), (STRIPE_BYTES,)]
        await tier.write(B, memory(2 * STRIPE_BYTES))
        assert written() == [(STRIPE_BYTES,), (), (STRIPE_BYTES,)]
        await tier.write(C, memory(PAGE))
        assert written() == [(), (PAGE,), ()]


async def test_priorities_reach_the_backend(tmp_path: Path) -> None:
    opener = FakeOpener()
    async with opened(tmp_path, 1, capacity_bytes=PAGE, open_backend=opener) as tier:
        page = memory(PAGE)
        await tier.write(A, page)
        await tier.write(A, page, priority=Priority.DEMAND)
        await tier.read(A, page)
        await tier.read(A, page, priority=Priority.PREFETCH)
        priorities = [priority for _, priority, _ in opener.backends[0].log if priority is not None]
        assert priorities == [Priority.BACKGROUND, Priority.DEMAND, Priority.DEMAND, Priority.PREFETCH]


async def test_directories_work_at_the_same_time_and_statistics_add_up(tmp_path: Path) -> None:
    opener = FakeOpener()
    async with opened(tmp_path, 3, capacity_bytes=3 * STRIPE_BYTES, open_backend=opener) as tier:
        opener.gate.clear()
        task = asyncio.create_task(tier.write(A, memory(3 * STRIPE_BYTES)))
        await settle(lambda: all(backend.num_waiting == 1 for backend in opener.backends))
        opener.gate.set()
        await task
        assert tier.statistics().num_writes == 3
        assert tier.statistics().written_bytes == 3 * STRIPE_BYTES
        assert tier.statistics().extra == {"batches": 3.0}


# --- what it refuses


async def test_lengths_that_do_not_fit_the_shard(tmp_path: Path) -> None:
    async with opened(tmp_path, 1, capacity_bytes=8 * PAGE, open_backend=FakeOpener()) as tier:
        await tier.write(A, memory(2 * PAGE))
        with pytest.raises(StorageError, match="unit 3 part 0 master: expected a target of the length") as caught:
            await tier.read(A, memory(PAGE))
        assert (caught.value.expected_bytes, caught.value.got_bytes) == (2 * PAGE, PAGE)
        for length in (0, 100, PAGE + 512):
            with pytest.raises(StorageError, match="master: expected a non-zero multiple of 4096") as caught:
                await tier.write(A, memoryview(bytearray(length)))
            assert caught.value.got_bytes == length
        with pytest.raises(StorageError, match=r"unit 3 part 1 state\.exp_avg is not in the NVMe tier"):
            await tier.read(B, memory(PAGE))


async def test_capacity_is_hard_and_the_message_shows_the_arithmetic(tmp_path: Path) -> None:
    async with opened(tmp_path, 2, capacity_bytes=5 * PAGE, open_backend=FakeOpener()) as tier:
        await tier.write(A, memory(2 * PAGE, 5))
        await tier.write(B, memory(2 * PAGE))
        with pytest.raises(BudgetError) as caught:
            await tier.write(A, memory(4 * PAGE))
        for part in (str(A), f"needs {4 * PAGE} bytes", f"take {2 * PAGE} of its {5 * PAGE}", f"short by {PAGE}"):
            assert part in str(caught.value)
        target = memory(2 * PAGE)
        await tier.read(A, target)
        assert target == memory(2 * PAGE, 5)
        await tier.write(A, memory(3 * PAGE, 6))
        assert tier.usage().used_bytes == 5 * PAGE


async def test_transfers_of_one_shard_must_be_ordered(tmp_path: Path) -> None:
    opener = FakeOpener()
    async with opened(tmp_path, 1, capacity_bytes=8 * PAGE, open_backend=opener) as tier:
        page, other = memory(PAGE), memory(PAGE)
        await tier.write(A, page)
        opener.gate.clear()
        reads = [asyncio.create_task(tier.read(A, target)) for target in (page, other)]
        writing = asyncio.create_task(tier.write(B, page))
        await settle(lambda: opener.backends[0].num_waiting == 3)
        for key in (A, B):
            with pytest.raises(EngineStateError, match=f"write of {key} while another transfer"):
                await tier.write(key, page)
            with pytest.raises(EngineStateError, match=f"delete of {key} while another transfer"):
                tier.delete(key)
        with pytest.raises(EngineStateError, match=f"read of {B} while another transfer"):
            await tier.read(B, page)
        assert B not in tier
        opener.gate.set()
        await asyncio.gather(*reads, writing)
        tier.delete(A)
        assert B in tier


# --- faults


def failing(operation: str, error: BaseException, *, where: str = "") -> Callable[[str, Path], BaseException | None]:
    return lambda happening, path: error if happening == operation and where in str(path) else None


async def test_errors_name_the_shard_and_keep_what_they_carry(tmp_path: Path) -> None:
    opener = FakeOpener()
    async with opened(tmp_path, 1, capacity_bytes=8 * PAGE, open_backend=opener) as tier:
        file = tmp_path / "nvme0" / "infinity-rank0" / "shards.bin"
        await tier.write(A, memory(PAGE, 1))
        short = ShortTransferError("read", path=file, offset=7, expected_bytes=PAGE, got_bytes=5, errno=errno.EIO)
        opener.faults = failing("read", short)
        with pytest.raises(ShortTransferError, match=r"^read of unit 3 part 0 master: read ") as caught:
            await tier.read(A, memory(PAGE))
        error = caught.value
        assert (error.path, error.offset, error.expected_bytes, error.got_bytes) == (file, 7, PAGE, 5)
        assert error.errno == errno.EIO
        assert error.args == (str(error),)

        full = DiskFullError("write", path=file, errno=errno.ENOSPC)
        opener.faults = failing("write", full)
        with pytest.raises(DiskFullError, match=r"^write of unit 3 part 1 state\.exp_avg: "):
            await tier.write(B, memory(2 * PAGE))
        assert B not in tier
        assert tier.usage().used_bytes == PAGE
        with pytest.raises(DiskFullError, match=r"^write of unit 3 part 0 master: "):
            await tier.write(A, memory(2 * PAGE))
        assert A in tier

        opener.faults = failing("fsync", StorageError("fsync", path=file, errno=errno.EIO))
        with pytest.raises(StorageError, match=r"^flush of the NVMe tier: fsync .*EIO"):
            await tier.flush()
        opener.faults = lambda operation, path: None
        await tier.write(A, memory(2 * PAGE, 4))
        await tier.write(B, memory(6 * PAGE, 5))
        target = memory(2 * PAGE)
        await tier.read(A, target)
        assert target == memory(2 * PAGE, 4)


async def test_error_in_one_directory_waits_for_the_others(tmp_path: Path) -> None:
    opener = FakeOpener()
    async with opened(tmp_path, 2, capacity_bytes=2 * STRIPE_BYTES, open_backend=opener) as tier:
        error = StorageError("write", path=tmp_path, errno=errno.EIO)
        opener.faults = failing("write", error, where="nvme0")
        opener.gate.clear()
        task = asyncio.create_task(tier.write(A, memory(2 * STRIPE_BYTES)))
        await settle(lambda: opener.backends[1].num_waiting == 1)
        assert opener.backends[0].statistics().num_errors == 1
        assert not task.done()
        opener.gate.set()
        with pytest.raises(StorageError, match=str(A)):
            await task
        assert A not in tier
        assert tier.usage().used_bytes == 0


async def test_cancelled_first_write_leaves_nothing(tmp_path: Path, num_paths: int) -> None:
    opener = FakeOpener()
    size = num_paths * STRIPE_BYTES
    async with opened(tmp_path, num_paths, capacity_bytes=size, open_backend=opener) as tier:
        await cancel_held(opener, num_paths, tier.write(A, memory(size, 1)))
        assert A not in tier
        assert tier.usage().used_bytes == 0
        await tier.write(B, memory(size, 2))
        target = memory(size)
        await tier.read(B, target)
        assert target == memory(size, 2)


async def test_cancelled_overwrite_and_read_leave_the_shard(tmp_path: Path, num_paths: int) -> None:
    opener = FakeOpener()
    size = num_paths * STRIPE_BYTES
    async with opened(tmp_path, num_paths, capacity_bytes=2 * size, open_backend=opener) as tier:
        await tier.write(A, memory(size, 1))
        await tier.write(B, memory(PAGE, 9))
        target = memory(size)
        await cancel_held(opener, num_paths, tier.read(A, target))
        await tier.read(A, target)
        assert target == memory(size, 1)
        for new_size in (size, size + PAGE):
            await cancel_held(opener, num_paths, tier.write(A, memory(new_size, 2)))
            assert A in tier
            await tier.read(A, memory(new_size))  # undefined, but there
        await tier.write(A, memory(size, 3))
        await tier.read(A, target)
        assert target == memory(size, 3)
        await tier.read(B, target[:PAGE])
        assert target[:PAGE] == memory(PAGE, 9)


async def cancel_held(opener: FakeOpener, num_paths: int, transfer: object) -> None:
    """Cancel a transfer that all directories have begun: twice, and see it wait for them nevertheless."""
    assert asyncio.iscoroutine(transfer)
    opener.gate.clear()
    task = asyncio.create_task(transfer)
    await settle(lambda: sum(backend.num_waiting for backend in opener.backends) == num_paths)
    for _ in range(2):
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
    opener.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- closing


async def test_close_waits_for_what_is_in_flight_even_when_cancelled(tmp_path: Path) -> None:
    opener = FakeOpener()
    async with opened(tmp_path, 2, capacity_bytes=2 * STRIPE_BYTES, open_backend=opener) as tier:
        opener.gate.clear()
        write = asyncio.create_task(tier.write(A, memory(2 * STRIPE_BYTES)))
        await settle(lambda: opener.backends[1].num_waiting == 1)
        closing = [asyncio.create_task(tier.aclose()) for _ in range(2)]
        for _ in range(2):
            await asyncio.sleep(0)
            closing[0].cancel()
        await asyncio.sleep(0)
        assert not closing[0].done()
        assert not opener.backends[0].closed
        for late in (tier.write(B, memory(PAGE)), tier.read(A, memory(PAGE)), tier.flush()):
            with pytest.raises(EngineStateError, match="closed"):
                await late
        with pytest.raises(EngineStateError, match="closed"):
            tier.delete(A)
        opener.gate.set()
        await write
        with pytest.raises(asyncio.CancelledError):
            await closing[0]
        await closing[1]
        assert_nothing_is_left(tmp_path)
        assert tier.statistics().written_bytes == 2 * STRIPE_BYTES


async def test_close_removes_the_directories_though_a_backend_fails(tmp_path: Path) -> None:
    opener = FakeOpener()
    tier = await open_failing(make_paths(tmp_path, 2), opener)
    opener.faults = failing("aclose", StorageError("close", path=tmp_path, errno=errno.EIO))
    with pytest.raises(StorageError, match="close"):
        await tier.aclose()
    assert_nothing_is_left(tmp_path)


# --- opening


async def test_open_refuses_paths_and_leaves_nothing(tmp_path: Path) -> None:
    paths = make_paths(tmp_path, 2)
    with pytest.raises(ConfigError, match="at least one directory"):
        await open_failing([], FakeOpener())
    with pytest.raises(DirectoryError, match="mkdir -p"):
        await open_failing([*paths, tmp_path / "missing"], FakeOpener())
    with pytest.raises(DirectoryError, match="one directory"):
        await open_failing([paths[0], paths[0]], FakeOpener())
    directory = JobDirectory.open(paths[1])
    with pytest.raises(DirectoryInUseError):
        await open_failing(paths, FakeOpener())
    directory.close()
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("operation", ["open_backend", "open_file", "preallocate"])
async def test_open_that_fails_leaves_nothing(tmp_path: Path, operation: str) -> None:
    paths = make_paths(tmp_path, 3)
    for where in ("nvme0", "nvme1", "nvme2"):
        opener = FakeOpener()
        opener.faults = failing(operation, StorageError(operation, path=tmp_path, errno=errno.EIO), where=where)
        with pytest.raises(StorageError, match=operation):
            await open_failing(paths, opener)
        assert all(backend.closed for backend in opener.backends)
        assert_nothing_is_left(tmp_path)


async def test_open_that_fails_reports_the_first_failure(tmp_path: Path) -> None:
    opener = FakeOpener()
    errors = {name: StorageError(name, path=tmp_path, errno=errno.EIO) for name in ("preallocate", "aclose")}
    opener.faults = lambda operation, path: errors.get(operation)
    with pytest.raises(StorageError, match="preallocate"):
        await open_failing(make_paths(tmp_path, 1), opener)
    assert_nothing_is_left(tmp_path)


async def test_disk_without_room_at_preallocation(tmp_path: Path) -> None:
    opener = FakeOpener(disk_bytes=4 * PAGE)
    paths = make_paths(tmp_path, 2)
    with pytest.raises(DiskFullError):
        await open_failing(paths, opener, capacity_bytes=9 * PAGE)
    assert_nothing_is_left(tmp_path)
    tier = await open_failing(paths, opener, capacity_bytes=8 * PAGE)
    await tier.aclose()


async def test_preflight_shows_the_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make_paths(tmp_path, 2)
    capacity_bytes = 4 << 30
    free_bytes = capacity_bytes + MARGIN_BYTES
    monkeypatch.setattr(JobDirectory, "free_bytes", lambda self: free_bytes)
    tier = await open_failing(paths, FakeOpener(), capacity_bytes=capacity_bytes)  # sparse files: the disk is a fake
    await tier.aclose()
    free_bytes -= 1 << 30
    opener = FakeOpener()
    with pytest.raises(DiskFullError) as caught:
        await open_failing(paths, opener, capacity_bytes=capacity_bytes)
    for part in (
        "needs 4.000 GiB, and 16.0 MiB to spare on each file system",
        f"in {paths[0]} and {paths[1]} 3.016 GiB are free: short by 1.000 GiB",
        "give directories on other disks",
    ):
        assert part in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert opener.backends == []
    assert_nothing_is_left(tmp_path)


async def test_a_fuller_disk_leaves_more_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"nvme0": 1 << 30, "nvme1": 5 << 30, "nvme2": 0}
    monkeypatch.setattr(JobDirectory, "free_bytes", lambda self: free[self.path.parent.name] + MARGIN_BYTES)
    monkeypatch.setattr(JobDirectory, "device", property(lambda self: int(self.path.parent.name[-1])))
    weights = (2.0, 1.0, 1.0)
    async with opened(
        tmp_path, 3, capacity_bytes=5 << 30, open_backend=FakeOpener(), weights=weights
    ) as tier:  # sparse files
        sizes = [(path / "shards.bin").stat().st_size for path in tier.choices]
        assert sizes == [1 << 30, 4 << 30, 0]
        await tier.write(A, memory(4 * STRIPE_BYTES, 1))
        target = memory(4 * STRIPE_BYTES)
        await tier.read(A, target)
        assert target == memory(4 * STRIPE_BYTES, 1)
    with pytest.raises(DiskFullError, match=r"nvme0 1.016 GiB are free, in \S*nvme1 5.016 GiB are free, in"):
        await open_failing([tmp_path / name for name in free], FakeOpener(), capacity_bytes=(6 << 30) + PAGE)
    assert_nothing_is_left(tmp_path)


async def test_weights_are_one_for_each_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nvme_weights: expected one for each of 2 directories, got 3"):
        async with opened(tmp_path, 2, capacity_bytes=0, open_backend=FakeOpener(), weights=(1, 2, 3)):
            pass


async def test_cancelled_open_leaves_nothing(tmp_path: Path) -> None:
    paths = make_paths(tmp_path, 2)
    for operation in ("open_backend", "open_file", "preallocate"):
        opener = FakeOpener()

        def hold(happening: str, path: Path, *, opener: FakeOpener = opener, wanted: str = operation) -> None:
            if happening == wanted:
                opener.gate.clear()

        opener.faults = hold
        task = asyncio.create_task(open_failing(paths, opener))
        await settle(lambda opener=opener: not opener.gate.is_set())  # type: ignore[misc]
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        opener.faults = lambda happening, path: None
        opener.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_nothing_is_left(tmp_path)


async def test_open_cancelled_while_directories_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def held(paths: Sequence[Path], *, rank: int) -> list[JobDirectory]:
        directories = open_directories(paths, rank=rank)
        reached.set()
        assert go_on.wait(60)
        return directories

    monkeypatch.setattr("infinity.store.volumes.open_directories", held)
    task = asyncio.create_task(open_failing(make_paths(tmp_path, 2), FakeOpener()))
    await asyncio.to_thread(reached.wait, 60)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_nothing_is_left(tmp_path)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process with an open tier that holds one shard."""
    script = """
import asyncio, sys
from pathlib import Path
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey

async def main():
    tier = await NvmeTier.open(
        [Path(path) for path in sys.argv[1:]],
        capacity_bytes=1 << 20, backend_name="threads", num_threads=1, block_bytes=4096,
    )
    await tier.write(ShardKey(0, 0, "master"), memoryview(bytearray(4096)))
    print("held", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, *map(str, make_paths(tmp_path, 2))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(infinity.__file__).parents[1])},
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


async def test_takeover_after_kill(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    paths = [tmp_path / "nvme0", tmp_path / "nvme1"]
    with pytest.raises(DirectoryInUseError, match=f"process {holder.pid} "):
        await open_failing(paths, open_backend)
    holder.send_signal(signal.SIGKILL)
    assert holder.wait() == -signal.SIGKILL
    assert all((path / "infinity-rank0" / "shards.bin").stat().st_size == 1 << 19 for path in paths)
    tier = await open_failing(paths, open_backend)
    assert ShardKey(0, 0, "master") not in tier
    await tier.write(A, memory(PAGE))
    await tier.aclose()
    assert_nothing_is_left(tmp_path)
