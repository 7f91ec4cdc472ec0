"""``Commits``: the moments of a run to which it can return.

A commit is made of bytes that are held (``versions.py``) and of a record that says where they are (``manifest.py``):

    bytes held and durable -> tensors in their place, durable -> record written beside, durable -> renamed
        -> directory durable: the commit is made -> all ranks have made theirs (``agreement.py``)
        -> older records removed -> directory durable -> what only they held may be written over, tensors removed

So at any moment, and after a crash at any moment, the disk has the last commit whole: nothing that a record names is
written over or removed while the record may come back, and no record is there whose bytes may be missing. A commit
that fails changes nothing. The order of what happens between two syncs does not matter, and no write has to be atomic
but the rename (``tests/test_crash_states.py`` tries it). What could not be removed keeps its bytes until it has been.

Where making data durable has failed, the system may call it clean all the same, and the next attempt would succeed
without having written it. So what no commit has had by then is written once more.

With several ranks a commit that fails on one fails on all. Where they lose each other half-way, those who have made it
keep it, and the one before: what all have is found at the next start.

What it costs on the disk: with ``num_retained`` commits kept, shards that every step changes exist ``num_retained + 1``
times at most, the new ones included; shards that do not change exist once.

All coroutines belong to the loop thread; one runs at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from infinity.errors import NoCommitError, RankFailedError, StorageError, UncertainCommitError
from infinity.io.completion import call_in_thread
from infinity.store.agreement import ALONE, Agreement
from infinity.store.manifest import (
    Manifest,
    StoredExtent,
    StoredFile,
    StoredShard,
    StoredTensors,
    encode,
    long_checksum,
    manifest_name,
    tensors_name,
)
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey
from infinity.store.state import OpenState
from infinity.store.versions import Held, read_through
from infinity.store.volumes import Volume


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """One that is on the disk.

    Attributes:
        manifest: its record.
        held: its bytes.
    """

    manifest: Manifest
    held: Held


class Commits:
    """The commits of a run, oldest first; made when the tier has been opened, before anything is written to it.

    Args:
        nvme: has the shards.
        state: the state directories, with the commits that were found.
        num_retained: how many are kept, 1 at least.
        doubtful: whether shards that were found are checked when they are first read.
        rank: of this process.
        world_size: how many there are.
        agreement: with the others, on each commit.
    """

    def __init__(
        self,
        nvme: NvmeTier,
        state: OpenState,
        *,
        num_retained: int,
        doubtful: bool,
        rank: int = 0,
        world_size: int = 1,
        agreement: Agreement = ALONE,
    ) -> None:
        self._nvme = nvme
        self._state = state
        self._num_retained = num_retained
        self._rank = rank
        self._world_size = world_size
        self._agreement = agreement
        self._doomed: list[Commit] = []
        self._may_be_lost = False
        self._commits = [Commit(each, nvme.versions.adopt(each, doubtful=doubtful)) for each in state.manifests]
        nvme.versions.end_adopting()
        self._number = max((each.number for each in state.manifests), default=0)
        self._number = max(self._number, state.highest_number)

    @property
    def last(self) -> Commit | None:
        """The newest."""
        return self._commits[-1] if self._commits else None

    @property
    def all(self) -> tuple[Commit, ...]:
        """Those that are kept, oldest first."""
        return tuple(self._commits)

    @property
    def is_tidy(self) -> bool:
        """Whether nothing is left of commits that are no more: see ``tidy``."""
        return not self._doomed

    def find(self, number: int) -> Commit:
        """One by its number.

        Raises:
            NoCommitError: it is not there.
        """
        for commit in self._commits:
            if commit.manifest.number == number:
                return commit
        there = ", ".join(str(each.manifest.number) for each in self._commits) or "none"
        raise NoCommitError(f"there is no commit {number}; commits there are: {there}", path=self._state.files.path)

    async def make(
        self, held: Held, dtypes: Mapping[ShardKey, str], engine: Mapping[str, Any], tensors: bytes | None
    ) -> Commit:
        """Make a commit of bytes that are held; ``held`` is its own from now on, and let go if it fails.

        Args:
            held: all shards that it is to have.
            dtypes: of their elements.
            engine: what the engine keeps beside.
            tensors: a file of tensors that ``engine`` names.

        Raises:
            DiskFullError: there is no room for its record; the commit before stands.
            RankFailedError: another rank's failed; the commit before stands.
            RanksApartError: it is durable here, and may not be elsewhere; nothing older has been let go.
            UncertainCommitError: it failed, and its record may be there after a crash, whole; ``tidy`` removes it.
            StorageError: the system reported an error, now or when older commits were to be removed; the commit before
                stands.
        """
        with self._nvme.in_flight:
            number, step = self._next_number, _step_of(engine)
            try:
                await self._settle_doubts(held)
                commit, interrupt = await self._write(held, dtypes, engine, tensors)
            except BaseException as error:
                await self._agreement.failed(number, step, error)
                raise
            interrupt = await self._agree(commit, step) or interrupt
            self._take_up(commit)
            self._doom(self._commits[: -self._num_retained])
            with contextlib.suppress(StorageError):  # this commit is made; the next one begins with it
                await self.tidy()
        if interrupt is not None:
            raise interrupt
        return commit

    async def skip(self, step: int, error: BaseException) -> None:
        """A commit that is due cannot be begun here: the other ranks are told, and it counts on none.

        Args:
            step: after which step.
            error: why.
        """
        with self._nvme.in_flight:
            await self._agreement.failed(self._next_number, step, error)

    @property
    def _next_number(self) -> int:
        """The same on all ranks, whatever has failed on some."""
        return max(self._number, self._agreement.highest_number) + 1

    async def _agree(self, commit: Commit, step: int | None) -> BaseException | None:
        """Wait until all ranks have made theirs; returns a cancellation that came meanwhile."""
        try:
            return await self._agreement.made(commit.manifest.number, step)
        except RankFailedError:
            self._doomed.append(commit)
            with contextlib.suppress(StorageError):  # the next one begins with it
                await self.tidy()
            raise
        except BaseException:
            self._take_up(commit)  # beside those before: it may be the one that all have
            raise

    def _take_up(self, commit: Commit) -> None:
        for version in commit.held.values():
            version.generation = commit.manifest.number if version.generation is None else version.generation
        self._commits.append(commit)

    async def _settle_doubts(self, held: Held) -> None:
        """Before older commits go that may be whole: read what the new one has of another process and nobody has read.

        Raises:
            RanksApartError: the new one can never count.
            StorageError: it is damaged, or could not be read; the older commits stay.
        """
        try:
            self._agreement.check()
            for commit in self._commits[: len(self._commits) + 1 - self._num_retained]:
                for key, version in held.items():
                    if version.doubtful and commit.held.get(key) is not version:
                        await read_through(key, version)
        except BaseException:
            self._nvme.versions.let_go(held)
            raise

    async def check(self, commit: Commit) -> None:
        """Read what a commit has of another process and nobody has read yet.

        Raises:
            StorageError: it is damaged, or could not be read.
        """
        with self._nvme.in_flight:
            for key, version in commit.held.items():
                if version.doubtful:
                    await read_through(key, version)

    async def drop_after(self, commit: Commit) -> None:
        """Remove the commits that came after one, which is thus the last.

        Raises:
            StorageError: the system reported an error; ``tidy`` removes them.
        """
        self._doom(self._commits[self._commits.index(commit) + 1 :])
        await self.tidy()

    async def tidy(self) -> None:
        """Remove the records of commits that are no more; then, and only then, let their bytes go.

        Raises:
            StorageError: the system reported an error; the bytes stay until it has been done again.
        """
        doomed, files = tuple(self._doomed), self._state.files

        def remove() -> None:
            for commit in doomed:
                files.unlink(manifest_name(commit.manifest.number))
            files.sync()
            for commit in doomed:
                files.unlink(tensors_name(commit.manifest.number))

        if doomed:
            with self._nvme.in_flight:
                await call_in_thread(remove)
        for commit in doomed:
            self._doomed.remove(commit)
            self._nvme.versions.let_go(commit.held)
        await self._nvme.volumes.drop_empty()

    async def _make_durable(self, held: Held) -> None:
        if self._may_be_lost:
            for key, version in held.items():
                if version.generation is None:
                    await self._nvme.rewrite(key, version)
        self._may_be_lost = True
        await self._nvme.flush()
        self._may_be_lost = False

    def _doom(self, commits: list[Commit]) -> None:
        self._doomed += commits
        self._commits = [commit for commit in self._commits if commit not in commits]

    async def _write(
        self, held: Held, dtypes: Mapping[ShardKey, str], engine: Mapping[str, Any], tensors: bytes | None
    ) -> tuple[Commit, BaseException | None]:
        """Write a commit's record, and what it says durable: the commit, and the cancellation that came too late."""
        try:
            self._number = self._next_number
            await self.tidy()
            await self._make_durable(held)
            commit = Commit(self._describe(held, dtypes, engine, tensors), held)
        except BaseException:
            self._nvme.versions.let_go(held)
            raise
        writing = _Writing(self._state, commit.manifest, tensors)
        try:
            await call_in_thread(writing.run)
        except BaseException as error:
            if writing.is_done:
                return commit, error
            if writing.is_uncertain:
                self._doomed.append(commit)  # its bytes stay, since the record may come back
            else:
                self._nvme.versions.let_go(held)
            raise
        return commit, None

    def _describe(
        self, held: Held, dtypes: Mapping[ShardKey, str], engine: Mapping[str, Any], tensors: bytes | None
    ) -> Manifest:
        number = self._number
        volumes: dict[Volume, int] = {}
        shards = []
        for key, version in sorted(held.items()):
            assert version.checksums is not None
            extents = [
                StoredExtent(
                    file=volumes.setdefault(volume, len(volumes)),
                    offset=extent.offset,
                    num_bytes=extent.num_bytes,
                    checksum=checksum,
                )
                for (volume, extent), checksum in zip(version.places(), version.checksums, strict=True)
            ]
            generation = number if version.generation is None else version.generation
            shards.append(
                StoredShard(
                    unit=key.unit,
                    part=key.part,
                    kind=key.kind,
                    dtype=dtypes[key],
                    generation=generation,
                    extents=extents,
                )
            )
        return Manifest(
            state=self._state.state,
            number=number,
            rank=self._rank,
            world_size=self._world_size,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            files=[
                StoredFile(
                    name=volume.file.path.name,
                    num_bytes=volume.allocator.size_bytes,
                    directory=str(volume.file.path.parent),
                )
                for volume in volumes
            ],
            shards=shards,
            tensors=None if tensors is None else StoredTensors(num_bytes=len(tensors), checksum=long_checksum(tensors)),
            engine=dict(engine),
        )


