"""Removing commits of a state that no job owns, and giving their room back.

First the manifests go, durably: from then on the commits are none, whatever happens next. Then the files and ranges
that only they named: a data file that no commit names any more is removed, and in the others holes are punched, which
gives back blocks and keeps every offset. A file that has further links is somebody else's too, and stays as it is.

What a commit that cannot be read uses is not known. While one stays, no data is touched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infinity.errors import NoCommitError, StorageError, system_errors
from infinity.io.holes import punch
from infinity.store.finding import CommitFile, find_directories, list_commits, read_manifest
from infinity.store.held import LOCK, Held, claim, remove, remove_data, sync_directory
from infinity.store.manifest import COMMIT_NAME, DATA_NAME, MEMBER_NAME, Manifest, tensors_name
from infinity.store.owner import OWNER, read_owner, replace_owner

Ranges = dict[str, list[tuple[int, int]]]
"""By the name of a data file: where ranges begin and end."""


@dataclass(slots=True)
class Pruned:
    """What was removed.

    Attributes:
        commits: their numbers.
        freed_bytes: what data took that nobody names any more.
        kept_bytes: of that, what could not be given back.
        notes: why not.
    """

    commits: list[int] = field(default_factory=list)
    freed_bytes: int = 0
    kept_bytes: int = 0
    notes: list[str] = field(default_factory=list)


class Pruning:
    """Commits that may be removed; a context manager that owns their directories.

    Args:
        paths: the directories of one state, or NVMe paths that hold them.

    Raises:
        DirectoryInUseError: a live job owns one, or somebody reads it.
        InfinityError: they are no state directories.

    Attributes:
        directories: of the state.
        commits: those that there are, newest first, damaged ones too.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.directories = find_directories(paths)
        with contextlib.ExitStack() as stack:
            self._held: dict[Path, tuple[int, Held]] = {}
            for directory in self.directories:
                with system_errors("locking a state directory", directory):
                    self._claim(directory, stack)
            self.commits: list[CommitFile] = list_commits(self.directories)
            self._manifests = {file.number: _manifest_of(file) for file in self.commits}
            self._closing = stack.pop_all()

    def __enter__(self) -> Pruning:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing.close()

    def but_newest(self, num_kept: int) -> list[int]:
        """The numbers of all commits but so many of the newest that can be used."""
        usable = [file.number for file in self.commits if self._manifests[file.number] is not None]
        return [file.number for file in self.commits if file.number not in usable[:num_kept]]

    def remove(self, numbers: Sequence[int]) -> Pruned:
        """Remove some commits, and what only they named.

        Raises:
            NoCommitError: one is not there; nothing has been removed.
            StorageError: the system reported an error; each commit is there whole, or is none any more.
        """
        there = {file.number: file for file in self.commits}
        for number in numbers:
            if number not in there:
                names = ", ".join(map(str, there)) or "none"
                raise NoCommitError(f"there is no commit {number}; there are: {names}", path=self.directories[0])
        doomed = [there[number] for number in sorted(set(numbers))]  # the oldest first
        with system_errors("removing a commit", self.directories[0]):
            for file in doomed:
                file.path.unlink()
            for directory in {file.path.parent for file in doomed}:
                sync_directory(directory)
            for file in doomed:
                file.path.with_name(tensors_name(file.number)).unlink(missing_ok=True)
            kept = [file for file in self.commits if file not in doomed]
            if not kept:
                _forget_membership(self.directories)
        pruned = Pruned([file.number for file in doomed])
        unknown = [file.number for file in kept if self._manifests[file.number] is None]
        if unknown:
            pruned.notes.append(f"commit {unknown[0]} cannot be read, so no data was removed; remove it as well")
            return pruned
        used = _ranges([manifest for file in kept if (manifest := self._manifests[file.number]) is not None])
        freed = _ranges([manifest for file in doomed if (manifest := self._manifests[file.number]) is not None])
        self._remove_data(freed, used, pruned)
        self.commits = kept
        return pruned

    def remove_all(self) -> list[str]:
        """Remove the directories with all that is infinity's.

        Returns:
            Files that are not; their directories have stayed.

        Raises:
            StorageError: the system reported an error; what is left may be removed again.
        """
        strangers = []
        for directory in self.directories:
            with system_errors("removing a state directory", directory):
                if directory in self._held:
                    strangers += [str(directory / name) for name in remove(*self._held[directory])]
                else:
                    strangers += _remove_checkpoint(directory)
        return strangers

    def _claim(self, directory: Path, stack: contextlib.ExitStack) -> None:
        """Own a directory, as the next job would; a saved checkpoint has nothing to own."""
        if not (directory / LOCK).exists():
            return
        parent = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, parent)
        held = claim(parent, directory.name, directory)
        if held is None:
            raise NoCommitError("the state has just been removed", path=directory)
        stack.callback(held.close)
        owner = read_owner(held.directory) or {}
        with contextlib.suppress(OSError):  # so that others are told who has it; a full disk is no reason not to prune
            replace_owner(held.directory, rank if isinstance(rank := owner.get("rank"), int) else 0)
        self._held[directory] = parent, held

    def _remove_data(self, freed: Ranges, used: Ranges, pruned: Pruned) -> None:
        for name, ranges in freed.items():
            path = next((each / name for each in self.directories if (each / name).is_file()), None)
            if path is None:
                continue
            with system_errors("giving room back", path):
                if name not in used:
                    pruned.freed_bytes += sum(stop - start for start, stop in ranges)
                    _unlink_data(path)
                    continue
                holes = _without(ranges, used[name])
                num_bytes = sum(stop - start for start, stop in holes)
                if path.stat().st_nlink > 1:
                    pruned.kept_bytes += num_bytes
                    pruned.notes.append(f"{path} has further links, so its room was not given back")
                elif punch(path, holes):
                    pruned.freed_bytes += num_bytes
                else:
                    pruned.kept_bytes += num_bytes
                    pruned.notes.append(f"the file system of {path} punches no holes, so its room was not given back")


