"""Waiting in a coroutine for work that must not be abandoned half-way.

A transfer in flight owns its buffer, and a call that opens a file owns a descriptor, until a thread is done with it.
So no wait here ends before the work has: a cancellation is noted, passed on as a wish to drop what has not begun, and
*reported* by the wait's result. The caller finishes its own bookkeeping first and raises ``CancelledError`` last.
This needs neither tasks nor ``asyncio.shield``, costs one future per wait, and survives any number of cancellations.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Completion:
    """Something that ends once; made on the event loop whose coroutines wait for it."""

    __slots__ = ("_loop", "_waiters", "done")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiters: list[asyncio.Future[None]] = []
        self.done = False

    def finish(self) -> None:
        """Wake all that wait; on the loop only. Finishing twice is harmless."""
        self.done = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def finish_threadsafe(self) -> None:
        """``finish`` from any thread: one wake-up of the loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self.finish)

    async def wait(self, on_cancel: Callable[[], object] | None = None) -> bool:
        """Wait for the end, through cancellations; returns whether there were any.

        Args:
            on_cancel: called on the loop at each cancellation; may call ``finish``.
        """
        cancelled = False
        while not self.done:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                cancelled = True
                if on_cancel is not None:
                    on_cancel()
        return cancelled


class InFlight:
    """Counts what uses a thing, as a context manager; whoever closes the thing waits until nothing does."""

    __slots__ = ("_idle", "count")

    def __init__(self) -> None:
        self.count = 0
        self._idle: Completion | None = None

    def begin(self) -> None:
        """One more."""
        self.count += 1

    def end(self) -> None:
        """One less; never without its ``begin``."""
        self.count -= 1
        if self.count == 0 and self._idle is not None:
            self._idle.finish()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    async def drained(self) -> bool:
        """Wait until the count is 0; the caller sees to it that nothing new begins. Returns whether cancelled."""
        if self.count == 0:
            return False
        self._idle = Completion()
        return await self._idle.wait()


async def call_in_thread(function: Callable[[], T], *, on_cancel: Callable[[], object] | None = None) -> T:
    """Run a blocking function on a thread of its own: for rare calls, where no backend's workers are at hand.

    Args:
        function: what to call.
        on_cancel: called at a cancellation, to tell ``function`` that its result is no longer wanted.

    Raises:
        CancelledError: only once ``function`` has ended.
        BaseException: what ``function`` raised.
    """
    completion = Completion()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again below
            errors.append(error)
        completion.finish_threadsafe()

    thread = threading.Thread(target=run, name="infinity-io-call", daemon=True)
    thread.start()
    cancelled = await completion.wait(on_cancel)
    thread.join()  # it has nothing left to do
    if cancelled:
        raise asyncio.CancelledError
    if errors:
        raise errors.pop()
    return results[0]
