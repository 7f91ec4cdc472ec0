"""``Relay``: functions in threads of their own, of which exactly one runs at any time, because it has the baton.

Guarantees
    * A thread gives the baton away only where it says so (``hand_over``) and when it ends. So what they share needs no
      locks, and the order in which things happen is the same in every run.
    * Turns go round: after ``i`` comes the next living one above it, and after the last one, which ends a *lap*, the
      first living one.
    * When one fails, or the caller of ``run`` is interrupted, nobody goes on: each of the others gets the baton once
      more, in order, and ``Unwound`` raised where it waits, so that it cleans up what it has begun.
    * ``run`` returns or raises only when all threads have ended. An interrupt is seen where a thread asks next
      (``check``, ``hand_over``): one that computes for long, or waits for something else, is waited for.

Rejected: greenlets (autograd keeps its place in thread-local storage, which must not be switched under it), generators
(the code to be cut in pieces is the user's), a thread for the first one less (its place in the order of turns would be
that of the main thread, whose interrupts could come at any instruction of the engine's own code).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from infinity.engine.lent import signals_after


class Unwound(BaseException):
    """Raised in a thread whose work is in vain, since another one failed; no code should catch it."""


class Relay:
    """Threads that take turns.

    Args:
        num_threads: how many; at least one.
        pause: called with a thread's number, in it, before it gives the baton away.
        resume: called with a thread's number, in it, when it has got it.
        end_lap: called before the first one's turn comes again.

    Attributes:
        current: the number of the one that has the baton.
        failure: the first one that failed, and with what.
    """

    def __init__(
        self,
        num_threads: int,
        *,
        pause: Callable[[int], None],
        resume: Callable[[int], None],
        end_lap: Callable[[], None],
    ) -> None:
        self.current = 0
        self.failure: tuple[int, BaseException] | None = None
        self._pause = pause
        self._resume = resume
        self._end_lap = end_lap
        self._living = list(range(num_threads))
        self._batons = [threading.Semaphore(0) for _ in self._living]
        self._ended = threading.Event()
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether one failed, or all are to end."""
        return self._is_over

    def run(self, function: Callable[[int], None]) -> None:
        """Call ``function`` with each number in a thread of its own, by turns. What it raises is in ``failure``."""
        threads = [
            threading.Thread(target=self._main, args=(number, function), name=f"infinity-micro-batch-{number}")
            for number in self._living
        ]
        interrupt: BaseException | None = None
        try:
            with signals_after():
                self._start(threads)
                self._next_after(-1)
        except BaseException as error:
            if all(thread.ident is None for thread in threads):
                raise
            interrupt, self._is_over = error, True  # of a signal that came meanwhile
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except BaseException as error:
                interrupt, self._is_over = interrupt or error, True
        with signals_after():
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if interrupt is not None:
            raise interrupt

    def _start(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            try:
                thread.start()
            except RuntimeError as error:  # the system has no more threads
                self._living = self._living[: threads.index(thread)]
                self._fail(len(self._living), error)
                break

    def check(self) -> None:
        """Go on only if it is not in vain.

        Raises:
            Unwound: it is.
        """
        if self._is_over:
            raise Unwound

    def hand_over(self) -> None:
        """Give the baton to the next one, and wait until it comes round again.

        Raises:
            Unwound: going on is in vain.
        """
        self.check()
        number = self.current
        self._pause(number)
        try:
            self._next_after(number)
            self._batons[number].acquire()
        finally:
            self.current = number
            self._resume(number)
        self.check()

    def _main(self, number: int, function: Callable[[int], None]) -> None:
        self._batons[number].acquire()
        self.current = number
        try:
            self._resume(number)
            self.check()
            function(number)
        except Unwound:
            pass
        except BaseException as error:
            self._fail(number, error)
        finally:
            self._leave(number)

    def _leave(self, number: int) -> None:
        try:
            self._pause(number)
        except BaseException as error:
            self._fail(number, error)
        after = [other for other in self._living if other > number]
        self._living.remove(number)
        try:
            if not after and self._living:
                self._end_lap()
        except BaseException as error:
            self._fail(number, error)
        self._wake((after or self._living)[:1])

    def _next_after(self, number: int) -> None:
        after = [other for other in self._living if other > number]
        if not after and self._living:
            self._end_lap()
        self._wake((after or self._living)[:1])

    def _wake(self, numbers: list[int]) -> None:
        for number in numbers:
            self._batons[number].release()
        if not numbers:
            self._ended.set()

    def _fail(self, number: int, error: BaseException) -> None:
        self._is_over = True
        if self.failure is None:
            self.failure = number, error
