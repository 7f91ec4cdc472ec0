"""The system calls of ``infinity.io``, behind one object that a test can replace to inject faults."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from infinity.io.ring import Ring


class Syscalls:
    """Each method is one system call and raises ``OSError`` as the system does; all are safe from any thread."""

    def open(self, path: Path, flags: int) -> int:
        """Open ``path``, mode 0600 where it is created; the descriptor is not inherited by child processes."""
        return os.open(path, flags, 0o600)

    def close(self, descriptor: int) -> None:
        """Release a descriptor. On Linux it is gone even when this raises."""
        os.close(descriptor)

    def read_into(self, descriptor: int, view: memoryview, offset: int) -> int:
        """Fill ``view`` from ``offset``; how many bytes came, 0 at the end of the file. Releases the GIL."""
        return os.preadv(descriptor, (view,), offset)

    def write_from(self, descriptor: int, view: memoryview, offset: int) -> int:
        """Write ``view`` at ``offset``; how many bytes were taken. Releases the GIL."""
        return os.pwritev(descriptor, (view,), offset)

    def read_into_many(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """``read_into`` for several stretches of memory in turn, as if they were one; at most 1024."""
        return os.preadv(descriptor, views, offset)

    def write_from_many(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        """``write_from`` for several stretches of memory in turn, as if they were one; at most 1024."""
        return os.pwritev(descriptor, views, offset)

    def open_ring(self, num_operations: int) -> Ring:
        """An io_uring for so many operations at once."""
        return Ring(num_operations)

    def size(self, descriptor: int) -> int:
        """Length of the file in bytes."""
        return os.fstat(descriptor).st_size

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        """Make the file exactly ``size_bytes`` long."""
        os.ftruncate(descriptor, size_bytes)

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        """Reserve blocks for the first ``size_bytes`` and make the file at least that long."""
        os.posix_fallocate(descriptor, 0, size_bytes)

    def sync_data(self, descriptor: int) -> None:
        """Make data and size durable (``fdatasync``)."""
        os.fdatasync(descriptor)

    def sync(self, descriptor: int) -> None:
        """Make data and all metadata durable (``fsync``); also for directories."""
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give ``source`` the name ``target``, replacing what was there, in one step."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        path.unlink()


SYSCALLS = Syscalls()
"""The real ones."""
