"""The portable backend, over ``aiofiles``; and small files, written so that they are whole or not there.

Same requests, order and guarantees as ``ThreadBackend`` (``queued.py``), but tasks do the blocks and every system
call is an ``aiofiles`` call on an executor of the backend's own. ``aiofiles`` has no ``pread``: a position belongs to
a handle, and seek and read are two calls. So a file is opened once per worker (a *lane*), and a lane serves one block
at a time. That costs two thread switches per block, which is why this backend is not the default. Bytes at misaligned
addresses go through the page cache: bouncing them would take a third switch.

Tasks exist only while there are blocks, so none is left to be destroyed with the loop. Someone may still cancel them
(``asyncio.run`` cancels every task at its end), while a call in a thread cannot be interrupted and ``aiofiles``
forgets it when its await is cancelled. ``LastCall`` remembers it: the task waits for the call all the same, keeps
its outcome, and goes on; the cancelled callers have by then dropped the blocks that nobody wants, so it comes to an
end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from aiofiles.threadpool import wrap
from aiofiles.threadpool.binary import AsyncFileIO

from infinity.errors import storage_error
from infinity.io.completion import Completion, call_in_thread
from infinity.io.files import Descriptors, QueuedFile
from infinity.io.queued import QueuedBackend, without_frames
from infinity.io.requests import Block, CallBlock, TransferBlock
from infinity.io.syscalls import SYSCALLS, Syscalls

P = ParamSpec("P")
T = TypeVar("T")

RawFile = Callable[[int, str, bool], io.FileIO]
"""``io.FileIO(descriptor, mode, closefd)`` or a subclass of it: what ``aiofiles`` calls in its threads."""


class LastCall(Executor):
    """Hands one user's calls to shared threads and remembers the last of them."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._last: Future[Any] | None = None

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Pass the call on."""
        future = self._threads.submit(function, *args, **kwargs)
        self._last = future
        return future

    async def finish(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await one call on this executor to its end, whoever cancels; make it again if it was cancelled unbegun."""
        try:
            while True:
                try:
                    return await call()
                except asyncio.CancelledError:
                    last = self._last
                    assert last is not None
                await _until_done(last)
                if not last.cancelled():  # else it never ran
                    result: T = last.result()
                    return result
        finally:
            self._last = last = None  # its exception, once raised, would keep the caller's frames


async def _until_done(future: Future[Any]) -> None:
    done = Completion()
    future.add_done_callback(lambda _: done.finish_threadsafe())
    await done.wait()


class _Lane:
    """The handles that one block uses at a time."""

    def __init__(self, descriptors: Descriptors, threads: Executor, raw_file: RawFile) -> None:
        self.descriptors = descriptors
        self._calls = LastCall(threads)
        self._handles: dict[int, AsyncFileIO] = {
            descriptor: wrap(raw_file(descriptor, "r+b", False), executor=self._calls)
            for descriptor in (descriptors.buffered, descriptors.direct)
            if descriptor is not None
        }

    async def move(self, descriptor: int, view: memoryview, position: int, *, write: bool) -> int:
        """One system call's worth; how many bytes moved."""
        handle = self._handles[descriptor]
        await self._calls.finish(lambda: handle.seek(position))
        return await self._calls.finish(lambda: handle.write(view) if write else handle.readinto(view)) or 0


class _AiofilesFile(QueuedFile):
    """An open file with its free lanes: as many as there are workers, so one is always free."""

    def __init__(
        self,
        backend: AiofilesBackend,
        path: Path,
        lanes: Sequence[Descriptors],
        release: Callable[[QueuedFile], Awaitable[bool]],
        free: list[_Lane],
    ) -> None:
        super().__init__(backend, path, lanes, release)
        self.free = free


