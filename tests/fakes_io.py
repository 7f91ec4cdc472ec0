"""I/O backends over the real file system whose every system call passes a hook: to count, hold, shorten or fail it.

The hook sits below all of the code under test: in place of a system call, below ``aiofiles`` as a subclass of the
``io.FileIO`` that it calls in its threads, and before an io_uring, where every operation waits in a thread of its own
for what the hook decides. What a hook lets pass is done by the real kernel. ``Kind`` names a backend to test: a new
backend joins the contract and the fault suites by one more entry in ``KINDS``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import io
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity.io.aiofile import AiofilesBackend
from infinity.io.backend import Backend
from infinity.io.memory import PAGE_BYTES, allocate, as_bytes, round_up
from infinity.io.ring import Ring, refusal
from infinity.io.syscalls import Syscalls
from infinity.io.threads import ThreadBackend
from infinity.io.uring import UringBackend

BLOCK_BYTES = 64 << 10


@dataclass(frozen=True)
class Operation:
    """A system call that is about to be made, in the thread that makes it."""

    action: str
    offset: int = 0
    num_bytes: int = 0
    direct: bool = False


Hook = Callable[[Operation], "int | None"]
"""Raises the error that the call is to have, or says how many bytes it is to move (``None``: as the system does)."""


def let_pass(operation: Operation) -> None:
    """The hook that changes nothing."""


class HookedSyscalls(Syscalls):
    """The real system calls, behind a hook."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def open(self, path: Path, flags: int) -> int:
        self._hook(Operation("open", direct=bool(flags & os.O_DIRECT)))
        return super().open(path, flags)

    def close(self, descriptor: int) -> None:
        super().close(descriptor)  # as on Linux: it is gone even when that fails
        self._hook(Operation("close"))

    def read_into(self, descriptor: int, view: memoryview, offset: int) -> int:
        limit = self._hook(_transfer("read", descriptor, len(view), offset))
        return super().read_into(descriptor, view, offset) if limit is None else _read(descriptor, view[:limit], offset)

    def write_from(self, descriptor: int, view: memoryview, offset: int) -> int:
        limit = self._hook(_transfer("write", descriptor, len(view), offset))
        if limit is None:
            return super().write_from(descriptor, view, offset)
        return _write(descriptor, view[:limit], offset)

    def read_into_many(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        num_bytes = sum(len(view) for view in views)
        limit = self._hook(_transfer("read", descriptor, num_bytes, offset))
        if limit is None:
            return super().read_into_many(descriptor, views, offset)
        return _read_all(descriptor, views, limit, offset)

    def write_from_many(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        num_bytes = sum(len(view) for view in views)
        limit = self._hook(_transfer("write", descriptor, num_bytes, offset))
        if limit is None:
            return super().write_from_many(descriptor, views, offset)
        return _write_all(descriptor, views, limit, offset)

    def open_ring(self, num_operations: int) -> Ring:
        return HookedRing(num_operations, self._hook)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        self._hook(Operation("truncate", num_bytes=size_bytes))
        super().truncate(descriptor, size_bytes)

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        """A number from the hook: grow the file so far, then find the disk full."""
        limit = self._hook(Operation("reserve", num_bytes=size_bytes))
        if limit is None:
            super().reserve(descriptor, size_bytes)
        else:
            os.ftruncate(descriptor, limit)
            raise OSError(28, "No space left on device")

    def sync_data(self, descriptor: int) -> None:
        self._hook(Operation("fdatasync"))
        super().sync_data(descriptor)

    def sync(self, descriptor: int) -> None:
        self._hook(Operation("fsync"))
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._hook(Operation("rename"))
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._hook(Operation("unlink"))
        super().unlink(path)


class HookedRing(Ring):
    """A real ring, behind a hook. What is no ``OSError`` is raised by the operation that is prepared instead."""

    def __init__(self, num_operations: int, hook: Hook) -> None:
        self._hook = hook
        self._threads = ThreadPoolExecutor(num_operations)
        self._unmade = threading.Lock()
        self._passed: list[Callable[[], None]] = []
        self._done: list[tuple[int, int]] = []
        self._bugs: list[BaseException] = []
        super().__init__(num_operations)

    def transfer(
        self, token: int, descriptor: int, offset: int, segments: Sequence[tuple[int, int]], *, write: bool
    ) -> None:
        if self._bugs:
            raise self._bugs.pop()
        views = [memoryview((ctypes.c_char * length).from_address(address)).cast("B") for address, length in segments]
        operation = _transfer("write" if write else "read", descriptor, sum(map(len, views)), offset)
        make = functools.partial(super().transfer, token, descriptor, offset, segments, write=write)
        self._threads.submit(self._decide, token, operation, descriptor, views, make)

    def _decide(
        self, token: int, operation: Operation, descriptor: int, views: list[memoryview], make: Callable[[], None]
    ) -> None:
        try:
            limit = self._hook(operation)
            move = _write_all if operation.action == "write" else _read_all
            result = None if limit is None else move(descriptor, views, limit, operation.offset)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        except BaseException as bug:
            self._bugs.append(bug)
            result = -errno.EINTR
        with self._unmade:
            if result is None:
                self._passed.append(make)
            else:
                self._done.append((token, result))
        self.wake()

    def wait(self) -> list[tuple[int, int]]:
        with self._unmade:
            passed, self._passed = self._passed, []
            done, self._done = self._done, []
        for make in passed:
            make()
        return done or super().wait()

    def close(self) -> None:
        self._threads.shutdown()
        super().close()


class HookedFileIO(io.FileIO):
    """The file object under ``aiofiles``, behind a hook."""

    hook: Hook

    def readinto(self, buffer: Any, /) -> int | None:
        view = memoryview(buffer)
        limit = self.hook(_transfer("read", self.fileno(), len(view), self.tell()))
        return super().readinto(view) if limit is None else _read(self.fileno(), view[:limit], self.tell())

    def write(self, buffer: Any, /) -> int:
        view = memoryview(buffer)
        limit = self.hook(_transfer("write", self.fileno(), len(view), self.tell()))
        return super().write(view) if limit is None else _write(self.fileno(), view[:limit], self.tell())


def _transfer(action: str, descriptor: int, num_bytes: int, offset: int) -> Operation:
    flags = int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0], 8)
    return Operation(action, offset, num_bytes, bool(flags & os.O_DIRECT))


