"""``LentThread``: the optimizer's arithmetic on the training thread itself, where both compute on the same processors.

On the CPU a thread of its own would gain the optimizer nothing and cost training much. Nothing: the processors are busy
with forward and backward already. Much: two threads with OpenMP teams are more threads than there are processors, so
that GNU's runtime no longer spins between parallel regions but sleeps; every operator of training then waits for a
wake-up, and wherever one team is behind the other waits in the middle of an operator. (Two cores, 116M parameters in
bf16, a step of 1920 tokens: forward and backward take 2.0-2.3 s in plain PyTorch, 2.45 s beside an optimizer's thread
that computes nothing at that time, and 2.0-2.1 s with this.) So the training thread does it: where it passes from one
module to the next, where a gradient arrives (``lend``), and whenever it waits for the loop, which is most of the time
where the disk is slower.

Guarantees
    * One call at a time, in the order of submission, by whoever lends a thread first; the rest of the time nobody's.
      Everyone who waits for the loop lends, so whoever waits for a call also sees to it.
    * A call finds what a thread of its own would have: no autocast, no inference mode, no modes that see functions or
      operators, gradients enabled, training's number of threads.
    * A signal whose handler is Python's (Ctrl-C) is handled after the call: a handler may raise, and no call may end in
      the middle. An exception set by another thread (``PyThreadState_SetAsyncExc``) cannot be put off.
    * In a process that was forked meanwhile no call is made: they are the parent's, and OpenMP would hang there.

What is given up: the tail of a step rests while the training thread is in code of the user's own.

Rejected: one OpenMP thread for the optimizer's thread (no sleeping, but two busy threads and a third on two cores; the
arithmetic takes twice as long where training waits); turns taken by two threads (both teams still sleep between their
regions); ``GOMP_SPINCOUNT`` (read when torch is loaded, too late for a library).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without stubs; see signals_after
import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from infinity.engine.worker import ThreadCounts, Worker

_SIGNALS = sorted(map(int, signal.valid_signals()))
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that waits for a thread."""

    future: Future[Any]
    function: Callable[[], Any]
    counts: ThreadCounts

    def run(self) -> None:
        """Make it, and tell the future how it ended."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            with own_thread_state(), self.counts.applied():
                result = self.function()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class LentThread(Worker):
    """An executor without a thread; safe from any."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._calls: deque[_Call] = deque()
        self._is_busy = False
        self._is_shut_down = False
        self._changed = threading.Condition()

    @property
    def has_calls(self) -> bool:
        """Whether a call waits for a thread."""
        return bool(self._calls) and os.getpid() == self._pid

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have ``fn(*args, **kwargs)`` called by the next thread that is lent.

        Raises:
            RuntimeError: the executor is shut down.
        """
        future: Future[_T] = Future()
        with self._changed:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.append(_Call(future, lambda: fn(*args, **kwargs), self.counts))
            self._changed.notify_all()
        return future

    def lend(self) -> None:
        """Make the calls that wait."""
        while self._make_one():
            pass

    def wait(self, future: Future[Any], timeout: float) -> None:
        """Wait until ``future`` has ended, making calls meanwhile, or until there was none to make for ``timeout``."""
        future.add_done_callback(self._tell)
        while not future.done():
            if self._make_one():
                continue
            with self._changed:
                can_go_on = future.done() or self._can_make()
                if not can_go_on and not self._changed.wait(timeout):
                    return

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and make or cancel those that wait. Shutting down twice is harmless."""
        with self._changed:
            self._is_shut_down = True
            if cancel_futures:
                for call in self._calls:
                    call.future.cancel()
                self._calls.clear()
        if wait:
            self.lend()

    def _can_make(self) -> bool:
        return not self._is_busy and self.has_calls

    def _make_one(self) -> bool:
        if not self._can_make():
            return False
        with signals_after():  # from here on, or a call that has been taken would be lost
            with self._changed:
                if not self._can_make():
                    return False
                call = self._calls.popleft()
                self._is_busy = True
            call.run()
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
        return True

    def _tell(self, future: Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()


@contextlib.contextmanager
def own_thread_state() -> Iterator[None]:
    """Compute as on a thread of one's own, whatever the thread is in the middle of."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        yield


@contextlib.contextmanager
def signals_after() -> Iterator[None]:
    """Have signals handled at the end of this; only the main thread is interrupted by them.

    By ``_signal``, since ``signal`` looks for an enumeration member for each number and handler: 270 us and not 8.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers: dict[
        int, Any
    ] = {}  # what _signal gives, since signal makes an enumeration member of each: 5 us and not 300

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))

    try:
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                _signal.signal(number, note)
        yield
    finally:
        for each in handlers:
            _signal.signal(each, handlers[each])
        for each, frame in came:
            handlers[each](each, frame)
