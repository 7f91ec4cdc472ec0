"""``StepGuard``: the one optimizer step that may be running, and whether the last one left the state whole."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Coroutine
from typing import Any

from infinity.errors import EngineStateError
from infinity.store.loop import LoopThread


class StepGuard:
    """Runs steps, one at a time. Belongs to the training thread.

    Args:
        loop: the loop thread.
    """

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._running: concurrent.futures.Future[None] | None = None
        self._error: BaseException | None = None

    def run(self, step: Coroutine[Any, Any, None]) -> None:
        """Run a step and wait for it. What it raises is raised, and remembered: the state is no longer whole.

        A second interrupt ends the wait but not the step; whatever comes next waits for it.
        """
        self._running = self._loop.submit(step)
        try:
            self._loop.wait(self._running)
        finally:
            if self._running.done():
                self.join()

    def join(self) -> None:
        """Wait for a step that an interrupt left running."""
        running = self._running
        if running is not None:
            with contextlib.suppress(Exception):
                self._loop.wait(running)
            self._running = None
            self._error = concurrent.futures.CancelledError() if running.cancelled() else running.exception()

    def check(self) -> None:
        """Refuse to go on from a state that is not whole.

        Raises:
            EngineStateError: a step failed half-way.
        """
        self.join()
        if self._error is not None:
            raise EngineStateError(
                f"an optimizer step failed half-way, so the state is no longer whole: {self._error}; "
                "start again from your last saved state"
            ) from self._error
