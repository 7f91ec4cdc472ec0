"""Requests, and the segments and blocks that workers move.

A *request* is what one ``await`` waits for: a batch of transfers, or one call such as ``fsync``. It is a cursor over
its bytes. Workers take the next *block* off it, as long as may be; so a large request spreads over idle workers by
itself, an urgent one waits for one block at most, and a request costs one future and one wake-up of the loop however
many blocks it has. Splitting requests into queued blocks up front was rejected: it costs a future, a wake-up and a
queue entry per block (twice the CPU time, measured), and a cancellation has to find them all again.

A block is a run of bytes of one file. Where small requests (or pieces of a batch) continue each other in the file,
one block holds a *segment* of each, and one ``preadv`` or ``pwritev`` moves them all.

Life of a request: *queued* (while bytes remain), *running* (some were taken), *ended* when it is exhausted and nothing
of it is running. An error or a cancellation exhausts it: what was not taken is dropped, what was is waited for. Bytes
are taken in the order of the file, so by then every byte before the end of a file has been counted: the bytes that an
error reports as moved do not depend on timing.

Nothing here locks, waits or makes a system call; ``queue.py`` orders requests, a backend uses it under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from infinity.errors import ShortTransferError, storage_error
from infinity.io.backend import DIRECT_ALIGNMENT, Priority, Timing
from infinity.io.completion import Completion
from infinity.io.files import QueuedFile

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Piece:
    """A ``Transfer`` under way.

    Attributes:
        file: where in the file system.
        offset: byte offset in the file.
        view: the caller's checked memory as flat bytes.
        address: where that begins.
        misaligned: whether aligned file offsets meet unaligned addresses, which direct I/O refuses.
        moved_bytes: how much of it was moved.
    """

    file: QueuedFile
    offset: int
    view: memoryview
    address: int
    misaligned: bool = field(init=False)
    moved_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.misaligned = (self.address - self.offset) % DIRECT_ALIGNMENT != 0


@dataclass(slots=True, eq=False)
class Segment:
    """Bytes ``start`` to ``stop`` of one piece of one request."""

    request: Transfers
    piece: Piece
    start: int
    stop: int

    @property
    def position(self) -> int:
        """Byte offset in the file."""
        return self.piece.offset + self.start

    @property
    def num_bytes(self) -> int:
        """How many bytes it has."""
        return self.stop - self.start

    @property
    def view(self) -> memoryview:
        """The caller's memory for these bytes."""
        return self.piece.view[self.start : self.stop]

    @property
    def address(self) -> int:
        """Where that memory begins."""
        return self.piece.address + self.start


@dataclass(slots=True, eq=False)
class TransferBlock:
    """What one worker moves at a time: bytes of one file, to or from one or several runs of memory.

    Attributes:
        file: whose bytes.
        write: memory to file, or file to memory.
        position: byte offset in the file.
        num_bytes: how many bytes, all segments together.
        segments: in the order of the file, without gaps. With direct I/O they meet at multiples of
            ``DIRECT_ALIGNMENT``, in the file and in memory.
        misaligned: direct I/O would refuse the address; then there is one segment.
        started: when its worker took it (``time.perf_counter``).
        moved_bytes: bytes moved so far, however they went; in the end all of the block's, or there is an error.
        bounced_bytes: those copied through an aligned buffer, because the caller's address was not aligned.
        cached_bytes: those that went through the page cache.
        error: what stopped it.
    """

    file: QueuedFile
    write: bool
    position: int
    num_bytes: int
    segments: list[Segment]
    misaligned: bool
    started: float = 0.0
    moved_bytes: int = 0
    bounced_bytes: int = 0
    cached_bytes: int = 0
    error: BaseException | None = None

    def time(self, now: float) -> None:
        """Tell the requests that want to know that the block moved until ``now``."""
        for segment in self.segments:
            if (timing := segment.request.timing) is not None:
                timing.add(self.started, now)

    def views(self, start: int, num_bytes: int) -> list[memoryview]:
        """The callers' memory for ``num_bytes`` bytes of the block, from its byte ``start`` on."""
        if len(self.segments) == 1:
            begin = self.segments[0].start + start
            return [self.segments[0].piece.view[begin : begin + num_bytes]]
        views = []
        for segment in self.segments:
            if start < segment.num_bytes:
                view = segment.piece.view[segment.start + start : min(segment.stop, segment.start + start + num_bytes)]
                views.append(view)
                num_bytes -= len(view)
                if not num_bytes:
                    break
            start = max(0, start - segment.num_bytes)
        return views


