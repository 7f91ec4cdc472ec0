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
of 9 passes of 512 MiB in requests of 64 MiB, of 4 x 1500 for latencies; in brackets the least and largest):

| | threads | io_uring |
|---|---|---|
| 4 MiB x 8, read: GB/s, CPU s per GB | 2.30 [2.01-2.74], .0167 | 2.39 [2.04-2.69], .0161 |
| 4 MiB x 8, write | 4.01 [3.48-4.27], .0165 | 3.53 [3.04-4.37], .0164 |
| 32 MiB x 2, read | 2.18 [1.62-2.41], .0093 | 2.01 [1.54-2.31], .0094 |
| 32 MiB x 2, write | 3.47 [1.84-3.65], .0122 | 3.58 [2.93-4.15], .0101 |
| 4 KiB read at depth 1: p50 | 151 us | 151 us |
| 4 KiB write at depth 1: p50 | 147 us | 157 us |

So it does not pay on such a machine: the kernel's work is the same, and what is left is this process's own work on
blocks, which is the same too (the bare ring takes .007 CPU s per GB at 4 MiB x 8, bare threads .010). It may where
switching threads is dearer or a device wants hundreds of small operations at once; ``race.py`` finds out.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from queue import SimpleQueue

import numpy as np

from infinity.io.completion import Completion
from infinity.io.memory import HUGE_PAGE_BYTES, allocate, as_bytes
from infinity.io.queued import QueuedBackend, without_frames
from infinity.io.requests import Block, CallBlock, Outcome, TransferBlock
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

    __slots__ = ("block", "bounce", "bounced", "cached", "num_retries", "outcome", "started")

    def __init__(self, block: TransferBlock) -> None:
        self.block = block
        self.outcome = Outcome()
        self.started = time.perf_counter()
        self.num_retries = 0
        self.bounce: _Bounce | None = None
        self.bounced = self.cached = False

    def segments(self, num_bytes: int) -> list[tuple[int, int]]:
        """Address and length of the callers' memory for the next ``num_bytes`` bytes."""
        start, segments = self.outcome.moved_bytes, self.block.segments
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

    def move(self, result: int) -> None:
        """Take in what an operation has come to; raises where nothing more can come of the block."""
        if result == 0:
            raise EOFError
        if result < 0:
            self.num_retries += 1
            if -result not in (errno.EINTR, errno.EAGAIN) or self.num_retries > _MAX_RETRIES:
                raise OSError(-result, os.strerror(-result))
            return
        outcome = self.outcome
        if self.bounced:
            assert self.bounce is not None
            if not self.block.write:
                _copy(self.block.views(outcome.moved_bytes, result)[0], self.bounce.view[:result])
            outcome.bounced_bytes += result
        if self.cached:
            outcome.cached_bytes += result
        outcome.moved_bytes += result


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

    def _wake(self) -> None:
        with self._lock:
            if not self._asleep or not self._queue.ready:
                return
            self._asleep = False
        self._ring.wake()

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

    # On the thread that owns the ring.

    def _work(self) -> None:
        while (ending := self._end_of_work()) is None:
            self._work_once()
        self._calls.put(None)
        self._ring.close()
        ending.finish_threadsafe()

    def _end_of_work(self) -> Completion | None:
        with self._lock:
            return self._ending

    def _work_once(self) -> None:
        """Begin what may begin, then wait for something to end. Nothing here keeps a view of a caller's memory."""
        while (block := self._take()) is not None:
            if isinstance(block, CallBlock):
                self._calls.put(block)
            else:
                self._begin(_Flight(block))
        for token, result in self._ring.wait():
            self._advance(self._flights.pop(token), result)

    def _take(self) -> Block | None:
        with self._lock:
            self._asleep = False
            if len(self._flights) + (self._num_calls > 0) >= self._queue_depth:
                return None  # whatever ends next comes back here
            block = self._queue.take()
            self._asleep = block is None
            self._num_calls += isinstance(block, CallBlock)
            return block

    def _begin(self, flight: _Flight) -> None:
        """Prepare the next operation of a block."""
        block, outcome, token = flight.block, flight.outcome, next(self._tokens)
        try:
            position = block.position + outcome.moved_bytes
            lane = block.file.lanes[0]
            descriptor, num_bytes = lane.route(position, block.num_bytes - outcome.moved_bytes)
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
            _copy(bounce.view[:num_bytes], flight.block.views(flight.outcome.moved_bytes, num_bytes)[0])
        return [(bounce.address, num_bytes)]

    def _advance(self, flight: _Flight, result: int) -> None:
        """An operation has ended: go on from there, or end the block."""
        try:
            flight.move(result)
        except BaseException as error:  # raised again where the request is awaited
            self._end(flight, error)
        else:
            if flight.outcome.moved_bytes < flight.block.num_bytes:
                self._begin(flight)
            else:
                self._end(flight)

    def _end(self, flight: _Flight, error: BaseException | None = None) -> None:
        outcome = flight.outcome
        outcome.seconds = time.perf_counter() - flight.started
        if error is not None:
            outcome.error = without_frames(error)
        if flight.bounce is not None:
            self._bounces.append(flight.bounce)
        ended = self._complete(flight.block, outcome)
        if ended:
            self._finish_threadsafe(ended)

    # On the thread for calls.

    def _work_calls(self) -> None:
        while self._call_once():
            pass

    def _call_once(self) -> bool:
        block = self._calls.get()
        if block is None:
            return False
        outcome = Outcome()
        try:
            block.request.run()
        except BaseException as error:  # raised again where the request is awaited
            outcome.error = without_frames(error)
        with self._lock:
            self._num_calls -= 1
        self._ring.wake()  # before the request ends: once it has, the ring may be closed
        self._finish_threadsafe(self._complete(block, outcome))
        return True


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
