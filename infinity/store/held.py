"""Directories that one process holds: locked, marked as infinity's, made and removed so that none is left half made.

The rules and the argument stand at the head of ``directory.py``; here is how they are kept. A directory is claimed by
``flock`` on its ``lock`` file, made under a partial name and renamed into place, and removed the other way round.
Nothing is followed through a symbolic link.

Everything here is synchronous and short, and belongs on a worker thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import DirectoryError, DirectoryInUseError, StorageError, storage_error
from infinity.store.manifest import COMMIT_NAME, MEMBER_NAME
from infinity.store.owner import OWNER, OWNER_PARTIAL, is_marked, open_mark, read_owner, replace_owner, write_owner

__all__ = [
    "MAX_ATTEMPTS",
    "PROBE_NAME",
    "Held",
    "claim",
    "create",
    "empty",
    "leads_to",
    "refuse_checkpoint",
    "remove",
    "replace_owner",
    "sync_directory",
    "typed_errors",
]

LOCK = "lock"
PROBE_NAME = re.compile(r"\.infinity-probe-[0-9a-f]{16}")
_DATA = re.compile(
    r"shards(-[0-9a-f]{16})?\.bin|(commit-\d{10,15}\.(json|safetensors)|(state|member)-[0-9a-f]{32}\.json)(\.partial)?|"
    + PROBE_NAME.pattern
)
MAX_ATTEMPTS = 64
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

_REPAIRS = {
    errno.ENOENT: "the NVMe path does not exist; create it first: mkdir -p {path}",
    errno.ENOTDIR: "the NVMe path is not a directory; give a directory",
    errno.EACCES: "the NVMe path may not be read and written by this user; give it to the user: chown {user} {path}",
    errno.EPERM: "the NVMe path may not be read and written by this user; give it to the user: chown {user} {path}",
    errno.EROFS: "the NVMe path is on a read-only file system; remount it writable, or give another directory",
    errno.ENOLCK: "the NVMe path is on a file system without flock; give a directory on a local disk",
    errno.EOPNOTSUPP: "the NVMe path is on a file system without flock; give a directory on a local disk",
}


@dataclass(frozen=True, slots=True)
class Held:
    """A job directory that this process has locked."""

    name: str
    directory: int
    lock: int

    def close(self) -> None:
        """Release the lock."""
        os.close(self.directory)
        os.close(self.lock)


@contextlib.contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    """Turn what system calls on the job directories below ``path`` raise into errors that state the repair."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        repair = _REPAIRS.get(error.errno or 0)
        if repair is None:
            raise storage_error("preparing or removing the job directory", error, path=path) from error
        message = repair.format(path=shlex.quote(str(path)), user=os.geteuid())
        raise DirectoryError(message, path=path, errno=error.errno) from error


def sync_directory(path: Path) -> None:
    """Make what was created, renamed and removed in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leads_to(parent: int, name: str, descriptor: int) -> bool:
    """Whether ``name`` in directory ``parent`` is the very inode that ``descriptor`` has open."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))


