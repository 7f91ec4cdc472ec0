"""A commit on disk, of all the ranks that have made it: ``StoredCommit`` for each, in the order of ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from infinity.errors import DirectoryError, ManifestError, NoCommitError, StorageError
from infinity.store.finding import CommitFile, find_directories, hold_off_jobs, list_homes, read_manifest
from infinity.store.manifest import Manifest
from infinity.store.stored import StoredCommit

Homes = Mapping[Path, Sequence[CommitFile]]


def open_commits(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    number: int | None = None,
    *,
    lock: bool = True,
) -> list[StoredCommit]:
    """Open a commit of all ranks whose directories are given, and hold off jobs until the first of them is closed.

    Args:
        paths: state directories, or paths that hold them: of one state.
        number: which commit; ``None`` for the newest that all ranks have and can be used.
        lock: false for whoever owns the directories.

    Raises:
        ConfigError: these are no paths.
        DirectoryError: a path is not such a directory, or they are of several states.
        DirectoryInUseError: a live job owns one.
        ManifestError: the commit ``number`` is damaged.
        NoCommitError: there is no such commit, or none that can be used.
        StorageError: a file could not be read.
    """
    directories = find_directories(paths)
    homes = list_homes(directories)
    if len(homes) <= 1:
        return [StoredCommit.open(paths, number, lock=lock)]
    with contextlib.ExitStack() as stack:
        for directory in directories if lock else ():
            held = hold_off_jobs(directory)
            if held is not None:
                stack.callback(os.close, held)
        homes = list_homes(directories)
        manifests, passed_over = _choose(homes, number)
        others = [directory for directory in directories if directory not in homes]
        commits = [StoredCommit(manifest, file.path, [file.path.parent, *others]) for manifest, file in manifests]
        commits[0].passed_over = passed_over
        commits[0].keep(stack.pop_all())
        return commits


def numbers_of_all(homes: Homes) -> list[int]:
    """The numbers of the commits of which all ranks have a manifest, newest first."""
    if not homes:
        return []
    return sorted(set.intersection(*({file.number for file in files} for files in homes.values())), reverse=True)


def _choose(homes: Homes, number: int | None) -> tuple[list[tuple[Manifest, CommitFile]], list[StorageError]]:
    """The manifests of a commit, in the order of ranks, and what is wrong with newer ones."""
    there = numbers_of_all(homes)
    where = next(iter(homes))
    if number is not None and number not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise NoCommitError(f"there is no commit {number} of all ranks; there are: {listed}", path=where)
    damaged: list[StorageError] = []
    for each in there if number is None else [number]:
        files = [file for of_rank in homes.values() for file in of_rank if file.number == each]
        try:
            found = [(read_manifest(file), file) for file in files]
        except StorageError as error:
            if number is not None:
                raise
            damaged.append(error)
            continue
        _check_ranks(found)
        return sorted(found, key=lambda of_rank: of_rank[0].rank), damaged
    if damaged:
        raise NoCommitError(f"no commit can be used; of the newest: {damaged[0]}", path=where) from damaged[0]
    listed = "; ".join(f"{home}: {', '.join(str(file.number) for file in files)}" for home, files in homes.items())
    raise NoCommitError(f"no commit is there of all ranks: {listed}", path=where)


def _check_ranks(found: Sequence[tuple[Manifest, CommitFile]]) -> None:
    """Refuse what is not of one state, one number of ranks, and different ranks."""
    first, file = found[0]
    for manifest, other in found[1:]:
        if (manifest.state, manifest.world_size) != (first.state, first.world_size):
            raise DirectoryError(
                f"{file.path.parent} and {other.path.parent} both hold commits, of different runs; give the "
                "directories of one state",
                path=other.path.parent,
            )
    by_rank: dict[int, CommitFile] = {}
    for manifest, other in found:
        if manifest.rank in by_rank:
            raise DirectoryError(
                f"{by_rank[manifest.rank].path.parent} and {other.path.parent} both hold commits, of rank "
                f"{manifest.rank}; give the directories of one state",
                path=other.path.parent,
            )
        by_rank[manifest.rank] = other
        if manifest.rank >= manifest.world_size:
            raise ManifestError(
                f"commit cannot be used: it says rank {manifest.rank} of {manifest.world_size}", path=other.path
            )
