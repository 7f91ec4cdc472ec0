"""``PartialDirectory``: a directory that is made beside its place and then put there, whole, whatever ends the process.

    <place>.<16 hex>.partial    is being made; its maker has a shared ``flock`` on its ``owner.json``
    <place>.<16 hex>.replaced   was in the place, where the system cannot exchange two names

Guarantees
    * Where the system exchanges two names in one step (Linux, on nearly all local file systems), there is at every
      moment what was in the place, or the new one, both whole. Elsewhere there are two renames, and a crash between
      them leaves nothing in the place, and under ``.replaced`` what was there: the next directory that is made for this
      place finds it and puts it back first.
    * A crash leaves at most directories of these names. The next that is made for the same place removes those that
      nobody has locked and in which nothing is but our marker and regular files of our names, and directories of
      ranks with nothing but such. What was replaced has
      the ``.partial`` name then, and no lock, so it goes the same way.
    * A live one is never removed: the marker is locked as soon as it is there, and a maker whose directory was removed
      before that makes another. Where there is no ``flock``, nothing is removed but by its maker.

``owner.json`` serves as the lock, and not a file of its own, so that a directory in its place needs no further change,
and none of a crash between two.

Everything here is synchronous and belongs on a worker thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Container
from pathlib import Path

from infinity.io.paths import exchange
from infinity.store.held import MAX_ATTEMPTS, OPEN_DIRECTORY, leads_to
from infinity.store.manifest import COMMIT_NAME, DATA_NAME
from infinity.store.owner import OWNER, open_mark, read_owner, write_owner

_PART = re.compile(r"rank-\d{5,10}-of-\d{5,10}")
_PART_OR_LEFT = re.compile(rf"{_PART.pattern}(\.[0-9a-f]{{16}}\.(partial|replaced))?")
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP)


class PartialDirectory:
    """A directory that is being made.

    Args:
        place: where it is to be, absolute; the directory that is to hold it exists.

    Raises:
        OSError: the system reported an error; nothing is left.

    Attributes:
        path: where it is until then.
        descriptor: the directory, open.
    """

    def __init__(self, place: Path) -> None:
        self._place = place.name
        self._own: set[str] = set()
        with contextlib.ExitStack() as stack:
            self._parent = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, self._parent)
            stack.callback(_tidy, self._parent, self._place, self._own)
            _tidy(self._parent, self._place, ())
            self._name, self.descriptor, self._lock = self._make()
            stack.pop_all()
        self.path = place.with_name(self._name)

    def _make(self) -> tuple[str, int, int]:
        for _ in range(MAX_ATTEMPTS):
            stem = f"{self._place}.{secrets.token_hex(8)}"
            self._own.add(stem)
            made = _make(self._parent, f"{stem}.partial")
            if made is not None:
                return f"{stem}.partial", *made
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def put(self) -> None:
        """Its content is durable: give it its place, durably.

        Raises:
            OSError: the system reported an error; what was in the place is there.
        """
        place, replaced = self._place, f"{self._name.removesuffix('partial')}replaced"
        with contextlib.ExitStack() as undo:
            if not _is_there(self._parent, place):
                self._rename(undo, self._name, place)
            elif exchange(self._parent, self._name, place):
                undo.callback(exchange, self._parent, self._name, place)
            else:
                self._rename(undo, place, replaced)
                self._rename(undo, self._name, place)
            os.fsync(self._parent)
            undo.pop_all()

    def _rename(self, undo: contextlib.ExitStack, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        undo.callback(os.rename, new, old, src_dir_fd=self._parent, dst_dir_fd=self._parent)

    def close(self) -> None:
        """Remove it, unless it has its place; and what it has replaced there."""
        os.close(self._lock)
        os.close(self.descriptor)
        try:
            _tidy(self._parent, self._place, self._own)
        finally:
            os.close(self._parent)


def is_ours(name: str) -> bool:
    """Whether a checkpoint has files of this name."""
    return name == OWNER or bool(COMMIT_NAME.fullmatch(name) or DATA_NAME.fullmatch(name))


def part_name(rank: int, num_ranks: int) -> str:
    """The directory of one rank's part in a checkpoint of several."""
    return f"rank-{rank:05d}-of-{num_ranks:05d}"


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is a checkpoint, of one rank or of several, and holds nothing else.

    Raises:
        OSError: the system reported an error.
    """
    return os.path.lexists(path / OWNER) and _are_all_ours(path, lambda name: bool(_PART.fullmatch(name)))


def _are_all_ours(path: Path | int, is_part: Callable[[str], bool]) -> bool:
    """Whether all that is in a directory are files of ours, and parts that hold nothing but such.

    Args:
        path: of it, or its descriptor.
        is_part: tells by its name.
    """
    with os.scandir(path) as entries:
        files = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    return all(is_ours(name) if is_file else is_part(name) and _is_part(path, name) for name, is_file in files.items())


def _is_part(parent: Path | int, name: str) -> bool:
    try:
        if isinstance(parent, int):
            directory = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
        else:
            directory = os.open(parent / name, OPEN_DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    try:
        return _are_all_ours(directory, lambda _: False)
    finally:
        os.close(directory)


def _names_in(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries]


def _make(parent: int, name: str) -> tuple[int, int] | None:
    """Make, mark and lock a directory: it and its lock; ``None`` if it was taken for a dead one before it was locked.

    Raises:
        OSError: the system reported an error; what is left is a dead one.
    """
    os.mkdir(name, 0o700, dir_fd=parent)
    with contextlib.ExitStack() as stack:
        try:
            directory = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
            stack.callback(os.close, directory)
            write_owner(directory, 0)
            lock = os.open(OWNER, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
        if not (leads_to(directory, OWNER, lock) and leads_to(parent, name, directory)):
            return None
        stack.pop_all()
        return directory, lock


def _tidy(parent: int, place: str, own: Container[str]) -> None:
    """Remove what is left of directories that were made for a place; where it is empty, put back what was there.

    What cannot be removed stays, for the next time.

    Args:
        parent: the directory of all of them, open.
        place: the name.
        own: what the names of those begin with that the caller has made, and nobody else removes.
    """
    pattern = re.compile(rf"({re.escape(place)}\.[0-9a-f]{{16}})\.(partial|replaced)")
    with contextlib.suppress(OSError):
        found = [match for name in sorted(os.listdir(parent)) if (match := pattern.fullmatch(name))]
        is_alive = False
        for match in (match for match in found if match[2] == "partial"):
            try:
                _remove(parent, match[0], is_own=match[1] in own)
            except BlockingIOError:
                is_alive = True
            except OSError:
                continue
        for match in (match for match in found if match[2] == "replaced" and not is_alive):
            with contextlib.suppress(OSError):
                if _is_there(parent, place):
                    _remove(parent, match[0], is_own=match[1] in own)
                else:
                    os.rename(match[0], place, src_dir_fd=parent, dst_dir_fd=parent)


def _remove(parent: int, name: str, *, is_own: bool) -> None:
    """Remove a directory, if all of it is ours.

    Raises:
        BlockingIOError: its maker lives.
        OSError: the system reported an error.
    """
    with contextlib.ExitStack() as stack:
        directory = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
        stack.callback(os.close, directory)
        if os.fstat(directory).st_uid != os.geteuid():
            return
        lock = open_mark(directory, OWNER, os.O_RDWR)
        if lock is not None:
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if not (is_own and error.errno in _NO_FLOCK):
                    raise
            names = _names_in(directory)
            is_marked = read_owner(directory) is not None or len(names) == 1  # it was being marked
            if not (is_marked and _are_all_ours(directory, lambda each: bool(_PART_OR_LEFT.fullmatch(each)))):
                return
            for each in (*sorted(set(names) - {OWNER}), OWNER):
                if is_ours(each):
                    os.unlink(each, dir_fd=directory)
                else:
                    _remove_part(directory, each)
        os.rmdir(name, dir_fd=parent)  # empty, or not ours to empty


def _remove_part(parent: int, name: str) -> None:
    directory = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
    try:
        for file in _names_in(directory):
            os.unlink(file, dir_fd=directory)
    finally:
        os.close(directory)
    os.rmdir(name, dir_fd=parent)


def _is_there(parent: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
