"""Small files are whole or not there, and durable when the call returns; whatever fails, nothing temporary stays."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

import pytest

import fakes_io
from fakes_io import Faults, HookedSyscalls, fail, files_in, noise, spin
from infinity.errors import DiskFullError, StorageError
from infinity.io.aiofile import read_small, write_small_atomic
from infinity.io.completion import call_in_thread


async def test_small_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    for data in (b"first", b"", noise(1 << 20)):
        await write_small_atomic(path, data)
        assert await read_small(path) == data
    assert path.stat().st_mode & 0o777 == 0o600
    assert files_in(tmp_path) == ["manifest.json"]


async def test_a_small_file_is_durable_in_this_order(tmp_path: Path) -> None:
    actions: list[str] = []
    await write_small_atomic(tmp_path / "a", b"new", syscalls=HookedSyscalls(lambda op: actions.append(op.action)))
    assert actions == ["open", "write", "fsync", "close", "rename", "open", "fsync", "close"]


async def test_short_writes_of_a_small_file_are_continued(tmp_path: Path) -> None:
    path, data = tmp_path / "a", noise(1000)
    faults = Faults("write", {0: 1, 1: 400})
    await write_small_atomic(path, data, syscalls=HookedSyscalls(faults))
    assert path.read_bytes() == data
    with pytest.raises(StorageError, match="got 1 bytes"):
        await write_small_atomic(path, b"new", syscalls=HookedSyscalls(Faults("write", {0: 1, 1: 0})))
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("action", "nth", "code"),
    [
        ("open", 0, errno.EACCES),
        ("write", 0, errno.ENOSPC),
        ("fsync", 0, errno.EIO),
        ("close", 0, errno.EIO),
        ("rename", 0, errno.EXDEV),
    ],
)
async def test_a_failed_replacement_leaves_the_former_file(tmp_path: Path, action: str, nth: int, code: int) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(b"former")
    before = fakes_io.resources()
    faults = Faults(action, {nth: fail(code)})
    with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
        await write_small_atomic(path, b"new", syscalls=HookedSyscalls(faults))
    assert isinstance(caught.value, DiskFullError) == (code == errno.ENOSPC)
    assert caught.value.path == path
    assert path.read_bytes() == b"former"
    assert files_in(tmp_path) == ["manifest.json"]
    assert fakes_io.resources() == before


async def test_a_directory_that_cannot_be_flushed_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with pytest.raises(StorageError, match="EIO"):
        await write_small_atomic(path, b"new", syscalls=HookedSyscalls(Faults("fsync", {1: fail(errno.EIO)})))
    assert files_in(tmp_path) == ["manifest.json"]


@pytest.mark.parametrize(
    ("action", "replaced"), [("open", False), ("write", False), ("fsync", False), ("rename", True)]
)
async def test_a_cancelled_replacement_leaves_one_whole_file(tmp_path: Path, action: str, replaced: bool) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(b"former")
    before = fakes_io.resources()
    gate = fakes_io.Gate(action)
    task = asyncio.ensure_future(write_small_atomic(path, b"new", syscalls=HookedSyscalls(gate)))
    await gate.arrival()
    task.cancel()
    await spin()
    assert not task.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert path.read_bytes() == (b"new" if replaced else b"former")
    assert files_in(tmp_path) == ["manifest.json"]
    assert fakes_io.resources() == before


async def test_a_small_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"read failed.*ENOENT"):
        await read_small(tmp_path / "nothing")
    with pytest.raises(StorageError, match=r"read failed.*EISDIR"):
        await read_small(tmp_path)


async def test_a_call_in_a_thread_is_waited_for(tmp_path: Path) -> None:
    before = fakes_io.resources()
    started, finish = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def function() -> None:
        loop.call_soon_threadsafe(started.set)
        assert finish.wait(60)

    task = asyncio.ensure_future(call_in_thread(function))
    await started.wait()
    task.cancel()
    await spin()
    assert not task.done()
    finish.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fakes_io.resources() == before