def _step_of(engine: Mapping[str, Any]) -> int | None:
    """After which step a commit is, for the other ranks."""
    step = engine.get("step")
    return step if isinstance(step, int) else None


class _Writing:
    """The record of one commit on its way to the disk. ``run`` belongs on a worker thread.

    Attributes:
        is_done: whether the commit is made.
        is_uncertain: whether it is not, and a record of it may be left.
    """

    def __init__(self, state: OpenState, manifest: Manifest, tensors: bytes | None) -> None:
        self._state = state
        self._manifest = manifest
        self._tensors = tensors
        self.is_done = False
        self.is_uncertain = False

    def run(self) -> None:
        """Write it, or leave nothing.

        Raises:
            UncertainCommitError: it failed, and what is left of it could not be removed.
            StorageError: it failed.
        """
        files, number = self._state.files, self._manifest.number
        self._state.make_durable()
        self._state.keep()  # from now on something may be left
        try:
            if self._tensors is not None:
                files.write(tensors_name(number), self._tensors)
                files.sync()
            files.write(manifest_name(number), encode(self._manifest))
            files.sync()
        except BaseException as error:
            self.is_uncertain = True
            try:
                files.unlink(manifest_name(number))
                files.sync()
                files.unlink(tensors_name(number))
            except StorageError as another:
                raise UncertainCommitError(
                    f"commit {number} failed ({error}), and whether a record of it is left is not known ({another}); "
                    "its bytes are kept, so that it is whole if there is one",
                    path=files.path / manifest_name(number),
                ) from error
            self.is_uncertain = False
            raise
        self.is_done = True
        with contextlib.suppress(StorageError):  # it is made, marked or not; the next one tries again
            self._state.mark()
