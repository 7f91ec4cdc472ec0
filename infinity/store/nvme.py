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
    * What ``versions.hold`` has returned stays on the disk as it is until ``let_go``: shards in it are written
      elsewhere (``versions.py``). This is all that commits need (``commits.py``).
    * With checksums, what is read is what was written, by this process or by the one before, or a ``MismatchError``.
    * After ``aclose``, or an ``open`` that failed, no descriptor or thread of ours is left; and no file or directory,
      but for those of a durable state.

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
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from infinity.config import BackendName
from infinity.errors import ConfigError, EngineStateError, StorageError
from infinity.io.backend import DIRECT_ALIGNMENT, IOStatistics, Priority, Timing
from infinity.io.completion import InFlight
from infinity.io.memory import allocate, as_bytes
from infinity.io.open import Choice
from infinity.io.open import open_backend as _open_backend
from infinity.io.tasks import call_in_executor, gather_all
from infinity.store.shard import ShardKey
from infinity.store.state import OpenState
from infinity.store.versions import Version, Versions, under_way
from infinity.store.volumes import OpenBackend, Volumes
from infinity.trace import READ, WRITE, TierUsage, TransferObserver

Verify = Literal["always", "resume", "off"]


class NvmeTier:
    """Shards on NVMe; made by ``NvmeTier.open``. What it guarantees stands at the head of this file.

    Attributes:
        in_flight: what ``aclose`` waits for.
    """

    def __init__(
        self,
        capacity_bytes: int,
        observe: TransferObserver | None = None,
        *,
        keeps_checksums: bool = False,
        checks_reads: bool = False,
    ) -> None:
        self._observe = observe
        self._keeps_checksums = keeps_checksums
        self._checks_reads = checks_reads
        self._hasher = ThreadPoolExecutor(1, "infinity-checksum")
        self._volumes = Volumes()
        self._versions = Versions(self._volumes, capacity_bytes)
        self.in_flight = InFlight()
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
        state: OpenState | None = None,
        verify: Verify = "off",
    ) -> NvmeTier:
        """Make a job directory below each of ``paths``, and in each a file for its share of ``capacity_bytes``.

        With a durable state, its directories and files serve instead; ``adopt`` then takes over its shards.

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
            state: the durable state below ``paths``, the tier's from now on.
            verify: which reads are checked against the checksums of what was written: ``"always"``: all;
                ``"resume"``: the first of each shard that another process has written.

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
        tier = cls(
            capacity_bytes,
            observe,
            keeps_checksums=state is not None or verify == "always",
            checks_reads=verify == "always",
        )
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
                state=state,
            )
        except BaseException:
            with contextlib.suppress(StorageError):  # the first failure is the one to repair
                await tier.aclose()
            raise
        return tier

    def __contains__(self, key: ShardKey) -> bool:
        version = self._versions.live.get(key)
        return version is not None and version.readable

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
        before = self._find(key, "write")
        if source.nbytes == 0 or source.nbytes % DIRECT_ALIGNMENT:
            raise self._error(f"{key}: expected a non-zero multiple of {DIRECT_ALIGNMENT} bytes", source)
        is_held = before is not None and before.is_held
        if before is not None and before.num_reads and not is_held:
            raise under_way(key, "write")
        version = before
        if version is None or is_held or version.num_bytes != source.nbytes:
            version = self._versions.renew(key, source.nbytes)
        version.writing = True
        try:
            with self._doing(f"write of {key}"):
                timings, begun = [Timing() for _ in version.extents], time.perf_counter()
                moving = [
                    volume.backend.write_many(batch, priority=priority, timing=timing)
                    for (volume, batch), timing in zip(version.batches(source), timings, strict=True)
                ]
                if self._keeps_checksums:
                    moving.append(self._note_checksums(version, source))
                await gather_all(moving)
            version.readable = True
            self._report(WRITE, key, version.num_bytes, begun, timings)
        finally:
            version.writing = False
            self._versions.settle(key, before if is_held else None)

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
        version = self._versions.live.get(key)
        if version is None:
            raise self._error(
                f"{key} is not in the NVMe tier: never written, deleted, or its only write failed", target
            )
        if version.writing:
            raise under_way(key, "read")
        await self.read_version(key, version, target, priority=priority)

    async def read_version(
        self, key: ShardKey, version: Version, target: memoryview, *, priority: Priority = Priority.DEMAND
    ) -> None:
        """Fill ``target`` with the bytes of one version, of ``hold``; as ``read``."""
        if version.num_bytes != target.nbytes:
            raise self._error(f"{key}: expected a target of the length that was written", target, version)
        version.num_reads += 1
        version.num_holders += 1
        try:
            with self._doing(f"read of {key}"):
                timings, begun = [Timing() for _ in version.extents], time.perf_counter()
                await gather_all(
                    volume.backend.read_many(batch, priority=priority, timing=timing)
                    for (volume, batch), timing in zip(version.batches(target), timings, strict=True)
                )
                if version.checksums is not None and (self._checks_reads or version.doubtful):
                    version.check(key, await call_in_executor(self._hasher, version.digest, target))
                    version.doubtful = False
            self._report(READ, key, version.num_bytes, begun, timings)
        finally:
            version.num_reads -= 1
            self._versions.put_down(version)

    async def rewrite(self, key: ShardKey, version: Version) -> None:
        """Write the bytes of a version once more, where they are: whether the disk has them is in doubt.

        It takes memory of the version's size, beside all budgets.

        Raises:
            MismatchError: what is read back is not what was written.
            StorageError: the system reported an error.
        """
        memory = as_bytes(allocate(version.num_bytes))
        version.doubtful = True
        await self.read_version(key, version, memory, priority=Priority.BACKGROUND)
        with self._doing(f"write of {key}"):
            await gather_all(
                volume.backend.write_many(batch, priority=Priority.BACKGROUND)
                for volume, batch in version.batches(memory)
            )

    def delete(self, key: ShardKey) -> None:
        """Forget a shard and give its extents back; harmless where there is none.

        Raises:
            EngineStateError: a transfer of this shard is under way, or the tier is closed.
        """
        version = self._find(key, "delete")
        if version is not None:
            if version.num_reads and not version.is_held:
                raise under_way(key, "delete")
            self._versions.forget(key)

    async def flush(self) -> None:
        """Make every write that has ended durable.

        Raises:
            StorageError: the system reported an error; what was written since the last flush may be lost.
            EngineStateError: the tier is closed.
        """
        self._check_open()
        with self._doing("flush of the NVMe tier"):
            await self._volumes.sync()

    @property
    def versions(self) -> Versions:
        """Which bytes each shard has and had: what commits hold."""
        return self._versions

    @property
    def volumes(self) -> Volumes:
        """The files there are, and what is done to all of them."""
        return self._volumes

    def usage(self) -> TierUsage:
        """Bytes that shards take now, the most they ever took, and the capacity; safe from any thread."""
        return self._versions.usage()

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
        await self.in_flight.drained()
        self._hasher.shutdown()
        self._versions.live.clear()
        await self._volumes.close()

    def _check_open(self) -> None:
        if self._closing is not None:
            raise EngineStateError("the NVMe tier is closed")

    def _find(self, key: ShardKey, action: str) -> Version | None:
        """The shard, if there is one; it is an error if it is being written."""
        self._check_open()
        version = self._versions.live.get(key)
        if version is not None and version.writing:
            raise under_way(key, action)
        return version

    async def _note_checksums(self, version: Version, source: memoryview) -> None:
        version.checksums = None
        version.checksums = await call_in_executor(self._hasher, version.digest, source)

    @contextlib.contextmanager
    def _doing(self, action: str) -> Iterator[None]:
        """Count an operation, so that ``aclose`` waits for it, and name it in the errors of the backend."""
        with self.in_flight:
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

    def _error(self, message: str, memory: memoryview, version: Version | None = None) -> StorageError:
        return StorageError(
            message,
            path=self._volumes.path,
            expected_bytes=version.num_bytes if version is not None else None,
            got_bytes=memory.nbytes,
        )
