"""``Lane``: collectives one after the other, on a thread of its own, in the order in which they were asked for.

Guarantees
    * Order. What is submitted first runs first, whatever is ready first. Callers submit at points of the program that
      are the same on all ranks, so the ranks' orders are the same by construction. Where they are not after all (a
      branch that depends on the data of one rank), every rank is told what the others were about to do, before any byte
      has moved: no hang, and no wrong number.
    * Failure. A rank that cannot take part (its disk failed, it was closed) tells the others in the place of the
      collective; what failed on one rank so ends on all of them with the true cause. After a failure nothing runs: the
      orders would not be the same any more.
    * Nothing blocks the caller: ``submit`` returns a future.

A collective may wait for something of this rank's first (``ready``: its slice has been read, its step has ended). As
long as it waits, so does all that comes after it; so what ``ready`` waits for must never wait for the same lane.

Two lanes have nothing to do with each other, and must not share ``Collectives``. Ranks that wait for each other on
different ones are found by ``watch.py``, which ``fail``s them.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from infinity.engine.collectives import Collectives
from infinity.engine.ranks.awaited import Awaited
from infinity.errors import EngineStateError, RanksError

T = TypeVar("T")

_LEAVING_SECONDS = 5.0
_POLL_SECONDS = 0.1

CLOSED = "its engine was closed"
"""What other ranks are told of one that takes part no more, unless it knows more."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket(Generic[T]):
    what: str
    work: Callable[[], T]
    ready: Future[Any] | None
    done: Future[T]


class Lane(Awaited):
    """Runs collectives. ``submit`` is for any thread; callers order it.

    Args:
        collectives: what its calls use, and nobody else.
        name: of its thread.
    """

    def __init__(self, collectives: Collectives, name: str) -> None:
        super().__init__()
        self._collectives = collectives
        self._tickets: queue.SimpleQueue[_Ticket[Any] | None] = queue.SimpleQueue()
        self._current: _Ticket[Any] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._why = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, what: str, work: Callable[[], T], *, ready: Future[Any] | None = None) -> Future[T]:
        """Have ``work`` run when it is its turn; returns its result to come.

        Args:
            what: what it is; the same on all ranks.
            work: calls collectives.
            ready: what it waits for, of this rank's.

        Raises (the future):
            RanksError: another rank has ended, has failed or is about to do something else.
            BaseException: what ``ready`` or ``work`` failed with.
        """
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()
        self._tickets.put(_Ticket(what, work, ready, done))
        return done

    def run(self, what: str, work: Callable[[], T]) -> T:
        """``submit``, and wait for its result."""
        done = self.submit(what, work)
        with self.awaited():
            return done.result()

    def fail(self, error: BaseException) -> None:
        """See ``Awaited``: whoever waits for what it has yet to agree on is told. Its thread may stay."""
        with self._lock:
            self._error = self._error or error
            if self._current is not None and self.waits_for is not None and not self._current.done.done():
                self._current.done.set_exception(error)

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for other ranks although it was closed."""
        return self._closed and self._thread.is_alive()

    def close(self, why: str = CLOSED) -> None:
        """End it: what has not begun fails, here and on ranks that go on. Closing twice is harmless.

        Args:
            why: what other ranks are told.
        """
        if not self._closed:
            self._why = why
            self._closed = True
            self._tickets.put(None)
            self._thread.join(_LEAVING_SECONDS)  # longer only where a rank is missing: its time-out ends that

    def _main(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            self._current = ticket
            if self._error is not None:
                ticket.done.set_exception(
                    RanksError(f"{ticket.what}: nothing is done with other ranks any more, after: {self._error}")
                )
            elif (failure := self._failure_before(ticket)) is not None:
                self._error = failure
                ticket.done.set_exception(failure)  # first: its memory is free, however long the others are away
                with contextlib.suppress(RanksError):
                    self._collectives.agree(ticket.what, failure)
            else:
                self._run(ticket)
            self.num_ended += 1
            self._current = None
            del ticket  # and what it holds, while this waits for the next

    def _failure_before(self, ticket: _Ticket[T]) -> BaseException | None:
        """Wait until this rank is ready; why it cannot take part, if so."""
        ready = ticket.ready
        while ready is not None and not ready.done() and not self._closed:
            wait([ready], _POLL_SECONDS)
        if self._closed:
            return EngineStateError(self._why)
        if ready is None:
            return None
        error = asyncio.CancelledError() if ready.cancelled() else ready.exception()
        return EngineStateError(CLOSED) if isinstance(error, asyncio.CancelledError) else error

    def _run(self, ticket: _Ticket[T]) -> None:
        try:
            self.waits_for = ticket.what
            self._collectives.agree(ticket.what)
            with self._lock:
                self.waits_for = None
                if ticket.done.done():  # failed
                    return
            result = ticket.work()
        except BaseException as error:
            with self._lock:
                self.waits_for = None
                self._error = self._error or error
                if not ticket.done.done():
                    ticket.done.set_exception(error)
        else:
            ticket.done.set_result(result)
