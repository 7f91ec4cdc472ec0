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

Two lanes have nothing to do with each other, and must not share ``Collectives``.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from infinity.engine.collectives import Collectives
from infinity.errors import EngineStateError, RanksError

T = TypeVar("T")

_LEAVING_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket(Generic[T]):
    what: str
    work: Callable[[], T]
    ready: Future[Any] | None
    done: Future[T]


class Lane:
    """Runs collectives. ``submit`` is for any thread; callers order it.

    Args:
        collectives: what its calls use, and nobody else.
        name: of its thread.
    """

    def __init__(self, collectives: Collectives, name: str) -> None:
        self._collectives = collectives
        self._tickets: queue.SimpleQueue[_Ticket[Any] | None] = queue.SimpleQueue()
        self._closed = False
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

    def close(self) -> None:
        """End it: what has not begun fails, here and on ranks that go on. Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            self._tickets.put(None)
            self._thread.join(_LEAVING_SECONDS)  # longer only where a rank is missing: its time-out ends that

    def _main(self) -> None:
        while (ticket := self._tickets.get()) is not None:
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
            del ticket  # and what it holds, while this waits for the next

    def _failure_before(self, ticket: _Ticket[T]) -> BaseException | None:
        """Wait until this rank is ready; why it cannot take part, if so."""
        closed = EngineStateError("its engine was closed")
        try:
            if ticket.ready is not None and not self._closed:
                ticket.ready.result()
        except CancelledError:
            return closed
        except Exception as error:
            return error
        return closed if self._closed else None

    def _run(self, ticket: _Ticket[T]) -> None:
        try:
            self._collectives.agree(ticket.what)
            result = ticket.work()
        except BaseException as error:
            self._error = error
            ticket.done.set_exception(error)
        else:
            ticket.done.set_result(result)
