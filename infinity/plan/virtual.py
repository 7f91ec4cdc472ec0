"""Virtual time: an event loop whose clock jumps to what happens next, and what takes time in it.

Everything runs on one thread, in an order that depends on nothing but what is simulated: the same plan twice takes the
same virtual seconds, to the last bit.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from infinity.errors import EngineStateError
from infinity.io.backend import Priority

_T = TypeVar("_T")


class _Jumping(selectors.SelectSelector):
    """A selector of nothing, which lets virtual time pass instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Nothing ever comes from outside: jump to when the next timer is due."""
        if timeout is None:
            raise EngineStateError("the simulated step waits for what never comes")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since it was made."""
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, _T]) -> _T:
    """Run something to its end in virtual time.

    Raises:
        EngineStateError: it waits for what never comes.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        left = asyncio.all_tasks(loop)  # some only where it failed
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()


class Server:
    """What serves one customer at a time, in the order in which they come: a processor, a copy engine.

    Attributes:
        busy_seconds: how long it has worked.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self.busy_seconds = 0.0

    async def work(self, seconds: float) -> None:
        """Wait for a turn, and take so long."""
        async with self._turn:
            self.busy_seconds += seconds
            await asyncio.sleep(seconds)


class Disk:
    """Two lanes, one each way, which share what the disk moves where both are busy.

    Requests are cut into blocks; of those that wait in a lane, the one of the highest priority goes first, and of
    equals the one that came first.

    Args:
        read: bytes per second of reads alone.
        write: of writes alone.
        mixed: of both together while both go on.
        block_bytes: the largest block.
    """

    def __init__(self, *, read: float, write: float, mixed: float, block_bytes: int) -> None:
        self._alone = (read, write)
        self._mixed = mixed
        self._block_bytes = block_bytes
        self._waiting: tuple[list[_Request], list[_Request]] = ([], [])
        self._busy = [False, False]
        self._order = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self.busy_seconds = [0.0, 0.0]
        self._moving_since: float | None = None
        self.moving_seconds = 0.0

    async def move(self, num_bytes: int, *, write: bool, priority: Priority) -> None:
        """Move so many bytes one way."""
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[write], (int(priority), next(self._order), num_bytes, done))
        if not self._busy[write]:
            self._busy[write] = True
            task = asyncio.get_running_loop().create_task(self._serve(write))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await done

    async def _serve(self, write: bool) -> None:
        """One lane, until nothing waits in it."""
        clock, waiting = asyncio.get_running_loop().time, self._waiting[write]
        if self._moving_since is None:
            self._moving_since = clock()
        while waiting:
            priority, order, num_bytes, done = heapq.heappop(waiting)
            block_bytes = min(num_bytes, self._block_bytes)
            alone = self._alone[write]
            rate = self._rate(write) if self._busy[not write] else alone
            seconds = block_bytes / rate
            self.busy_seconds[write] += seconds
            await asyncio.sleep(seconds)
            if block_bytes < num_bytes:
                heapq.heappush(waiting, (priority, order, num_bytes - block_bytes, done))
            elif not done.done():
                done.set_result(None)
        self._busy[write] = False
        if not self._busy[not write]:
            self.moving_seconds += clock() - self._moving_since
            self._moving_since = None

    def _rate(self, write: bool) -> float:
        """Of one lane while both are busy: the disk's time goes to both in equal parts of the bytes."""
        return min(self._alone[write], self._mixed / 2)


_Request = tuple[int, int, int, "asyncio.Future[None]"]
"""Priority, order of arrival, bytes that are left, and what is told when there are none."""
