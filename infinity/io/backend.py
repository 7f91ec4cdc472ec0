"""The contract of asynchronous file I/O.

Guarantees, for every backend:

* ``read_into`` and ``write_from`` move exactly ``len(buffer)`` bytes or raise a ``StorageError`` that names the file,
  the offset, the bytes expected and the bytes moved. A short transfer is continued; it is never success.
* Any offset and any length work. Where the file system wants aligned direct I/O, the aligned body is moved directly
  and ragged edges take a slower path; the bytes are the same. Buffers whose address, offset and length are multiples
  of ``DIRECT_ALIGNMENT`` are moved without a copy.
* The caller's buffer is not touched after the await has ended, *however* it ended: a cancelled call drops what was not
  yet submitted, waits for what was, and only then raises ``CancelledError``. A buffer may therefore be reused at once.
* Demand requests overtake prefetch requests, and both overtake background writes, at the grain of one block.
* Among requests as urgent, reads and writes take turns; and no more than ``MAX_IN_FLIGHT_BYTES`` (``queue.py``) are
  with the device at a time.
* Small requests that continue each other in the file may be moved by one system call. Each still succeeds, fails or is
  cancelled on its own.
* Nothing blocks the event loop: system calls run elsewhere. With worker threads one request costs one wake-up of the
  loop at most; aiofiles needs two for each block.

Concurrent transfers on disjoint byte ranges of one file are independent. Overlapping ones have no order.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infinity.io.latency import LatencyHistogram

DIRECT_ALIGNMENT = 4096
"""Bytes. Offset, length and address multiple of this are always safe for O_DIRECT (512-byte and 4Kn devices)."""


class Priority(enum.IntEnum):
    """Who goes first when requests queue; smaller is sooner."""

    DEMAND = 0
    PREFETCH = 1
    BACKGROUND = 2


@dataclass(frozen=True, slots=True)
class Transfer:
    """One contiguous piece of a batch.

    Attributes:
        file: an open file of the same backend.
        offset: byte offset in the file.
        buffer: writable (for reads) or readable (for writes) contiguous memory of unsigned bytes.
    """

    file: File
    offset: int
    buffer: memoryview


@dataclass(slots=True)
class Timing:
    """When the bytes of a request were moving: given to ``read_many`` or ``write_many``, which fill it in.

    Attributes:
        start_seconds: when the first of its blocks was taken off the queue (``time.perf_counter``); infinite before.
        end_seconds: when the last of them had moved.
    """

    start_seconds: float = math.inf
    end_seconds: float = -math.inf

    def add(self, start_seconds: float, end_seconds: float) -> None:
        """A block was moving from then to then."""
        self.start_seconds = min(self.start_seconds, start_seconds)
        self.end_seconds = max(self.end_seconds, end_seconds)


@dataclass(slots=True)
class IOStatistics:
    """What a backend has moved since it was opened.

    Bytes count completed work; seconds are summed over blocks. Numbers of reads and writes count transfers, whole.
    Latencies are of blocks, from when a worker takes or submits one until its bytes have moved.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    num_reads: int = 0
    num_writes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    num_errors: int = 0
    num_in_flight: int = 0
    read_latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    write_latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    extra: dict[str, float] = field(default_factory=dict)


class File(ABC):
    """An open file: made by ``Backend.open_file``, closed by ``aclose`` once no transfer is in flight."""

    path: Path

    @abstractmethod
    async def aclose(self) -> None:
        """Wait for transfers in flight, then close. Closing twice is harmless."""


class Backend(ABC):
    """Asynchronous I/O on files. All coroutines belong to the event loop that first awaits one of them."""

    name: str

    @property
    @abstractmethod
    def direct(self) -> bool:
        """Whether aligned transfers bypass the page cache."""

    @abstractmethod
    async def open_file(self, path: Path, *, create: bool = False) -> File:
        """Open ``path`` for reading and writing; with ``create`` it must not exist yet and gets mode 0600."""

    @abstractmethod
    async def read_into(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = Priority.DEMAND
    ) -> None:
        """Fill ``buffer`` with the file's bytes from ``offset``.

        Raises:
            ShortTransferError: the file ends before the buffer is full.
            StorageError: the system reported an error.
        """

    @abstractmethod
    async def write_from(
        self, file: File, offset: int, buffer: memoryview, *, priority: Priority = Priority.BACKGROUND
    ) -> None:
        """Write all of ``buffer`` to the file at ``offset``.

        Raises:
            DiskFullError: no room.
            StorageError: the system reported an error.
        """

    @abstractmethod
    async def read_many(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.DEMAND, timing: Timing | None = None
    ) -> None:
        """``read_into`` for several pieces at once; ends when all have ended, raises the first error among them."""

    @abstractmethod
    async def write_many(
        self, transfers: Sequence[Transfer], *, priority: Priority = Priority.BACKGROUND, timing: Timing | None = None
    ) -> None:
        """``write_from`` for several pieces at once; ends when all have ended, raises the first error among them."""

    @abstractmethod
    async def fsync(self, file: File) -> None:
        """Make the file's data and size durable (``fdatasync`` where there is one)."""

    @abstractmethod
    async def preallocate(self, file: File, size_bytes: int) -> None:
        """Reserve space up to ``size_bytes``; on failure the file is cut back to its former length.

        Raises:
            DiskFullError: no room.
        """

    @abstractmethod
    def statistics(self) -> IOStatistics:
        """A snapshot; safe from any thread."""

    @abstractmethod
    async def aclose(self) -> None:
        """Wait for everything in flight, then end threads and close files. Closing twice is harmless."""
