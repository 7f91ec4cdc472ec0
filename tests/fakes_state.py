"""Durable states on real directories, with faults where tests want them."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fakes_store import FakeOpener
from infinity.io.memory import allocate, as_bytes
from infinity.store.agreement import ALONE, Agreement
from infinity.store.commits import Commit, Commits
from infinity.store.files import DirectoryFiles
from infinity.store.manifest import MARK_NAME
from infinity.store.nvme import NvmeTier
from infinity.store.shard import Extent, ShardKey
from infinity.store.state import OpenState, open_state
from infinity.store.versions import Held, Version

PAGE = 4096
KEYS = [ShardKey(unit, 0, kind) for unit in range(2) for kind in ("param", "master")]

Faults = Callable[[str, str], BaseException | None]


def no_faults(operation: str, name: str) -> BaseException | None:
    return None


class FaultyFiles(DirectoryFiles):
    """Small files whose system calls fail when told so.

    Attributes:
        faults: called with ``create``, ``rename``, ``unlink`` or ``sync`` and the file's name before each; what it
            returns, if anything, is raised.
        log: what was called.
    """

    faults: Faults = staticmethod(no_faults)
    log: list[tuple[str, str]]

    def _check(self, operation: str, name: str) -> None:
        self.log = [*getattr(self, "log", []), (operation, name)]
        error = self.faults(operation, name)
        if error is not None:
            raise error

    def _create(self, name: str, content: bytes) -> None:
        self._check("create", name)
        super()._create(name, content)

    def _rename(self, name: str, other: str) -> None:
        self._check("rename", other)
        super()._rename(name, other)

    def _unlink(self, name: str) -> None:
        self._check("unlink", name)
        super()._unlink(name)

    def _sync(self) -> None:
        self._check("sync", "")
        super()._sync()


class Rig:
    """A state that is open, with its tier and commits.

    Attributes:
        opener: of the backends.
        state: the directories.
        nvme: the tier.
        commits: the commits.
    """

    def __init__(self, opener: FakeOpener, state: OpenState, nvme: NvmeTier, commits: Commits) -> None:
        self.opener = opener
        self.state = state
        self.nvme = nvme
        self.commits = commits

    @property
    def files(self) -> FaultyFiles:
        """Where the commits are."""
        assert isinstance(self.state.files, FaultyFiles)
        return self.state.files

    def set_faults(self, faults: Faults) -> None:
        """Of all operations on all files."""
        for files in self.state.every:
            assert isinstance(files, FaultyFiles)
            files.faults = faults
        self.opener.faults = lambda operation, path: faults(operation, path.name)

    async def write(self, key: ShardKey, content: bytes) -> None:
        await self.nvme.write(key, memory_of(content))

    async def read(self, key: ShardKey) -> bytes:
        return await self.read_version(key, self.nvme.versions.live[key])

    async def read_version(self, key: ShardKey, version: Version) -> bytes:
        target = as_bytes(allocate(version.num_bytes))
        await self.nvme.read_version(key, version, target)
        return bytes(target)

    async def commit(self, step: int, tensors: bytes | None = b"tensors") -> Commit:
        """All that there is."""
        held = self.nvme.versions.hold(self.nvme.versions.live)
        return await self.commits.make(held, dict.fromkeys(held, "float32"), {"step": step}, tensors)

    async def contents(self, commit: Commit) -> dict[ShardKey, bytes]:
        return {key: await self.read_version(key, version) for key, version in commit.held.items()}

    def check_room(self, *holds: Held) -> None:
        """Extents of all versions are apart, and what they take is what counts as used."""
        versions = {id(version): version for version in self.nvme.versions.live.values()}
        for commit in (*self.commits.all, *self.commits._doomed):
            versions |= {id(version): version for version in commit.held.values()}
        for held in holds:
            versions |= {id(version): version for version in held.values()}
        by_file: dict[object, list[Extent]] = {}
        for version in versions.values():
            for volume, extent in version.places():
                by_file.setdefault(volume, []).append(extent)
        for extents in by_file.values():
            extents.sort()
            for extent, after in itertools.pairwise(extents):
                assert extent.offset + extent.num_bytes <= after.offset, "two versions share a place"
        used_bytes = sum(version.num_bytes for version in versions.values())
        assert self.nvme.usage().used_bytes == used_bytes
        volumes = [*self.nvme.volumes._volumes, *self.nvme.volumes._retired]
        assert sum(volume.allocator.used_bytes for volume in volumes) == used_bytes


def memory_of(content: bytes) -> memoryview:
    memory = as_bytes(allocate(len(content)))
    memory[:] = content
    return memory


def content_of(key: ShardKey, step: int, num_pages: int = 2) -> bytes:
    """Bytes that no other shard or step has."""
    return b"".join(f"{key} {step} {page}".encode().ljust(PAGE, b"-") for page in range(num_pages))


def failing(number: int = errno.EIO) -> OSError:
    return OSError(number, os.strerror(number))


def make_paths(parent: Path, num_paths: int) -> list[Path]:
    paths = [parent / f"nvme{index}" for index in range(num_paths)]
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    return paths


@asynccontextmanager
async def opened(
    paths: Sequence[Path],
    *,
    capacity_bytes: int = 64 * PAGE,
    num_retained: int = 1,
    rank: int = 0,
    world_size: int = 1,
    agreement: Agreement = ALONE,
    before: Callable[[OpenState], None] = lambda state: None,
) -> AsyncIterator[Rig]:
    """A state below existing directories; its shards are those of the last commit."""
    opener = FakeOpener()
    state = await asyncio.to_thread(lambda: open_state(paths, rank=rank, open_files=FaultyFiles))
    try:
        before(state)
        await asyncio.to_thread(state.tidy)
        nvme = await NvmeTier.open(
            paths,
            capacity_bytes=capacity_bytes,
            backend_name="threads",
            num_threads=1,
            block_bytes=1 << 20,
            weights=[1.0] * len(paths),
            open_backend=opener,
            state=state,
            verify="always",
        )
    except BaseException:
        state.close()
        raise
    commits = Commits(
        nvme,
        state,
        num_retained=num_retained,
        doubtful=True,
        rank=rank,
        world_size=world_size,
        agreement=agreement,
    )
    rig = Rig(opener, state, nvme, commits)
    if rig.commits.last is not None:
        nvme.versions.restore(rig.commits.last.held)
    try:
        yield rig
    finally:
        opener.gate.set()
        await nvme.aclose()


def names_below(path: Path) -> list[str]:
    """Files of a state directory but for the lock, the owner's and marks."""
    directory = path / "infinity-state-rank0"
    if not directory.exists():
        return []
    names = [each.name for each in directory.iterdir() if each.name not in {"lock", "owner.json"}]
    return sorted(name for name in names if not MARK_NAME.fullmatch(name))
