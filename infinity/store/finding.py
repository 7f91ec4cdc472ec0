"""Where the commits of a durable state are, for whoever reads them without an engine.

A *state directory* holds ``commit-<number>.json``, the tensors beside it, and data files; with several NVMe paths there
are several, of which one has the commits. A user may name the directories themselves or the paths that hold them.
Where several ranks have run, each has such directories of its own, in one called ``rank-<rank>``; in a checkpoint that
they have saved together, ``rank-<rank>-of-<how many>``. The path that holds these leads to those of all ranks.

Who reads takes a shared ``flock`` on ``lock``, whose exclusive one is a job's: so nobody reads what a live job prunes,
and no job starts to prune what is being read. A saved checkpoint has no ``lock``, and needs none: nobody changes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from infinity.errors import (
    DirectoryError,
    DirectoryInUseError,
    ManifestError,
    NoCommitError,
    ShortTransferError,
    StorageError,
    storage_error,
)
from infinity.io.paths import user_path
from infinity.store.held import LOCK
from infinity.store.manifest import (
    COMMIT_NAME,
    DATA_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    decode,
    manifest_name,
    tensors_name,
)
from infinity.store.owner import read_owner

STATE_NAME = re.compile(r"infinity-state-rank\d+")
RANK_NAME = re.compile(r"rank-\d{1,10}(-of-\d{5,10})?")

_PIECE_BYTES = 4 << 20


class CommitFile(NamedTuple):
    """A manifest that is there, whatever it says."""

    number: int
    path: Path


def find_directories(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The state directories that ``paths`` are, or hold: those of all ranks.

    Raises:
        ConfigError: these are no paths.
        DirectoryError: a path is missing or no directory.
        NoCommitError: a path neither is a state directory nor holds one.
        StorageError: it could not be listed.
    """
    found: dict[Path, None] = {}
    given = paths if isinstance(paths, Iterable) and not isinstance(paths, (str, bytes)) else [paths]
    for path in [user_path(each, "a checkpoint, or the NVMe directories of a run") for each in given]:
        names = _list(path)
        inside = _inside(path, names)
        for name in names if not inside else ():
            if RANK_NAME.fullmatch(name) and (path / name).is_dir():
                inside += _inside(path / name, _list(path / name))
        if not inside:
            if not STATE_NAME.fullmatch(path.absolute().name):
                raise NoCommitError(
                    "neither a state directory nor an NVMe path that holds one: expected commit-NUMBER.json or "
                    "infinity-state-rank0 in it",
                    path=path,
                )
            inside = [path]
        found.update(dict.fromkeys(each.absolute() for each in inside))
    return list(found)


def states_in(path: Path) -> list[Path]:
    """The state directories with commits that a directory holds.

    Raises:
        OSError: the system reported an error.
    """
    inside = [each for each in path.iterdir() if STATE_NAME.fullmatch(each.name) and each.is_dir()]
    return sorted(each for each in inside if any(COMMIT_NAME.fullmatch(file.name) for file in each.iterdir()))


def _inside(path: Path, names: Sequence[str]) -> list[Path]:
    """The state directories that a directory is, or holds."""
    if any(COMMIT_NAME.fullmatch(name) or DATA_NAME.fullmatch(name) for name in names):
        return [path]
    return [path / name for name in names if STATE_NAME.fullmatch(name) and (path / name).is_dir()]


