"""The default backend: worker threads, each in a plain ``preadv`` or ``pwritev``.

A thread blocked in a system call costs nothing and holds no GIL, and a few blocks of several MiB in flight keep any
NVMe device busy: measured, this equals a C loop over io_uring (1.0x the bandwidth) as long as one request costs one
wake-up of the loop. It needs no dependency and no kernel feature, and works on every file system.

Where the CPU time goes (2 virtual cores shared with other work, so +-20%; 2 requests of 64 MiB, reading, CPU seconds
per GB, medians of 9):

==============================  ===========  ==========  ==========
blocks in flight                4 MiB x 8    8 MiB x 4   32 MiB x 2
==============================  ===========  ==========  ==========
bare threads around ``preadv``  .008-.010    .006
this backend                    .016-.018    .014        .008
its loop thread, of that        .003         .003        .003
a bare asyncio wake-up          .0016        .0016       .0016
==============================  ===========  ==========  ==========

The difference is hardly instructions: all that a request of one block runs takes 12 us in a tight loop, but a request
of 64 MiB costs 190 us of the loop thread alone, because by the time it ends the caches hold other things (a bare
asyncio wake-up costs 100 us in the same way). So what counts is how rarely code runs, and how much *different* code:

* One wake-up of the loop for all requests that end together, by an eventfd (``bell.py``), and none for blocks.
* A worker gives back its block and takes the next at one go. Only where someone sleeps and a block is ready is one
  sleeper woken, who wakes the next: ``Condition.notify(n)`` woke threads that found nothing (with one request for each
  block, half as many context switches again). Each sleeps on a lock of its own, and who slept last is woken first.
* What became of a block is put down, and added up when someone asks for statistics.

Tried, and not worth it (below 3%): waking the awaiting task in the same turn of the loop, by an awaitable of our own;
the whole path of a request written out in one function.

With one request for each block of 4 MiB the cost is .026-.033 (measured before ``bell.py``), half of it the loop's:
large requests are what makes asyncio cheap.

Aligned bytes move straight between the device and the caller's memory. Where only the *address* is misaligned, they
go through a small aligned buffer that each thread keeps for that, copied without the GIL: slower, and still around
the page cache. Ragged edges go through the page cache (see ``files.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from infinity.io.completion import Completion
from infinity.io.memory import HUGE_PAGE_BYTES, allocate, as_bytes
from infinity.io.queued import QueuedBackend, without_frames
from infinity.io.requests import Block, CallBlock, TransferBlock
from infinity.io.syscalls import SYSCALLS, Syscalls

_Move = Callable[[int, memoryview, int], int]


class ThreadBackend(QueuedBackend):
    """Asynchronous I/O by worker threads.

    Args:
        num_threads: worker threads, which is the queue depth that the device sees.
        block_bytes: largest single system call, and the grain at which an urgent request overtakes; at least
            ``DIRECT_ALIGNMENT``, and rounded down to a multiple of it.
        direct: bypass the page cache (``O_DIRECT``); ``open_file`` then refuses where the file system does not have it.
        syscalls: the system calls to make.

    Raises:
        ValueError: an argument is out of range.
    """

    name = "threads"

    def __init__(
        self,
        num_threads: int = 4,
        block_bytes: int = 8 << 20,
        direct: bool = True,
        syscalls: Syscalls = SYSCALLS,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads: expected at least 1, got {num_threads}")
        super().__init__(block_bytes=block_bytes, direct=direct, num_lanes=1, syscalls=syscalls)
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._sleepers: list[threading.Lock] = []
        self._waking = False
        self._ending: Completion | None = None
        self._num_ended = 0
        self._local = threading.local()

    def _start(self) -> None:
        while len(self._threads) < self._num_threads:
            name = f"infinity-io-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _waker(self) -> Callable[[], object] | None:
        """The lock of a thread that sleeps; of nobody while one who was woken has not looked yet."""
        if self._waking or not self._sleepers or not self._queue.ready:
            return None
        self._waking = True
        return self._sleepers.pop().release

    async def _stop(self) -> bool:
        if not self._threads:
            return False
        with self._lock:
            ending = self._ending = Completion()
            while self._sleepers:
                self._sleepers.pop().release()
        cancelled = await ending.wait()
        for thread in self._threads:
            thread.join()  # each has left its loop: the last to do so ended the wait
        self._threads.clear()
        return cancelled

    def _work(self) -> None:
        signal = threading.Lock()
        signal.acquire()
        while (ending := self._work_once(signal)) is None:
            pass
        with self._lock:
            self._num_ended += 1
            last = self._num_ended == len(self._threads)
        if last:
            self._finish_threadsafe([ending])

    def _work_once(self, signal: threading.Lock) -> Completion | None:
        """Do blocks while there are any, then sleep; what to finish, at the end."""
        block = self._turn(None, signal)
        while block is not None:
            try:
                if isinstance(block, CallBlock):
                    block.request.run()
                else:
                    self._move(block)
            except BaseException as error:  # raised again where the request is awaited
                block.error = without_frames(error)
            block = self._turn(block, signal)
        signal.acquire()
        return self._ending

    def _turn(self, done: Block | None, signal: threading.Lock) -> Block | None:
        """Give back a block and take the next; where there is none, ``signal`` is released when there may be."""
        now = time.perf_counter()
        with self._lock:
            if done is None:
                self._waking = False
                ended = []
            else:
                ended = self._complete(done, now)
            block = self._queue.take()
            if isinstance(block, TransferBlock):
                block.started = now
            wake = self._waker()
            if block is None:
                if self._ending is None:
                    self._sleepers.append(signal)
                else:
                    signal.release()
        self._finish_threadsafe(ended)
        if wake is not None:
            wake()
        return block

    def _move(self, block: TransferBlock) -> None:
        """Move the bytes of a block, continuing after short transfers; raise ``EOFError`` where no more move."""
        calls, lane, write = self._syscalls, block.file.lanes[0], block.write
        while (done := block.moved_bytes) < block.num_bytes:
            position = block.position + done
            descriptor, num_bytes = lane.route(position, block.num_bytes - done)
            views = block.views(done, num_bytes)
            move = calls.write_from if write else calls.read_into
            bounce = block.misaligned and descriptor == lane.direct
            try:
                if bounce:
                    moved_bytes = self._bounce(move, descriptor, views[0], position, write=write)
                elif len(views) == 1:
                    moved_bytes = move(descriptor, views[0], position)
                else:
                    moved_bytes = (calls.write_from_many if write else calls.read_into_many)(
                        descriptor, views, position
                    )
            except InterruptedError:
                continue
            if moved_bytes == 0:
                raise EOFError
            block.moved_bytes += moved_bytes
            if bounce:
                block.bounced_bytes += moved_bytes
            if descriptor == lane.buffered:
                block.cached_bytes += moved_bytes

    def _bounce(self, move: _Move, descriptor: int, view: memoryview, position: int, *, write: bool) -> int:
        """``move`` by way of this thread's aligned buffer, as much as that holds."""
        aligned = getattr(self._local, "aligned", None)
        if aligned is None:
            aligned = self._local.aligned = as_bytes(allocate(min(self._block_bytes, HUGE_PAGE_BYTES)))
        aligned = aligned[: len(view)]
        if write:
            _copy(aligned, view[: len(aligned)])
        moved_bytes = move(descriptor, aligned, position)
        if moved_bytes and not write:
            _copy(view[:moved_bytes], aligned[:moved_bytes])
        return moved_bytes


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
