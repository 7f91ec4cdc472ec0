"""What backends do when the system fails them: every fault comes from below the code under test.

Injected where this machine cannot be made to fail (``fakes_io``), real where it can (``RLIMIT_FSIZE``).
"""

from __future__ import annotations

import asyncio
import errno
import random
import resource
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fakes_io
from fakes_io import BLOCK_BYTES, KINDS, Faults, Gate, Operation, Rig, buffer, fail, noise, spin, until
from infinity.errors import DiskFullError, ShortTransferError, StorageError
from infinity.io.backend import DIRECT_ALIGNMENT, Backend, Priority, Transfer

PAGE = DIRECT_ALIGNMENT


@pytest.fixture(params=KINDS, ids=str)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    async with fakes_io.rig_for(request.param, tmp_path) as rig:
        yield rig


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """A real limit: no file of this process may grow beyond 256 KiB."""
    limit_bytes = 256 << 10
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    yield limit_bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Errors of transfers


@pytest.mark.parametrize("action", ["read", "write"])
@pytest.mark.parametrize(
    ("code", "kind"), [(errno.EIO, StorageError), (errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError)]
)
async def test_an_error_is_typed_and_says_where(rig: Rig, action: str, code: int, kind: type[StorageError]) -> None:
    rig.path.write_bytes(bytes(BLOCK_BYTES + 6 * BLOCK_BYTES))
    faults = Faults(action, {2: fail(code)})
    backend = rig.backend(faults, num_workers=1)
    file = await backend.open_file(rig.path)
    transfer = backend.read_into if action == "read" else backend.write_from
    with pytest.raises(kind, match=f"{action} of {BLOCK_BYTES} bytes at {3 * BLOCK_BYTES} failed") as caught:
        await transfer(file, BLOCK_BYTES, buffer(6 * BLOCK_BYTES))
    error = caught.value
    assert type(error) is kind
    assert (error.path, error.offset, error.errno) == (rig.path, BLOCK_BYTES, code)
    assert (error.expected_bytes, error.got_bytes) == (6 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert faults.num_calls == 3  # the rest was dropped
    assert backend.statistics().num_errors == 1
    await transfer(file, BLOCK_BYTES, buffer(6 * BLOCK_BYTES))  # and it works on
    assert faults.num_calls == 9


async def test_an_error_waits_for_blocks_in_flight(rig: Rig) -> None:
    rig.path.write_bytes(b"a" * (8 * BLOCK_BYTES))
    gate, faults = rig.gate("read"), Faults("read", {0: fail(errno.EIO)})

    def hook(operation: Operation) -> int | None:
        gate(operation)
        return faults(operation)

    backend = rig.backend(hook, num_workers=2)
    file = await backend.open_file(rig.path)
    memory = buffer(8 * BLOCK_BYTES)
    read = asyncio.ensure_future(backend.read_into(file, 0, memory))
    assert {(await gate.arrival()).offset for _ in range(2)} == {0, BLOCK_BYTES}
    gate.let_one_pass()
    await until(lambda: backend.statistics().read_seconds > 0)  # the failed block was given back
    assert not read.done()
    gate.open()
    with pytest.raises(StorageError, match="EIO"):
        await read
    assert gate.count("read") == 2
    memory[:] = b"\xee" * len(memory)
    await backend.fsync(file)
    assert memory == b"\xee" * len(memory)


async def test_a_full_disk_in_some_blocks_of_a_batch(rig: Rig) -> None:
    faults = Faults("write", {3: fail(errno.ENOSPC), 4: fail(errno.ENOSPC)})
    backend = rig.backend(faults)
    file = await backend.open_file(rig.path, create=True)
    memory = buffer(8 * BLOCK_BYTES)
    with pytest.raises(DiskFullError, match="free space") as caught:
        await backend.write_many(
            [Transfer(file, index * BLOCK_BYTES, memory[index * BLOCK_BYTES :][:BLOCK_BYTES]) for index in range(8)]
        )
    assert caught.value.expected_bytes == BLOCK_BYTES
    assert caught.value.got_bytes == 0
    assert backend.statistics().num_in_flight == 0


async def test_an_unforeseen_exception_reaches_the_caller(rig: Rig) -> None:
    def hook(operation: Operation) -> None:
        if operation.action == "read":
            raise MemoryError("no bounce buffer")

    backend = rig.backend(hook)
    rig.path.write_bytes(bytes(PAGE))
    file = await backend.open_file(rig.path)
    with pytest.raises(MemoryError, match="no bounce buffer"):
        await backend.read_into(file, 0, buffer(PAGE))
    await backend.write_from(file, 0, buffer(PAGE))


async def test_a_full_disk_for_real(rig: Rig, file_size_limit: int) -> None:
    backend = rig.backend(num_workers=1)
    file = await backend.open_file(rig.path, create=True)
    memory = buffer(2 * file_size_limit, fill=noise(PAGE))
    with pytest.raises(DiskFullError, match="EFBIG") as caught:
        await backend.write_from(file, 0, memory)
    assert caught.value.got_bytes == file_size_limit == rig.path.stat().st_size
    assert rig.path.read_bytes() == memory[:file_size_limit]
    with pytest.raises(DiskFullError, match=r"preallocate.*EFBIG"):
        await backend.preallocate(file, 2 * file_size_limit)
    assert rig.path.stat().st_size == file_size_limit


# Merged calls


def merged_rig(rig: Rig, hook: Callable[[Operation], int | None]) -> tuple[Gate, Backend]:
    """A backend with one worker, which is kept busy by a first write, so that what comes then can be merged."""
    gate = rig.gate("write")

    def both(operation: Operation) -> int | None:
        if operation.offset == 0:
            gate(operation)
            return None
        return hook(operation)

    return gate, rig.backend(both, num_workers=1)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
async def test_an_error_in_a_merged_call_is_its_requests_alone(rig: Rig, code: int) -> None:
    bad = 5 * PAGE

    def hook(operation: Operation) -> int | None:
        if operation.action == "write" and operation.offset <= bad < operation.offset + operation.num_bytes:
            raise fail(code)
        return None

    gate, backend = merged_rig(rig, hook)
    file = await backend.open_file(rig.path, create=True)
    first = asyncio.ensure_future(backend.write_from(file, 0, buffer(PAGE)))
    await gate.arrival()
    tasks = [
        asyncio.ensure_future(backend.write_from(file, (1 + index) * PAGE, buffer(PAGE, fill=bytes([65 + index]))))
        for index in range(8)
    ]
    await spin()
    gate.open()
    await asyncio.wait([first, *tasks])
    errors = {index: task.exception() for index, task in enumerate(tasks) if task.exception() is not None}
    assert list(errors) == [4]
    error = errors[4]
    assert isinstance(error, DiskFullError if code == errno.ENOSPC else StorageError)
    assert (error.offset, error.expected_bytes, error.got_bytes, error.errno) == (bad, PAGE, 0, code)
    written = rig.path.read_bytes()
    assert [written[(1 + index) * PAGE] for index in range(8) if index != 4] == [65, 66, 67, 68, 70, 71, 72]
    assert backend.statistics().num_errors == 1
    assert backend.statistics().num_writes == 8


@pytest.mark.parametrize("limit", [300, 512, PAGE, PAGE + 1, 3 * PAGE - 1])
async def test_a_short_merged_call_is_continued(rig: Rig, limit: int) -> None:
    gate, backend = merged_rig(rig, lambda operation: min(limit, operation.num_bytes) or None)
    file = await backend.open_file(rig.path, create=True)
    first = asyncio.ensure_future(backend.write_from(file, 0, buffer(PAGE)))
    await gate.arrival()
    data = noise(4 * PAGE)
    writes = [backend.write_from(file, (1 + i) * PAGE, buffer(PAGE, fill=data[i * PAGE :][:PAGE])) for i in range(4)]
    tasks = [asyncio.ensure_future(write) for write in writes]
    await spin()
    gate.open()
    await asyncio.gather(first, *tasks)
    assert rig.path.read_bytes()[PAGE:] == data
    targets = [buffer(PAGE) for _ in range(4)]
    await backend.read_many([Transfer(file, (1 + index) * PAGE, target) for index, target in enumerate(targets)])
    assert b"".join(map(bytes, targets)) == data


async def test_one_cancelled_of_those_merged_waits_and_the_others_get_theirs(rig: Rig) -> None:
    rig.path.write_bytes(noise(8 * PAGE))
    gate = rig.gate("read")
    backend = rig.backend(gate, num_workers=1)
    file = await backend.open_file(rig.path)
    first = asyncio.ensure_future(backend.read_into(file, 7 * PAGE, buffer(PAGE)))
    await gate.arrival()
    memory = [buffer(PAGE) for _ in range(4)]
    tasks = [asyncio.ensure_future(backend.read_into(file, index * PAGE, memory[index])) for index in range(4)]
    await spin()
    gate.let_one_pass()
    assert (await gate.arrival()).offset == 0
    for _ in range(2):
        tasks[1].cancel()
        await spin()
    assert not tasks[1].done()
    gate.open()
    await asyncio.wait([first, *tasks])
    assert [task.cancelled() for task in tasks] == [False, True, False, False]
    memory[1][:] = b"\xee" * PAGE
    await backend.fsync(file)
    assert memory[1] == b"\xee" * PAGE
    for index in (0, 2, 3):
        assert memory[index] == noise(8 * PAGE)[index * PAGE :][:PAGE]


async def test_a_merged_read_past_the_end_fails_for_those_it_concerns(rig: Rig) -> None:
    rig.path.write_bytes(noise(2 * PAGE + 100))
    gate = rig.gate("read")
    backend = rig.backend(gate, num_workers=1)
    file = await backend.open_file(rig.path)
    first = asyncio.ensure_future(backend.read_into(file, 0, buffer(1)))
    await gate.arrival()
    tasks = [asyncio.ensure_future(backend.read_into(file, index * PAGE, buffer(PAGE))) for index in range(4)]
    await spin()
    gate.open()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await first
    assert results[:2] == [None, None]
    assert [error.got_bytes for error in results[2:] if isinstance(error, ShortTransferError)] == [100, 0]


# Everything at random


class Chaos:
    """A hook: bytes that cannot be moved, and short, interrupted and slow calls at random."""

    def __init__(self, seed: int, bad: dict[int, int]) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._bad = bad

    def __call__(self, operation: Operation) -> int | None:
        if operation.action not in ("read", "write"):
            return None
        for position, code in self._bad.items():
            if operation.offset <= position < operation.offset + operation.num_bytes:
                raise fail(code)
        with self._lock:
            fate = self._random.randrange(8)
            limit = self._random.randrange(1, operation.num_bytes + 1)
        if fate == 0:
            return limit
        if fate == 1:
            raise fail(errno.EINTR)
        if fate == 2:
            time.sleep(0.0005)
        return None


@dataclass
class Job:
    """One request of many, and what is to become of its bytes."""

    offset: int
    memory: memoryview
    write: bool
    cancel_after: int | None
    task: asyncio.Task[None] | None = None

    @property
    def stop(self) -> int:
        return self.offset + len(self.memory)


def random_jobs(rng: random.Random, num_bytes: int) -> list[Job]:
    """The whole of a file as neighbours of random sizes, in random order; some misaligned, some to be cancelled."""
    jobs, offset = [], 0
    while offset < num_bytes:
        size = rng.choice([PAGE, PAGE, 2 * PAGE, 5 * PAGE, BLOCK_BYTES, 3 * BLOCK_BYTES, 100, 5000])
        size = min(size - offset % PAGE if size > 5000 and rng.random() < 0.8 else size, num_bytes - offset)
        memory = buffer(size, shift=(offset % PAGE if rng.random() < 0.8 else 8), fill=noise(size, offset))
        cancel_after = rng.randrange(30) if rng.random() < 0.25 else None
        jobs.append(Job(offset, memory, rng.random() < 0.5, cancel_after))
        offset += size
    rng.shuffle(jobs)
    return jobs


@given(seed=st.integers(0, 2**32), num_bad=st.integers(0, 2), num_workers=st.integers(1, 4))
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_whatever_happens_every_request_gets_its_own(rig: Rig, seed: int, num_bad: int, num_workers: int) -> None:
    """Exactly those fail whose bytes cannot be moved; all others move theirs, and nobody touches anything else."""
    rng = random.Random(seed)
    size = 12 * BLOCK_BYTES + rng.choice([0, 77])
    before = noise(size, seed)
    rig.path.write_bytes(before)
    bad = {rng.randrange(size): rng.choice([errno.EIO, errno.ENOSPC]) for _ in range(num_bad)}
    backend = rig.backend(Chaos(seed, bad), num_workers=num_workers)
    file = await backend.open_file(rig.path)
    jobs = random_jobs(rng, size)

    async def run(job: Job) -> None:
        move = backend.write_from if job.write else backend.read_into
        await move(file, job.offset, job.memory, priority=rng.choice([Priority.PREFETCH, Priority.BACKGROUND]))

    async def cancel(job: Job, num_turns: int) -> None:
        await spin(num_turns)
        assert job.task is not None
        job.task.cancel()

    for job in jobs:
        job.task = asyncio.ensure_future(run(job))
    cancellers = [asyncio.ensure_future(cancel(job, job.cancel_after)) for job in jobs if job.cancel_after is not None]
    tasks = [job.task for job in jobs if job.task is not None]
    await asyncio.wait([*tasks, *cancellers], timeout=60)
    assert all(task.done() for task in tasks)
    assert backend.statistics().num_in_flight == 0
    untouched = []
    for job in jobs:
        assert job.task is not None
        if job.task.cancelled():
            untouched.append(job)
            job.memory[:] = b"\xee" * len(job.memory)
    await backend.aclose()
    after = rig.path.read_bytes()
    assert len(after) == size
    for job in jobs:
        check(job, before, after, bad)
    assert all(job.memory == b"\xee" * len(job.memory) for job in untouched)


def check(job: Job, before: bytes, after: bytes, bad: dict[int, int]) -> None:
    """One job's end, its memory and its part of the file."""
    assert job.task is not None
    old, now = before[job.offset : job.stop], after[job.offset : job.stop]
    if job.task.cancelled():
        assert job.cancel_after is not None
        new = noise(len(old), job.offset) if job.write else old
        assert all(byte in pair for byte, pair in zip(now, zip(old, new, strict=True), strict=True))
        return
    codes = [code for position, code in bad.items() if job.offset <= position < job.stop]
    error = job.task.exception()
    assert (error is None) == (not codes)
    if not job.write:
        assert now == old
    if error is None:
        assert job.memory == now
    else:
        assert isinstance(error, StorageError)
        assert error.errno in codes
        assert (error.offset, error.expected_bytes) == (job.offset, len(old))
        assert error.got_bytes is not None
        assert 0 <= error.got_bytes < len(old)


# Interrupted and short transfers


@pytest.mark.parametrize("action", ["read", "write"])
async def test_interrupted_calls_are_made_again(rig: Rig, action: str) -> None:
    data = noise(3 * BLOCK_BYTES + 17)
    rig.path.write_bytes(data)
    faults = Faults(action, {index: fail(errno.EINTR) for index in range(0, 12, 2)})
    backend = rig.backend(faults)
    file = await backend.open_file(rig.path)
    memory = buffer(len(data))
    if action == "read":
        await backend.read_into(file, 0, memory)
        assert memory == data
    else:
        await backend.write_from(file, 0, memory)
        assert rig.path.read_bytes() == memory


@pytest.mark.parametrize("action", ["read", "write"])
@pytest.mark.parametrize("limit", [1, 511, 512, PAGE - 1, PAGE + 1, 5000, BLOCK_BYTES - 1])
@pytest.mark.parametrize("shift", [0, 3])
async def test_short_transfers_are_continued(rig: Rig, action: str, limit: int, shift: int) -> None:
    """Every other call is cut short, at any byte; direct I/O goes on from aligned positions only."""
    data = noise(2 * BLOCK_BYTES + 100)
    rig.path.write_bytes(data if action == "read" else bytes(len(data)))
    calls: list[Operation] = []

    def hook(operation: Operation) -> int | None:
        if operation.action != action:
            return None
        calls.append(operation)
        return min(limit, operation.num_bytes) if len(calls) % 2 else None

    backend = rig.backend(hook, num_workers=1)
    file = await backend.open_file(rig.path)
    memory = buffer(len(data), shift=shift)
    if action == "read":
        await backend.read_into(file, 0, memory)
        assert memory == data
    else:
        memory[:] = data
        await backend.write_from(file, 0, memory)
        assert rig.path.read_bytes() == data
    assert len(calls) > 3
    assert all(call.offset % PAGE == 0 and call.num_bytes % PAGE == 0 for call in calls if call.direct)


@pytest.mark.parametrize("action", ["read", "write"])
@pytest.mark.parametrize("got_bytes", [0, 1, 5000, 2 * PAGE])
async def test_short_and_then_nothing_is_an_error(rig: Rig, action: str, got_bytes: int) -> None:
    rig.path.write_bytes(bytes(BLOCK_BYTES))
    left = got_bytes

    def hook(operation: Operation) -> int | None:
        nonlocal left
        if operation.action != action:
            return None
        now = min(left, operation.num_bytes)
        left -= now
        return now

    backend = rig.backend(hook)
    file = await backend.open_file(rig.path)
    transfer = backend.read_into if action == "read" else backend.write_from
    with pytest.raises(ShortTransferError, match=f"{action} stopped short") as caught:
        await transfer(file, 0, buffer(BLOCK_BYTES))
    assert (caught.value.expected_bytes, caught.value.got_bytes) == (BLOCK_BYTES, got_bytes)


# Errors of calls on files


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
async def test_a_failed_open_leaves_nothing(rig: Rig, last: bool) -> None:
    num_opens = rig.kind.num_descriptors(num_workers=2)
    faults = Faults("open", {num_opens - 1 if last else 0: fail(errno.EMFILE)})
    backend = rig.backend(faults, num_workers=2)
    with pytest.raises(StorageError, match=r"open.*EMFILE"):
        await backend.open_file(rig.path, create=True)
    assert not rig.path.exists()
    assert fakes_io.num_open(rig.path.parent) == 0
    await backend.open_file(rig.path, create=True)
    assert fakes_io.num_open(rig.path.parent) == num_opens


async def test_a_file_system_without_direct_io(rig: Rig) -> None:
    def hook(operation: Operation) -> None:
        if operation.action == "open" and operation.direct:
            raise fail(errno.EINVAL)

    backend = rig.backend(hook)
    if not rig.kind.direct:
        await backend.open_file(rig.path, create=True)
        return
    with pytest.raises(StorageError, match=r"open for direct I/O failed.*EINVAL"):
        await backend.open_file(rig.path, create=True)
    assert not rig.path.exists()


async def test_a_failed_flush(rig: Rig) -> None:
    backend = rig.backend(Faults("fdatasync", {0: fail(errno.EIO)}))
    file = await backend.open_file(rig.path, create=True)
    with pytest.raises(StorageError, match=r"fdatasync failed.*EIO"):
        await backend.fsync(file)
    await backend.fsync(file)


async def test_a_failed_preallocation_is_cut_back(rig: Rig) -> None:
    faults = Faults("reserve", {0: 7 * PAGE})
    backend = rig.backend(faults)
    file = await backend.open_file(rig.path, create=True)
    await backend.write_from(file, 0, buffer(100, fill=b"a"))
    with pytest.raises(DiskFullError, match="preallocate") as caught:
        await backend.preallocate(file, 9 * PAGE)
    assert (caught.value.expected_bytes, caught.value.got_bytes) == (9 * PAGE, 100)
    assert rig.path.read_bytes() == b"a" * 100


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
async def test_where_space_cannot_be_reserved_the_file_is_made_that_long(rig: Rig, code: int) -> None:
    backend = rig.backend(Faults("reserve", {0: fail(code), 1: fail(code)}))
    file = await backend.open_file(rig.path, create=True)
    await backend.preallocate(file, 9 * PAGE)
    assert rig.path.stat().st_size == 9 * PAGE
    await backend.preallocate(file, PAGE)
    assert rig.path.stat().st_size == 9 * PAGE


async def test_a_failed_close_closes_all_the_same(rig: Rig) -> None:
    before = fakes_io.resources()
    backend = rig.backend(Faults("close", {0: fail(errno.EIO)}))
    file = await backend.open_file(rig.path, create=True)
    await backend.open_file(rig.path)
    with pytest.raises(StorageError, match=r"close failed.*EIO"):
        await file.aclose()
    await backend.aclose()
    assert fakes_io.resources() == before


@pytest.mark.parametrize("held", ["write", "close"])
async def test_a_cancelled_close_that_fails_is_a_cancellation(rig: Rig, held: str) -> None:
    gate, faults = rig.gate(held), Faults("close", {0: fail(errno.EIO)})

    def hook(operation: Operation) -> int | None:
        gate(operation)
        return faults(operation)

    backend = rig.backend(hook)
    file = await backend.open_file(rig.path, create=True)
    write = asyncio.ensure_future(backend.write_from(file, 0, buffer(PAGE)))
    await spin()
    closing = asyncio.ensure_future(file.aclose())
    await gate.arrival()
    closing.cancel()
    await spin()
    gate.open()
    await write
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert fakes_io.num_open(rig.path.parent) == 0


async def test_a_failed_close_at_the_end_closes_all_the_same(rig: Rig) -> None:
    before = fakes_io.resources()
    backend = rig.backend(Faults("close", {0: fail(errno.EIO)}))
    for index in range(3):
        await backend.open_file(rig.path.with_name(f"part{index}"), create=True)
    with pytest.raises(StorageError, match=r"close failed.*EIO"):
        await backend.aclose()
    assert fakes_io.resources() == before