def _read(descriptor: int, view: memoryview, offset: int) -> int:
    """Any number of bytes, also where the descriptor is for direct I/O."""
    other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    try:
        return os.preadv(other, (view,), offset) if view else 0
    finally:
        os.close(other)


def _write(descriptor: int, view: memoryview, offset: int) -> int:
    other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    try:
        return os.pwritev(other, (view,), offset) if view else 0
    finally:
        os.close(other)


def _read_all(descriptor: int, views: Sequence[memoryview], limit: int, offset: int) -> int:
    joined = memoryview(bytearray(limit))
    moved_bytes = _read(descriptor, joined, offset)
    joined = joined[:moved_bytes]
    for view in views:
        view[: len(joined)] = joined[: len(view)]
        joined = joined[len(view) :]
    return moved_bytes


def _write_all(descriptor: int, views: Sequence[memoryview], limit: int, offset: int) -> int:
    return _write(descriptor, memoryview(b"".join(views))[:limit], offset)


@dataclass(frozen=True)
class Kind:
    """A backend to test."""

    name: str
    direct: bool

    def make(self, hook: Hook = let_pass, *, num_workers: int = 4, block_bytes: int = BLOCK_BYTES) -> Backend:
        syscalls = HookedSyscalls(hook)
        if self.name == "threads":
            return ThreadBackend(num_workers, block_bytes, self.direct, syscalls)
        if self.name == "uring":
            return UringBackend(num_workers, block_bytes, self.direct, syscalls)

        def raw_file(descriptor: int, mode: str, closefd: bool) -> io.FileIO:
            file = HookedFileIO(descriptor, mode, closefd)
            file.hook = hook
            return file

        return AiofilesBackend(num_workers, block_bytes, self.direct, syscalls, raw_file)

    def num_descriptors(self, *, num_workers: int) -> int:
        """How many descriptors an open file takes."""
        return (1 + self.direct) * (num_workers if self.name == "aiofiles" else 1)

    def __str__(self) -> str:
        return f"{self.name}-{'direct' if self.direct else 'buffered'}"


KINDS = [Kind(name, direct) for name in ("threads", "uring", "aiofiles") for direct in (True, False)]


@functools.cache
def ring_refusal() -> str | None:
    """Why this machine has no io_uring; ``None`` where it has."""
    try:
        Ring(1).close()
    except OSError as error:
        return refusal(error)
    return None


