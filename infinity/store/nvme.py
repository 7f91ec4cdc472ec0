"""The NVMe tier: shards in one large file per directory, moved with asynchronous direct I/O.

Guarantees
    * What was enough at open stays enough. Each file is preallocated to its share of the capacity, and a shard is
      placed wherever room is: in one extent if a hole is large enough, else in several, else in other directories.
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

Several directories are striped in proportion to their speed (``striping.py``), which is given or measured at open
(``speeds.py``); ``volumes.py`` opens their files and finds room in them. Speed decides where bytes go and never which:
what was enough stays enough under all weights.

Rejected: letting files grow past their share when they are unevenly filled or fragmented (the disk may be full by
then, in the middle of a training run); a file per shard (a descriptor, an inode and a fallocate each); fixed slots (a
small shard pins a large slot); buddy extents (round up to half as much again).

Everything belongs to the event loop that awaited ``open``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from infinity.config import BackendName
from infinity.errors import BudgetError, ConfigError, EngineStateError, StorageError
from infinity.io.backend import DIRECT_ALIGNMENT, IOStatistics, Priority, Timing, Transfer
from infinity.io.completion import InFlight
from infinity.io.open import Choice
from infinity.io.open import open_backend as _open_backend
from infinity.io.tasks import gather_all
from infinity.store.shard import Extent, ShardKey
from infinity.store.volumes import OpenBackend, Volume, Volumes
from infinity.trace import READ, WRITE, TierUsage, TransferObserver


@dataclasses.dataclass(slots=True, eq=False)
class _Shard:
    """Where a shard's bytes are, in the order of the dictionary and of its lists, and who is moving them."""

    num_bytes: int
    extents: dict[Volume, list[Extent]]
    readable: bool
    writing: bool = False
    num_reads: int = 0


class NvmeTier:
    """Shards on NVMe; made by ``NvmeTier.open``. What it guarantees stands at the head of this file."""

    def __init__(self, capacity_bytes: int, observe: TransferObserver | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._observe = observe
        self._used_bytes = 0
        self._peak_bytes = 0
        self._volumes = Volumes()
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
        weights: Sequence[float] | None = None,
        rank: int = 0,
        observe: TransferObserver | None = None,
        open_backend: OpenBackend = _open_backend,
    ) -> NvmeTier:
        """Make a job directory below each of ``paths``, and in each a file for its share of ``capacity_bytes``.

        Args:
            paths: existing, writable directories; several are striped.
            capacity_bytes: the most that all shards together may take.
            backend_name: which I/O backend, or ``"auto"``.
            num_threads: worker threads per directory.
            block_bytes: largest single system call.
            weights: relative speeds of the directories, positive, one each; ``None`` to measure those of several.
            rank: rank of this process; ranks may share paths.
            observe: told of each shard that was written or read, on the loop.
            open_backend: opens the backend of one directory.

        Raises:
            ConfigError: ``paths`` is empty, or ``weights`` are not one for each.
            DirectoryError: a path cannot be used, or another live job uses it (``DirectoryInUseError``).
            DiskFullError: the file systems lack room; the message shows the arithmetic.
            StorageError: any other failure of the system.
        """
        assert capacity_bytes >= 0
        if not paths:
            raise ConfigError("nvme: expected at least one directory for the NVMe tier, got none")
        if weights is not None and len(weights) != len(paths):
            raise ConfigError(f"nvme_weights: expected one for each of {len(paths)} directories, got {len(weights)}")
        tier = cls(capacity_bytes, observe)
        try:
            await tier._volumes.open(
                paths,
                capacity_bytes=capacity_bytes,
                weights=weights,
                backend_name=backend_name,
                num_threads=num_threads,
                block_bytes=block_bytes,
                rank=rank,
                open_backend=open_backend,
            )
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
                timings, begun = [Timing() for _ in shard.extents], time.perf_counter()
                await gather_all(
                    volume.backend.write_many(batch, priority=priority, timing=timing)
                    for (volume, batch), timing in zip(_batches(shard, source), timings, strict=True)
                )
            shard.readable = True
            self._report(WRITE, key, shard.num_bytes, begun, timings)
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
                timings, begun = [Timing() for _ in shard.extents], time.perf_counter()
                await gather_all(
                    volume.backend.read_many(batch, priority=priority, timing=timing)
                    for (volume, batch), timing in zip(_batches(shard, target), timings, strict=True)
                )
            self._report(READ, key, shard.num_bytes, begun, timings)
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
            await self._volumes.sync()

    def usage(self) -> TierUsage:
        """Bytes that shards take now, the most they ever took, and the capacity; safe from any thread."""
        return TierUsage(self._used_bytes, self._peak_bytes, self._capacity_bytes)

    def statistics(self) -> IOStatistics:
        """What all backends have moved since they were opened, their probes included; safe from any thread."""
        return self._volumes.statistics()

    @property
    def choices(self) -> dict[Path, Choice]:
        """For each job directory, which backend ``open_backend`` chose and which weight it has, and why."""
        return dict(self._volumes.choices)

    @property
    def weights(self) -> tuple[float, ...]:
        """The relative speed of each directory, given or measured; the fastest has 1."""
        return self._volumes.weights

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
        await self._in_flight.drained()
        self._shards.clear()
        await self._volumes.close()

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

    def _report(self, route: str, key: ShardKey, num_bytes: int, begun: float, timings: Sequence[Timing]) -> None:
        """Say that a shard was moved: from the first block that any directory took to the last one moved."""
        if self._observe is not None:
            start = min(timing.start_seconds for timing in timings)
            end = max(timing.end_seconds for timing in timings)
            self._observe(route, key, start, end, num_bytes=num_bytes, queued_seconds=start - begun)

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
        shard = _Shard(num_bytes, self._volumes.place(num_bytes), readable=old is not None)
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

    def _error(self, message: str, memory: memoryview, shard: _Shard | None = None) -> StorageError:
        return StorageError(
            message,
            path=self._volumes.path,
            expected_bytes=shard.num_bytes if shard is not None else None,
            got_bytes=memory.nbytes,
        )


def _under_way(key: ShardKey, action: str) -> EngineStateError:
    return EngineStateError(f"{action} of {key} while another transfer of it is under way; await that first")


def _batches(shard: _Shard, memory: memoryview) -> Iterator[tuple[Volume, list[Transfer]]]:
    """The shard's memory cut into its extents: one batch for each directory."""
    start = 0
    for volume, extents in shard.extents.items():
        batch = []
        for extent in extents:
            batch.append(Transfer(volume.file, extent.offset, memory[start : start + extent.num_bytes]))
            start += extent.num_bytes
        yield volume, batch