def claim(parent: int, name: str, path: Path) -> Held | None:
    """Lock the directory ``name`` of a dead job.

    Returns:
        ``None`` if there is none, or not any more.

    Raises:
        DirectoryError: it was not made by infinity.
        DirectoryInUseError: its job is alive, or somebody reads it.
    """
    partial = name.endswith(".partial")
    with contextlib.ExitStack() as stack:
        try:
            directory = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            return None
        except (NotADirectoryError, PermissionError) as error:
            raise _not_ours(path, errno=error.errno) from error
        stack.callback(os.close, directory)
        if os.fstat(directory).st_uid != os.geteuid():
            raise _not_ours(path)
        lock = open_mark(directory, LOCK, os.O_RDWR)
        if lock is not None:
            stack.callback(os.close, lock)
        elif partial:
            # Its maker or its remover died when there was no lock: it is empty, or it is not ours to empty.
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=parent)
            return None
        owner = read_owner(directory)
        if lock is None or (owner is None and not partial):
            if not leads_to(parent, name, directory):
                return None
            refuse_checkpoint(path)
            raise _not_ours(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise (_being_read(path) if _is_shared(lock) else _in_use(path, owner or {})) from error
        if not (leads_to(directory, LOCK, lock) and leads_to(parent, name, directory)):
            return None
        stack.pop_all()
        return Held(name, directory, lock)


def create(parent: int, name: str, rank: int) -> Held | None:
    """Make, lock and mark a directory, and give it ``name``; ``None`` if another starter was first."""
    partial = f"{name}.{secrets.token_hex(8)}.partial"
    os.mkdir(partial, 0o700, dir_fd=parent)
    with contextlib.ExitStack() as stack:
        stack.callback(_discard, parent, partial)
        try:
            directory = os.open(partial, OPEN_DIRECTORY, dir_fd=parent)
            stack.callback(os.close, directory)
            lock = os.open(LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600, dir_fd=directory)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return None  # taken for a dead job's, before it had a lock
        if not (leads_to(directory, LOCK, lock) and leads_to(parent, partial, directory)):
            return None
        write_owner(directory, rank)
        try:
            os.rename(partial, name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                return None
            raise
        stack.pop_all()
        return Held(name, directory, lock)


def _discard(parent: int, partial: str) -> None:
    """Remove a directory of ours that never got its name; what cannot be removed is left to the next start."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        directory = os.open(partial, OPEN_DIRECTORY, dir_fd=parent)
        stack.callback(os.close, directory)
        _remove_marks(parent, partial, directory)


def remove(parent: int, held: Held) -> list[str]:
    """Remove a locked directory and our files in it.

    Returns:
        Names of files that are not ours; if there are any, the directory and its marks have stayed.
    """
    strangers = []
    with os.scandir(held.directory) as entries:
        names = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    for name, regular in sorted(names.items()):
        if regular and _DATA.fullmatch(name):
            remove_data(held.directory, name)
        elif not (regular and name in {LOCK, OWNER, OWNER_PARTIAL}):
            strangers.append(name)
    if strangers:
        return strangers
    doomed = held.name
    if not doomed.endswith(".partial"):
        doomed = f"{held.name}.{secrets.token_hex(8)}.partial"
        os.rename(held.name, doomed, src_dir_fd=parent, dst_dir_fd=parent)
        os.fsync(parent)  # or a crash may leave the name and not the mark
    _remove_marks(parent, doomed, held.directory)
    return []


def empty(held: Held) -> None:
    """Remove all of our data in a locked directory, but what says to which state it belongs."""
    with os.scandir(held.directory) as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    for name in names:
        if _DATA.fullmatch(name) and not MEMBER_NAME.fullmatch(name):
            remove_data(held.directory, name)


def remove_data(directory: int, name: str) -> None:
    """Unlink a file, giving its blocks back at once.

    XFS frees the blocks of an unlinked file later, in the background, and a start right after would find the disk full.
    """
    descriptor = os.open(name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        if os.fstat(descriptor).st_nlink == 1:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
    os.unlink(name, dir_fd=directory)


def _remove_marks(parent: int, partial: str, directory: int) -> None:
    """Remove what makes a directory ours, and the directory; what has gone already was removed by another starter."""
    for name in (OWNER_PARTIAL, OWNER, LOCK):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(partial, dir_fd=parent)


def _not_ours(path: Path, *, errno: int | None = None) -> DirectoryError:
    return DirectoryError(
        "expected no such name, or a directory that infinity made for this user; this is a file, a link, another "
        "user's or a stranger's directory, and stays untouched: remove it, or give another NVMe directory",
        path=path,
        errno=errno,
    )


def refuse_checkpoint(path: Path) -> None:
    """Refuse to work in, or below, a saved checkpoint: it has our marker and no lock.

    Raises:
        DirectoryError: this is one.
    """
    if is_marked(path) and not os.path.lexists(path / LOCK) and _has_commits(path):
        raise DirectoryError(
            "this is a saved checkpoint, and no place for a run to work in: give the run an NVMe directory without one "
            "(if it was copied there, move it away), and have engine.load_checkpoint() read it",
            path=path,
        )


def _has_commits(path: Path) -> bool:
    return any(COMMIT_NAME.fullmatch(entry.name) for entry in path.iterdir())


def _is_shared(lock: int) -> bool:
    """Whether those who have locked it read: a job shares with nobody."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _being_read(path: Path) -> DirectoryInUseError:
    return DirectoryInUseError(
        "NVMe directory is being read: by infinity.open_checkpoint, engine.load_checkpoint, or infinity checkpoint "
        "(verify, export, diff); wait until that ends, or end it",
        path=path,
    )


def _in_use(path: Path, owner: dict[str, object]) -> DirectoryInUseError:
    """What to say of a directory that somebody else has locked for himself."""
    return DirectoryInUseError(
        f"NVMe directory is in use by process {owner.get('pid')} on host {owner.get('hostname')} "
        f"since {owner.get('time')}; wait until it ends, or give another directory",
        path=path,
    )
