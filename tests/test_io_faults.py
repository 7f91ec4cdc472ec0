"""What backends do when the system fails them: every fault comes from below the code under test.

Injected where this machine cannot be made to fail (``fakes_io``), real where it can (``RLIMIT_FSIZE``).
"""

from __future__ import annotations

import asyncio
import errno
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import fakes_io
from fakes_io import BLOCK_BYTES, KINDS, Faults, Operation, Rig, buffer, fail, noise, spin, until
from infinity.errors import DiskFullError, ShortTransferError, StorageError
from infinity.io.backend import DIRECT_ALIGNMENT, Transfer

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
    before = fakes_io.resources()[0]
    with pytest.raises(StorageError, match=r"open.*EMFILE"):
        await backend.open_file(rig.path, create=True)
    assert not rig.path.exists()
    assert fakes_io.resources()[0] == before
    await backend.open_file(rig.path, create=True)
    assert fakes_io.resources()[0] == before + num_opens


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
    before = fakes_io.resources()[0]
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
    assert fakes_io.resources()[0] == before


async def test_a_failed_close_at_the_end_closes_all_the_same(rig: Rig) -> None:
    before = fakes_io.resources()
    backend = rig.backend(Faults("close", {0: fail(errno.EIO)}))
    for index in range(3):
        await backend.open_file(rig.path.with_name(f"part{index}"), create=True)
    with pytest.raises(StorageError, match=r"close failed.*EIO"):
        await backend.aclose()
    assert fakes_io.resources() == before
