"""The files that are measured: one in each job directory, as the NVMe tier has them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.bench.settings import BenchSettings
from infinity.errors import storage_error
from infinity.io.backend import Backend, File
from infinity.io.completion import call_in_thread
from infinity.io.open import Choice
from infinity.io.pagecache import is_cached
from infinity.io.tasks import gather_all
from infinity.store.directory import JobDirectory, open_directories
from infinity.store.nvme import OpenBackend

_FILE_NAME = "shards.bin"  # one of the names that JobDirectory removes


@dataclass(frozen=True, slots=True)
class Volume:
    """One directory's file.

    Attributes:
        index: its number.
        path: what the user gave.
        backend: moves the bytes.
        choice: why this backend.
        file: the file, preallocated.
    """

    index: int
    path: Path
    backend: Backend
    choice: Choice
    file: File


@contextlib.asynccontextmanager
async def job_directories(paths: Sequence[Path]) -> AsyncIterator[list[JobDirectory]]:
    """Hold a locked directory of our own below each path, removed at the end.

    Raises:
        DirectoryError: a path cannot be used, or another live job uses it (``DirectoryInUseError``).
        StorageError: any other failure of a system call.
    """
    directories: list[JobDirectory] = []
    try:
        await call_in_thread(lambda: directories.extend(open_directories(paths)))
        yield directories
    finally:
        removal = contextlib.ExitStack()
        for directory in directories:
            removal.callback(directory.close)
        await call_in_thread(removal.close)


@contextlib.asynccontextmanager
async def open_volumes(
    settings: BenchSettings, directories: Sequence[JobDirectory], share_bytes: int, open_backend: OpenBackend
) -> AsyncIterator[list[Volume]]:
    """Open a file of ``share_bytes`` in each directory, with workers for the deepest point.

    Raises:
        DirectoryError: no I/O backend works in a directory.
        DiskFullError: no room.
        StorageError: any other failure of a system call.
    """
    volumes: list[Volume] = []
    async with contextlib.AsyncExitStack() as stack:
        for index, (path, directory) in enumerate(zip(settings.nvme, directories, strict=True)):
            backend, choice = await open_backend(
                settings.io_backend,
                directory.path,
                num_threads=max(2, *(point.depth for point in settings.points)),
                block_bytes=max(point.block_bytes for point in settings.points),
            )
            stack.push_async_callback(backend.aclose)
            file = await backend.open_file(directory.path / _FILE_NAME, create=True)
            volumes.append(Volume(index, path, backend, choice, file))
        await gather_all(volume.backend.preallocate(volume.file, share_bytes) for volume in volumes)
        yield volumes


async def sync(volumes: Sequence[Volume]) -> None:
    """Make all that was written durable.

    Raises:
        StorageError: the system reported an error.
    """
    await gather_all(volume.backend.fsync(volume.file) for volume in volumes)


async def drop_page_cache(volumes: Sequence[Volume]) -> None:
    """Drop the files' clean pages from the page cache where I/O goes through it; the rest is out of our hands.

    Raises:
        StorageError: the system reported an error.
    """
    for volume in volumes:
        if not volume.backend.direct:
            path = volume.file.path
            await call_in_thread(lambda path=path: _drop(path))  # type: ignore[misc]


async def still_cached(volume: Volume, num_bytes: int) -> bool | None:
    """Whether pages of the file's first bytes are in the page cache; ``None`` where the system does not say."""
    return await call_in_thread(lambda: is_cached(volume.file.path, num_bytes))


def _drop(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error("dropping the page cache", error, path=path) from error
