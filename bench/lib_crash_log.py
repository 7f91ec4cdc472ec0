"""What a run does to the disk, call by call: recorded so that every state in which a crash may leave it can be made.

``recording`` takes the place of the system calls and of the I/O backend of ``infinity.store``; everything still
happens, and stands in a ``Log`` besides. An ``Op`` has a beginning and an end, since calls overlap: what has begun may
be on the disk, and what has ended before a sync of its file or directory began is on it once that sync has ended.
Nothing else is promised (``lib_crash_states.py`` makes the states).
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from infinity.config import BackendName
from infinity.engine import assembly, tiers
from infinity.io.backend import Backend, File, IOStatistics, Priority, Timing, Transfer
from infinity.io.open import Choice, open_backend
from infinity.store import directory, files, held, owner, striping
from infinity.store.commits import Commit, Commits
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey
from infinity.store.versions import Held

Kind = Literal["create", "rename", "unlink", "write", "size", "sync", "commit", "drop"]


@dataclass(slots=True, eq=False)
class Op:
    """One thing done.

    Attributes:
        kind: ``create``, ``rename`` and ``unlink`` change a directory; ``write`` and ``size`` a file; ``sync`` makes
            either durable; ``commit`` and ``drop`` say what the store was about.
        inode: the file or directory.
        begin: how many events there were before it began.
        end: how many before it ended.
        name: of a directory's entry.
        other: what it is renamed to.
        child: what the entry leads to.
        offset: in bytes.
        data: what is written.
        number: a size in bytes, or the number of a commit.
        truth: what a commit was.
    """

    kind: Kind
    inode: int = -1
    begin: int = 0
    end: int | None = None
    name: str = ""
    other: str = ""
    child: int = -1
    offset: int = 0
    data: bytes = b""
    number: int = 0
    truth: Truth | None = None


@dataclass(frozen=True, slots=True)
class Truth:
    """What a commit was when it was made.

    Attributes:
        shards: their bytes.
        engine: what the engine kept beside.
        tensors: and its tensors.
    """

    shards: dict[ShardKey, bytes]
    engine: dict[str, Any]
    tensors: bytes | None


@dataclass(slots=True)
class Log:
    """All that was done, in order.

    Attributes:
        ops: by their beginnings.
        num_events: beginnings and ends so far; a crash comes after any number of them.
        roots: the inodes of the NVMe paths.
        is_directory: by inode.
        num_begun: how many events tell what there was before.
    """

    ops: list[Op] = field(default_factory=list)
    num_events: int = 0
    roots: list[int] = field(default_factory=list)
    is_directory: list[bool] = field(default_factory=list)
    num_begun: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _known: dict[tuple[int, int], int] = field(default_factory=dict)

    def new_inode(self, *, is_directory: bool) -> int:
        with self._lock:
            self.is_directory.append(is_directory)
            return len(self.is_directory) - 1

    def add_root(self, path: Path) -> None:
        """An NVMe path; what there is in it is durable."""
        self.roots.append(self._add(path))

    def _add(self, path: Path) -> int:
        inode = self.new_inode(is_directory=path.is_dir())
        self.bind(path.stat(), inode)
        if path.is_dir():
            for entry in path.iterdir():
                self.note(Op("create", inode, name=entry.name, child=self._add(entry)))
        else:
            self.note(Op("size", inode, number=path.stat().st_size))
            self.note(Op("write", inode, data=path.read_bytes()))
        self.note(Op("sync", inode))
        return inode

    def note(self, op: Op) -> None:
        """This has been done."""
        with self.doing(op):
            pass

    def bind(self, status: os.stat_result, inode: int) -> None:
        """From now on, what the system has there is this inode."""
        self._known[status.st_dev, status.st_ino] = inode

    def bind_path(self, path: Path, inode: int) -> None:
        """What is there now is this inode."""
        self.bind(path.stat(), inode)

    def find(self, status: os.stat_result) -> int:
        """The inode of what the system has there."""
        return self._known[status.st_dev, status.st_ino]

    def find_path(self, path: Path) -> int:
        """The inode of a path."""
        return self.find(path.stat())

    @contextlib.contextmanager
    def doing(self, *ops: Op) -> Iterator[None]:
        """These begin, and have ended after the block; changes of a directory have not been if it raises an error."""
        with self._lock:
            for op in ops:
                op.begin = self.num_events
                self.num_events += 1
                self.ops.append(op)
        try:
            yield
        except OSError:
            with self._lock:
                self.ops = [op for op in self.ops if op not in ops or op.kind not in ("create", "rename", "unlink")]
            raise
        finally:
            with self._lock:
                for op in ops:
                    op.end = self.num_events
                    self.num_events += 1


class RecordingOs:
    """The module ``os`` for those modules of the store that change directories."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & os.O_CREAT:
            return os.open(path, flags, mode, dir_fd=dir_fd)
        assert dir_fd is not None
        child = self._log.new_inode(is_directory=False)
        with self._log.doing(Op("create", self._inode(dir_fd), name=path, child=child)):
            descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
            self._log.bind(os.fstat(descriptor), child)
        return descriptor

    def mkdir(self, path: str, mode: int, *, dir_fd: int) -> None:
        child = self._log.new_inode(is_directory=True)
        with self._log.doing(Op("create", self._inode(dir_fd), name=path, child=child)):
            os.mkdir(path, mode, dir_fd=dir_fd)
            self._log.bind(os.stat(path, dir_fd=dir_fd), child)

    def rename(self, path: str, other: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        child = self._log.find(os.stat(path, dir_fd=src_dir_fd))
        assert os.path.samestat(os.fstat(src_dir_fd), os.fstat(dst_dir_fd))
        with self._log.doing(Op("rename", self._inode(src_dir_fd), name=path, other=other, child=child)):
            os.rename(path, other, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        self._remove(os.unlink, path, dir_fd)

    def rmdir(self, path: str, *, dir_fd: int) -> None:
        self._remove(os.rmdir, path, dir_fd)

    def ftruncate(self, descriptor: int, num_bytes: int) -> None:
        with self._log.doing(Op("size", self._inode(descriptor), number=num_bytes)):
            os.ftruncate(descriptor, num_bytes)

    def fsync(self, descriptor: int) -> None:
        inode = self._inode(descriptor)
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            content = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            self._log.note(Op("write", inode, data=content))
        with self._log.doing(Op("sync", inode)):
            os.fsync(descriptor)

    def _remove(self, call: Any, path: str, dir_fd: int) -> None:
        try:
            child = self._log.find(os.stat(path, dir_fd=dir_fd, follow_symlinks=False))
        except KeyError:  # a probe of ``open_backend``, which is not recorded
            child = -1
        with self._log.doing(Op("unlink", self._inode(dir_fd), name=path, child=child)):
            call(path, dir_fd=dir_fd)

    def _inode(self, descriptor: int) -> int:
        return self._log.find(os.fstat(descriptor))


class RecordingBackend(Backend):
    """A backend whose writes stand in the log.

    Args:
        inner: moves the bytes.
        log: where to write it down.
    """

    name = "recording"

    def __init__(self, inner: Backend, log: Log) -> None:
        self._inner = inner
        self._log = log

    @property
    def direct(self) -> bool:
        return self._inner.direct

    async def open_file(self, path: Path, *, create: bool = False) -> File:
        if not create:
            return await self._inner.open_file(path)
        child = self._log.new_inode(is_directory=False)
        with self._log.doing(Op("create", self._log.find_path(path.parent), name=path.name, child=child)):
            file = await self._inner.open_file(path, create=True)
            self._log.bind_path(path, child)
        return file

    async def read_into(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = Priority.DEMAND
    ) -> None:
        await self._inner.read_into(file, offset, buffer, priority=priority)

    async def write_from(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = Priority.BACKGROUND
    ) -> None:
        await self.write_many([Transfer(file, offset, buffer)], priority=priority)

    async def read_many(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.DEMAND, timing: Timing | None = None
    ) -> None:
        await self._inner.read_many(transfers, priority=priority, timing=timing)

    async def write_many(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.BACKGROUND, timing: Timing | None = None
    ) -> None:
        ops = [
            Op("write", self._log.find_path(each.file.path), offset=each.offset, data=bytes(each.buffer))
            for each in transfers
        ]
        with self._log.doing(*ops):
            await self._inner.write_many(transfers, priority=priority, timing=timing)

    async def fsync(self, file: File) -> None:
        with self._log.doing(Op("sync", self._log.find_path(file.path))):
            await self._inner.fsync(file)

    async def preallocate(self, file: File, size_bytes: int) -> None:
        with self._log.doing(Op("size", self._log.find_path(file.path), number=size_bytes)):
            await self._inner.preallocate(file, size_bytes)

    def statistics(self) -> IOStatistics:
        return self._inner.statistics()

    async def aclose(self) -> None:
        await self._inner.aclose()


def bytes_of(versions: Held) -> dict[ShardKey, bytes]:
    """What held shards have on the disk now."""
    found = {}
    for key, version in versions.items():
        content = b""
        for volume, extent in version.places():
            with volume.file.path.open("rb") as file:
                file.seek(extent.offset)
                content += file.read(extent.num_bytes)
        found[key] = content
    return found


def recording_classes(log: Log) -> tuple[type[NvmeTier], type[Commits]]:
    """The two classes of the store that a log needs to hear of."""

    async def open_recording(
        name: BackendName, directory: Path, *, num_threads: int, block_bytes: int
    ) -> tuple[Backend, Choice]:
        backend, choice = await open_backend(name, directory, num_threads=num_threads, block_bytes=block_bytes)
        return RecordingBackend(backend, log), choice

    class RecordingTier(NvmeTier):
        @classmethod
        async def open(cls, paths: Sequence[Path], **arguments: Any) -> NvmeTier:
            return await super().open(paths, **{**arguments, "open_backend": open_recording})

    class RecordingCommits(Commits):
        async def make(
            self, held: Held, dtypes: Mapping[ShardKey, str], engine: Mapping[str, Any], tensors: bytes | None
        ) -> Commit:
            truth = Truth(bytes_of(held), dict(engine), tensors)
            with log.doing(Op("commit", number=self._number + 1, truth=truth)):
                return await super().make(held, dtypes, engine, tensors)

        async def drop_after(self, commit: Commit) -> None:
            with log.doing(Op("drop", number=commit.manifest.number)):
                await super().drop_after(commit)

    return RecordingTier, RecordingCommits


@contextlib.contextmanager
def recording(paths: Sequence[Path], commits: Mapping[int, Truth] | None = None) -> Iterator[Log]:
    """What is done to durable states below ``paths`` meanwhile. Shards are striped, however small.

    Args:
        paths: existing directories.
        commits: those that there are.
    """
    log = Log()
    for path in paths:
        log.add_root(path)
    for number, truth in sorted((commits or {}).items()):
        log.note(Op("commit", number=number, truth=truth))
    log.num_begun = log.num_events
    tier, recording_commits = recording_classes(log)
    with contextlib.ExitStack() as stack:
        for module in (directory, files, held, owner):
            stack.enter_context(mock.patch.object(module, "os", RecordingOs(log)))
        stack.enter_context(mock.patch.object(tiers, "NvmeTier", tier))
        stack.enter_context(mock.patch.object(assembly, "Commits", recording_commits))
        stack.enter_context(mock.patch.object(striping, "STRIPE_BYTES", 4096))
        yield log
