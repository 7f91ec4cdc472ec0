"""One job's own directory below a user's NVMe path.

Guarantees
    * The job works in ``<path>/infinity-rank<rank>``, made by it (0700), whose ``lock`` it holds with ``flock`` as
      long as it lives. ``flock`` alone says who is alive: the kernel drops it with the process, however that ends.
      ``owner.json`` is the marker that infinity made the directory, and tells people who holds it.
    * That name is never seen half made. A directory is prepared, locked and marked under a partial name
      (``infinity-rank<rank>.<16 hex>.partial``), then renamed into place, which fails if another job's is there;
      before its marker goes, it is renamed back to a partial name. So a directory of that name without a marker is a
      stranger's and is refused untouched, and a crash at any step leaves a whole directory whose lock is free, or a
      partial one. The next start removes both.
    * Only these are ever removed: the regular files ``lock``, ``owner.json``, ``shards.bin`` and ``.infinity-probe-<16
      hex>`` (of ``open_backend``) in a directory that carries the marker or a partial name, and that directory once
      empty. Nothing is followed through a symbolic link. The user's path itself is neither made nor removed.

Starters and closers may meet at any step. Whoever locks a directory then checks that its path still leads to the very
inodes that were opened; if not, it was removed meanwhile, and the starter begins again. A partial directory may even
be removed between ``mkdir`` and ``flock``; its maker then makes another.

Assumptions: ``flock`` works between all hosts that see the path (where there is none, the start is refused), and the
file system keeps the order of its own metadata changes over a power loss (ext4, XFS and btrfs do).

Rejected: deciding by process id (reused, and meaningless in another container or host); a lock file beside the
directory (cannot be removed without a race); creating in place, and taking an unmarked directory for a crashed one (it
may be the user's); one gate lock on the user's path (a stranger can hold it for ever, and NFS refuses it on a
directory). The gap that stays: ``rename`` replaces an *empty* directory that a stranger makes in the microseconds
since we looked.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import DirectoryError, DirectoryInUseError, StorageError, storage_error
from infinity.store.owner import OWNER, open_mark, read_owner, write_owner

_LOCK = "lock"
_DATA = re.compile(r"shards\.bin|\.infinity-probe-[0-9a-f]{16}")
_JOB = re.compile(r"infinity-rank\d+(\.[0-9a-f]{16}\.partial)?")
_MAX_ATTEMPTS = 64
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

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
class _Held:
    """A job directory that this process has locked."""

    name: str
    directory: int
    lock: int

    def close(self) -> None:
        os.close(self.directory)
        os.close(self.lock)


class JobDirectory:
    """This job's directory, locked until ``close``; made by ``JobDirectory.open``.

    Attributes:
        path: absolute path of the directory.
    """

    def __init__(self, path: Path, parent: int, held: _Held) -> None:
        self.path = path
        self._parent = parent
        self._held = held
        self._pid = os.getpid()
        self._closed = False
        _open_here.add(self)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, rank: int = 0) -> JobDirectory:
        """Make and lock ``<path>/infinity-rank<rank>``, after removing what dead jobs left below ``path``.

        Args:
            path: an existing, writable directory.
            rank: the rank of this process; ranks of one job may share a path.

        Raises:
            DirectoryInUseError: a live job holds it.
            DirectoryError: the path is missing, not a directory, not writable, or without ``flock``; a stranger's file,
                link or directory stands in the place of ours; a dead job's directory holds files that are not ours.
            DiskFullError: no room for even a directory.
            StorageError: any other failure of a system call.
        """
        assert rank >= 0
        path = Path(path).absolute()
        name = f"infinity-rank{rank}"
        with contextlib.ExitStack() as stack, _typed_errors(path):
            parent = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, parent)
            for _ in range(_MAX_ATTEMPTS):
                _remove_dead(parent, path, name)
                held = _create(parent, name, rank)
                if held is not None:
                    stack.pop_all()
                    return cls(path / name, parent, held)
        raise DirectoryInUseError("other jobs keep starting and ending in this NVMe path; try again", path=path / name)

    @property
    def device(self) -> int:
        """``st_dev`` of the file system; directories of one device share their free space."""
        return os.fstat(self._held.directory).st_dev

    def free_bytes(self) -> int:
        """Bytes of the file system that this user may still take."""
        status = os.fstatvfs(self._held.directory)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Remove the directory and all in it that is ours, and release the lock.

        A stranger's file in it stays, and then so do the directory, its marker and its lock file: the next start names
        that file. If the path no longer leads to this directory, nothing is removed. Closing twice is harmless; in a
        forked child it does nothing.

        Raises:
            StorageError: something could not be removed; the lock is released all the same.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        _open_here.discard(self)
        try:
            with _typed_errors(self.path):
                if _leads_to(self._parent, self._held.name, self._held.directory):
                    _remove(self._parent, self._held)
        finally:
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._held.close()
        os.close(self._parent)


def open_directories(paths: Sequence[str | os.PathLike[str]], *, rank: int = 0) -> list[JobDirectory]:
    """Open a job directory below each of ``paths``: all of them, or none.

    Raises:
        DirectoryError: two paths lead to the same directory, or one cannot be used, as in ``JobDirectory.open``.
        StorageError: as in ``JobDirectory.open``.
    """
    seen: dict[tuple[int, int], Path] = {}
    for path in map(Path, paths):
        with _typed_errors(path):
            status = path.stat()
        inode = (status.st_dev, status.st_ino)
        if inode in seen:
            raise DirectoryError(f"NVMe paths {seen[inode]} and {path} are one directory; give it once", path=path)
        seen[inode] = path
    with contextlib.ExitStack() as stack:
        directories = []
        for path in seen.values():
            directory = JobDirectory.open(path, rank=rank)
            stack.callback(directory.close)
            directories.append(directory)
        stack.pop_all()
        return directories


_open_here: set[JobDirectory] = set()


def _forget_in_child() -> None:
    """A forked child gives up its copies of the descriptors, so that a lock ends with the process that took it."""
    for directory in _open_here:
        directory._closed = True
        directory._close_descriptors()
    _open_here.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@contextlib.contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
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


def _leads_to(parent: int, name: str, descriptor: int) -> bool:
    """Whether ``name`` in directory ``parent`` is the very inode that ``descriptor`` has open."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))


