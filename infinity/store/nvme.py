"""The NVMe tier: shards in one large file per directory, moved with asynchronous direct I/O.

Guarantees
    * What was enough at open stays enough. Each file is preallocated to its share of the capacity, and a shard is
      placed wherever room is: in one extent if a hole is large enough, else in several, else in several directories.
      So any shard that fits the capacity by arithmetic fits in fact, no file ever grows, and a disk that was large
      enough at open stays so.
    * ``write``, ``read`` and ``flush`` move every byte or raise a ``StorageError`` that names the shard and the file.
      After they end, however they end, the caller's memory is not touched any more.
    * A shard is readable once a write of it has ended well. A first write that failed or was cancelled leaves nothing.
      A failed or cancelled overwrite leaves the shard readable with undefined contents: the caller writes it again
      before it reads it, or restores from what it committed.
    * After ``aclose``, or an ``open`` that failed, no descriptor, thread, file or directory of ours is left.

The caller orders the transfers of one shard: no write or delete while another transfer of it is under way. The tier
refuses what breaks this (``EngineStateError``), because an extent given back too early would be another shard's bytes.

Striping: a shard of at least ``STRIPE_BYTES`` per directory is cut into nearly equal pieces, one per directory, moved
at the same time; a smaller one goes whole to the directory that holds least, since halves of it would only be smaller
requests.

Rejected: letting files grow past their share when they are unevenly filled or fragmented (the disk may be full by
then, in the middle of a training run); a file per shard (a descriptor, an inode and a fallocate each); fixed slots (a
small shard pins a large slot); buddy extents (round up to half as much again).

Everything belongs to the event loop that awaited ``open``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from infinity.config import BackendName
from infinity.errors import BudgetError, ConfigError, DiskFullError, EngineStateError, StorageError
from infinity.io.backend import DIRECT_ALIGNMENT, Backend, File, IOStatistics, Priority, Transfer
from infinity.io.completion import InFlight, call_in_thread
from infinity.io.open import Choice
from infinity.io.open import open_backend as _open_backend
from infinity.io.tasks import gather_all
from infinity.store.directory import JobDirectory, open_directories
from infinity.store.shard import Extent, ExtentAllocator, ShardKey
from infinity.trace import TierUsage

STRIPE_BYTES = 1 << 20
"""A shard is cut over the directories when each gets at least this much."""

MARGIN_BYTES = 16 << 20
"""What must stay free on a file system beyond our files: its own metadata for them, and other people's logs."""


class OpenBackend(Protocol):
    """The signature of ``infinity.io.open.open_backend``."""

    async def __call__(
        self, name: BackendName, directory: Path, *, num_threads: int, block_bytes: int
    ) -> tuple[Backend, Choice]:
        """Open the best backend for ``directory`` that ``name`` allows, and say why it was chosen."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Volume:
    """One directory's file, and the backend that moves its bytes."""

    backend: Backend
    file: File
    allocator: ExtentAllocator


@dataclasses.dataclass(slots=True, eq=False)
class _Shard:
    """Where a shard's bytes are, in the order of the dictionary and of its lists, and who is moving them."""

    num_bytes: int
    extents: dict[_Volume, list[Extent]]
    readable: bool
    writing: bool = False
    num_reads: int = 0