def _list(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except (FileNotFoundError, NotADirectoryError) as error:
        message = "not a directory that exists; give a state directory, or the NVMe path that holds it"
        raise DirectoryError(message, path=path, errno=error.errno) from error
    except OSError as error:
        raise storage_error("listing a state directory", error, path=path) from error


def list_commits(directories: Sequence[Path]) -> list[CommitFile]:
    """The manifests in state directories of one rank, newest first; none of them has been looked into.

    Raises:
        DirectoryError: more than one of the directories has commits.
        StorageError: a directory could not be listed.
    """
    found = list_homes(directories)
    if len(found) > 1:
        both = " and ".join(map(str, found))
        raise DirectoryError(f"{both} both hold commits; give the directories of one state", path=next(iter(found)))
    return next(iter(found.values()), [])


def list_homes(directories: Sequence[Path]) -> dict[Path, list[CommitFile]]:
    """The state directories that have commits, one for each rank, and the manifests in them, newest first.

    Raises:
        StorageError: a directory could not be listed.
    """
    found: dict[Path, list[CommitFile]] = {}
    for directory in directories:
        for name in _list(directory):
            match = COMMIT_NAME.fullmatch(name)
            if match is not None and name == manifest_name(int(match[1])):
                found.setdefault(directory, []).append(CommitFile(int(match[1]), directory / name))
    return {directory: sorted(files, reverse=True) for directory, files in found.items()}


def read_manifest(file: CommitFile) -> Manifest:
    """What a commit says, if its tensors are beside it unharmed; data files are not looked at.

    Raises:
        ManifestError: it is damaged or none, or its tensors are.
        ShortTransferError: the file of tensors ends early.
        StorageError: a file could not be read.
    """
    manifest = decode(b"".join(_contents(file.path, MAX_MANIFEST_BYTES)), file.path)
    if manifest.number != file.number:
        raise ManifestError(
            f"commit cannot be used: its name says number {file.number}, its content {manifest.number}", path=file.path
        )
    digest = xxhash.xxh3_128()
    for piece in _checked_size(manifest, file.path):
        digest.update(piece)
    _check_digest(manifest, file.path, digest.hexdigest())
    return manifest


def read_tensors(manifest: Manifest, path: Path) -> bytes:
    """The content of a commit's file of tensors; none: empty.

    Args:
        manifest: of the commit.
        path: its manifest's file.

    Raises:
        ManifestError: it is damaged.
        ShortTransferError: it ends early.
        StorageError: it could not be read.
    """
    content = b"".join(_checked_size(manifest, path))
    _check_digest(manifest, path, xxhash.xxh3_128_hexdigest(content))
    return content


def _checked_size(manifest: Manifest, path: Path) -> Iterator[bytes]:
    """The bytes of the tensors' file, no more of them than the manifest says."""
    if manifest.tensors is None:
        return
    beside, expected, got = path.with_name(tensors_name(manifest.number)), manifest.tensors.num_bytes, 0
    for piece in _contents(beside, expected):
        got += len(piece)
        yield piece
    if got < expected:
        raise ShortTransferError(
            "the tensors of a commit end early", path=beside, expected_bytes=expected, got_bytes=got
        )


def _check_digest(manifest: Manifest, path: Path, got: str) -> None:
    if manifest.tensors is not None and got != manifest.tensors.checksum:
        raise ManifestError(
            f"the tensors of a commit are damaged: expected checksum {manifest.tensors.checksum}, got {got}",
            path=path.with_name(tensors_name(manifest.number)),
        )


def open_regular(path: Path, flags: int = 0) -> int:
    """A descriptor that reads a regular file; what else may have its name is not waited for.

    Raises:
        StorageError: it is none, or cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as error:
        raise storage_error("opening a file of a commit", error, path=path) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StorageError("expected a regular file", path=path)
    return descriptor


def _contents(path: Path, at_most: int) -> Iterator[bytes]:
    """A whole file, in pieces."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > at_most:
            raise ManifestError(f"the file is too large: {size} bytes, expected at most {at_most}", path=path)
        try:
            while piece := file.read(_PIECE_BYTES):
                yield piece
        except OSError as error:
            raise storage_error("reading a file of a commit", error, path=path) from error


def hold_off_jobs(directory: Path) -> int | None:
    """Keep jobs out of a state directory; closing the descriptor lets them in again.

    Returns:
        ``None`` where there is nothing to lock, or no ``flock``: then no job can run there.

    Raises:
        DirectoryInUseError: a live job owns it.
        StorageError: the lock could not be opened.
    """
    if not (directory / LOCK).exists():
        return None
    descriptor = open_regular(directory / LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
            return None
        if isinstance(error, BlockingIOError):
            raise _in_use(directory) from error
        raise storage_error("locking a state directory", error, path=directory) from error
    return descriptor


def _in_use(directory: Path) -> DirectoryInUseError:
    """What to say of a directory that a live job owns."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        owner = read_owner(descriptor) or {}
    finally:
        os.close(descriptor)
    return DirectoryInUseError(
        f"the state belongs to process {owner.get('pid')} on host {owner.get('hostname')}, which runs since "
        f"{owner.get('time')} and replaces its commits; wait until it ends, or have it save a checkpoint",
        path=directory,
    )