def _remove_dead(parent: int, path: Path, own_name: str) -> None:
    """Remove the directories of dead jobs below ``path``.

    Live jobs' and strangers' are left alone, unless it is ``own_name`` that they hold: that is an error.
    """
    others = sorted(name for name in os.listdir(parent) if _JOB.fullmatch(name) and name != own_name)
    for name in (own_name, *others):
        try:
            held = _claim(parent, name, path / name)
        except DirectoryError:
            if name == own_name:
                raise
            continue
        if held is None:
            continue
        with contextlib.closing(held):
            strangers = _remove(parent, held)
        if strangers:
            raise DirectoryError(
                f"the directory of a job that has ended holds files that are not infinity's ({', '.join(strangers)}); "
                "move them away, or remove the directory",
                path=path / name,
            )


def _claim(parent: int, name: str, path: Path) -> _Held | None:
    """Lock the directory ``name`` of a dead job.

    Returns:
        ``None`` if there is none, or not any more.

    Raises:
        DirectoryError: it was not made by infinity.
        DirectoryInUseError: its job is alive.
    """
    partial = name.endswith(".partial")
    with contextlib.ExitStack() as stack:
        try:
            directory = os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            return None
        except (NotADirectoryError, PermissionError) as error:
            raise _not_ours(path, errno=error.errno) from error
        stack.callback(os.close, directory)
        if os.fstat(directory).st_uid != os.geteuid():
            raise _not_ours(path)
        lock = open_mark(directory, _LOCK, os.O_RDWR)
        if lock is not None:
            stack.callback(os.close, lock)
        elif partial:
            # Its maker or its remover died when there was no lock: it is empty, or it is not ours to empty.
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=parent)
            return None
        owner = read_owner(directory)
        if lock is None or (owner is None and not partial):
            if not _leads_to(parent, name, directory):
                return None
            raise _not_ours(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(path, owner or {}) from error
        if not (_leads_to(directory, _LOCK, lock) and _leads_to(parent, name, directory)):
            return None
        stack.pop_all()
        return _Held(name, directory, lock)


def _create(parent: int, name: str, rank: int) -> _Held | None:
    """Make, lock and mark a directory, and give it ``name``; ``None`` if another starter was first."""
    partial = f"{name}.{secrets.token_hex(8)}.partial"
    os.mkdir(partial, 0o700, dir_fd=parent)
    with contextlib.ExitStack() as stack:
        stack.callback(_discard, parent, partial)
        try:
            directory = os.open(partial, _OPEN_DIRECTORY, dir_fd=parent)
            stack.callback(os.close, directory)
            lock = os.open(_LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600, dir_fd=directory)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return None  # taken for a dead job's, before it had a lock
        if not (_leads_to(directory, _LOCK, lock) and _leads_to(parent, partial, directory)):
            return None
        write_owner(directory, rank)
        try:
            os.rename(partial, name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                return None
            raise
        stack.pop_all()
        return _Held(name, directory, lock)


def _discard(parent: int, partial: str) -> None:
    """Remove a directory of ours that never got its name; what cannot be removed is left to the next start."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        directory = os.open(partial, _OPEN_DIRECTORY, dir_fd=parent)
        stack.callback(os.close, directory)
        _remove_marks(parent, partial, directory)


def _remove(parent: int, held: _Held) -> list[str]:
    """Remove a locked directory and our files in it.

    Returns:
        Names of files that are not ours; if there are any, the directory and its marks have stayed.
    """
    strangers = []
    with os.scandir(held.directory) as entries:
        names = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    for name, regular in sorted(names.items()):
        if regular and _DATA.fullmatch(name):
            _remove_data(held.directory, name)
        elif not (regular and name in {_LOCK, OWNER}):
            strangers.append(name)
    if strangers:
        return strangers
    doomed = held.name
    if not doomed.endswith(".partial"):
        doomed = f"{held.name}.{secrets.token_hex(8)}.partial"
        os.rename(held.name, doomed, src_dir_fd=parent, dst_dir_fd=parent)
    _remove_marks(parent, doomed, held.directory)
    return []


def _remove_data(directory: int, name: str) -> None:
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
    for name in (OWNER, _LOCK):
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


def _in_use(path: Path, owner: dict[str, object]) -> DirectoryInUseError:
    return DirectoryInUseError(
        f"NVMe directory is in use by process {owner.get('pid')} on host {owner.get('hostname')} "
        f"since {owner.get('time')}; wait until it ends, or give another directory",
        path=path,
    )
