"""Every state in which a crash may leave the disk after a recorded run, and whether a run can go on from it.

A crash comes after any number of a log's events. What a sync has covered is on the disk then. Of all else that had
begun, any part may be: each change of a directory or not, a rename with both names, each 4 KiB of a write or of a small
file or not, a file's new length or not. A ``Choice`` says which. The state is then made of real directories, opened,
and compared, byte by byte, with the commits that were made.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lib_crash_log import Log, Op, Truth

from infinity.store.manifest import DATA_NAME, MARK_NAME, Manifest, checksum, manifest_name, tensors_name
from infinity.store.state import OpenState, open_state

BLOCK_BYTES = 4096


class Choice(Protocol):
    """What of the things that may be on the disk is there."""

    def takes(self, op: Op) -> int:
        """0 if a change is not there, 1 if it is, 2 for a file's rename that has left the old name."""

    def blocks(self, op: Op, num_blocks: int) -> Sequence[bool]:
        """Which blocks of a write are there."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice, thing by thing; ``pattern`` is repeated over the blocks of those writes that are there."""

    what: dict[int, int]
    pattern: tuple[bool, ...] = (True,)

    def takes(self, op: Op) -> int:
        return self.what.get(id(op), 0)

    def blocks(self, op: Op, num_blocks: int) -> Sequence[bool]:
        there = bool(self.takes(op))
        return [there and self.pattern[index % len(self.pattern)] for index in range(num_blocks)]


class Drawn:
    """A choice at random, of which more or less is there."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._share = self._random.choice((0.1, 0.5, 0.9, self._random.random()))

    def takes(self, op: Op) -> int:
        if self._random.random() >= self._share:
            return 0
        return 2 if op.kind == "rename" and self._random.random() < 0.25 else 1

    def blocks(self, op: Op, num_blocks: int) -> Sequence[bool]:
        torn = self._random.random() < 0.5
        whole = self._random.random() < self._share
        return [self._random.random() < self._share if torn else whole for _ in range(num_blocks)]


@dataclass(slots=True)
class FileState:
    """A file: its length, and its blocks that are not zeros."""

    num_bytes: int = 0
    blocks: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> FileState:
        return FileState(self.num_bytes, dict(self.blocks))

    def resize(self, num_bytes: int, *, shrink: bool) -> None:
        if shrink or num_bytes > self.num_bytes:
            self.num_bytes = num_bytes
            self.blocks = {at: data for at, data in self.blocks.items() if at * BLOCK_BYTES < num_bytes}

    def write(self, op: Op, there: Sequence[bool]) -> None:
        for index, is_there in enumerate(there):
            if is_there:
                data = op.data[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
                start = op.offset + index * BLOCK_BYTES
                self.blocks[start // BLOCK_BYTES] = data
                self.num_bytes = max(self.num_bytes, start + len(data))


class Disk:
    """What is on the disk: entries of directories, and files.

    Args:
        log: of a run.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.entries: dict[int, dict[str, int]] = {
            inode: {} for inode, is_directory in enumerate(log.is_directory) if is_directory
        }
        self.files = {inode: FileState() for inode, is_directory in enumerate(log.is_directory) if not is_directory}

    def copy(self) -> Disk:
        other = Disk.__new__(Disk)
        other._log = self._log
        other.entries = {inode: dict(entries) for inode, entries in self.entries.items()}
        other.files = {inode: file.copy() for inode, file in self.files.items()}
        return other

    def apply(self, op: Op, choice: Choice) -> None:
        if op.kind == "write":
            self.files[op.inode].write(op, choice.blocks(op, num_blocks(op)))
            return
        taken = choice.takes(op)
        if not taken:
            return
        if op.kind == "size":
            self.files[op.inode].resize(op.number, shrink=not op.number)
            return
        entries = self.entries[op.inode]
        if op.kind == "create":
            entries[op.name] = op.child
            return
        if entries.get(op.name) == op.child and (taken == 1 or self._log.is_directory[op.child]):
            del entries[op.name]
        if op.kind == "rename":
            entries[op.other] = op.child

    def materialise(self, root: Path) -> list[Path]:
        """Make it below ``root``; the NVMe paths."""
        paths = [root / f"nvme{index}" for index in range(len(self._log.roots))]
        for path, inode in zip(paths, self._log.roots, strict=True):
            self._make(path, inode)
        return paths

    def _make(self, path: Path, inode: int) -> None:
        if not self._log.is_directory[inode]:
            state = self.files[inode]
            with path.open("xb") as file:
                file.truncate(state.num_bytes)
                for at, data in state.blocks.items():
                    file.seek(at * BLOCK_BYTES)
                    file.write(data)
            path.chmod(0o600)
            return
        path.mkdir(0o700)
        for name, child in self.entries[inode].items():
            self._make(path / name, child)


