"""``open_backend``: choose how to do I/O in a directory, by doing some.

Nothing is concluded from versions or names of file systems. Each candidate writes and reads back a small file in the
target directory, aligned and ragged, and is taken if the bytes are right and, where it claims to bypass the page
cache, if nothing shows that it does not. What was tried and why it was or was not taken comes back in words, for
``infinity doctor``.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from infinity.config import BackendName
from infinity.errors import DirectoryError, DiskFullError, StorageError, storage_error
from infinity.io.aiofile import AiofilesBackend
from infinity.io.backend import DIRECT_ALIGNMENT, Backend, File
from infinity.io.completion import call_in_thread
from infinity.io.memory import allocate, as_bytes
from infinity.io.pagecache import declared_alignment, is_cached
from infinity.io.syscalls import SYSCALLS, Syscalls
from infinity.io.threads import ThreadBackend

_PROBE_BYTES = 64 << 10
_RAGGED_OFFSET = _PROBE_BYTES - 4000
_RAGGED_BYTES = 9001

_THREADS = (("threads", True), ("threads", False))
_AIOFILES = (("aiofiles", True), ("aiofiles", False))
_CANDIDATES = {"auto": _THREADS + _AIOFILES, "threads": _THREADS, "aiofiles": _AIOFILES}


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend a directory got, and why.

    Attributes:
        name: ``"threads"`` or ``"aiofiles"``.
        direct: whether aligned transfers bypass the page cache.
        reasons: what was tried, in order, and what became of it, in words.
    """

    name: str
    direct: bool
    reasons: tuple[str, ...]


async def open_backend(
    name: BackendName,
    directory: Path,
    *,
    num_threads: int,
    block_bytes: int,
    syscalls: Syscalls = SYSCALLS,
) -> tuple[Backend, Choice]:
    """Open the best backend that works in a directory.

    Args:
        name: a backend to use, or ``"auto"`` for the first of threads and aiofiles that works; direct I/O first.
        directory: an existing directory, where a small file is made and removed again.
        num_threads: worker threads, or handles per file.
        block_bytes: largest single system call.
        syscalls: the system calls to make.

    Returns:
        The backend, to be closed by the caller, and the choice.

    Raises:
        DirectoryError: the directory is missing or not a directory, or no backend that ``name`` allows works in it.
        DiskFullError: no room for the probe.
    """
    await call_in_thread(lambda: _check_directory(directory))
    reasons: list[str] = []
    error: StorageError | None = None
    for candidate, direct in _CANDIDATES[name]:
        words = f"{candidate}, {'direct' if direct else 'buffered'} I/O"
        backend: Backend = (
            ThreadBackend(num_threads, block_bytes, direct, syscalls)
            if candidate == "threads"
            else AiofilesBackend(num_threads, block_bytes, direct, syscalls)
        )
        try:
            reasons.append(f"{words}: chosen; {await _probe(backend, directory)}")
        except BaseException as refusal:
            await backend.aclose()
            if not isinstance(refusal, StorageError) or isinstance(refusal, DiskFullError):
                raise
            reasons.append(f"{words}: {refusal.message}")
            error = refusal
        else:
            return backend, Choice(candidate, direct, tuple(reasons))
    raise DirectoryError(
        f"no I/O backend that {name!r} allows works here: {'; '.join(reasons)}. Give another NVMe directory",
        path=directory,
        errno=None if error is None else error.errno,
    ) from error


def _check_directory(directory: Path) -> None:
    try:
        mode = directory.stat().st_mode
    except OSError as error:
        repair = "create it, or give another" if error.errno == errno.ENOENT else "give another"
        raise DirectoryError(f"cannot use this NVMe directory: {repair}", path=directory, errno=error.errno) from error
    if not stat.S_ISDIR(mode):
        raise DirectoryError("expected a directory, found a file: give another NVMe directory", path=directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise DirectoryError("this user may not write to the directory: change its mode or owner", path=directory)


async def _probe(backend: Backend, directory: Path) -> str:
    """Use the backend in ``directory``; what is known of it then. Raises a ``StorageError`` that says what is wrong."""
    path = directory / f".infinity-probe-{secrets.token_hex(8)}"
    file = await backend.open_file(path, create=True)
    try:
        return await _exercise(backend, file)
    finally:
        try:
            await file.aclose()
        finally:
            await call_in_thread(lambda: _remove(path))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error("removal of the probe", error, path=path) from error


async def _exercise(backend: Backend, file: File) -> str:
    source, target = (as_bytes(allocate(2 * _PROBE_BYTES)) for _ in range(2))
    source[:] = os.urandom(len(source))
    expected = bytearray(source[:_PROBE_BYTES])

    await backend.write_from(file, 0, source[:_PROBE_BYTES])
    known = await call_in_thread(lambda: _examine(file.path)) if backend.direct else "through the page cache"
    await backend.read_into(file, 0, target[:_PROBE_BYTES])
    _compare(file, target[:_PROBE_BYTES], expected)

    ragged = source[1 : 1 + _RAGGED_BYTES]
    expected[_RAGGED_OFFSET:] = ragged
    await backend.write_from(file, _RAGGED_OFFSET, ragged)
    target = target[3 : len(expected)]
    await backend.read_into(file, 3, target)
    _compare(file, target, expected[3:])
    await backend.fsync(file)
    return known


def _examine(path: Path) -> str:
    """What is known about direct I/O on a file just written by it."""
    alignment = declared_alignment(path)
    if alignment == 0:
        raise StorageError("O_DIRECT is accepted, but the file system declares that it has no direct I/O", path=path)
    if alignment is not None and alignment > DIRECT_ALIGNMENT:
        raise StorageError(f"direct I/O here needs {alignment}-byte alignment, not {DIRECT_ALIGNMENT}", path=path)
    cached = is_cached(path, _PROBE_BYTES)
    if cached:
        raise StorageError("O_DIRECT is accepted, but what was written stays in the page cache", path=path)
    if alignment is None and cached is None:
        return "whether it really bypasses the page cache, this system does not say"
    return "it bypasses the page cache"


def _compare(file: File, got: memoryview, expected: bytearray) -> None:
    if got != expected:
        first = next(index for index, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1])
        raise StorageError(f"wrong bytes were read back, from byte {first} of a read on", path=file.path)
