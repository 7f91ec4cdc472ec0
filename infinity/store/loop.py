"""The one event-loop thread, and the only bridge between synchronous and asynchronous code.

The training thread calls ``run`` (wait) or ``submit`` (do not wait); everything that owns bytes lives on the loop. An
interrupt of a wait (Ctrl-C) goes on only when the operation has ended, so that no transfer is left without an owner and
an optimizer step is whole or not begun; a second interrupt goes on at once. When the loop has gone, waiting callers get
an error instead of a hang.

A program may end without closing it: the loop closes itself when the interpreter exits, and before it, latest first,
whatever else has registered with ``register_exit``. ``atexit`` would be too late: by then executors take no more work,
and from Python 3.12 on no thread can be started.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # has its own exit registered before ours, and so run after it
import contextlib
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from infinity.errors import EngineStateError

_T = TypeVar("_T")
_LIVENESS_SECONDS = 1.0


class Waiter(Protocol):
    """How callers wait for the loop."""

    def wait(self, future: concurrent.futures.Future[Any], timeout: float) -> None:
        """Wait until ``future`` has ended, or so many seconds in which nothing happened."""
        ...


class Idle:
    """Doing nothing else."""

    def wait(self, future: concurrent.futures.Future[Any], timeout: float) -> None:
        """See ``Waiter``."""
        with contextlib.suppress(concurrent.futures.CancelledError, concurrent.futures.TimeoutError):
            future.exception(timeout)


class LoopThread:
    """An asyncio event loop on a daemon thread of its own.

    Attributes:
        waiter: how callers wait for it; one that has something to do meanwhile may be put here.

    Raises (from ``run`` and ``submit``):
        EngineStateError: the loop is closed, or the caller is the loop thread itself.
    """

    def __init__(self, name: str = "infinity-store") -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.RLock()  # what is accepted under it comes before the end of the loop
        self._closed = False
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.waiter: Waiter = Idle()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        register_exit(self.close)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            with self._lock:
                self._closed = True
            try:
                self._loop.run_until_complete(self._drain())
                while asyncio.all_tasks(self._loop):  # begun by what the end of the others has called back
                    self._loop.run_until_complete(self._drain())
                self._loop.close()
            finally:
                self._ended.set_result(None)

    @staticmethod
    async def _drain() -> None:
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_default_executor()

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Start ``coroutine`` on the loop and return its future."""
        try:
            with self._lock:
                if threading.current_thread() is self._thread:
                    raise EngineStateError("a synchronous call into the store came from its own event loop")
                if self._closed or not self._thread.is_alive():
                    raise EngineStateError("the store's event loop is closed; the engine can no longer be used")
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except EngineStateError:
            coroutine.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Start ``coroutine`` on the loop, wait for it and return its result or raise its exception."""
        return self.wait(self.submit(coroutine))

    def wait(self, future: concurrent.futures.Future[_T]) -> _T:
        """Wait for a future of ``submit``; an interrupt of the wait first lets the operation end."""
        try:
            return self._result(future)
        except (KeyboardInterrupt, SystemExit):
            with contextlib.suppress(Exception):
                self._result(future)
            raise

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """Call ``callback(*args)`` on the loop, in the order of the calls; nothing when the loop is closed."""
        with self._lock:
            if not self._closed and self._thread.is_alive():
                self._loop.call_soon_threadsafe(callback, *args)

    def close(self) -> None:
        """Cancel and join every task that is left, then end the loop and its thread. Closing twice is harmless.

        Raises:
            EngineStateError: the caller is the loop thread itself.
        """
        if threading.current_thread() is self._thread:
            raise EngineStateError("the store's event loop cannot be closed from its own thread")
        with self._lock:
            if not self._closed and self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._closed = True
        while self._thread.is_alive() and not self._ended.done():  # its tasks may wait for what is done by who waits
            self.waiter.wait(self._ended, _LIVENESS_SECONDS)
        self._thread.join()
        unregister_exit(self.close)

    def _result(self, future: concurrent.futures.Future[_T]) -> _T:
        while not future.done():
            alive = self._thread.is_alive()
            self.waiter.wait(future, _LIVENESS_SECONDS)
            if not alive and not future.done():
                raise EngineStateError("the store's event loop thread has died")
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise EngineStateError("the store's event loop was closed while an operation was under way") from None


_exits: dict[Callable[[], None], None] = {}


def register_exit(close: Callable[[], None]) -> None:
    """Have ``close`` called when the interpreter exits, while threads and executors still work; the latest first."""
    _exits[close] = None


def unregister_exit(close: Callable[[], None]) -> None:
    """Undo ``register_exit``; harmless when ``close`` is not registered."""
    _exits.pop(close, None)


def _close_all() -> None:
    for close in reversed(list(_exits)):
        try:
            close()
        except Exception:  # nobody is left to raise it to, and the next must still have its turn
            traceback.print_exc()


# What ``concurrent.futures`` itself uses. A Python without it would have executors that live until ``atexit``.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
