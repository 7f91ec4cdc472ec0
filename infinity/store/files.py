"""``DirectoryFiles``: small files in a state directory, written so that a crash leaves the old one or the new one.

Every change of the directory goes through ``_create``, ``_rename``, ``_unlink`` and ``sync``, one system call each as
far as a crash can tell; tests record these and replay every state in which a crash may leave the disk.
"""

from __future__ import annotations

import contextlib
import os
import stat

from infinity.errors import StorageError, system_errors
from infinity.store.directory import StateDirectory

_PARTIAL = ".partial"


class DirectoryFiles:
    """The files of one state directory. Synchronous: its methods belong on a worker thread.

    Args:
        directory: whose; open as long as this is used.
    """

    def __init__(self, directory: StateDirectory) -> None:
        self.path = directory.path
        self._directory = directory.descriptor

    def names(self) -> list[str]:
        """The regular files there are, sorted.

        Raises:
            StorageError: the system reported an error.
        """
        with self._doing("listing the state directory"), os.scandir(self._directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))

    def size_bytes(self, name: str) -> int:
        """The length of a file.

        Raises:
            StorageError: the system reported an error, or it is no regular file.
        """
        with self._doing("looking at a file", name):
            status = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError("expected a regular file", path=self.path / name)
        return status.st_size

    def read(self, name: str) -> bytes:
        """All of a file.

        Raises:
            StorageError: the system reported an error.
        """
        with self._doing("reading", name):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._directory)
            with os.fdopen(descriptor, "rb") as file:
                return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Write a file whole and put it in the place of any of that name; durable after the next ``sync``.

        Raises:
            DiskFullError: no room; what was there stays.
            StorageError: the system reported an error; what was there stays.
        """
        partial = name + _PARTIAL
        with self._doing("writing", name):
            try:
                with contextlib.suppress(FileNotFoundError):
                    self._unlink(partial)
                self._create(partial, content)
                self._rename(partial, name)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._unlink(partial)
                raise

    def unlink(self, name: str) -> None:
        """Remove a file; harmless where there is none. Durable after the next ``sync``.

        Raises:
            StorageError: the system reported an error.
        """
        with self._doing("removing", name), contextlib.suppress(FileNotFoundError):
            self._unlink(name)

    def sync(self) -> None:
        """Make what was created, renamed and removed durable.

        Raises:
            StorageError: the system reported an error.
        """
        with self._doing("making the state directory durable"):
            self._sync()

    def _create(self, name: str, content: bytes) -> None:
        """A new file with durable content, whose name is not durable yet."""
        write_new(self._directory, name, content)

    def _rename(self, name: str, other: str) -> None:
        os.rename(name, other, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def _unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._directory)

    def _sync(self) -> None:
        os.fsync(self._directory)

    def _doing(self, action: str, name: str = "") -> contextlib.AbstractContextManager[None]:
        return system_errors(action, self.path / name)


def write_new(directory: int, name: str, content: bytes) -> None:
    """Make a file in an open directory, with durable content; its name is not durable yet.

    Raises:
        OSError: the system reported an error.
    """
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=directory)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