class _Everything:
    def takes(self, op: Op) -> int:
        return 1

    def blocks(self, op: Op, num_blocks: int) -> Sequence[bool]:
        return [True] * num_blocks


def num_blocks(op: Op) -> int:
    """Into how many pieces a crash may tear a write."""
    return -(-len(op.data) // BLOCK_BYTES)


class Crashes:
    """The crashes that may end a run.

    Args:
        log: of the run.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._point = -1
        self._base = Disk(log)
        self._pending: list[Op] = []

    def pending(self, point: int) -> list[Op]:
        """What may or may not be there after so many events."""
        self._go(point)
        return self._pending

    def disk(self, point: int, choice: Choice) -> Disk:
        """What is there after so many events."""
        self._go(point)
        disk = self._base.copy()
        for op in self._pending:
            disk.apply(op, choice)
        return disk

    def exhaustive(self, point: int, limit: int) -> Iterator[Choice]:
        """All choices after so many events if they are few, else those with one thing only or all but one; torn, too.

        Args:
            point: after how many events.
            limit: how many make few.
        """
        pending = self.pending(point)
        kinds = [(0, 1, 2) if op.kind == "rename" else (0, 1) for op in pending]
        total = 1
        for each in kinds:
            total *= len(each)
        if total <= limit:
            for values in itertools.product(*kinds):
                yield Chosen({id(op): value for op, value in zip(pending, values, strict=True)})
        else:
            for value in (0, 1):
                yield Chosen({id(op): value for op in pending})
                for one in pending:
                    yield Chosen({id(op): 1 - value if op is one else value for op in pending})
        if any(op.kind == "write" and num_blocks(op) > 1 for op in pending):
            for pattern in ((True, False), (False, True)):
                yield Chosen({id(op): 1 for op in pending}, pattern)

    def allowed(self, point: int) -> set[int | None]:
        """The commits that may be the newest after so many events: what has ended is sure, what has begun may be."""
        sure: int | None = None
        maybe: set[int | None] = set()
        events = [(op.begin, op, False) for op in self._log.ops if op.kind in ("commit", "drop")]
        events += [(op.end, op, True) for op in self._log.ops if op.kind in ("commit", "drop") and op.end is not None]
        for at, op, ended in sorted(events, key=lambda event: event[0]):
            if at >= point:
                break
            if ended:
                sure, maybe = op.number, set()
            elif op.kind == "commit":
                maybe.add(op.number)
            else:
                maybe |= {each.number for each in self._log.ops if each.kind == "commit" and each.begin < at}
                maybe = {each for each in maybe if each is not None and each >= op.number}
        return {sure} | maybe

    def truth(self, number: int, point: int) -> Truth:
        """What a commit was, the latest of that number."""
        found = [op for op in self._log.ops if op.kind == "commit" and op.number == number and op.begin < point]
        assert found[-1].truth is not None
        return found[-1].truth

    def _go(self, point: int) -> None:
        """Have ``_base`` be what is certainly there, and ``_pending`` what may be."""
        if point == self._point:
            return
        begun = [op for op in self._log.ops if op.begin < point and op.kind not in ("commit", "drop", "sync")]
        covered: dict[int, int] = {}
        for op in self._log.ops:
            if op.kind == "sync" and op.end is not None and op.end < point:
                covered[op.inode] = max(covered.get(op.inode, 0), op.begin)
        everything = _Everything()
        self._point, self._base, self._pending = point, Disk(self._log), []
        for op in begun:
            if op.end is not None and op.end < covered.get(op.inode, 0):
                self._base.apply(op, everything)
            else:
                self._pending.append(op)


@dataclass(slots=True)
class Tally:
    """What came of states.

    Attributes:
        num_states: how many were tried.
        num_commits: how many of them had a commit.
        num_resumed: from how many a run was gone on with.
        lost: what was wrong with the others, in words.
    """

    num_states: int = 0
    num_commits: int = 0
    num_resumed: int = 0
    lost: list[str] = field(default_factory=list)


def check(crashes: Crashes, point: int, choice: Choice, root: Path, tally: Tally) -> tuple[list[Path], int | None]:
    """Make a state and open it.

    Args:
        crashes: of the run.
        point: after how many events.
        choice: what is there.
        root: a directory that does not exist; ``discard`` removes it.
        tally: gets the outcome.

    Returns:
        The NVMe paths, and the number of the newest commit.
    """
    root.mkdir()
    paths = crashes.disk(point, choice).materialise(root)
    number: int | None = None
    tally.num_states += 1
    try:
        state = open_state(paths)
        try:
            number = state.manifests[-1].number if state.manifests else None
            state.tidy()
            wrong = _differences(crashes, point, state)
        finally:
            state.close()
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    tally.num_commits += number is not None
    if wrong:
        tally.lost.append(f"after {point} events: {wrong}")
    return paths, number


def discard(root: Path) -> None:
    """Remove a state."""
    shutil.rmtree(root)


def _differences(crashes: Crashes, point: int, state: OpenState) -> str:
    """What is wrong with a state that was opened; empty where nothing is."""
    newest = state.manifests[-1].number if state.manifests else None
    if newest not in crashes.allowed(point):
        return f"commit {newest} is the newest; expected one of {crashes.allowed(point)}"
    for manifest in state.manifests:
        truth = crashes.truth(manifest.number, point)
        wrong = _wrong_shards(manifest, state, truth)
        if wrong or manifest.engine != truth.engine or state.read_tensors(manifest) != truth.tensors:
            return f"commit {manifest.number} is another than was made: {wrong or 'its record'}"
    kept = {manifest_name(each.number) for each in state.manifests}
    kept |= {tensors_name(each.number) for each in state.manifests if each.tensors is not None}
    for index, files in enumerate(state.every):
        names = {name for name in files.names() if not DATA_NAME.fullmatch(name) or state.places.get(name) != index}
        names = {name for name in names if not (state.manifests and MARK_NAME.fullmatch(name))}
        strangers = names - {"lock", "owner.json"} - (kept if files is state.files else set())
        if strangers:
            return f"left in {files.path}: {sorted(strangers)}"
    return ""


def _wrong_shards(manifest: Manifest, state: OpenState, truth: Truth) -> str:
    if {shard.key for shard in manifest.shards} != set(truth.shards):
        return "other shards"
    contents = [state.every[state.places[file.name]].path / file.name for file in manifest.files]
    data = [path.read_bytes() for path in contents]
    for shard in manifest.shards:
        pieces = [data[each.file][each.offset : each.offset + each.num_bytes] for each in shard.extents]
        if b"".join(pieces) != truth.shards[shard.key]:
            return str(shard.key)
        if [checksum(piece) for piece in pieces] != [each.checksum for each in shard.extents]:
            return f"the checksum of {shard.key}"
    return ""