class NvmeTier:
    """Shards on NVMe; made by ``NvmeTier.open``. What it guarantees stands at the head of this file.

    Attributes:
        choices: for each job directory, which backend ``open_backend`` chose and why.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.choices: dict[Path, Choice] = {}
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._peak_bytes = 0
        self._directories: list[JobDirectory] = []
        self._backends: list[Backend] = []
        self._volumes: list[_Volume] = []
        self._shards: dict[ShardKey, _Shard] = {}
        self._in_flight = InFlight()
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def open(
        cls,
        paths: Sequence[Path],
        *,
        capacity_bytes: int,
        backend_name: BackendName,
        num_threads: int,
        block_bytes: int,
        rank: int = 0,
        open_backend: OpenBackend = _open_backend,
    ) -> NvmeTier:
        """Make a job directory below each of ``paths``, and in each a file for its share of ``capacity_bytes``.

        Args:
            paths: existing, writable directories; several are striped.
            capacity_bytes: the most that all shards together may take.
            backend_name: which I/O backend, or ``"auto"``.
            num_threads: worker threads per directory.
            block_bytes: largest single system call.
            rank: rank of this process; ranks may share paths.
            open_backend: opens the backend of one directory.

        Raises:
            ConfigError: ``paths`` is empty.
            DirectoryError: a path cannot be used, or another live job uses it (``DirectoryInUseError``).
            DiskFullError: the file systems lack room; the message shows the arithmetic.
            StorageError: any other failure of the system.
        """
        assert capacity_bytes >= 0
        if not paths:
            raise ConfigError("nvme: expected at least one directory for the NVMe tier, got none")
        tier = cls(capacity_bytes)
        try:
            await call_in_thread(lambda: tier._directories.extend(open_directories(paths, rank=rank)))
            num_pages_each = -(-capacity_bytes // (DIRECT_ALIGNMENT * len(paths)))
            share_bytes = num_pages_each * DIRECT_ALIGNMENT
            await call_in_thread(lambda: _check_free(tier._directories, capacity_bytes, share_bytes))
            for directory in tier._directories:
                backend, choice = await open_backend(
                    backend_name, directory.path, num_threads=num_threads, block_bytes=block_bytes
                )
                tier._backends.append(backend)
                tier.choices[directory.path] = choice
                file = await backend.open_file(directory.path / "shards.bin", create=True)
                tier._volumes.append(_Volume(backend, file, ExtentAllocator(share_bytes)))
            if share_bytes:
                await gather_all(volume.backend.preallocate(volume.file, share_bytes) for volume in tier._volumes)
        except BaseException:
            with contextlib.suppress(StorageError):  # the first failure is the one to repair
                await tier.aclose()
            raise
        return tier

    def __contains__(self, key: ShardKey) -> bool:
        shard = self._shards.get(key)
        return shard is not None and shard.readable

    async def write(self, key: ShardKey, source: memoryview, *, priority: Priority = Priority.BACKGROUND) -> None:
        """Store all of ``source`` under ``key``: in place if it has the length of the last time, else in new extents.

        Args:
            key: which shard.
            source: contiguous unsigned bytes, a non-zero multiple of ``DIRECT_ALIGNMENT`` of them.
            priority: who goes first.

        Raises:
            BudgetError: the capacity has no room for it; what the tier held of it before stays.
            DiskFullError: the file system has no room.
            StorageError: the length is not a multiple, or the system reported an error; names the shard.
            EngineStateError: a transfer of this shard is under way, or the tier is closed.
        """
        assert source.format == "B"
        shard = self._find_idle(key, "write")
        if source.nbytes == 0 or source.nbytes % DIRECT_ALIGNMENT:
            raise self._error(f"{key}: expected a non-zero multiple of {DIRECT_ALIGNMENT} bytes", source)
        if shard is None or shard.num_bytes != source.nbytes:
            shard = self._replace(key, source.nbytes)
        shard.writing = True
        try:
            with self._doing(f"write of {key}"):
                await gather_all(
                    volume.backend.write_many(batch, priority=priority) for volume, batch in _batches(shard, source)
                )
            shard.readable = True
        finally:
            shard.writing = False
            if not shard.readable:
                self._release(key)

    async def read(self, key: ShardKey, target: memoryview, *, priority: Priority = Priority.DEMAND) -> None:
        """Fill ``target`` with the shard's bytes.

        Args:
            key: which shard.
            target: contiguous writable unsigned bytes, exactly as many as were written.
            priority: who goes first.

        Raises:
            StorageError: the tier does not hold the shard, it has another length, or the system reported an error.
            EngineStateError: a write of this shard is under way, or the tier is closed.
        """
        assert target.format == "B"
        self._check_open()
        shard = self._shards.get(key)
        if shard is None:
            raise self._error(
                f"{key} is not in the NVMe tier: never written, deleted, or its only write failed", target
            )
        if shard.writing:
            raise _under_way(key, "read")
        if shard.num_bytes != target.nbytes:
            raise self._error(f"{key}: expected a target of the length that was written", target, shard)
        shard.num_reads += 1
        try:
            with self._doing(f"read of {key}"):
                await gather_all(
                    volume.backend.read_many(batch, priority=priority) for volume, batch in _batches(shard, target)
                )
        finally:
            shard.num_reads -= 1

    def delete(self, key: ShardKey) -> None:
        """Forget a shard and give its extents back; harmless where there is none.

        Raises:
            EngineStateError: a transfer of this shard is under way, or the tier is closed.
        """
        if self._find_idle(key, "delete") is not None:
            self._release(key)

    async def flush(self) -> None:
        """Make every write that has ended durable.

        Raises:
            StorageError: the system reported an error; what was written since the last flush may be lost.
            EngineStateError: the tier is closed.
        """
        self._check_open()
        with self._doing("flush of the NVMe tier"):
            await gather_all(volume.backend.fsync(volume.file) for volume in self._volumes)

    def usage(self) -> TierUsage:
        """Bytes that shards take now, the most they ever took, and the capacity; safe from any thread."""
        return TierUsage(self._used_bytes, self._peak_bytes, self._capacity_bytes)

    def statistics(self) -> IOStatistics:
        """What all backends have moved since they were opened, their probes included; safe from any thread."""
        total = IOStatistics()
        for part in (backend.statistics() for backend in self._backends):
            for field in dataclasses.fields(IOStatistics):
                if field.name != "extra":
                    setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))
            for name, value in part.extra.items():
                total.extra[name] = total.extra.get(name, 0.0) + value
        return total

    async def aclose(self) -> None:
        """Wait for what is in flight, close the backends, remove the directories. Closing twice is harmless.

        A cancelled call still ends only when all of this is done.

        Raises:
            StorageError: a file or directory could not be closed or removed.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        cancelled = False
        while not self._closing.done():
            try:
                await asyncio.wait([self._closing])
            except asyncio.CancelledError:
                cancelled = True
        error = self._closing.exception()
        if cancelled:
            raise asyncio.CancelledError
        if error is not None:
            raise error

    async def _close(self) -> None:
        try:
            await self._in_flight.drained()
            await gather_all(backend.aclose() for backend in self._backends)
        finally:
            self._shards.clear()
            removal = contextlib.ExitStack()
            for directory in self._directories:
                removal.callback(directory.close)
            await call_in_thread(removal.close)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise EngineStateError("the NVMe tier is closed")

    def _find_idle(self, key: ShardKey, action: str) -> _Shard | None:
        """The shard, if there is one; it is an error if a transfer of it is under way."""
        self._check_open()
        shard = self._shards.get(key)
        if shard is not None and (shard.writing or shard.num_reads):
            raise _under_way(key, action)
        return shard

    @contextlib.contextmanager
    def _doing(self, action: str) -> Iterator[None]:
        """Count an operation, so that ``aclose`` waits for it, and name it in the errors of the backend."""
        with self._in_flight:
            try:
                yield
            except StorageError as error:
                error.message = f"{action}: {error.message}"
                error.args = (error.message,)
                raise

    def _replace(self, key: ShardKey, num_bytes: int) -> _Shard:
        """Give ``key`` extents for ``num_bytes`` instead of those it has."""
        old = self._shards.get(key)
        used_bytes = self._used_bytes - (old.num_bytes if old is not None else 0)
        if used_bytes + num_bytes > self._capacity_bytes:
            raise BudgetError(
                f"{key} needs {num_bytes} bytes of the NVMe tier, but other shards take {used_bytes} of its "
                f"{self._capacity_bytes}: short by {used_bytes + num_bytes - self._capacity_bytes}; "
                f"the smallest capacity_bytes that would do is {used_bytes + num_bytes}"
            )
        if old is not None:
            self._release(key)
        shard = _Shard(num_bytes, self._place(num_bytes), readable=old is not None)
        self._shards[key] = shard
        self._used_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return shard

    def _release(self, key: ShardKey) -> None:
        shard = self._shards.pop(key)
        self._used_bytes -= shard.num_bytes
        for volume, extents in shard.extents.items():
            for extent in extents:
                volume.allocator.free(extent)

    def _place(self, num_bytes: int) -> dict[_Volume, list[Extent]]:
        """Take room for a shard: striped or whole, and what does not fit there wherever room is."""
        volumes = sorted(self._volumes, key=lambda volume: volume.allocator.used_bytes)
        wanted = [num_bytes] + [0] * (len(volumes) - 1)
        if num_bytes >= len(volumes) * STRIPE_BYTES:
            num_pages, num_extra = divmod(num_bytes // DIRECT_ALIGNMENT, len(volumes))
            wanted = [(num_pages + (index < num_extra)) * DIRECT_ALIGNMENT for index in range(len(volumes))]
        room = [volume.allocator.free_bytes for volume in volumes]
        sizes = [min(pair) for pair in zip(wanted, room, strict=True)]
        for index in range(len(volumes)):
            sizes[index] += min(num_bytes - sum(sizes), room[index] - sizes[index])
        assert sum(sizes) == num_bytes, "the files together are at least as large as the capacity"
        return {volume: volume.allocator.allocate(size) for volume, size in zip(volumes, sizes, strict=True) if size}

    def _error(self, message: str, memory: memoryview, shard: _Shard | None = None) -> StorageError:
        return StorageError(
            message,
            path=self._volumes[0].file.path,
            expected_bytes=shard.num_bytes if shard is not None else None,
            got_bytes=memory.nbytes,
        )


def _under_way(key: ShardKey, action: str) -> EngineStateError:
    return EngineStateError(f"{action} of {key} while another transfer of it is under way; await that first")


def _batches(shard: _Shard, memory: memoryview) -> Iterator[tuple[_Volume, list[Transfer]]]:
    """The shard's memory cut into its extents: one batch for each directory."""
    start = 0
    for volume, extents in shard.extents.items():
        batch = []
        for extent in extents:
            batch.append(Transfer(volume.file, extent.offset, memory[start : start + extent.num_bytes]))
            start += extent.num_bytes
        yield volume, batch


def _check_free(directories: Sequence[JobDirectory], capacity_bytes: int, share_bytes: int) -> None:
    """Compare what each file system must hold with what it has free."""
    devices = [directory.device for directory in directories]
    for directory in directories:
        num_sharing = devices.count(directory.device)
        needed_bytes = num_sharing * share_bytes + MARGIN_BYTES
        free_bytes = directory.free_bytes()
        if free_bytes < needed_bytes:
            raise DiskFullError(
                f"the NVMe tier needs {_in_gib(capacity_bytes)} in {len(directories)} directories = "
                f"{_in_gib(share_bytes)} each; {num_sharing} of them on this file system, with {_in_gib(MARGIN_BYTES)} "
                f"to spare, need {_in_gib(needed_bytes)}; {_in_gib(free_bytes)} are free: short by "
                f"{_in_gib(needed_bytes - free_bytes)}. Free space there, or give directories on other disks",
                path=directory.path,
                errno=errno.ENOSPC,
            )


def _in_gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.3f} GiB"
