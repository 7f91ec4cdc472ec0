"""Whether every byte of commits is what was written: all faults, not only the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.checkpoint.moving import Moving
from infinity.engine.persistence.joined import JoinedState
from infinity.engine.persistence.stored_state import StoredState
from infinity.errors import DirectoryError, InfinityError, NoCommitError, ShortTransferError, StorageError
from infinity.io.memory import allocate, as_bytes
from infinity.store.finding import find_directories, list_homes
from infinity.store.manifest import StoredExtent, StoredShard
from infinity.store.stored import BLOCK_BYTES, StoredCommit


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is not as it was written.

    Attributes:
        commits: whose.
        shard: which; ``None``: the commit's own files.
        file: where.
        offset: of the range, in bytes.
        num_bytes: its length.
        expected: its checksum.
        got: the checksum that it has now, or what else is wrong.
    """

    commits: list[int]
    shard: str | None
    file: str
    offset: int | None
    num_bytes: int | None
    expected: str | None
    got: str

    def __str__(self) -> str:
        commits = ", ".join(map(str, self.commits))
        what = "" if self.shard is None else f"{self.shard}: "
        where = "" if self.offset is None else f" at offset {self.offset}, {self.num_bytes} bytes"
        expected = "" if self.expected is None else f"expected checksum {self.expected}, got "
        return f"commit {commits}: {what}{self.file}{where}: {expected}{self.got}"


@dataclass(slots=True)
class Report:
    """What a check has found.

    Attributes:
        commits: the numbers of those that were checked.
        faults: all of them.
        num_bytes: how much was read.
        seconds: how long that took.
    """

    commits: list[int]
    faults: list[Fault] = field(default_factory=list)
    num_bytes: int = 0
    seconds: float = 0.0

    def as_document(self) -> dict[str, Any]:
        """For JSON."""
        speed = self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0
        return {**asdict(self), "gb_per_second": speed, "good": not self.faults}


def verify(paths: Sequence[Path], number: int | None, console: Console) -> Report:
    """Read every byte of every commit, or of one.

    Args:
        paths: the directories of one state.
        number: which commit; ``None`` for all.
        console: where a person looks.

    Raises:
        DirectoryInUseError: a live job owns a directory.
        NoCommitError: there is no such commit, or none at all.
        StorageError: a directory cannot be read.
    """
    directories = find_directories(paths)
    homes = list_homes(directories)
    numbers = sorted({file.number for files in homes.values() for file in files if number in (None, file.number)})[::-1]
    if not numbers:
        raise NoCommitError(
            "there is nothing to verify" if number is None else f"there is no commit {number}", path=paths[0]
        )
    report = Report(numbers)
    others = [directory for directory in directories if directory not in homes]
    sound: list[StoredCommit] = []
    try:
        for each in numbers:
            having = [home for home, files in homes.items() if any(file.number == each for file in files)]
            found = [commit for home in having if (commit := _open([home, *others], each, report)) is not None]
            sound += found
            if 1 < len(found) == len(homes):
                _check_together(found, report)
        extents = list(_extents(sound))
        with Moving(console, "verifying", sum(extent.num_bytes for _, _, extent, _ in extents)) as moving:
            memory = as_bytes(allocate(BLOCK_BYTES))
            for commit, shard, extent, commits in extents:
                fault = _check(commit, shard, extent, commits, memory)
                if fault is not None:
                    report.faults.append(fault)
                moving.moved(extent.num_bytes)
        report.num_bytes, report.seconds = moving.num_bytes, moving.seconds
    finally:
        for commit in sound:
            commit.close()
    return report


def _open(paths: Sequence[Path], number: int, report: Report) -> StoredCommit | None:
    """One commit, if what it says of itself holds."""
    try:
        commit = StoredCommit.open(paths, number)
    except (DirectoryError, NoCommitError):
        raise
    except StorageError as error:
        report.faults.append(Fault([number], None, str(error.path), None, None, None, str(error)))
        return None
    try:
        StoredState(commit)
    except InfinityError as error:
        report.faults.append(Fault([number], None, str(commit.path), None, None, None, str(error)))
    return commit


def _check_together(commits: Sequence[StoredCommit], report: Report) -> None:
    """Whether what ranks have of a commit fits together."""
    try:
        JoinedState(sorted(commits, key=lambda commit: commit.manifest.rank))
    except InfinityError as error:
        number, path = commits[0].manifest.number, commits[0].path
        report.faults.append(Fault([number], None, str(path), None, None, None, str(error)))


def _extents(commits: Sequence[StoredCommit]) -> Iterator[tuple[StoredCommit, StoredShard, StoredExtent, list[int]]]:
    """Every range that commits name, once: those that several share with the numbers of all."""
    found: dict[tuple[str, int, int, str], tuple[StoredCommit, StoredShard, StoredExtent, list[int]]] = {}
    for commit in commits:
        for shard in commit.manifest.shards:
            for extent in shard.extents:
                name = commit.manifest.files[extent.file].name
                key = (name, extent.offset, extent.num_bytes, extent.checksum)
                found.setdefault(key, (commit, shard, extent, []))[3].append(commit.manifest.number)
    for key in sorted(found):  # in the order of the files, which is the fastest
        yield found[key]


def _check(
    commit: StoredCommit, shard: StoredShard, extent: StoredExtent, commits: list[int], memory: memoryview
) -> Fault | None:
    name = commit.manifest.files[extent.file].name
    where = next((str(each / name) for each in commit.directories if (each / name).exists()), name)
    expected: str | None = None
    try:
        got = commit.digest(shard, extent, memory)
        if got == extent.checksum:
            return None
        expected = extent.checksum
    except ShortTransferError as error:
        got = f"the file ends early: {error.got_bytes} bytes are there"
    except StorageError as error:
        got = str(error)
    return Fault(commits, str(shard.key), where, extent.offset, extent.num_bytes, expected, got)
