"""The one event-loop thread, and the only bridge between synchronous and asynchronous code.

The training thread calls ``run`` (wait) or ``submit`` (do not wait); everything that owns bytes lives on the loop. An
interrupt of a wait (Ctrl-C) goes on only when the operation has ended, so that no transfer is left without an owner and
an optimizer step is whole or not begun; a second interrupt goes on at once. When the loop has gone, waiting callers get
an error instead of a hang.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from infinity.errors import EngineStateError

_T = TypeVar("_T")
_LIVENESS_SECONDS = 1.0


class LoopThread:
    """An asyncio event loop on a daemon thread of its own.

    Raises (from ``run`` and ``submit``):
        EngineStateError: the loop is closed, or the caller is the loop thread itself.
    """

    def __init__(self, name: str = "infinity-store") -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Start ``coroutine`` on the loop and return its future."""
        if self._closed or not self._thread.is_alive():
            coroutine.close()
            raise EngineStateError("the store's event loop is closed; the engine can no longer be used")
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise EngineStateError("a synchronous call into the store came from its own event loop")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

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

    def _result(self, future: concurrent.futures.Future[_T]) -> _T:
        while True:
            try:
                return future.result(timeout=_LIVENESS_SECONDS)
            except concurrent.futures.TimeoutError:
                if future.done():
                    return future.result()
                if not self._thread.is_alive():
                    raise EngineStateError("the store's event loop thread has died") from None

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """Call ``callback(*args)`` on the loop, in the order of the calls; nothing when the loop is closed."""
        if not self._closed:
            self._loop.call_soon_threadsafe(callback, *args)

    def close(self) -> None:
        """Cancel and join every task that is left, then end the loop and its thread. Closing twice is harmless."""
        if self._closed:
            return
        if self._thread.is_alive():
            self.run(self._drain())
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    async def _drain() -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_default_executor()