def _manifest_of(file: CommitFile) -> Manifest | None:
    try:
        return read_manifest(file)
    except StorageError:
        return None


def _forget_membership(directories: Sequence[Path]) -> None:
    """A rank that has no commit any more is not one that has never had any."""
    for directory in directories:
        marks = [each for each in directory.iterdir() if MEMBER_NAME.fullmatch(each.name)]
        for mark in marks:
            mark.unlink()
        if marks:
            sync_directory(directory)


def _ranges(manifests: Sequence[Manifest]) -> Ranges:
    found: dict[str, set[tuple[int, int]]] = {}
    for manifest in manifests:
        for shard in manifest.shards:
            for extent in shard.extents:
                place = extent.offset, extent.offset + extent.num_bytes
                found.setdefault(manifest.files[extent.file].name, set()).add(place)
    return {name: sorted(ranges) for name, ranges in found.items()}


def _without(ranges: Sequence[tuple[int, int]], used: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of the ranges is in none of ``used``; both sorted by their beginnings."""
    left: list[tuple[int, int]] = []
    end = 0
    for start, stop in ranges:
        start = max(start, end)
        for used_start, used_stop in used:
            if used_stop <= start:
                continue
            if used_start >= stop:
                break
            if start < used_start:
                left.append((start, used_start))
            start = max(start, used_stop)
        if start < stop:
            left.append((start, stop))
        end = max(end, stop)
    return left


def _remove_checkpoint(path: Path) -> list[str]:
    """Remove what is infinity's in a directory without a lock, commits first; and the directory, if that was all."""
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file() and not entry.is_symlink())
    for name in [name for name in names if COMMIT_NAME.fullmatch(name)]:
        (path / name).unlink()
    sync_directory(path)
    for name in [name for name in names if DATA_NAME.fullmatch(name)]:
        _unlink_data(path / name)
    strangers = sorted(str(entry) for entry in path.iterdir() if entry.name != OWNER)
    if not strangers:
        (path / OWNER).unlink(missing_ok=True)
        path.rmdir()
    return strangers


def _unlink_data(path: Path) -> None:
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        remove_data(descriptor, path.name)
    finally:
        os.close(descriptor)
