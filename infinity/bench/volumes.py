"""The files that are measured, one in each job directory as the NVMe tier has them, and the backends that open them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.bench.settings import Point
from infinity.config import BackendName
from infinity.errors import storage_error
from infinity.io.backend import Backend, File, Priority
from infinity.io.completion import call_in_thread
from infinity.io.latency import LatencyHistogram
from infinity.io.memory import as_bytes
from infinity.io.open import Choice
from infinity.io.pagecache import is_cached
from infinity.io.tasks import gather_all
from infinity.store.directory import JobDirectory, open_directories
from infinity.store.volumes import OpenBackend

_FILE_NAME = "shards.bin"  # one of the names that JobDirectory removes


@dataclass(frozen=True, slots=True)
class Volume:
    """One directory's file.

    Attributes:
        index: its number.
        path: what the user gave.
        directory: the job directory.
    """

    index: int
    path: Path
    directory: Path

    @property
    def file(self) -> Path:
        """Where the file is."""
        return self.directory / _FILE_NAME


@dataclass(frozen=True, slots=True)
class _Open:
    backend: Backend
    choice: Choice
    file: File


class Channel:
    """All files, opened by one backend at one block size and depth; made by ``open_channel``.

    Attributes:
        volumes: the files.
        point: block size and depth.
    """

    def __init__(self, volumes: Sequence[Volume], point: Point, opened: Sequence[_Open]) -> None:
        self.volumes = volumes
        self.point = point
        self._opened = opened

    @property
    def choices(self) -> list[Choice]:
        """For each volume what was opened, and why."""
        return [opened.choice for opened in self._opened]

    @property
    def direct(self) -> bool:
        """Whether every file is read and written around the page cache."""
        return all(opened.backend.direct for opened in self._opened)

    async def read_into(self, volume: Volume, offset: int, target: torch.Tensor) -> None:
        """Fill host memory from a file. Reading and writing have one priority, as with equals side by side.

        Raises:
            StorageError: the read failed.
        """
        opened = self._opened[volume.index]
        await opened.backend.read_into(opened.file, offset, as_bytes(target), priority=Priority.DEMAND)

    async def write_from(self, volume: Volume, offset: int, source: torch.Tensor) -> None:
        """Write host memory to a file.

        Raises:
            StorageError: the write failed.
        """
        opened = self._opened[volume.index]
        await opened.backend.write_from(opened.file, offset, as_bytes(source), priority=Priority.DEMAND)

    def latency(self) -> LatencyHistogram:
        """Of all blocks that went through so far."""
        total = LatencyHistogram()
        for opened in self._opened:
            statistics = opened.backend.statistics()
            total += statistics.read_latency + statistics.write_latency
        return total

    async def preallocate(self, share_bytes: int) -> None:
        """Reserve the files' space.

        Raises:
            DiskFullError: no room.
            StorageError: any other failure of a system call.
        """
        await gather_all(opened.backend.preallocate(opened.file, share_bytes) for opened in self._opened)

    async def sync(self) -> None:
        """Make all that was written durable.

        Raises:
            StorageError: the system reported an error.
        """
        await gather_all(opened.backend.fsync(opened.file) for opened in self._opened)

    async def drop_page_cache(self) -> None:
        """Drop clean pages of the files that are read through the page cache; the rest is out of our hands.

        Raises:
            StorageError: the system reported an error.
        """
        for volume, opened in zip(self.volumes, self._opened, strict=True):
            if not opened.backend.direct:
                await call_in_thread(lambda path=volume.file: _drop(path))  # type: ignore[misc]

    async def still_cached(self, num_bytes: int) -> list[Volume]:
        """The volumes of which some of the first bytes are in the page cache, as far as the system says."""
        return [
            volume
            for volume in self.volumes
            if await call_in_thread(lambda path=volume.file: is_cached(path, num_bytes))  # type: ignore[misc]
        ]


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
async def open_channel(
    volumes: Sequence[Volume], backend: BackendName, point: Point, open_backend: OpenBackend
) -> AsyncIterator[Channel]:
    """Open the file of each volume, making those that are not there, with as many workers as the point is deep.

    Raises:
        DirectoryError: the backend does not work in a directory.
        StorageError: any other failure of a system call.
    """
    opened: list[_Open] = []
    async with contextlib.AsyncExitStack() as stack:
        for volume in volumes:
            made, choice = await open_backend(
                backend, volume.directory, num_threads=point.depth, block_bytes=point.block_bytes
            )
            stack.push_async_callback(made.aclose)
            new = not await call_in_thread(volume.file.exists)
            opened.append(_Open(made, choice, await made.open_file(volume.file, create=new)))
        yield Channel(volumes, point, opened)


def _drop(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error("dropping the page cache", error, path=path) from error
