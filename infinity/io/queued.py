"""What every backend shares: admission, the life of requests and files, checks, statistics.

Workers (threads, or tasks over aiofiles) take and complete blocks under one lock, held for microseconds and never
around a system call. Everything else belongs to the event loop. Work that was accepted is finished or dropped before
the call that asked for it ends, and ``aclose`` accepts no more and waits for what there is: so nothing here outlives
its caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from infinity.errors import EngineStateError, StorageError, storage_error
from infinity.io.backend import DIRECT_ALIGNMENT, Backend, File, IOStatistics, Priority, Timing, Transfer
from infinity.io.bell import Bell
from infinity.io.completion import Completion, InFlight
from infinity.io.files import Descriptors, QueuedFile
from infinity.io.memory import address_of
from infinity.io.queue import RequestQueue
from infinity.io.requests import Block, Call, Piece, Request, TransferBlock, Transfers
from infinity.io.syscalls import Syscalls

T = TypeVar("T")

_MAX_MOVED = 1024


class QueuedBackend(Backend):
    """A backend whose workers take blocks from one queue; subclasses bring the workers."""

    def __init__(self, *, block_bytes: int, direct: bool, num_lanes: int, syscalls: Syscalls) -> None:
        if block_bytes < DIRECT_ALIGNMENT:
            raise ValueError(f"block_bytes: expected at least {DIRECT_ALIGNMENT}, got {block_bytes}")
        self._block_bytes = block_bytes - block_bytes % DIRECT_ALIGNMENT
        self._direct = direct
        self._num_lanes = num_lanes
        self._syscalls = syscalls
        self._lock = threading.Lock()
        self._queue = RequestQueue(block_bytes=self._block_bytes, direct=direct)
        self._statistics = IOStatistics(extra={"bounced_bytes": 0, "cached_bytes": 0})
        self._files: set[QueuedFile] = set()
        self._in_flight = InFlight()
        self._moved: list[tuple[bool, int, float]] = []
        self._bell: Bell | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed: Completion | None = None

    # What subclasses bring.

    @abstractmethod
    def _start(self) -> None:
        """Start workers that are missing; before each request."""

    @abstractmethod
    def _waker(self) -> Callable[[], object] | None:
        """Under the lock, when the queue may have become ``ready``: how to have a worker look, if one must be."""

    @abstractmethod
    async def _stop(self) -> bool:
        """End and join the workers, which are idle; whether cancelled meanwhile."""

    def _make_file(self, path: Path, lanes: Sequence[Descriptors]) -> QueuedFile:
        return QueuedFile(self, path, lanes, self._release)

    # The contract.

    @property
    def direct(self) -> bool:
        """Whether aligned transfers bypass the page cache."""
        return self._direct

    async def open_file(self, path: Path, *, create: bool = False) -> File:
        """Open a file; a cancelled or failed call leaves no descriptor, and no file that it created."""
        try:
            self._admit()
        except OSError as error:  # no descriptor is left
            raise storage_error("open", error, path=path) from error
        call = Call(lambda: self._make_file(path, self._open(path, create=create)), Priority.DEMAND)
        with self._in_flight:
            cancelled = await self._perform(call)
            if cancelled and call.results:
                undo = Call(lambda: self._undo_open(call.results[0], created=create), Priority.DEMAND)
                await self._perform(undo, droppable=False)
        if cancelled:
            raise asyncio.CancelledError
        file = call.result()
        self._files.add(file)
        return file

    async def read_into(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = Priority.DEMAND
    ) -> None:
        """One request of one transfer."""
        await self._transfer([Transfer(file, offset, buffer)], write=False, priority=priority)

    async def write_from(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = Priority.BACKGROUND
    ) -> None:
        """One request of one transfer."""
        await self._transfer([Transfer(file, offset, buffer)], write=True, priority=priority)

    async def read_many(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.DEMAND, timing: Timing | None = None
    ) -> None:
        """One request of many transfers; an error drops what was not begun."""
        await self._transfer(transfers, write=False, priority=priority, timing=timing)

    async def write_many(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.BACKGROUND, timing: Timing | None = None
    ) -> None:
        """One request of many transfers; an error drops what was not begun."""
        await self._transfer(transfers, write=True, priority=priority, timing=timing)

    async def fsync(self, file: File) -> None:
        """Queued as background work: a flush never holds up a read that waits."""
        await self._call(self._own(file), self._sync)

    async def preallocate(self, file: File, size_bytes: int) -> None:
        """Reserve space; where the file system cannot, only make the file that long (sparse)."""
        if size_bytes < 0:
            raise ValueError(f"size_bytes: expected 0 or more, got {size_bytes}")
        await self._call(self._own(file), lambda own: self._reserve(own, size_bytes))

    def statistics(self) -> IOStatistics:
        """Transfers by kind, failed requests, requests queued or running.

        ``extra`` has the bytes that took a slower path: ``bounced_bytes`` were copied because of the caller's address,
        ``cached_bytes`` went through the page cache.
        """
        with self._lock:
            self._count()
            now = self._statistics
            return replace(
                now,
                read_latency=now.read_latency.copy(),
                write_latency=now.write_latency.copy(),
                extra=dict(now.extra),
            )

    async def aclose(self) -> None:
        """Finish what was accepted, then close files and end workers.

        Raises:
            StorageError: the system could not close a file; everything is closed all the same.
        """
        self._bind()
        errors: list[StorageError] = []
        if self._closed is not None:
            cancelled = await self._closed.wait()
        else:
            self._closed = Completion()
            cancelled = await self._in_flight.drained()
            for file in tuple(self._files):
                try:
                    cancelled |= await file.close()
                except StorageError as error:
                    errors.append(error)
            cancelled |= await self._stop()
            if self._bell is not None:
                self._bell.close()
            self._closed.finish()
        if cancelled:
            raise asyncio.CancelledError
        if errors:
            raise errors[0]

    # On the loop.

    async def _release(self, file: QueuedFile) -> bool:
        call = Call(lambda: self._close(file), Priority.DEMAND)
        cancelled = await self._perform(call, droppable=False)
        self._files.discard(file)
        if not cancelled:
            call.result()
        return cancelled

    def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise EngineStateError(f"I/O backend {self.name!r} belongs to another event loop: open one per loop")

    def _admit(self) -> None:
        self._bind()
        if self._closed is not None:
            raise EngineStateError(f"I/O backend {self.name!r} is closed: open another before more transfers")
        if self._bell is None:
            self._bell = Bell()
        self._start()

    def _own(self, file: File) -> QueuedFile:
        if not isinstance(file, QueuedFile) or file.backend is not self:
            raise ValueError(f"file {file.path} was not opened by this backend")
        file.check_open()
        return file

    def _pieces(self, transfers: Iterable[Transfer], *, write: bool) -> list[Piece]:
        pieces = []
        for each in transfers:
            own, offset, view = self._own(each.file), each.offset, each.buffer
            if offset < 0:
                raise ValueError(f"offset in {own.path}: expected 0 or more, got {offset}")
            if not view.c_contiguous or (view.readonly and not write):
                raise ValueError(f"buffer for {own.path}: expected contiguous memory, writable for a read")
            if view.nbytes:
                flat = view.cast("B")
                pieces.append(Piece(own, offset, flat, address_of(flat)))
        return pieces

    async def _transfer(
        self, transfers: Iterable[Transfer], *, write: bool, priority: Priority, timing: Timing | None = None
    ) -> None:
        self._admit()
        pieces = self._pieces(transfers, write=write)
        if not pieces:
            return
        request = Transfers(pieces, write=write, priority=priority, timing=timing)
        for piece in pieces:
            piece.file.in_flight.begin()
        try:
            cancelled = await self._perform(request)
        finally:
            for piece in pieces:
                piece.file.in_flight.end()
        error = request.error()
        request.failure = None
        for piece in pieces:
            piece.view.release()  # a worker may keep its block for a moment more; the memory is the caller's again
        if cancelled:
            raise asyncio.CancelledError
        if error is not None:
            try:
                raise error
            finally:
                del error, request, pieces  # else the traceback keeps this frame, the frame the error and the buffers

    async def _call(self, file: QueuedFile, function: Callable[[QueuedFile], T]) -> T:
        self._admit()
        call = Call(lambda: function(file), Priority.BACKGROUND)
        with file.in_flight:
            cancelled = await self._perform(call)
        if cancelled:
            raise asyncio.CancelledError
        return call.result()

    async def _perform(self, request: Request, *, droppable: bool = True) -> bool:
        """Queue a request and wait until it has ended; whether cancelled meanwhile."""
        statistics = self._statistics
        statistics.num_in_flight += 1
        with self._in_flight:
            with self._lock:
                self._queue.push(request)
                wake = self._waker()
            if wake is not None:
                wake()
            cancelled = await request.wait((lambda: self._drop(request)) if droppable else None)
        statistics.num_in_flight -= 1
        statistics.num_errors += request.failure is not None
        if request.write:
            statistics.num_writes += request.num_whole
        else:
            statistics.num_reads += request.num_whole
        if len(self._moved) >= _MAX_MOVED:
            with self._lock:
                self._count()
        return cancelled

    def _drop(self, request: Request) -> None:
        with self._lock:
            ended = self._queue.drop(request)
            wake = self._waker()  # who had to wait behind it may fit
        if ended:
            request.finish()
        if wake is not None:
            wake()

    # On the workers; the first two under the lock.

    def _complete(self, block: Block, now: float) -> list[Request]:
        """Give back a block. Returns the requests that have ended by this, which the worker is to finish."""
        ended = self._queue.complete(block)
        block.error = None  # raised where it is awaited, it would keep that frame and its buffers
        if isinstance(block, TransferBlock):
            block.time(now)
            self._moved.append((block.write, block.moved_bytes, now - block.started))
            if block.bounced_bytes or block.cached_bytes:
                extra = self._statistics.extra
                extra["bounced_bytes"] += block.bounced_bytes
                extra["cached_bytes"] += block.cached_bytes
        return ended

    def _count(self) -> None:
        """Add up what was moved; when someone asks or there is much, and not each time a block is done."""
        statistics = self._statistics
        for write, num_bytes, seconds in self._moved:
            if write:
                statistics.written_bytes += num_bytes
                statistics.write_seconds += seconds
                statistics.write_latency.add(seconds)
            else:
                statistics.read_bytes += num_bytes
                statistics.read_seconds += seconds
                statistics.read_latency.add(seconds)
        self._moved.clear()

    def _finish_threadsafe(self, ended: Sequence[Completion]) -> None:
        """Wake those who wait for what has ended, by one wake-up of the loop at most."""
        if ended:
            assert self._bell is not None
            self._bell.ring(ended)

    # Whole files, on the workers.

    def _open(self, path: Path, *, create: bool) -> list[Descriptors]:
        lanes: list[Descriptors] = []
        with contextlib.ExitStack() as undo:
            try:
                for index in range(self._num_lanes):
                    new = create and index == 0
                    # Not with O_DIRECT: where that is refused, the file would have been created all the same.
                    buffered = self._syscalls.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0))
                    if new:
                        undo.callback(self._syscalls.unlink, path)
                    undo.callback(self._syscalls.close, buffered)
                    direct = None
                    if self._direct:
                        os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_RANDOM)
                        direct = self._syscalls.open(path, os.O_RDWR | os.O_DIRECT)
                        undo.callback(self._syscalls.close, direct)
                    lanes.append(Descriptors(buffered, direct))
            except OSError as error:
                raise storage_error("open for direct I/O" if self._direct else "open", error, path=path) from error
            undo.pop_all()
        return lanes

    def _undo_open(self, file: QueuedFile, *, created: bool) -> None:
        self._close(file)
        if created:
            self._syscalls.unlink(file.path)

    def _close(self, file: QueuedFile) -> None:
        errors: list[OSError] = []
        for lane in file.lanes:
            for descriptor in (lane.buffered, lane.direct):
                try:
                    if descriptor is not None:
                        self._syscalls.close(descriptor)
                except OSError as error:
                    errors.append(error)
        if errors:
            raise storage_error("close", errors[0], path=file.path) from errors[0]

    def _sync(self, file: QueuedFile) -> None:
        try:
            self._syscalls.sync_data(file.descriptor)
        except OSError as error:
            raise storage_error("fdatasync", error, path=file.path) from error

    def _reserve(self, file: QueuedFile, size_bytes: int) -> None:
        """On the direct descriptor, where glibc's emulation (a byte written into each block) fails at once."""
        calls, descriptor = self._syscalls, file.descriptor
        former_bytes = 0
        try:
            former_bytes = calls.size(descriptor)
            try:
                if size_bytes:
                    calls.reserve(descriptor, size_bytes)
            except OSError as error:
                with contextlib.suppress(OSError):  # the first error tells more
                    if calls.size(descriptor) > former_bytes:
                        calls.truncate(descriptor, former_bytes)
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                if size_bytes > former_bytes:
                    calls.truncate(descriptor, size_bytes)
        except OSError as error:
            raise storage_error(
                "preallocate", error, path=file.path, expected_bytes=size_bytes, got_bytes=former_bytes
            ) from error


def without_frames(error: BaseException) -> BaseException:
    """Strip the tracebacks: they hold a worker's frames, and those hold views of the caller's buffer."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
