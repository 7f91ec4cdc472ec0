"""``RequestQueue``: which block is next.

Guarantees
    * The smallest ``Priority`` first. Among equal priority, of reads and writes the direction that has fewer blocks
      running goes first, so that mixed traffic keeps a full-duplex device busy both ways; then who came first.
    * At most ``MAX_IN_FLIGHT_BYTES`` are with the workers, however many there are and however large their blocks: more
      would not make a device faster, but an urgent read wait behind it (measured: 42-69 ms behind six large writes).
      Only a block that is larger by itself is let through, alone. Who is next and does not fit waits, and so do all
      behind it: else small requests could starve a large one.
    * Requests that continue each other in a file go as one block, as far as they suit it: same file, direction and
      priority, and aligned where I/O is direct. Each line of requests (one priority, one direction) knows by file and
      offset who begins there, so finding the neighbour is one look-up, whatever the length of the line.
    * Merging shows nowhere but in speed. A merged block that fails is taken apart: what is left of each segment is
      moved again on its own, and so each request gets its own success, or its own error with its own bytes.

Blocks are never cut smaller to occupy workers that are idle. Measured, 16 MiB read by 4 idle workers, medians of two
times 80 interleaved: 6.4-6.8 ms as one block of 16 MiB, 6.7-6.8 as two of 8 MiB, 6.7-6.9 as four of 4 MiB, for 450-480,
490-520 and 570 us of CPU time. The kernel cuts what it is given to suit the device anyway.

Nothing here locks, waits or makes a system call; a backend uses the queue under its lock.
"""

from __future__ import annotations

from collections import OrderedDict

from infinity.io.backend import DIRECT_ALIGNMENT, Priority
from infinity.io.files import QueuedFile
from infinity.io.requests import Block, Call, CallBlock, Request, Segment, TransferBlock, Transfers

MAX_IN_FLIGHT_BYTES = 64 << 20
"""What the workers of one backend hold at most."""

MAX_SEGMENTS = 1024
"""Of one block: what ``preadv`` takes in one call (Linux: UIO_MAXIOV)."""


class _Line:
    """Requests of one priority and direction, in order of arrival."""

    __slots__ = ("requests", "starts")

    def __init__(self) -> None:
        self.requests: OrderedDict[Request, None] = OrderedDict()
        self.starts: dict[tuple[QueuedFile, int], Transfers] = {}


