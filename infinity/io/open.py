"""``open_backend``: choose how to do I/O in a directory, by doing some.

Nothing is concluded from versions or names of file systems. Each candidate writes and reads back a small file in the
target directory, aligned and ragged, and is taken if the bytes are right and, where it claims to bypass the page
cache, if nothing shows that it does not. ``"auto"`` takes io_uring only where a short race shows besides that it pays
(``race.py``). What was tried and why it was or was not taken comes back in words, for ``infinity doctor``.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from infinity.config import BackendName
from infinity.errors import DirectoryError, DiskFullError, StorageError
from infinity.io.aiofile import AiofilesBackend
from infinity.io.backend import DIRECT_ALIGNMENT, Backend, File
from infinity.io.completion import call_in_thread
from infinity.io.memory import allocate, as_bytes
from infinity.io.pagecache import declared_alignment, is_cached
from infinity.io.race import Verdict, race, scratch_file
from infinity.io.ring import refusal
from infinity.io.syscalls import SYSCALLS, Syscalls
from infinity.io.threads import ThreadBackend
from infinity.io.uring import UringBackend

_PROBE_BYTES = 64 << 10
_RAGGED_OFFSET = _PROBE_BYTES - 4000
_RAGGED_BYTES = 9001

_THREADS = (("threads", True), ("threads", False))
_AIOFILES = (("aiofiles", True), ("aiofiles", False))
_URING = (("uring", True), ("uring", False))
_CANDIDATES = {
    "auto": _URING[:1] + _THREADS + _AIOFILES,
    "threads": _THREADS,
    "uring": _URING,
    "aiofiles": _AIOFILES,
}
_BACKENDS: dict[str, type[ThreadBackend | UringBackend | AiofilesBackend]] = {
    backend.name: backend for backend in (ThreadBackend, UringBackend, AiofilesBackend)
}

_verdicts: dict[int, Verdict] = {}
"""Of races, by device; for the life of the process."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend a directory got, and why.

    Attributes:
        name: ``"threads"``, ``"uring"`` or ``"aiofiles"``.
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
        name: a backend to use, or ``"auto"`` for io_uring where it pays, else the first of threads and aiofiles that
            works; direct I/O first.
        directory: an existing directory, where a small file is made and removed again.
        num_threads: worker threads, operations in the ring at once, or handles per file.
        block_bytes: largest single system call.
        syscalls: the system calls to make.

    Returns:
        The backend, to be closed by the caller, and the choice.

    Raises:
        DirectoryError: the directory is missing or not a directory, or no backend that ``name`` allows works in it,
            or the kernel refuses this process the io_uring that ``name`` asks for.
        DiskFullError: no room for the probe.
    """
    await call_in_thread(lambda: _check_directory(directory))
    reasons: list[str] = []
    error: StorageError | None = None
    for candidate, direct in _CANDIDATES[name]:
        words = f"{candidate}, {'direct' if direct else 'buffered'} I/O"
        if name == "auto" and candidate == "uring":
            verdict = await _verdict(directory, syscalls)
            if not verdict.uring_pays:
                reasons.append(f"{words}: passed over; {verdict.words}")
                continue
        try:
            backend = _make(candidate, directory, num_threads, block_bytes, direct, syscalls)
            try:
                known = await _probe(backend, directory)
            except BaseException:
                await backend.aclose()
                raise
        except StorageError as refused:
            if isinstance(refused, DiskFullError) or (name == "uring" and isinstance(refused, DirectoryError)):
                raise
            reasons.append(f"{words}: {refused.message}")
            error = refused
        else:
            reasons.append(f"{words}: chosen; {known}")
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


def _make(name: str, directory: Path, num_threads: int, block_bytes: int, direct: bool, syscalls: Syscalls) -> Backend:
    try:
        return _BACKENDS[name](num_threads, block_bytes, direct, syscalls)
    except OSError as error:
        raise DirectoryError(
            f"{refusal(error)}, or use io_backend='threads'", path=directory, errno=error.errno
        ) from error


async def _verdict(directory: Path, syscalls: Syscalls) -> Verdict:
    """Whether io_uring pays here, from the last race on this device, or from one now."""
    device = await call_in_thread(lambda: directory.stat().st_dev)
    if device not in _verdicts:
        try:
            _verdicts[device] = await race(directory, syscalls)
        except DiskFullError:
            return Verdict(False, "no room for a race against threads")
        except StorageError as error:
            return Verdict(False, error.message)
        except OSError as error:
            return Verdict(False, refusal(error))
    return _verdicts[device]


async def _probe(backend: Backend, directory: Path) -> str:
    """Use the backend in ``directory``; what is known of it then. Raises a ``StorageError`` that says what is wrong."""
    async with scratch_file(directory) as path:
        file = await backend.open_file(path, create=True)
        try:
            return await _exercise(backend, file)
        finally:
            await file.aclose()


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
