"""Fakes below the store: a backend on real files that can be held, made to fail, and given a disk of any size."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from infinity.config import BackendName
from infinity.errors import DiskFullError, ShortTransferError
from infinity.io.backend import Backend, File, IOStatistics, Priority, Timing, Transfer
from infinity.io.open import Choice


class FakeFile(File):
    """A descriptor; ``aclose`` closes it once."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    async def aclose(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class FakeBackend(Backend):
    """Moves bytes at once, on the loop; keeps the contract under cancellation and faults.

    Attributes:
        faults: called with the operation's name ("read", "write", "fsync", "preallocate", "open_file", "aclose") and
            the file's path before it runs; what it returns, if anything, is raised.
        gate: operations wait here; clear it to hold them in flight.
        log: the operations, with the priority of transfers and the lengths in bytes of their pieces.
    """

    name = "fake"

    def __init__(self, disk_bytes: int = 1 << 40) -> None:
        self.faults: Callable[[str, Path], BaseException | None] = lambda operation, path: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.log: list[tuple[str, Priority | None, tuple[int, ...]]] = []
        self.num_waiting = 0
        self.closed = False
        self._disk_bytes = disk_bytes
        self._files: list[FakeFile] = []
        self._statistics = IOStatistics()

    @property
    def direct(self) -> bool:
        return False

    async def open_file(self, path: Path, *, create: bool = False) -> File:
        await self._begin("open_file", path)
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        file = FakeFile(path, os.open(path, flags, 0o600))
        self._files.append(file)
        return file

    async def read_into(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = Priority.DEMAND
    ) -> None:
        await self.read_many([Transfer(file, offset, buffer)], priority=priority)

    async def write_from(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = Priority.BACKGROUND
    ) -> None:
        await self.write_many([Transfer(file, offset, buffer)], priority=priority)

    async def read_many(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.DEMAND, timing: Timing | None = None
    ) -> None:
        start_seconds = time.perf_counter()
        await self._transfer("read", transfers, priority)
        if timing is not None:
            timing.add(start_seconds, time.perf_counter())

    async def write_many(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.BACKGROUND, timing: Timing | None = None
    ) -> None:
        start_seconds = time.perf_counter()
        await self._transfer("write", transfers, priority)
        if timing is not None:
            timing.add(start_seconds, time.perf_counter())

    async def fsync(self, file: File) -> None:
        await self._begin("fsync", file.path)

    async def preallocate(self, file: File, size_bytes: int) -> None:
        await self._begin("preallocate", file.path)
        if size_bytes > self._disk_bytes:
            raise DiskFullError("preallocate failed", path=file.path, expected_bytes=size_bytes, errno=errno.ENOSPC)
        os.truncate(_descriptor(file), size_bytes)

    def statistics(self) -> IOStatistics:
        return self._statistics

    async def aclose(self) -> None:
        self.closed = True
        for file in self._files:
            await file.aclose()
        await self._begin("aclose", Path())

    async def _begin(self, operation: str, path: Path) -> None:
        cancelled = await self._admit(operation, path)
        if cancelled is not None:
            raise cancelled

    async def _admit(
        self, operation: str, path: Path, priority: Priority | None = None, lengths: tuple[int, ...] = ()
    ) -> asyncio.CancelledError | None:
        """Fail if so told, else wait for the gate as a submitted request does: even when cancelled meanwhile."""
        self.log.append((operation, priority, lengths))
        error = self.faults(operation, path)
        if error is not None:
            self._statistics.num_errors += 1
            raise error
        cancelled: asyncio.CancelledError | None = None
        self.num_waiting += 1
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError as caught:
                cancelled = caught
        self.num_waiting -= 1
        return cancelled

    async def _transfer(self, operation: str, transfers: Sequence[Transfer], priority: Priority) -> None:
        assert not self.closed
        lengths = tuple(len(each.buffer) for each in transfers)
        cancelled = await self._admit(operation, transfers[0].file.path, priority, lengths)
        for each in transfers:
            length = len(each.buffer) // 2 if cancelled is not None else len(each.buffer)
            if operation == "write":
                moved = os.pwrite(_descriptor(each.file), each.buffer[:length], each.offset)
                self._statistics.written_bytes += moved
            else:
                moved = os.preadv(_descriptor(each.file), [each.buffer[:length]], each.offset)
                self._statistics.read_bytes += moved
            if moved != length:
                raise ShortTransferError(operation, path=each.file.path, expected_bytes=length, got_bytes=moved)
        if cancelled is not None:
            raise cancelled
        if operation == "write":
            self._statistics.num_writes += 1
        else:
            self._statistics.num_reads += 1
        self._statistics.extra["batches"] = self._statistics.extra.get("batches", 0.0) + 1


def _descriptor(file: File) -> int:
    assert isinstance(file, FakeFile)
    return file.descriptor


class FakeOpener:
    """Stands in for ``open_backend``: one ``FakeBackend`` per directory.

    Args:
        disk_bytes: room on each directory's disk.

    Attributes:
        backends: those opened, in order.
        faults: given to each backend, and asked for "open_backend" with the directory.
        gate: given to each backend, and passed before it is opened.
    """

    def __init__(self, disk_bytes: int = 1 << 40) -> None:
        self.backends: list[FakeBackend] = []
        self.faults: Callable[[str, Path], BaseException | None] = lambda operation, path: None
        self.gate = asyncio.Event()
        self.gate.set()
        self._disk_bytes = disk_bytes

    async def __call__(
        self, name: BackendName, directory: Path, *, num_threads: int, block_bytes: int
    ) -> tuple[Backend, Choice]:
        error = self.faults("open_backend", directory)
        if error is not None:
            raise error
        await self.gate.wait()
        backend = FakeBackend(self._disk_bytes)
        backend.gate = self.gate
        backend.faults = lambda operation, path: self.faults(operation, path)
        self.backends.append(backend)
        return backend, Choice("fake", direct=False, reasons=("a test asked for it",))
