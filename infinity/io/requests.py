"""Requests, their blocks and their order: what the workers of a backend work through.

A *request* is what one ``await`` waits for: a batch of transfers, or one call such as ``fsync``. It is a cursor over
its *blocks*. Idle workers take the next block of the most urgent request (priority, then arrival), so a large request
spreads over idle workers by itself, an urgent one waits for one block at most, and a request costs one future and one
wake-up of the loop however many blocks it has. Splitting requests into queued blocks up front was rejected: it costs
a future, a wake-up and a queue entry per block (twice the CPU time, measured), and a cancellation has to find them
all again.

Life of a request: *queued* (in the heap while blocks remain), *running* (some blocks taken), *ended* when it is
exhausted and no block is running. An error or a cancellation exhausts it: what was not taken is dropped, what was is
waited for. Blocks are taken in order, so by then every byte before the end of a file has been counted: the bytes that
an error reports as moved do not depend on timing.

Nothing here locks, waits or makes a system call; a backend uses the queue under its lock.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from infinity.errors import ShortTransferError, storage_error
from infinity.io.backend import DIRECT_ALIGNMENT, Priority
from infinity.io.completion import Completion
from infinity.io.files import QueuedFile

T = TypeVar("T")


@dataclass(slots=True)
class Outcome:
    """What became of one block; its worker fills it in as it goes.

    Attributes:
        moved_bytes: bytes moved, however they went.
        bounced_bytes: those copied through an aligned buffer, because the caller's address was not aligned.
        cached_bytes: those that went through the page cache.
        seconds: how long the worker was busy with it.
        error: what stopped it.
    """

    moved_bytes: int = 0
    bounced_bytes: int = 0
    cached_bytes: int = 0
    seconds: float = 0.0
    error: BaseException | None = None


@dataclass(slots=True)
class Piece:
    """A ``Transfer`` under way: its checked memory as flat bytes, and where that begins."""

    file: QueuedFile
    offset: int
    view: memoryview
    address: int
    moved_bytes: int = 0


class Request(ABC):
    """What one await waits for. Made on the loop; everything but ``completion`` belongs to the queue and its lock."""

    num_blocks = 1

    def __init__(self, priority: Priority) -> None:
        self.priority = priority
        self.completion = Completion()
        self.num_running = 0
        self.exhausted = False
        self.failure: tuple[Block, BaseException] | None = None

    @property
    def ended(self) -> bool:
        """Whether no block is running and none will."""
        return self.exhausted and self.num_running == 0

    @abstractmethod
    def take(self) -> Block:
        """The next block; the last one exhausts the request."""


class Call(Request, Generic[T]):
    """A blocking function for a worker to call; a single block."""

    def __init__(self, function: Callable[[], T], priority: Priority) -> None:
        super().__init__(priority)
        self._function = function
        self.results: list[T] = []

    def take(self) -> Block:
        """The call itself."""
        self.exhausted = True
        return CallBlock(self)

    def run(self) -> None:
        """Call the function; what it raises is the worker's to record."""
        self.results.append(self._function())

    def result(self) -> T:
        """What the function returned or raised, once the request has ended."""
        if self.failure is not None:
            raise self.failure[1]
        return self.results[0]


class Transfers(Request):
    """A cursor over the blocks of one batch, cut where file offsets suit direct I/O."""

    def __init__(self, pieces: Sequence[Piece], *, write: bool, priority: Priority, block_bytes: int) -> None:
        super().__init__(priority)
        self.write = write
        self.num_blocks = sum(1 + len(piece.view) // block_bytes for piece in pieces)
        self._block_bytes = block_bytes
        self._pieces = pieces
        self._index = 0
        self._start = 0

    def take(self) -> Block:
        """The next block: as long as may be, up to an aligned file offset or the end of its piece."""
        piece, start = self._pieces[self._index], self._start
        stop = min(start + self._block_bytes, len(piece.view))
        if stop < len(piece.view):
            stop -= (piece.offset + stop) % DIRECT_ALIGNMENT
            self._start = stop
        else:
            self._index += 1
            self._start = 0
            self.exhausted = self._index == len(self._pieces)
        return TransferBlock(self, piece, start, stop)

    def error(self) -> BaseException | None:
        """The typed error to raise, once the request has ended."""
        if self.failure is None:
            return None
        block, error = self.failure
        assert isinstance(block, TransferBlock)
        piece, action = block.piece, "write" if self.write else "read"
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
            f"{action} of {block.stop - block.start} bytes at {block.position}",
            error,
            path=piece.file.path,
            offset=piece.offset,
            expected_bytes=len(piece.view),
            got_bytes=piece.moved_bytes,
        )
        typed.__cause__ = error
        return typed


@dataclass(slots=True)
class TransferBlock:
    """What one worker moves at a time: bytes ``start`` to ``stop`` of a piece."""

    request: Transfers
    piece: Piece
    start: int
    stop: int

    @property
    def position(self) -> int:
        """Byte offset in the file."""
        return self.piece.offset + self.start

    @property
    def view(self) -> memoryview:
        """The caller's memory for these bytes."""
        return self.piece.view[self.start : self.stop]


@dataclass(slots=True)
class CallBlock:
    """The whole of a ``Call``."""

    request: Call[Any]


Block = TransferBlock | CallBlock


class RequestQueue:
    """Requests that have blocks left, the most urgent first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request) -> None:
        """Add a request, which has at least one block."""
        heapq.heappush(self._heap, (request.priority, next(self._arrivals), request))

    def take(self) -> Block | None:
        """The next block of the most urgent request; ``None`` when there is none."""
        if not self._heap:
            return None
        request = self._heap[0][2]
        block = request.take()
        request.num_running += 1
        if request.exhausted:
            heapq.heappop(self._heap)
        return block

    def complete(self, block: Block, outcome: Outcome) -> bool:
        """Take back a block that is done with; whether its request has ended by this."""
        request = block.request
        if isinstance(block, TransferBlock):
            block.piece.moved_bytes += outcome.moved_bytes
        if outcome.error is not None:
            request.failure = request.failure or (block, outcome.error)
            self._exhaust(request)
        request.num_running -= 1
        return request.ended

    def drop(self, request: Request) -> bool:
        """Forget the blocks that were not taken; whether the request has ended by this."""
        if request.exhausted:
            return False
        self._exhaust(request)
        return request.ended

    def _exhaust(self, request: Request) -> None:
        if not request.exhausted:
            request.exhausted = True
            self._heap = [entry for entry in self._heap if entry[2] is not request]
            heapq.heapify(self._heap)
