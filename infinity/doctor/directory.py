"""Looks at a directory for the NVMe tier as training will use it, with small files that are removed again."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import replace
from pathlib import Path

from infinity.doctor.facts import Bandwidth, Directory
from infinity.errors import StorageError
from infinity.io.backend import Backend
from infinity.io.completion import call_in_thread
from infinity.io.holes import clone
from infinity.io.memory import allocate, as_bytes
from infinity.io.open import open_backend
from infinity.io.pagecache import declared_alignment
from infinity.io.race import scratch_file
from infinity.machine.paths import mount_of, path_facts

_NUM_THREADS = 4
_BLOCK_BYTES = 8 << 20
_STEP_BYTES = _NUM_THREADS * _BLOCK_BYTES
_MOST_BYTES = 1 << 30
_SECONDS = 0.6
_RESERVE = 4
"""At most one in so many free bytes is written."""


async def look_at(path: Path, *, measured: bool = True) -> Directory:
    """What there is under a path, and how well it works. Nothing is left there, and a missing one is not made.

    Args:
        path: where; it need not exist.
        measured: whether to measure bandwidth, which takes a second or two.
    """
    found = await call_in_thread(lambda: _under(path))
    try:
        backend, choice = await open_backend("auto", path, num_threads=_NUM_THREADS, block_bytes=_BLOCK_BYTES)
    except StorageError as error:
        return replace(found, fault=error.message, errno=error.errno)
    try:
        status = await call_in_thread(lambda: os.statvfs(path))
        found = replace(
            found,
            backend=choice.name,
            direct=choice.direct,
            reasons=choice.reasons,
            free_bytes=status.f_bavail * status.f_frsize,
            total_bytes=status.f_blocks * status.f_frsize,
        )
        return await _try(found, path, backend, measured=measured)
    except StorageError as error:
        return replace(found, fault=error.message, errno=error.errno)
    except OSError as error:
        return replace(found, fault=str(error), errno=error.errno)
    finally:
        await backend.aclose()


def _under(path: Path) -> Directory:
    """What is under a path, or under what of it there is."""
    path = path.absolute()
    existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
    mount = mount_of(existing)
    return Directory(
        replace(path_facts(existing), path=str(path)),
        exists=existing == path,
        mount_point=None if mount is None else mount.point,
        mount_options=None if mount is None else mount.options,
    )


async def _try(found: Directory, path: Path, backend: Backend, *, measured: bool) -> Directory:
    async with scratch_file(path) as name:
        await call_in_thread(lambda: name.write_bytes(bytes(1 << 16)))
        found = replace(
            found,
            alignment=await call_in_thread(lambda: declared_alignment(name)),
            hard_links=await call_in_thread(lambda: _links(name)),
            clones=await call_in_thread(lambda: _clones(name)),
        )
    if measured and backend.direct:
        assert found.free_bytes is not None
        found = replace(found, bandwidth=await measure(path, backend, found.free_bytes // _RESERVE))
    return found


async def measure(path: Path, backend: Backend, room_bytes: int, *, seconds: float = _SECONDS) -> Bandwidth | None:
    """How fast a file is written and read back, the writes made durable.

    Args:
        path: the directory.
        backend: bypasses the page cache.
        room_bytes: the most that may be written.
        seconds: how long each way, about.

    Returns:
        The figures, or ``None`` where there is no room for one request.

    Raises:
        StorageError: a transfer failed; the file is removed.
    """
    room_bytes = min(room_bytes, _MOST_BYTES)
    if room_bytes < _STEP_BYTES:
        return None
    memory = await call_in_thread(lambda: as_bytes(allocate(_STEP_BYTES)))
    memory[:] = await call_in_thread(lambda: os.urandom(_STEP_BYTES))  # some drives are faster at zeros
    async with scratch_file(path) as name:
        file = await backend.open_file(name, create=True)
        try:
            began, written = time.perf_counter(), 0
            while not written or (written + _STEP_BYTES <= room_bytes and time.perf_counter() - began < seconds):
                await backend.write_from(file, written, memory)
                written += _STEP_BYTES
            await backend.fsync(file)
            write_gb_s = written / 1e9 / (time.perf_counter() - began)
            began, num_bytes = time.perf_counter(), 0
            while not num_bytes or time.perf_counter() - began < seconds:
                await backend.read_into(file, num_bytes % written, memory)
                num_bytes += _STEP_BYTES
            return Bandwidth(num_bytes / 1e9 / (time.perf_counter() - began), write_gb_s)
        finally:
            await file.aclose()


def _links(name: Path) -> bool:
    second = _beside(name)
    try:
        os.link(name, second)
    except OSError:
        return False
    second.unlink()
    return True


def _clones(name: Path) -> bool:
    second = _beside(name)
    try:
        if not clone(name, second):
            return False
    except OSError:
        return False
    second.unlink()
    return True


def _beside(name: Path) -> Path:
    return name.with_name(f".infinity-probe-{secrets.token_hex(8)}")
