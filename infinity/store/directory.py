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
    * ``StateDirectory`` has another name (``infinity-state-rank<rank>``) and outlives its job, with data files and
      commits in it. No other job's start removes one; what is partial of one counts as a dead job's.

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
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from infinity.errors import DirectoryError, DirectoryInUseError
from infinity.store.held import (
    MAX_ATTEMPTS,
    Held,
    claim,
    create,
    empty,
    leads_to,
    refuse_checkpoint,
    remove,
    replace_owner,
    typed_errors,
)
from infinity.store.owner import is_marked

_JOB = re.compile(r"infinity-rank\d+(\.[0-9a-f]{16}\.partial)?|infinity-state-rank\d+\.[0-9a-f]{16}\.partial")


D = TypeVar("D", bound="JobDirectory")


class JobDirectory:
    """This job's directory, locked until ``close``, which removes it; made by ``JobDirectory.open``.

    Attributes:
        path: absolute path of the directory.
    """

    _prefix = "infinity-rank"

    def __init__(self, path: Path, parent: int, held: Held) -> None:
        self.path = path
        self._parent = parent
        self._held = held
        self._pid = os.getpid()
        self._closed = False
        _open_here.add(self)

    @classmethod
    def open(cls: type[D], path: str | os.PathLike[str], *, rank: int = 0) -> D:
        """Lock ``<path>/<prefix><rank>``, after removing what dead jobs left below ``path``.

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
        name = f"{cls._prefix}{rank}"
        with contextlib.ExitStack() as stack, typed_errors(path):
            parent = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, parent)
            for _ in range(MAX_ATTEMPTS):
                directory = cls._take(parent, path / name, rank)
                if directory is not None:
                    stack.pop_all()
                    return directory
        raise DirectoryInUseError("other jobs keep starting and ending in this NVMe path; try again", path=path / name)

    @classmethod
    def _take(cls: type[D], parent: int, path: Path, rank: int) -> D | None:
        """Make the directory, in the place of a dead job's; ``None`` if another starter was first."""
        _remove_dead(parent, path.parent, path.name)
        held = create(parent, path.name, rank)
        return None if held is None else cls(path, parent, held)

    @property
    def device(self) -> int:
        """``st_dev`` of the file system; directories of one device share their free space."""
        return os.fstat(self._held.directory).st_dev

    def free_bytes(self) -> int:
        """Bytes of the file system that this user may still take."""
        status = os.fstatvfs(self._held.directory)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Be done with it; here that is ``remove``."""
        self.remove()

    def remove(self) -> None:
        """Remove the directory and all in it that is ours, and release the lock.

        A stranger's file in it stays, and then so do the directory, its marker and its lock file: the next start names
        that file. If the path no longer leads to this directory, nothing is removed. Doing it twice is harmless; in a
        forked child it does nothing.

        Raises:
            StorageError: something could not be removed; the lock is released all the same.
        """
        if not self._end():
            return
        try:
            with typed_errors(self.path):
                if leads_to(self._parent, self._held.name, self._held.directory):
                    remove(self._parent, self._held)
        finally:
            self._close_descriptors()

    def _end(self) -> bool:
        """Whether it was open until now, in this process."""
        if self._closed or os.getpid() != self._pid:
            return False
        self._closed = True
        _open_here.discard(self)
        return True

    def _close_descriptors(self) -> None:
        self._held.close()
        os.close(self._parent)


class StateDirectory(JobDirectory):
    """A directory that stays when its job ends, and is taken over by the next: ``<path>/infinity-state-rank<rank>``.

    Attributes:
        is_kept: whether it stays. A new one does not, before somebody has made a commit in it.
        is_member: whether it stays without one, empty, since it belongs to the state of several ranks.
    """

    _prefix = "infinity-state-rank"
    is_kept = False
    is_member = False

    @classmethod
    def _take(cls, parent: int, path: Path, rank: int) -> StateDirectory | None:
        """Take over the directory of a job that has ended, or make one; ``None`` if another starter was first."""
        _remove_dead(parent, path.parent, None)
        found = claim(parent, path.name, path)
        held = found or create(parent, path.name, rank)
        if held is None:
            return None
        with contextlib.ExitStack() as stack:
            stack.callback(held.close)
            if found is not None:
                replace_owner(held.directory, rank)
            os.fsync(parent)
            stack.pop_all()
        directory = cls(path, parent, held)
        directory.is_kept = found is not None
        return directory

    @property
    def descriptor(self) -> int:
        """The open directory."""
        return self._held.directory

    def close(self) -> None:
        """Release the lock; all files stay if it is kept. Closing twice is harmless; in a forked child it does nothing.

        Raises:
            StorageError: it is not kept, and something could not be removed.
        """
        if not (self.is_kept or self.is_member):
            self.remove()
        elif self._end():
            try:
                with typed_errors(self.path):
                    if not self.is_kept and leads_to(self._parent, self._held.name, self._held.directory):
                        empty(self._held)
            finally:
                self._close_descriptors()


def open_directories(paths: Sequence[str | os.PathLike[str]], *, rank: int = 0) -> list[JobDirectory]:
    """Open a job directory below each of ``paths``: all of them, or none.

    Raises:
        DirectoryError: two paths lead to the same directory, or one is a run's own or a checkpoint, or cannot be
            used, as in ``JobDirectory.open``.
        StorageError: as in ``JobDirectory.open``.
    """
    return _open_all(paths, lambda path: JobDirectory.open(path, rank=rank))


def open_state_directories(paths: Sequence[str | os.PathLike[str]], *, rank: int = 0) -> list[StateDirectory]:
    """Open a state directory below each of ``paths``: all of them, or none. Errors: those of ``open_directories``."""
    return _open_all(paths, lambda path: StateDirectory.open(path, rank=rank))


def _open_all(paths: Sequence[str | os.PathLike[str]], open_one: Callable[[Path], D]) -> list[D]:
    seen: dict[tuple[int, int], Path] = {}
    for path in map(Path, paths):
        with typed_errors(path):
            status = path.stat()
            refuse_checkpoint(path)
            if is_marked(path):
                raise DirectoryError(
                    f"this is a directory that infinity made for a run: give the one that holds it, {path.parent}",
                    path=path,
                )
        inode = (status.st_dev, status.st_ino)
        if inode in seen:
            raise DirectoryError(f"NVMe paths {seen[inode]} and {path} are one directory; give it once", path=path)
        seen[inode] = path
    with contextlib.ExitStack() as stack:
        directories = []
        for path in seen.values():
            directory = open_one(path)
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


def _remove_dead(parent: int, path: Path, own_name: str | None) -> None:
    """Remove the directories of dead jobs below ``path``.

    Live jobs' and strangers' are left alone, unless it is ``own_name`` that they hold: that is an error.
    """
    others = sorted(name for name in os.listdir(parent) if _JOB.fullmatch(name) and name != own_name)
    for name in (*filter(None, [own_name]), *others):
        try:
            held = claim(parent, name, path / name)
        except DirectoryError:
            if name == own_name:
                raise
            continue
        if held is None:
            continue
        with contextlib.closing(held):
            strangers = remove(parent, held)
        if strangers:
            raise DirectoryError(
                f"the directory of a job that has ended holds files that are not infinity's ({', '.join(strangers)}); "
                "move them away, or remove the directory",
                path=path / name,
            )
