"""The io_uring backend: one thread, all blocks in flight at once.

The thread owns a ring (``ring.py``). In each turn it takes blocks off the queue while fewer than ``queue_depth`` are in
progress, prepares an operation for each, and makes one system call that begins them and sleeps until some have ended
or there is something new in the queue. The loop wakes it only when it sleeps and could take more.

Guarantees: those of ``backend.py``, as with worker threads, which share everything but this file: order, merging,
fairness, what counts as in flight, errors, statistics. A block is a chain of operations: a short one is continued from
where it stopped (through the page cache up to the next page, then directly again), EINTR and EAGAIN are tried again
(EAGAIN not for ever). A block is given back only when its last operation has come out of the ring, so its memory is
in use by nobody then. Misaligned memory goes through an aligned buffer of the block's own.

Calls (open, fdatasync, preallocate, close) run on a second thread, in order; all that wait there take one place of
``queue_depth`` together, so a slow flush leaves the others to transfers.

Assumed: beginning an operation may block (direct I/O looks up extents and waits for room in the device's queue, tens
of ms when it is full), therefore the event loop never begins one. What ``files.py`` says of direct and buffered I/O
in one file holds although direct writes do not keep the inode's lock until they have ended: they cover whole pages
that belong to one transfer, and edges only ever bring single other pages into the cache. A ring that fails as a whole
(``io_uring_enter`` reports EBADF, EFAULT, ...) is a bug in ``ring.py``: requests in flight then never end, because
their memory might still be written to.

Rejected: a ring on the event loop itself, with the ring's descriptor in its selector. A 4 KiB read is then a thread
switch faster, but every turn of the loop is as late as the slowest beginning of an operation. Also a pool for calls:
they are rare, and the pools of the standard library refuse work at interpreter exit, when ``close`` still needs it.

Measured against worker threads (2 cores shared with other work, virtio disk, ext4, Linux 6.18; interleaved, medians
of 9 passes of 1 GiB in requests of 64 MiB; in brackets the least and largest CPU time; 4 KiB: of 8 x 1500):

| | threads: GB/s, CPU s per GB | io_uring |
|---|---|---|
| 4 MiB x 8, read | 2.66, .0179 [.0159-.0250] | 2.61, .0142 [.0087-.0186] |
| 4 MiB x 8, write | 5.10, .0180 [.0140-.0251] | 5.03, .0134 [.0068-.0153] |
| 32 MiB x 2, read | 2.65, .0085 [.0072-.0139] | 2.59, .0084 [.0075-.0147] |
| 32 MiB x 2, write | 5.28, .0099 [.0062-.0115] | 5.12, .0086 [.0053-.0107] |
| 4 KiB read at depth 1: p50 | 122 us | 150 us |
| 4 KiB write at depth 1: p50 | 138 us | 159 us |

With less else going on, io_uring reads for .0110 at 4 MiB x 8 and .0075 at 32 MiB x 2. A bare loop around the ring
takes .0080 and .0047 of that, and a bare asyncio wake-up for each request .0016. All blocks that end together are given
back, and all that may begin taken, at one go: eight at a time here, for the price of little more than one, since what
costs is code that is not in the caches (see ``threads.py``). Threads are woken for each block, but share the work of
the kernel; so it pays with many small blocks, hardly with few large ones, and ``race.py`` finds out. Tried, and not
worth it (below 3%): a path of its own for a whole, aligned block in one segment.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from infinity.io.completion import Completion
from infinity.io.memory import HUGE_PAGE_BYTES, allocate, as_bytes
from infinity.io.queued import QueuedBackend, without_frames
from infinity.io.requests import CallBlock, Request, TransferBlock
from infinity.io.syscalls import SYSCALLS, Syscalls

_MAX_RETRIES = 1000


class _Bounce:
    """An aligned buffer."""

    __slots__ = ("address", "view")

    def __init__(self, num_bytes: int) -> None:
        memory = allocate(num_bytes)
        self.address = memory.data_ptr()
        self.view = as_bytes(memory)


class _Flight:
    """A block on its way, by one operation after the other."""

    __slots__ = ("block", "bounce", "bounced", "cached", "num_retries")

    def __init__(self, block: TransferBlock) -> None:
        self.block = block
        self.num_retries = 0
        self.bounce: _Bounce | None = None
        self.bounced = self.cached = False

    def segments(self, num_bytes: int) -> list[tuple[int, int]]:
        """Address and length of the callers' memory for the next ``num_bytes`` bytes."""
        start, segments = self.block.moved_bytes, self.block.segments
        if len(segments) == 1:
            return [(segments[0].address + start, num_bytes)]
        runs = []
        for segment in segments:
            if start < segment.num_bytes:
                run_bytes = min(segment.num_bytes - start, num_bytes)
                runs.append((segment.address + start, run_bytes))
                num_bytes -= run_bytes
                if not num_bytes:
                    break
            start = max(0, start - segment.num_bytes)
        return runs

    def move(self, result: int) -> bool:
        """Take in what an operation has come to; whether the block is whole. Raises where it never will be."""
        if result == 0:
            raise EOFError
        if result < 0:
            self.num_retries += 1
            if -result not in (errno.EINTR, errno.EAGAIN) or self.num_retries > _MAX_RETRIES:
                raise OSError(-result, os.strerror(-result))
            return False
        block = self.block
        if self.bounced:
            assert self.bounce is not None
            if not block.write:
                _copy(block.views(block.moved_bytes, result)[0], self.bounce.view[:result])
            block.bounced_bytes += result
        if self.cached:
            block.cached_bytes += result
        block.moved_bytes += result
        return block.moved_bytes == block.num_bytes