def fail(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class Faults:
    """A hook that follows a plan: the n-th call of an action raises an error or moves so many bytes."""

    def __init__(self, action: str, plan: dict[int, OSError | int]) -> None:
        self.num_calls = 0
        self._action = action
        self._plan = plan
        self._lock = threading.Lock()

    def __call__(self, operation: Operation) -> int | None:
        if operation.action != self._action:
            return None
        with self._lock:
            fault = self._plan.get(self.num_calls)
            self.num_calls += 1
        if isinstance(fault, OSError):
            raise fault
        return fault


class Gate:
    """A hook that holds chosen calls in their threads until the test lets them go."""

    def __init__(self, *actions: str) -> None:
        self.arrived: asyncio.Queue[Operation] = asyncio.Queue()
        self.log: list[Operation] = []
        self._actions = actions
        self._loop = asyncio.get_running_loop()
        self._permits = threading.Semaphore(0)
        self._open = False

    def __call__(self, operation: Operation) -> None:
        self.log.append(operation)
        if operation.action in self._actions and not self._open:
            self._loop.call_soon_threadsafe(self.arrived.put_nowait, operation)
            if not self._permits.acquire(timeout=60):
                raise AssertionError(f"nobody let {operation} pass")

    async def arrival(self) -> Operation:
        """The next call that waits at the gate."""
        return await asyncio.wait_for(self.arrived.get(), 60)

    def let_one_pass(self) -> None:
        """Release one call, now or when it comes."""
        self._permits.release()

    def open(self) -> None:
        """Release all calls, for good."""
        self._open = True
        self._permits.release(1000)

    def count(self, action: str) -> int:
        """How many calls of one kind have come, held or not."""
        return sum(operation.action == action for operation in self.log)


class Rig:
    """Backends of one kind and files for one test; closes what the test left open."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        self.kind = kind
        self.path = directory / "file"
        self._backends: list[Backend] = []
        self._gates: list[Gate] = []

    def gate(self, *actions: str) -> Gate:
        gate = Gate(*actions)
        self._gates.append(gate)
        return gate

    def backend(self, hook: Hook = let_pass, *, num_workers: int = 4, block_bytes: int = BLOCK_BYTES) -> Backend:
        backend = self.kind.make(hook, num_workers=num_workers, block_bytes=block_bytes)
        self._backends.append(backend)
        return backend

    async def aclose(self) -> None:
        for gate in self._gates:
            gate.open()
        for backend in self._backends:
            await backend.aclose()


@contextlib.asynccontextmanager
async def rig_for(kind: Kind, directory: Path) -> AsyncIterator[Rig]:
    """A rig for one test; fails the test that leaves a descriptor or a thread behind."""
    if kind.direct and not supports_direct(directory):
        pytest.skip(f"no O_DIRECT in {directory}")
    if kind.name == "uring" and ring_refusal() is not None:
        pytest.skip(f"no io_uring: {ring_refusal()}")
    before = resources()
    rig = Rig(kind, directory)
    yield rig
    await rig.aclose()
    assert resources() == before


def supports_direct(directory: Path) -> bool:
    """Whether files in ``directory`` can be opened with ``O_DIRECT``."""
    path = directory / "direct?"
    path.touch()
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    else:
        return True
    finally:
        path.unlink()


def resources() -> tuple[int, list[str]]:
    """How many descriptors the process has, and the names of its threads."""
    return len(list(Path("/proc/self/fd").iterdir())), sorted(thread.name for thread in threading.enumerate())


def num_open(directory: Path) -> int:
    """How many descriptors the process has of files in a directory, removed ones too."""
    targets = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return sum(target.startswith(f"{directory}/") for target in targets)


def buffer(num_bytes: int, *, shift: int = 0, fill: bytes = b"\0") -> memoryview:
    """Memory for I/O that begins ``shift`` bytes after a page boundary, filled with a repeated pattern."""
    view = as_bytes(allocate(round_up(max(1, num_bytes + shift), PAGE_BYTES)))[shift : shift + num_bytes]
    view[:] = (fill * (num_bytes // len(fill) + 1))[:num_bytes]
    return view


def noise(num_bytes: int, seed: int = 0) -> bytes:
    """Bytes of which no two stretches are alike, the same in every run."""
    return np.random.default_rng(seed).bytes(num_bytes)


async def spin(num_turns: int = 20) -> None:
    """Let the loop run what is ready."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread is about to do."""
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come")


def files_in(directory: Path) -> list[str]:
    """The names in a directory; none where it is none."""
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