class RequestQueue:
    """Requests of which something is left to take.

    Args:
        block_bytes: how long a block may be.
        direct: whether blocks have to suit direct I/O.
        max_bytes: how much may be running at a time.
    """

    def __init__(self, *, block_bytes: int, direct: bool, max_bytes: int = MAX_IN_FLIGHT_BYTES) -> None:
        self._block_bytes = block_bytes
        self._direct = direct
        self._max_bytes = max_bytes
        self._lines = [(_Line(), _Line()) for _ in Priority]
        self._num_arrived = 0
        self._first: Request | None = None
        self._num_running = [0, 0]
        self._running_bytes = 0

    def __len__(self) -> int:
        return sum(len(line.requests) for lines in self._lines for line in lines)

    @property
    def ready(self) -> bool:
        """Whether ``take`` would return a block."""
        return self._next() is not None

    def push(self, request: Request) -> None:
        """Add a request, which has something to take."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        line = self._line(request)
        line.requests[request] = None
        self._first = None
        if isinstance(request, Transfers):
            self._show(line, request)

    def take(self) -> Block | None:
        """The next block; ``None`` when there is none, or none that fits beside what is running."""
        request = self._next()
        if request is None:
            return None
        if isinstance(request, Call):
            request.exhausted = True
            request.num_running = 1
            self._leave(request)
            return CallBlock(request)
        assert isinstance(request, Transfers)
        again = bool(request.again)
        segment = request.again.popleft() if again else self._cut(request, self._block_bytes)
        if request.exhausted and not request.again:
            self._leave(request)
        piece, num_bytes = segment.piece, segment.stop - segment.start
        misaligned = self._direct and piece.misaligned
        block = TransferBlock(piece.file, request.write, piece.offset + segment.start, num_bytes, [segment], misaligned)
        if num_bytes < self._block_bytes and not (again or misaligned):
            self._extend(block, self._line(request))
        self._num_running[request.write] += 1
        self._running_bytes += block.num_bytes
        return block

    def complete(self, block: Block) -> list[Request]:
        """Take back a block that is done with; which requests have ended by this."""
        if isinstance(block, CallBlock):
            block.request.num_running = 0
            block.request.failure = block.error
            return [block.request]
        self._num_running[block.write] -= 1
        self._running_bytes -= block.num_bytes
        ended: list[Request] = []
        left_bytes = block.moved_bytes
        for segment in block.segments:
            request, num_bytes = segment.request, segment.stop - segment.start
            if num_bytes <= left_bytes:
                left_bytes -= num_bytes
                segment.piece.moved_bytes += num_bytes
            else:
                assert block.error is not None
                segment.piece.moved_bytes += left_bytes
                segment.start += left_bytes
                left_bytes = 0
                if len(block.segments) > 1 and not request.dropped:
                    self._repeat(segment)
                    continue
                self._fail(segment, block.error)
            request.num_running -= 1
            if request.exhausted and not request.num_running:
                ended.append(request)
        return ended

    def drop(self, request: Request) -> bool:
        """Forget what was not taken; whether the request has ended by this."""
        if request.ended or request.dropped:
            return False
        request.dropped = True
        self._exhaust(request)
        if isinstance(request, Transfers):
            request.num_running -= len(request.again)
            request.again.clear()
        self._leave(request)
        return request.ended

    def _line(self, request: Request) -> _Line:
        return self._lines[request.priority][request.write]

    def _leave(self, request: Request) -> None:
        self._line(request).requests.pop(request, None)
        self._first = None

    def _next(self) -> Request | None:
        """Whose turn it is, if that fits."""
        request = self._first
        if request is None:
            request = self._choose()
        if request is None or self._running_bytes + self._block_bytes <= self._max_bytes or self._fits(request):
            return request
        return None

    def _choose(self) -> Request | None:
        """Whose turn it is; kept in ``_first`` while that depends on nothing but who is there."""
        for reads, writes in self._lines:
            if reads.requests and writes.requests:
                read, write = next(iter(reads.requests)), next(iter(writes.requests))
                num_reads, num_writes = self._num_running
                if num_reads == num_writes:
                    return read if read.arrival < write.arrival else write
                return read if num_reads < num_writes else write
            if reads.requests or writes.requests:
                self._first = next(iter(reads.requests or writes.requests))
                return self._first
        return None

    def _fits(self, request: Request) -> bool:
        """Whether there is room for its next block, though not for any block."""
        if not self._running_bytes or not isinstance(request, Transfers):
            return True
        return self._running_bytes + request.next_bytes(self._block_bytes) <= self._max_bytes

    def _extend(self, block: TransferBlock, line: _Line) -> None:
        """Take what continues the block in the file too, while it may grow."""
        limit_bytes = min(self._block_bytes, max(block.num_bytes, self._max_bytes - self._running_bytes))
        while len(block.segments) < MAX_SEGMENTS:
            neighbour = line.starts.get((block.file, block.position + block.num_bytes))
            room_bytes = limit_bytes - block.num_bytes
            if neighbour is None or neighbour.again or not neighbour.next_bytes(room_bytes):
                return
            segment = self._cut(neighbour, room_bytes)
            if neighbour.exhausted:
                self._leave(neighbour)
            block.segments.append(segment)
            block.num_bytes += segment.num_bytes

    def _cut(self, request: Transfers, limit_bytes: int) -> Segment:
        """Take bytes under the cursor of a request, and have the neighbours know where it stands then."""
        if request.at_start:
            self._hide(self._line(request), request)
        segment = request.cut(limit_bytes)
        if request.at_start and not request.exhausted:
            self._show(self._line(request), request)
        return segment

    def _show(self, line: _Line, request: Transfers) -> None:
        """Let blocks that end where a request begins, or goes on with another piece, find it."""
        piece = request.next_piece
        if not self._direct or not (piece.offset % DIRECT_ALIGNMENT or piece.misaligned):
            line.starts[piece.file, piece.offset] = request

    def _hide(self, line: _Line, request: Transfers) -> None:
        piece = request.next_piece
        place = piece.file, piece.offset
        if line.starts.get(place) is request:  # not someone else who reads the same bytes
            del line.starts[place]

    def _repeat(self, segment: Segment) -> None:
        """Put back a segment, to be moved on its own; meanwhile it counts as running."""
        request = segment.request
        line = self._line(request)
        request.again.append(segment)
        line.requests[request] = None
        line.requests.move_to_end(request, last=False)
        self._first = None

    def _fail(self, segment: Segment, error: BaseException) -> None:
        """The first error of a request is its failure. What is to be repeated still is: its bytes are reported."""
        request = segment.request
        if request.failure is None:
            request.failure, request.failed = error, segment
        self._exhaust(request)
        if not request.again:
            self._leave(request)

    def _exhaust(self, request: Request) -> None:
        if isinstance(request, Transfers) and not request.exhausted and request.at_start:
            self._hide(self._line(request), request)
        request.exhausted = True