class AiofilesBackend(QueuedBackend):
    """Asynchronous I/O over ``aiofiles``.

    Args:
        num_handles: blocks in flight, threads, and handles per file (twice as many where I/O is direct).
        block_bytes: largest single system call, and the grain at which an urgent request overtakes; at least
            ``DIRECT_ALIGNMENT``, and rounded down to a multiple of it.
        direct: bypass the page cache (``O_DIRECT``); ``open_file`` then refuses where the file system does not have it.
        syscalls: the system calls on whole files.
        raw_file: makes the file objects under ``aiofiles``.

    Raises:
        ValueError: an argument is out of range.
    """

    name = "aiofiles"

    def __init__(
        self,
        num_handles: int = 8,
        block_bytes: int = 8 << 20,
        direct: bool = True,
        syscalls: Syscalls = SYSCALLS,
        raw_file: RawFile = io.FileIO,
    ) -> None:
        if num_handles < 1:
            raise ValueError(f"num_handles: expected at least 1, got {num_handles}")
        super().__init__(block_bytes=block_bytes, direct=direct, num_lanes=num_handles, syscalls=syscalls)
        self._raw_file = raw_file
        self._threads = ThreadPoolExecutor(num_handles, thread_name_prefix="infinity-aiofiles")
        self._tasks: set[asyncio.Task[None]] = set()

    def _make_file(self, path: Path, lanes: Sequence[Descriptors]) -> QueuedFile:
        free = [_Lane(lane, self._threads, self._raw_file) for lane in lanes]
        return _AiofilesFile(self, path, lanes, self._release, free)

    def _start(self) -> None:
        """The executor starts threads as it needs them."""

    def _waker(self) -> Callable[[], object] | None:
        """Another task, if there is something for it to do; it wakes the next."""
        return self._add_task if self._queue.ready and len(self._tasks) < self._num_lanes else None

    def _add_task(self) -> None:
        task = asyncio.get_running_loop().create_task(self._work())
        self._tasks.add(task)
        task.add_done_callback(self._worked)

    def _wake(self) -> None:
        if (wake := self._waker()) is not None:
            wake()

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake()  # a request came after its last look, or it was cancelled before it began

    async def _stop(self) -> bool:
        cancelled = False
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError:
                cancelled = True
        self._threads.shutdown()  # all are idle
        return cancelled

    async def _work(self) -> None:
        while (block := self._take()) is not None:
            try:
                if isinstance(block, CallBlock):
                    await self._run(block)
                else:
                    await self._move(block)
            except Exception as error:  # raised again where the request is awaited
                block.error = without_frames(error)
            for request in self._complete(block, time.perf_counter()):
                request.finish()

    def _take(self) -> Block | None:
        block = self._queue.take()
        if isinstance(block, TransferBlock):
            block.started = time.perf_counter()
        self._wake()
        return block

    async def _run(self, block: CallBlock) -> None:
        calls = LastCall(self._threads)
        await calls.finish(lambda: asyncio.get_running_loop().run_in_executor(calls, block.request.run))

    async def _move(self, block: TransferBlock) -> None:
        """Move the bytes of a block, continuing after short transfers; raise ``EOFError`` where no more move."""
        file = block.file
        assert isinstance(file, _AiofilesFile)
        lane = file.free.pop()
        try:
            while (done := block.moved_bytes) < block.num_bytes:
                position = block.position + done
                descriptor, num_bytes = lane.descriptors.route(position, block.num_bytes - done)
                if block.misaligned:
                    descriptor = lane.descriptors.buffered
                view = block.views(done, num_bytes)[0]
                try:
                    moved_bytes = await lane.move(descriptor, view, position, write=block.write)
                except InterruptedError:
                    continue
                if moved_bytes == 0:
                    raise EOFError
                block.moved_bytes += moved_bytes
                block.cached_bytes += moved_bytes if descriptor == lane.descriptors.buffered else 0
        finally:
            file.free.append(lane)


async def read_small(path: Path) -> bytes:
    """The whole of a small file.

    Raises:
        StorageError: it is not there or cannot be read.
    """

    def read() -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise storage_error("read", error, path=path) from error

    return await call_in_thread(read)


async def write_small_atomic(path: Path, data: bytes, *, syscalls: Syscalls = SYSCALLS) -> None:
    """Replace a small file, or create it with mode 0600; after a failure or crash it is the former or the new one.

    When this returns, the new content is durable. A cancellation that comes before the new file takes its name leaves
    the former one; nothing temporary is left in any case.

    Raises:
        DiskFullError: no room.
        StorageError: the system reported an error; when it is about the directory, the new file is in place, and it is
            unknown whether it would survive a power loss.
    """
    unwanted = threading.Event()
    await call_in_thread(lambda: _replace(path, data, unwanted, syscalls), on_cancel=unwanted.set)


def _replace(path: Path, data: bytes, unwanted: threading.Event, syscalls: Syscalls) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    written_bytes = 0
    try:
        descriptor = syscalls.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with contextlib.ExitStack() as undo:
            undo.callback(_unlink_quietly, temporary, syscalls)
            with contextlib.ExitStack() as opened:
                opened.callback(syscalls.close, descriptor)
                while written_bytes < len(data):
                    rest = memoryview(data)[written_bytes:]
                    moved_bytes = syscalls.write_from(descriptor, rest, written_bytes)
                    if moved_bytes == 0:
                        raise OSError(errno.EIO, "the device takes no more")
                    written_bytes += moved_bytes
                syscalls.sync(descriptor)
            if unwanted.is_set():
                return
            syscalls.rename(temporary, path)
            undo.pop_all()
        directory = syscalls.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            syscalls.sync(directory)
        finally:
            syscalls.close(directory)
    except OSError as error:
        raise storage_error(
            "atomic write", error, path=path, expected_bytes=len(data), got_bytes=written_bytes
        ) from error


def _unlink_quietly(path: Path, syscalls: Syscalls) -> None:
    with contextlib.suppress(OSError):
        syscalls.unlink(path)
