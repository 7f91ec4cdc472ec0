"""The contract of ``infinity.io.backend``, held against every backend, with and without direct I/O.

What lies on the disk is checked through ``pathlib``, behind the backend's back.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fakes_io
from fakes_io import BLOCK_BYTES, KINDS, Rig, buffer, noise, spin
from infinity.errors import EngineStateError, ShortTransferError, StorageError
from infinity.io.backend import DIRECT_ALIGNMENT, Transfer

PAGE = DIRECT_ALIGNMENT


@pytest.fixture(params=KINDS, ids=str)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    async with fakes_io.rig_for(request.param, tmp_path) as rig:
        yield rig


# Bytes


around = st.sampled_from([0, 512, PAGE, 3 * PAGE, BLOCK_BYTES, 2 * BLOCK_BYTES]).flatmap(
    lambda base: st.integers(max(0, base - 1), base + 1)
)
pieces = st.tuples(around, around, st.sampled_from([0, 1, 64, 512, PAGE - 1]), st.integers(0, 255))


@given(writes=st.lists(pieces, min_size=1, max_size=4), reads=st.lists(pieces, min_size=1, max_size=4))
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_any_size_offset_and_address(
    rig: Rig, writes: list[tuple[int, int, int, int]], reads: list[tuple[int, int, int, int]]
) -> None:
    backend = rig.backend()
    rig.path.unlink(missing_ok=True)
    file = await backend.open_file(rig.path, create=True)
    model = bytearray()
    for offset, num_bytes, shift, seed in writes:
        data = noise(num_bytes, seed)
        memory = buffer(num_bytes, shift=shift)
        memory[:] = data
        await backend.write_from(file, offset, memory)
        if data:
            model.extend(bytes(max(0, offset + num_bytes - len(model))))
            model[offset : offset + num_bytes] = data
    assert rig.path.read_bytes() == model
    for offset, num_bytes, shift, _ in reads:
        guarded = buffer(num_bytes + 2, shift=shift, fill=b"\xee")
        memory = guarded[1:-1]
        if offset + num_bytes <= len(model) or num_bytes == 0:
            await backend.read_into(file, offset, memory)
            assert memory == model[offset : offset + num_bytes]
        else:
            with pytest.raises(ShortTransferError) as caught:
                await backend.read_into(file, offset, memory)
            assert caught.value.got_bytes == max(0, len(model) - offset)
            assert memory[: caught.value.got_bytes] == model[offset:]
        assert guarded[0] == guarded[-1] == 0xEE
    await backend.aclose()


@pytest.mark.parametrize("offset", [(2 << 30) - 1, 3 << 30, (5 << 30) - 4095])
async def test_offsets_beyond_two_gib(rig: Rig, offset: int) -> None:
    backend = rig.backend()
    file = await backend.open_file(rig.path, create=True)
    os.truncate(rig.path, 6 << 30)
    data, target = buffer(3 * PAGE, fill=noise(3 * PAGE)), buffer(3 * PAGE + 2, fill=b"x")
    await backend.write_from(file, offset, data)
    await backend.read_into(file, offset - 1, target)
    assert target == b"\0" + bytes(data) + b"\0"
    assert rig.path.stat().st_size == 6 << 30


async def test_aligned_transfers_take_no_copy_and_no_cache(rig: Rig) -> None:
    backend = rig.backend()
    file = await backend.open_file(rig.path, create=True)
    data = buffer(5 * BLOCK_BYTES, fill=noise(PAGE))
    await backend.write_from(file, 3 * PAGE, data)
    await backend.read_into(file, 3 * PAGE, data)
    statistics = backend.statistics()
    assert statistics.extra == {"bounced_bytes": 0, "cached_bytes": 0 if rig.kind.direct else 10 * BLOCK_BYTES}


async def test_blocks_are_as_long_as_may_be_and_aligned(rig: Rig) -> None:
    gate = rig.gate()
    backend = rig.backend(gate, num_workers=1)
    file = await backend.open_file(rig.path, create=True)
    await backend.write_from(file, 100, buffer(3 * BLOCK_BYTES, shift=100))
    writes = [(op.offset, op.num_bytes, op.direct) for op in gate.log if op.action == "write"]
    blocks = [(BLOCK_BYTES, BLOCK_BYTES), (2 * BLOCK_BYTES, BLOCK_BYTES)]
    if rig.kind.direct:
        head, body, tail = (100, PAGE - 100), (PAGE, BLOCK_BYTES - PAGE), (3 * BLOCK_BYTES, 100)
        assert writes == [(*head, False), (*body, True), *((*block, True) for block in blocks), (*tail, False)]
    else:
        head, tail = (100, BLOCK_BYTES - 100), (3 * BLOCK_BYTES, 100)
        assert writes == [(*part, False) for part in (head, *blocks, tail)]


async def test_batches_over_several_files(rig: Rig) -> None:
    backend = rig.backend()
    files = [await backend.open_file(rig.path.with_name(f"part{index}"), create=True) for index in range(2)]
    sizes = [0, 1, PAGE, BLOCK_BYTES + 1, 3 * BLOCK_BYTES]
    sources = [buffer(size, shift=index, fill=noise(max(1, size), index)) for index, size in enumerate(sizes)]
    targets = [buffer(size, shift=2 * index) for index, size in enumerate(sizes)]
    offsets = [index * 4 * BLOCK_BYTES + index for index in range(len(sizes))]

    def batch(memory: list[memoryview]) -> list[Transfer]:
        return [Transfer(files[index % 2], offsets[index], memory[index]) for index in range(len(sizes))]

    await backend.write_many(batch(sources))
    await backend.read_many(batch(targets))
    assert targets == sources
    await backend.read_many([])
    await backend.write_many([])
    assert backend.statistics().num_reads == backend.statistics().num_writes == len(sizes) - 1


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
async def test_neighbours_that_queue_are_moved_by_one_call(rig: Rig, write: bool) -> None:
    gate = rig.gate("read", "write")
    backend = rig.backend(gate, num_workers=1)
    data = noise(16 * PAGE)
    rig.path.write_bytes(bytes(len(data)) if write else data)
    file = await backend.open_file(rig.path)
    first = asyncio.ensure_future(backend.read_into(file, 0, buffer(PAGE)))
    await gate.arrival()
    move = backend.write_from if write else backend.read_into
    memory = [buffer(PAGE, fill=data[page * PAGE :][:PAGE] if write else b"x") for page in range(2, 10)]
    order = [0, 5, 2, 7, 1, 3, 6, 4]
    tasks = {index: asyncio.ensure_future(move(file, (2 + index) * PAGE, memory[index])) for index in order}
    await spin()
    gate.open()
    await asyncio.gather(first, *tasks.values())
    calls = [(op.offset, op.num_bytes) for op in gate.log if op.action in ("read", "write")]
    if (
        rig.kind.name == "aiofiles"
    ):  # it has no call for several stretches of memory, but keeps to the order of the file
        assert calls == [(0, PAGE), *((page * PAGE, PAGE) for page in range(2, 10))]
    else:
        assert calls == [(0, PAGE), (2 * PAGE, 8 * PAGE)]
    moved = rig.path.read_bytes()[2 * PAGE : 10 * PAGE] if write else b"".join(map(bytes, memory))
    assert moved == data[2 * PAGE : 10 * PAGE]
    statistics = backend.statistics()
    assert (statistics.num_writes if write else statistics.num_reads - 1) == 8


async def test_neighbours_that_share_pages_are_independent(rig: Rig) -> None:
    backend = rig.backend(block_bytes=2 * PAGE)
    file = await backend.open_file(rig.path, create=True)
    num_bytes = 3 * PAGE // 2 + 1
    sources = [buffer(num_bytes, shift=index * 7 % 64, fill=noise(num_bytes, index)) for index in range(32)]
    await asyncio.gather(
        *(backend.write_from(file, index * num_bytes, source) for index, source in enumerate(sources[::2])),
        *(backend.write_from(file, (16 + index) * num_bytes, source) for index, source in enumerate(sources[1::2])),
    )
    expected = b"".join(bytes(source) for source in sources[::2] + sources[1::2])
    assert rig.path.read_bytes() == expected
    targets = [buffer(num_bytes, shift=3) for _ in range(32)]
    await asyncio.gather(*(backend.read_into(file, index * num_bytes, target) for index, target in enumerate(targets)))
    assert b"".join(bytes(target) for target in targets) == expected


@pytest.mark.parametrize("size", [0, 1, PAGE, PAGE + 5, BLOCK_BYTES, 2 * BLOCK_BYTES + 700])
async def test_a_read_past_the_end_says_what_was_there(rig: Rig, size: int) -> None:
    rig.path.write_bytes(noise(size))
    backend = rig.backend()
    file = await backend.open_file(rig.path)
    with pytest.raises(ShortTransferError, match="the file ends here") as caught:
        await backend.read_into(file, 0, buffer(6 * BLOCK_BYTES))
    error = caught.value
    assert (error.path, error.offset, error.expected_bytes, error.got_bytes) == (rig.path, 0, 6 * BLOCK_BYTES, size)


# Files


async def test_created_files_are_new_and_private(rig: Rig) -> None:
    backend = rig.backend()
    await (await backend.open_file(rig.path, create=True)).aclose()
    assert rig.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(StorageError, match="EEXIST"):
        await backend.open_file(rig.path, create=True)
    rig.path.unlink()
    with pytest.raises(StorageError, match="ENOENT"):
        await backend.open_file(rig.path)
    assert not rig.path.exists()


async def test_preallocate_grows_and_never_cuts(rig: Rig) -> None:
    backend = rig.backend()
    file = await backend.open_file(rig.path, create=True)
    await backend.preallocate(file, 0)
    assert rig.path.stat().st_size == 0
    await backend.preallocate(file, 3 * BLOCK_BYTES)
    assert rig.path.stat().st_blocks * 512 >= 3 * BLOCK_BYTES
    await backend.write_from(file, 0, buffer(PAGE, fill=b"a"))
    await backend.preallocate(file, PAGE)
    await backend.fsync(file)
    assert rig.path.read_bytes() == b"a" * PAGE + bytes(3 * BLOCK_BYTES - PAGE)


async def test_statistics_count_what_was_done(rig: Rig) -> None:
    gate = rig.gate("read")
    backend = rig.backend(gate)
    file = await backend.open_file(rig.path, create=True)
    await backend.write_from(file, 0, buffer(2 * BLOCK_BYTES + 1))
    read = asyncio.ensure_future(backend.read_into(file, 0, buffer(PAGE)))
    await gate.arrival()
    before = backend.statistics()
    assert (before.written_bytes, before.num_writes, before.num_reads) == (2 * BLOCK_BYTES + 1, 1, 0)
    assert (before.read_bytes, before.num_in_flight, before.num_errors) == (0, 1, 0)
    gate.open()
    await read
    with pytest.raises(ShortTransferError):
        await backend.read_into(file, 2 * BLOCK_BYTES, buffer(2))
    after = backend.statistics()
    assert (after.read_bytes, after.num_reads, after.num_errors, after.num_in_flight) == (PAGE + 1, 1, 1, 0)
    assert after.read_seconds > 0 < after.write_seconds
    assert (len(before.write_latency), len(before.read_latency)) == (3, 0)  # of blocks
    assert (len(after.write_latency), len(after.read_latency)) == (3, 2)
    assert 0 < after.read_latency.percentile(50) <= after.read_seconds * 1.1
    assert before.num_reads == 0  # a snapshot


async def test_misuse_is_refused(rig: Rig) -> None:
    backend, other = rig.backend(), rig.backend()
    file = await backend.open_file(rig.path, create=True)
    foreign = await other.open_file(rig.path)
    with pytest.raises(ValueError, match="not opened by this backend"):
        await backend.read_into(foreign, 0, buffer(1))
    with pytest.raises(ValueError, match="expected 0 or more, got -1"):
        await backend.read_into(file, -1, buffer(1))
    with pytest.raises(ValueError, match="expected 0 or more, got -1"):
        await backend.preallocate(file, -1)
    with pytest.raises(ValueError, match="writable"):
        await backend.read_into(file, 0, memoryview(b"constant"))
    with pytest.raises(ValueError, match="contiguous"):
        await backend.write_from(file, 0, buffer(8)[::2])
    await file.aclose()
    await file.aclose()
    for refused in (backend.read_into(file, 0, buffer(1)), backend.fsync(file), backend.preallocate(file, 1)):
        with pytest.raises(EngineStateError, match="is closed"):
            await refused
    await backend.aclose()
    await backend.aclose()
    with pytest.raises(EngineStateError, match="is closed"):
        await backend.open_file(rig.path)


async def test_read_only_memory_can_be_written(rig: Rig) -> None:
    backend = rig.backend()
    file = await backend.open_file(rig.path, create=True)
    await backend.write_from(file, 0, memoryview(noise(PAGE + 1)))
    assert rig.path.read_bytes() == noise(PAGE + 1)


async def test_a_backend_belongs_to_one_loop(rig: Rig) -> None:
    backend = rig.backend()
    await backend.open_file(rig.path, create=True)
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(use())
        except EngineStateError as error:
            caught.append(error)

    async def use() -> None:
        await backend.open_file(rig.path)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "another event loop" in str(caught[0])


@pytest.mark.parametrize("block_bytes", [0, PAGE - 1])
def test_blocks_smaller_than_a_page_are_refused(block_bytes: int) -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match="block_bytes: expected at least 4096"):
            kind.make(block_bytes=block_bytes)
        with pytest.raises(ValueError, match="expected at least 1, got 0"):
            kind.make(num_workers=0)
