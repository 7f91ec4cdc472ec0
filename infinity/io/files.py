"""An open file, its descriptors, and why buffered and direct I/O may meet in it.

Where I/O is direct, two kinds of descriptors serve one file. Aligned bytes go through the ``O_DIRECT`` one. Ragged
edges, and what is left of a page after a short transfer, go through the page cache, where the kernel does the
read-modify-write and knows the exact end of the file. Linux keeps the two coherent: a direct transfer first writes
back the cached pages in its range, a direct write drops them as well, and both hold the inode's lock against buffered
writes until they return (our direct I/O is synchronous in its thread). So disjoint transfers that share a page are
independent, which a read-modify-write in user space could not promise, and an edge read straight after an edge write
costs no I/O. Rejected for edge reads: direct I/O of the whole page into an aligned buffer, which would force such a
dirty page out to the disk first. The buffered descriptor gets ``POSIX_FADV_RANDOM``: read-ahead at an edge would only
cache the body.

Assumed: ext4, XFS, btrfs or another file system that keeps the coherence of the kernel's generic code, on one
machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import EngineStateError, StorageError
from infinity.io.backend import DIRECT_ALIGNMENT, Backend, File
from infinity.io.completion import Completion, InFlight


@dataclass(frozen=True, slots=True)
class Descriptors:
    """A file opened through the page cache and, where I/O is direct, around it."""

    buffered: int
    direct: int | None

    def route(self, position: int, num_bytes: int) -> tuple[int, int]:
        """Which descriptor takes the bytes at ``position``, and how many of ``num_bytes`` at once."""
        if self.direct is None:
            return self.buffered, num_bytes
        ragged_bytes = -position % DIRECT_ALIGNMENT
        if ragged_bytes or num_bytes < DIRECT_ALIGNMENT:
            return self.buffered, min(num_bytes, ragged_bytes or num_bytes)
        return self.direct, num_bytes - num_bytes % DIRECT_ALIGNMENT


class QueuedFile(File):
    """An open file of a ``QueuedBackend``.

    Args:
        backend: whose it is.
        path: where it is.
        lanes: descriptors; as many as workers may need at once.
        release: closes the descriptors, once nothing uses them; returns whether it was cancelled meanwhile.
    """

    def __init__(
        self,
        backend: Backend,
        path: Path,
        lanes: Sequence[Descriptors],
        release: Callable[[QueuedFile], Awaitable[bool]],
    ) -> None:
        self.backend = backend
        self.path = path
        self.lanes = lanes
        self.in_flight = InFlight()
        self._release = release
        self._closed: Completion | None = None

    @property
    def descriptor(self) -> int:
        """The descriptor for calls that concern the whole file."""
        lane = self.lanes[0]
        return lane.buffered if lane.direct is None else lane.direct

    def check_open(self) -> None:
        """Raise ``EngineStateError`` once ``aclose`` was called."""
        if self._closed is not None:
            raise EngineStateError(f"file {self.path} is closed: open it again before more transfers")

    async def aclose(self) -> None:
        """Wait for transfers in flight, then close. Closing twice is harmless.

        Raises:
            StorageError: the system could not close; the descriptors are gone all the same.
        """
        if await self.close():
            raise asyncio.CancelledError

    async def close(self) -> bool:
        """``aclose``, but a cancellation is returned and not raised."""
        if self._closed is not None:
            return await self._closed.wait()
        self._closed = Completion()
        cancelled = await self.in_flight.drained()
        try:
            return await self._release(self) or cancelled
        except StorageError:
            if cancelled:
                return True
            raise
        finally:
            self._closed.finish()
