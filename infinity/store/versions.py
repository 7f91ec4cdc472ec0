"""``Versions``: the bytes that shards have now, and those that they had and somebody holds.

A ``Version`` is the bytes of a shard at one time, in extents of their own. A shard that is written in place stays one
version. While others hold it (commits), it is not written: the shard's next bytes are another version, elsewhere, and
the extents of the old one are free again when neither the shard nor anybody else has it.

Everything belongs to the event loop of the tier, which orders transfers (``nvme.py``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import xxhash

from infinity.errors import BudgetError, EngineStateError, MismatchError
from infinity.io.backend import Priority, Transfer
from infinity.io.completion import call_in_thread
from infinity.io.memory import allocate, as_bytes
from infinity.store.manifest import Manifest, checksum
from infinity.store.shard import Extent, ShardKey
from infinity.store.volumes import Volume, Volumes
from infinity.trace import TierUsage

_BLOCK_BYTES = 8 << 20


@dataclasses.dataclass(slots=True, eq=False)
class Version:
    """Bytes of a shard, and who is moving them.

    Attributes:
        num_bytes: how many.
        extents: where they are, in the order of the dictionary and of its lists.
        readable: whether they have been written.
        writing: whether they are being written.
        num_reads: how many are reading them.
        num_holders: how many have it: the shard itself, commits, and who is reading it.
        generation: the number of the first commit that had it; ``None``: none has.
        checksums: of each extent, in order; ``None``: not known.
        doubtful: whether they were written by another process and have not been checked since.
    """

    num_bytes: int
    extents: dict[Volume, list[Extent]]
    readable: bool
    writing: bool = False
    num_reads: int = 0
    num_holders: int = 1
    generation: int | None = None
    checksums: list[str] | None = None
    doubtful: bool = False

    @property
    def is_held(self) -> bool:
        """Whether anybody has it beside the shard itself and who is reading it."""
        return self.num_holders - self.num_reads > 1

    def places(self) -> Iterator[tuple[Volume, Extent]]:
        """Its extents in order."""
        return ((volume, extent) for volume, extents in self.extents.items() for extent in extents)

    def batches(self, memory: memoryview) -> Iterator[tuple[Volume, list[Transfer]]]:
        """Its memory cut into its extents: one batch for each directory."""
        start = 0
        for volume, extents in self.extents.items():
            batch = []
            for extent in extents:
                batch.append(Transfer(volume.file, extent.offset, memory[start : start + extent.num_bytes]))
                start += extent.num_bytes
            yield volume, batch

    def digest(self, memory: memoryview) -> list[str]:
        """The checksum of each extent, of the bytes in memory. Computes."""
        found, start = [], 0
        for _, extent in self.places():
            found.append(checksum(memory[start : start + extent.num_bytes]))
            start += extent.num_bytes
        return found

    def check(self, key: ShardKey, found: list[str]) -> None:
        """Compare the checksums of what was read.

        Raises:
            MismatchError: they are others; it names the shard, the file and the offset.
        """
        for (volume, extent), expected, got in zip(self.places(), self.checksums or (), found, strict=True):
            if expected != got:
                raise MismatchError(
                    f"{key}: what is on the disk is not what was written there: {extent.num_bytes} bytes were expected "
                    f"to have checksum {expected}, and have {got}; go back to another commit, or another checkpoint",
                    path=volume.file.path,
                    offset=extent.offset,
                )


Held = dict[ShardKey, Version]
"""Bytes of shards that stay as they are: what ``Versions.hold`` returns."""


class Versions:
    """All versions of a tier's shards, and the room that they take.

    Args:
        volumes: where they are.
        capacity_bytes: the most that all together may take.

    Attributes:
        live: the bytes that shards have now.
    """

    def __init__(self, volumes: Volumes, capacity_bytes: int) -> None:
        self._volumes = volumes
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._peak_bytes = 0
        self._adopted: dict[tuple[Volume, Extent], Version] = {}
        self.live: Held = {}

    def usage(self) -> TierUsage:
        """Bytes that all versions take now, the most they ever took, and the capacity; safe from any thread."""
        return TierUsage(self._used_bytes, self._peak_bytes, self._capacity_bytes)

    def renew(self, key: ShardKey, num_bytes: int) -> Version:
        """Give a shard another version: in the place of the one it has, unless that is held. Then ``settle`` follows.

        Raises:
            BudgetError: there is no room; the shard keeps what it has.
        """
        before = self.live.get(key)
        goes = before is not None and not before.is_held
        used_bytes = self._used_bytes - (before.num_bytes if before is not None and goes else 0)
        if used_bytes + num_bytes > self._capacity_bytes:
            raise BudgetError(
                f"{key} needs {num_bytes} bytes of the NVMe tier, but other shards take {used_bytes} of its "
                f"{self._capacity_bytes}: short by {used_bytes + num_bytes - self._capacity_bytes}; "
                f"the smallest capacity_bytes that would do is {used_bytes + num_bytes}"
            )
        if before is not None and goes:
            self.put_down(before)
        version = Version(num_bytes, self._volumes.place(num_bytes), readable=goes)
        self.live[key] = version
        self._count(num_bytes)
        return version

    def settle(self, key: ShardKey, before: Version | None) -> None:
        """A write has ended, well if the shard's version is readable.

        Args:
            key: of which shard.
            before: the version that it had, if it was held: it has that again, or is one holder of it less.
        """
        if not self.live[key].readable:
            self.put_down(self.live.pop(key))
            if before is not None:
                self.live[key] = before
        elif before is not None:
            self.put_down(before)

    def forget(self, key: ShardKey) -> None:
        """The shard is no more."""
        self.put_down(self.live.pop(key))

    def put_down(self, version: Version) -> None:
        """One holder less; without any, its extents are free."""
        version.num_holders -= 1
        if not version.num_holders:
            self._count(-version.num_bytes)
            for volume, extent in version.places():
                volume.allocator.free(extent)

    def hold(self, keys: Iterable[ShardKey]) -> Held:
        """Keep the bytes that shards have now, whatever is written later, until ``let_go``.

        Raises:
            EngineStateError: one is not there, or is being written.
        """
        held = {}
        for key in keys:
            version = self.live.get(key)
            if version is None or not version.readable:
                raise EngineStateError(f"{key} is not in the NVMe tier: flush it first")
            if version.writing:
                raise under_way(key, "hold")
            held[key] = version
        for version in held.values():
            version.num_holders += 1
        return held

    def let_go(self, held: Held) -> None:
        """Give back what ``hold`` or ``adopt`` has returned, once."""
        for version in held.values():
            self.put_down(version)

    def restore(self, held: Held) -> None:
        """Make held bytes the shards' again; all other shards are forgotten. ``held`` stays held.

        Raises:
            EngineStateError: a transfer is under way.
        """
        for key, version in self.live.items():
            if version.writing or version.num_reads:
                raise under_way(key, "restore")
        for version in held.values():
            version.num_holders += 1
        before, self.live = self.live, dict(held)
        self.let_go(before)

    def put_back(self, key: ShardKey, version: Version) -> None:
        """Make held bytes one shard's again, and hold them no longer.

        Raises:
            EngineStateError: a write of the shard is under way.
        """
        before = self.live.get(key)
        if before is not None and before.writing:
            raise under_way(key, "restore")
        if before is not None:
            self.put_down(before)
        self.live[key] = version

    def adopt(self, manifest: Manifest, *, doubtful: bool) -> Held:
        """Take over the shards of a commit that was found at start: held, as by ``hold``.

        Args:
            manifest: the commit's; a version that several commits have is one.
            doubtful: whether they are checked when they are first read.

        Raises:
            BudgetError: another shard has their place: commits are adopted before anything is written.
        """
        held: Held = {}
        for shard in manifest.shards:
            extents: dict[Volume, list[Extent]] = {}
            for each in shard.extents:
                extents.setdefault(self._volumes.of_file(manifest.files[each.file].name), []).append(each.extent)
            place = next((volume, ranges[0]) for volume, ranges in extents.items())
            version = self._adopted.get(place)
            if version is None:
                for volume, ranges in extents.items():
                    for extent in ranges:
                        volume.allocator.reserve(extent)
                self._count(shard.num_bytes)
                version = Version(shard.num_bytes, extents, readable=True, num_holders=0)
                version.generation = shard.generation
                version.checksums = [each.checksum for each in shard.extents]
                version.doubtful = doubtful
                self._adopted[place] = version
            version.num_holders += 1
            held[shard.key] = version
        return held

    def end_adopting(self) -> None:
        """All commits are adopted: what is written from now on may take their places when they are free."""
        self._adopted.clear()

    def _count(self, num_bytes: int) -> None:
        self._used_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)


async def read_through(key: ShardKey, version: Version) -> None:
    """Read the bytes of a version that is held, for their checksums only: it is doubtful no more.

    Raises:
        MismatchError: they are not those that were written.
        StorageError: they could not be read.
    """
    assert version.checksums is not None
    memory = as_bytes(allocate(min(_BLOCK_BYTES, version.num_bytes)))
    found = []
    for volume, extent in version.places():
        digest = xxhash.xxh3_64()
        for done in range(0, extent.num_bytes, len(memory)):
            piece = memory[: min(len(memory), extent.num_bytes - done)]
            await volume.backend.read_into(volume.file, extent.offset + done, piece, priority=Priority.BACKGROUND)
            await call_in_thread(functools.partial(digest.update, piece))
        found.append(digest.hexdigest())
    version.check(key, found)
    version.doubtful = False


def under_way(key: ShardKey, action: str) -> EngineStateError:
    """The error of who comes while a transfer of the shard is under way."""
    return EngineStateError(f"{action} of {key} while another transfer of it is under way; await that first")