class Request(Completion):
    """What one await waits for. Made on the loop; but what it adds to a ``Completion`` is the queue's, under its lock.

    Args:
        write: whether it stands in line with the writes.
        priority: before or behind whom it stands.
    """

    __slots__ = ("arrival", "dropped", "exhausted", "failure", "num_running", "priority", "write")

    def __init__(self, *, write: bool, priority: Priority) -> None:
        super().__init__()
        self.write = write
        self.priority = priority
        self.arrival = 0
        self.num_running = 0
        self.exhausted = False
        self.dropped = False
        self.failure: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing of it is running and nothing will."""
        return self.exhausted and self.num_running == 0

    @property
    def num_whole(self) -> int:
        """How many transfers were moved whole."""
        return 0


class Call(Request, Generic[T]):
    """A blocking function for a worker to call; a single block. Writes before it in line go first."""

    __slots__ = ("_function", "results")

    def __init__(self, function: Callable[[], T], priority: Priority) -> None:
        super().__init__(write=True, priority=priority)
        self._function = function
        self.results: list[T] = []

    def run(self) -> None:
        """Call the function; what it raises is the worker's to record."""
        self.results.append(self._function())

    def result(self) -> T:
        """What the function returned or raised, once the request has ended."""
        if self.failure is not None:
            raise self.failure
        return self.results[0]


class Transfers(Request):
    """A cursor over the bytes of one batch, in the order of its files.

    Args:
        pieces: the transfers, of at least one byte each.
        write: memory to file, or file to memory.
        priority: before or behind whom it stands.
        timing: told when its blocks were moving.
    """

    __slots__ = ("_index", "_pieces", "_start", "again", "failed", "timing")

    def __init__(
        self, pieces: Sequence[Piece], *, write: bool, priority: Priority, timing: Timing | None = None
    ) -> None:
        super().__init__(write=write, priority=priority)
        self.timing = timing
        self.again: deque[Segment] = deque()
        self.failed: Segment | None = None
        if len(pieces) > 1:
            files = {piece.file: index for index, piece in enumerate(pieces)}
            pieces = sorted(pieces, key=lambda piece: (files[piece.file], piece.offset))
        self._pieces = pieces
        self._index = 0
        self._start = 0

    @property
    def num_whole(self) -> int:
        """How many transfers were moved whole."""
        if self.failure is None and not self.dropped:
            return len(self._pieces)
        return sum(piece.moved_bytes == len(piece.view) for piece in self._pieces)

    @property
    def next_piece(self) -> Piece:
        """The piece under the cursor, while there is one."""
        return self._pieces[self._index]

    @property
    def at_start(self) -> bool:
        """Whether the cursor is where a piece begins."""
        return self._start == 0

    def next_bytes(self, limit_bytes: int) -> int:
        """How many bytes the next segment has: ``limit_bytes``, or less to end at an aligned offset or with its piece.

        0 where no aligned offset is so near.
        """
        if self.again:
            return self.again[0].num_bytes
        piece, stop = self._pieces[self._index], self._start + limit_bytes
        if stop >= len(piece.view):
            return len(piece.view) - self._start
        return max(0, limit_bytes - (piece.offset + stop) % DIRECT_ALIGNMENT)

    def cut(self, limit_bytes: int) -> Segment:
        """Take the bytes that ``next_bytes`` speaks of, from under the cursor; the last segment exhausts the request.

        The cursor moves on.
        """
        piece, start = self._pieces[self._index], self._start
        stop, num_bytes = start + limit_bytes, len(piece.view)
        if stop < num_bytes:
            stop -= (piece.offset + stop) % DIRECT_ALIGNMENT
            self._start = stop
        else:
            stop = num_bytes
            self._index += 1
            self._start = 0
            self.exhausted = self._index == len(self._pieces)
        self.num_running += 1
        return Segment(self, piece, start, stop)

    def error(self) -> BaseException | None:
        """The typed error to raise, once the request has ended."""
        error, segment = self.failure, self.failed
        if error is None or segment is None:
            return error
        piece, action = segment.piece, "write" if self.write else "read"
        if isinstance(error, EOFError):
            reason = "the device takes no more" if self.write else "the file ends here: it was cut, or never written"
            return ShortTransferError(
                f"{action} stopped short; {reason}",
                path=piece.file.path,
                offset=piece.offset,
                expected_bytes=len(piece.view),
                got_bytes=piece.moved_bytes,
            )
        if not isinstance(error, OSError):
            return error
        typed = storage_error(
            f"{action} of {segment.num_bytes} bytes at {segment.position}",
            error,
            path=piece.file.path,
            offset=piece.offset,
            expected_bytes=len(piece.view),
            got_bytes=piece.moved_bytes,
        )
        typed.__cause__ = error
        return typed


@dataclass(slots=True, eq=False)
class CallBlock:
    """The whole of a ``Call``."""

    request: Call[Any]
    error: BaseException | None = None


Block = TransferBlock | CallBlock
