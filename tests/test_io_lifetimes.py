"""The contract of ``infinity.io.backend`` in time: order, threads, cancellation, closing, for every backend.

Calls are held in their threads by a gate below the code under test, so every order here is made and not hoped for.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import fakes_io
from fakes_io import BLOCK_BYTES, KINDS, Rig, buffer, spin
from infinity.errors import EngineStateError, ShortTransferError
from infinity.io.aiofile import LastCall
from infinity.io.backend import DIRECT_ALIGNMENT, Backend, File, Priority, Transfer
from infinity.io.threads import ThreadBackend

PAGE = DIRECT_ALIGNMENT


@pytest.fixture(params=KINDS, ids=str)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    async with fakes_io.rig_for(request.param, tmp_path) as rig:
        yield rig


# Who goes first, and where


async def test_the_urgent_overtake_at_the_next_block(rig: Rig) -> None:
    gate = rig.gate("read", "write")
    backend = rig.backend(gate, num_workers=1, block_bytes=PAGE)
    rig.path.write_bytes(bytes(64 * PAGE))
    file = await backend.open_file(rig.path)
    background = [asyncio.ensure_future(backend.write_from(file, 0, buffer(3 * PAGE)))]
    assert (await gate.arrival()).offset == 0
    background.append(asyncio.ensure_future(backend.write_from(file, 10 * PAGE, buffer(PAGE))))
    prefetch = asyncio.ensure_future(backend.read_into(file, 20 * PAGE, buffer(2 * PAGE), priority=Priority.PREFETCH))
    await spin()
    gate.let_one_pass()
    assert (await gate.arrival()).offset == 20 * PAGE  # past two blocks of one write, and another write
    demand = asyncio.ensure_future(backend.read_many([Transfer(file, 30 * PAGE, buffer(2 * PAGE))]))
    await spin()
    gate.open()
    await asyncio.gather(demand, prefetch, *background)
    moved = [op.offset // PAGE for op in gate.log if op.action in ("read", "write")]
    assert moved == [0, 20, 30, 31, 21, 1, 2, 10]


async def test_a_request_spreads_over_idle_workers(rig: Rig) -> None:
    gate = rig.gate("read")
    backend = rig.backend(gate, num_workers=3)
    rig.path.write_bytes(bytes(8 * BLOCK_BYTES))
    file = await backend.open_file(rig.path)
    read = asyncio.ensure_future(backend.read_into(file, 0, buffer(8 * BLOCK_BYTES)))
    offsets = {(await gate.arrival()).offset for _ in range(3)}
    assert offsets == {0, BLOCK_BYTES, 2 * BLOCK_BYTES}
    await spin()
    assert gate.count("read") == 3
    gate.open()
    await read
    assert gate.count("read") == 8


async def test_no_system_call_is_made_on_the_loop(rig: Rig) -> None:
    threads: dict[str, set[int]] = {}

    def hook(operation: fakes_io.Operation) -> None:
        threads.setdefault(operation.action, set()).add(threading.get_ident())

    backend = rig.backend(hook)
    file = await backend.open_file(rig.path, create=True)
    await backend.preallocate(file, BLOCK_BYTES)
    await backend.write_from(file, 1, buffer(BLOCK_BYTES))
    await backend.read_into(file, 1, buffer(BLOCK_BYTES))
    await backend.fsync(file)
    await file.aclose()
    await backend.aclose()
    assert set(threads) == {"open", "reserve", "write", "read", "fdatasync", "close"}
    assert all(threading.get_ident() not in used for used in threads.values())


@pytest.mark.parametrize("action", ["open", "read", "write", "fdatasync", "reserve", "close"])
async def test_the_loop_runs_while_a_call_is_stuck(rig: Rig, action: str) -> None:
    gate = rig.gate(action)
    backend = rig.backend(gate)

    async def everything() -> None:
        file = await backend.open_file(rig.path, create=True)
        await backend.preallocate(file, PAGE)
        await backend.write_from(file, 0, buffer(PAGE))
        await backend.read_into(file, 0, buffer(PAGE))
        await backend.fsync(file)
        await file.aclose()

    task = asyncio.ensure_future(everything())
    assert (await gate.arrival()).action == action
    await spin()
    assert not task.done()
    gate.open()
    await task


# Cancellation and closing


async def test_a_cancelled_read_waits_for_what_is_in_flight(rig: Rig) -> None:
    gate = rig.gate("read")
    backend = rig.backend(gate, num_workers=2)
    rig.path.write_bytes(b"a" * (8 * BLOCK_BYTES))
    file = await backend.open_file(rig.path)
    memory = buffer(8 * BLOCK_BYTES)
    read = asyncio.ensure_future(backend.read_into(file, 0, memory))
    for _ in range(2):
        await gate.arrival()
    for _ in range(3):
        read.cancel()
        await spin()
        assert not read.done()
    gate.let_one_pass()
    await spin()
    assert not read.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert gate.count("read") == 2  # the other six blocks were dropped
    memory[:] = b"\xee" * len(memory)
    await backend.read_into(file, 0, buffer(8 * BLOCK_BYTES))  # the backend works on
    assert memory == b"\xee" * len(memory)


async def test_a_cancelled_request_that_has_not_begun_ends_at_once(rig: Rig) -> None:
    gate = rig.gate("write")
    backend = rig.backend(gate, num_workers=1)
    file = await backend.open_file(rig.path, create=True)
    first = asyncio.ensure_future(backend.write_from(file, 0, buffer(PAGE)))
    await gate.arrival()
    second = asyncio.ensure_future(backend.write_from(file, PAGE, buffer(PAGE)))
    await spin()
    second.cancel()
    await spin()
    assert second.cancelled()
    assert not first.done()
    gate.open()
    await first
    assert rig.path.stat().st_size == PAGE


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
async def test_after_a_cancellation_at_any_moment_the_buffer_is_free(rig: Rig, write: bool) -> None:
    backend = rig.backend(block_bytes=PAGE)
    rig.path.write_bytes(b"a" * (16 * PAGE))
    file = await backend.open_file(rig.path)
    transfer: Callable[[File, int, memoryview], Coroutine[Any, Any, None]] = (
        backend.write_from if write else backend.read_into
    )
    for num_turns in range(14):
        memory = buffer(16 * PAGE - 9, shift=num_turns % 2 * 8, fill=b"b")
        task = asyncio.ensure_future(transfer(file, 5, memory))
        await spin(num_turns)
        task.cancel()
        await asyncio.wait([task])
        memory[:] = b"\xee" * len(memory)
        await backend.fsync(file)
        assert memory == b"\xee" * len(memory)
        assert b"\xee" not in rig.path.read_bytes()
        assert backend.statistics().num_in_flight == 0


async def test_a_cancelled_open_leaves_nothing(rig: Rig) -> None:
    gate = rig.gate("open")
    backend = rig.backend(gate)
    task = asyncio.ensure_future(backend.open_file(rig.path, create=True))
    await gate.arrival()
    task.cancel()
    await spin()
    assert not task.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not rig.path.exists()
    assert fakes_io.num_open(rig.path.parent) == 0


async def test_an_open_that_is_cancelled_again_while_it_is_undone_leaves_nothing(rig: Rig) -> None:
    gate = rig.gate("open")
    backend = rig.backend(gate, num_workers=1)
    first = asyncio.ensure_future(backend.open_file(rig.path, create=True))
    await gate.arrival()
    second = asyncio.ensure_future(backend.open_file(rig.path.with_name("second"), create=True))
    await spin()
    first.cancel()
    for _ in range(rig.kind.num_descriptors(num_workers=1)):
        gate.let_one_pass()
        await gate.arrival()
    await spin()  # the only worker is busy with the second file; undoing the first is in the queue
    first.cancel()
    await spin()
    assert not first.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await first
    await (await second).aclose()
    assert not rig.path.exists()
    assert fakes_io.num_open(rig.path.parent) == 0


async def test_closing_a_file_waits_for_its_transfers(rig: Rig) -> None:
    gate = rig.gate("read")
    backend = rig.backend(gate)
    rig.path.write_bytes(b"a" * (8 * BLOCK_BYTES))
    file = await backend.open_file(rig.path)
    memory = buffer(8 * BLOCK_BYTES)
    read = asyncio.ensure_future(backend.read_into(file, 0, memory))
    await gate.arrival()
    closes = [asyncio.ensure_future(file.aclose()) for _ in range(2)]
    await spin()
    assert gate.count("close") == 0
    with pytest.raises(EngineStateError):
        await backend.read_into(file, 0, memory)
    gate.open()
    await asyncio.gather(read, *closes)
    assert memory == rig.path.read_bytes()


@pytest.mark.parametrize("cancel", [False, True], ids=["", "cancelled"])
async def test_closing_with_io_in_flight_finishes_it(rig: Rig, cancel: bool) -> None:
    before = fakes_io.resources()
    gate = rig.gate("write")
    backend = rig.backend(gate, num_workers=2)
    file = await backend.open_file(rig.path, create=True)
    writes = [
        asyncio.ensure_future(backend.write_from(file, index * BLOCK_BYTES, buffer(BLOCK_BYTES, fill=b"a")))
        for index in range(4)
    ]
    await gate.arrival()
    closing = asyncio.ensure_future(backend.aclose())
    also_closing = asyncio.ensure_future(backend.aclose())
    await spin()
    if cancel:
        closing.cancel()
        await spin()
    assert not closing.done()
    with pytest.raises(EngineStateError):
        await backend.fsync(file)
    gate.open()
    await asyncio.gather(*writes)
    await also_closing
    await asyncio.wait([closing])
    assert closing.cancelled() == cancel
    assert rig.path.read_bytes() == b"a" * (4 * BLOCK_BYTES)
    assert fakes_io.resources() == before


async def test_closing_a_file_survives_cancellation_in_the_queue(rig: Rig) -> None:
    gate = rig.gate("write")
    backend = rig.backend(gate, num_workers=1)
    file, other = [await backend.open_file(rig.path.with_name(name), create=True) for name in ("a", "b")]
    write = asyncio.ensure_future(backend.write_from(other, 0, buffer(PAGE)))
    await gate.arrival()
    closing = asyncio.ensure_future(file.aclose())
    await spin()
    closing.cancel()
    await spin()
    assert not closing.done()
    gate.open()
    await write
    with pytest.raises(asyncio.CancelledError):
        await closing
    await other.aclose()
    assert fakes_io.num_open(rig.path.parent) == 0


async def test_closing_while_a_file_is_being_opened(rig: Rig) -> None:
    before = fakes_io.resources()
    gate = rig.gate("open")
    backend = rig.backend(gate)
    opening = asyncio.ensure_future(backend.open_file(rig.path, create=True))
    await gate.arrival()
    closing = asyncio.ensure_future(backend.aclose())
    await spin()
    assert not closing.done()
    gate.open()
    file = await opening
    await closing
    with pytest.raises(EngineStateError):
        await backend.read_into(file, 0, buffer(1))
    assert fakes_io.resources() == before


async def test_everyone_cancelled_at_once(rig: Rig) -> None:
    """What ``asyncio.run`` does at its end, to the tasks of the backend as well."""
    gate = rig.gate("read")
    backend = rig.backend(gate, num_workers=2)
    rig.path.write_bytes(b"a" * (8 * BLOCK_BYTES))
    file = await backend.open_file(rig.path)
    memory = buffer(8 * BLOCK_BYTES)
    read = asyncio.ensure_future(backend.read_into(file, 0, memory))
    await gate.arrival()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await spin()
    assert not read.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await read
    memory[:] = b"\xee" * len(memory)
    target = buffer(8 * BLOCK_BYTES)
    await backend.read_into(file, 0, target)
    assert target == rig.path.read_bytes()
    assert memory == b"\xee" * len(memory)


async def test_closing_what_was_never_used(rig: Rig) -> None:
    await rig.backend().aclose()


# What only threads promise


async def _count_wakeups(backend: Backend, monkeypatch: pytest.MonkeyPatch, path: Path, num_bytes: int) -> int:
    file = await backend.open_file(path, create=True)
    num_wakeups, eventfd_read = 0, os.eventfd_read

    def counted(descriptor: int) -> int:
        nonlocal num_wakeups
        num_wakeups += 1
        return eventfd_read(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_read", counted)
        await backend.write_many([Transfer(file, 0, buffer(num_bytes)), Transfer(file, num_bytes, buffer(1))])
    return num_wakeups


@pytest.mark.parametrize("num_blocks", [1, 50])
async def test_one_wakeup_per_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    backend = ThreadBackend(3, PAGE, direct=False)
    assert await _count_wakeups(backend, monkeypatch, tmp_path / "file", num_blocks * PAGE) == 1
    await backend.aclose()


async def test_memory_is_given_back_with_the_await(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    backend = ThreadBackend(2, PAGE, direct=False)
    file = await backend.open_file(tmp_path / "file")
    memory = bytearray(8 * PAGE)
    with pytest.raises(ShortTransferError):
        await backend.read_into(file, 0, memoryview(memory))
    memory.clear()  # BufferError if anyone still held a view
    await backend.aclose()


async def test_an_exception_that_was_raised_is_not_kept(rig: Rig) -> None:
    def hook(operation: fakes_io.Operation) -> None:
        if operation.action == "read":
            raise UnforeseenError

    rig.path.write_bytes(bytes(PAGE))
    backend = rig.backend(hook)
    file = await backend.open_file(rig.path)
    with pytest.raises(UnforeseenError) as caught:
        await backend.read_into(file, 0, buffer(PAGE))
    alive = weakref.ref(caught.value)
    del caught
    await spin()
    gc.collect()
    assert alive() is None


class UnforeseenError(Exception):
    """A bug."""


# What only aiofiles needs


async def test_a_cancelled_call_is_waited_for_and_one_cancelled_in_the_queue_is_made_again() -> None:
    calls: list[str] = []
    held, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold() -> str:
        calls.append("first")
        loop.call_soon_threadsafe(held.set)
        assert release.wait(60)
        return "first"

    def second() -> str:
        calls.append("second")
        return "second"

    with ThreadPoolExecutor(1) as threads:
        one, two = LastCall(threads), LastCall(threads)
        first = asyncio.ensure_future(one.finish(lambda: loop.run_in_executor(one, hold)))
        await held.wait()
        queued = asyncio.ensure_future(two.finish(lambda: loop.run_in_executor(two, second)))
        await spin()
        for task in (first, queued):
            task.cancel()
        await spin()
        assert not first.done()
        assert not queued.done()
        release.set()
        assert await first == "first"
        assert await queued == "second"
    assert calls == ["first", "second"]