class UringBackend(QueuedBackend):
    """Asynchronous I/O by io_uring.

    Args:
        queue_depth: how many blocks may be in progress at once, which is the queue depth that the device sees.
        block_bytes: largest single operation, and the grain at which an urgent request overtakes; at least
            ``DIRECT_ALIGNMENT``, and rounded down to a multiple of it.
        direct: bypass the page cache (``O_DIRECT``); ``open_file`` then refuses where the file system does not have it.
        syscalls: the system calls to make.

    Raises:
        ValueError: an argument is out of range.
        OSError: the kernel refuses a ring; ``infinity.io.ring.refusal`` says why, in words.
    """

    name = "uring"

    def __init__(
        self,
        queue_depth: int = 4,
        block_bytes: int = 8 << 20,
        direct: bool = True,
        syscalls: Syscalls = SYSCALLS,
    ) -> None:
        if queue_depth < 1:
            raise ValueError(f"queue_depth: expected at least 1, got {queue_depth}")
        super().__init__(block_bytes=block_bytes, direct=direct, num_lanes=1, syscalls=syscalls)
        self._queue_depth = queue_depth
        self._ring = syscalls.open_ring(queue_depth)
        self._calls: SimpleQueue[CallBlock | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._tokens = itertools.count(1)
        self._flights: dict[int, _Flight] = {}
        self._done: list[TransferBlock] = []
        self._bounces: list[_Bounce] = []
        self._num_calls = 0
        self._asleep = False
        self._ending: Completion | None = None

    def _start(self) -> None:
        if not self._threads:
            for name, work in (("infinity-io-call", self._work_calls), ("infinity-io-ring", self._work)):
                thread = threading.Thread(target=work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)

    def _waker(self) -> Callable[[], object] | None:
        if not self._asleep or not self._queue.ready:
            return None
        self._asleep = False
        return self._ring.wake

    async def _stop(self) -> bool:
        if not self._threads:
            self._ring.close()
            return False
        with self._lock:  # whoever sees the end has been woken for it: the ring is closed then
            ending = self._ending = Completion()
            self._ring.wake()
        cancelled = await ending.wait()
        for thread in self._threads:
            thread.join()  # it has nothing left to do
        self._threads.clear()
        return cancelled

    # On the thread that owns the ring. Nothing here keeps a view of a caller's memory, or a block, while it sleeps.

    def _work(self) -> None:
        while (ending := self._turn()) is None:
            if not self._done:  # else there is a block that could not even begin
                for token, result in self._ring.wait():
                    self._advance(self._flights.pop(token), result)
        self._calls.put(None)
        self._ring.close()
        self._finish_threadsafe([ending])

    def _turn(self) -> Completion | None:
        """Give back the blocks that are done with and begin as many as may begin; what to finish, at the end."""
        now = time.perf_counter()
        blocks: list[TransferBlock] = []
        ended: list[Request] = []
        with self._lock:
            if self._ending is not None:
                return self._ending
            for block in self._done:
                ended += self._complete(block, now)
            self._asleep = self._take(blocks)
        self._done.clear()
        for block in blocks:
            block.started = now
            self._begin(_Flight(block))
        self._finish_threadsafe(ended)  # last, because it lets others have the GIL
        return None

    def _take(self, blocks: list[TransferBlock]) -> bool:
        """Take what may begin; whether more might, if it came."""
        while len(self._flights) + len(blocks) + (self._num_calls > 0) < self._queue_depth:
            block = self._queue.take()
            if block is None:
                return True
            if isinstance(block, CallBlock):
                self._num_calls += 1
                self._calls.put(block)
            else:
                blocks.append(block)
        return False  # whatever ends next comes back here

    def _begin(self, flight: _Flight) -> None:
        """Prepare the next operation of a block."""
        block, token = flight.block, next(self._tokens)
        try:
            position = block.position + block.moved_bytes
            lane = block.file.lanes[0]
            descriptor, num_bytes = lane.route(position, block.num_bytes - block.moved_bytes)
            flight.cached = descriptor == lane.buffered
            flight.bounced = block.misaligned and not flight.cached
            segments = self._bounce(flight, num_bytes) if flight.bounced else flight.segments(num_bytes)
            self._ring.transfer(token, descriptor, position, segments, write=block.write)
        except BaseException as error:  # raised again where the request is awaited
            self._end(flight, error)
        else:
            self._flights[token] = flight

    def _bounce(self, flight: _Flight, num_bytes: int) -> list[tuple[int, int]]:
        """Put an aligned buffer between the caller's memory and the device, for as much as it holds."""
        bounce = flight.bounce
        if bounce is None:
            bounce = self._bounces.pop() if self._bounces else _Bounce(min(self._block_bytes, HUGE_PAGE_BYTES))
            flight.bounce = bounce
        num_bytes = min(num_bytes, len(bounce.view))
        if flight.block.write:
            _copy(bounce.view[:num_bytes], flight.block.views(flight.block.moved_bytes, num_bytes)[0])
        return [(bounce.address, num_bytes)]

    def _advance(self, flight: _Flight, result: int) -> None:
        """An operation has ended: go on from there, or end the block."""
        try:
            whole = flight.move(result)
        except BaseException as error:  # raised again where the request is awaited
            self._end(flight, error)
        else:
            if whole:
                self._end(flight)
            else:
                self._begin(flight)

    def _end(self, flight: _Flight, error: BaseException | None = None) -> None:
        if error is not None:
            flight.block.error = without_frames(error)
        if flight.bounce is not None:
            self._bounces.append(flight.bounce)
        self._done.append(flight.block)

    # On the thread for calls.

    def _work_calls(self) -> None:
        while self._call_once():
            pass

    def _call_once(self) -> bool:
        block = self._calls.get()
        if block is None:
            return False
        try:
            block.request.run()
        except BaseException as error:  # raised again where the request is awaited
            block.error = without_frames(error)
        with self._lock:
            self._num_calls -= 1
            ended = self._complete(block, 0.0)
        self._ring.wake()  # before the request ends: once it has, the ring may be closed
        self._finish_threadsafe(ended)
        return True


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
