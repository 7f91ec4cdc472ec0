"""LoopThread: the bridge between the training thread and the loop; interrupts, close, the end of the interpreter."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import EngineStateError
from infinity.store.loop import LoopThread, register_exit, unregister_exit


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("test-loop")
    yield made
    made.close()
    assert not any(thread.name == "test-loop" for thread in threading.enumerate())


async def add(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


async def fail(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def test_run_gives_the_result_of_a_coroutine_on_the_loops_thread(loop: LoopThread) -> None:
    async def where() -> str:
        return threading.current_thread().name

    assert loop.run(add(1, 2)) == 3
    assert loop.run(where()) == "test-loop"


@pytest.mark.parametrize("kind", [ValueError, TimeoutError, concurrent.futures.TimeoutError, OSError])
def test_run_raises_what_the_coroutine_raises(loop: LoopThread, kind: type[Exception]) -> None:
    """A ``TimeoutError`` of the operation is not one of the wait."""
    with pytest.raises(kind, match="boom"):
        loop.run(fail(kind("boom")))


def test_submitted_operations_go_on_while_nobody_waits(loop: LoopThread) -> None:
    gate = loop.run(make_event())
    future = loop.submit(pass_through(gate, 7))
    assert loop.run(add(1, 1)) == 2
    assert not future.done()
    loop.call_soon(gate.set)
    assert loop.wait(future) == 7


async def make_event() -> asyncio.Event:
    return asyncio.Event()


async def pass_through(gate: asyncio.Event, value: int) -> int:
    await gate.wait()
    return value


def test_callbacks_keep_their_order(loop: LoopThread) -> None:
    seen: list[int] = []
    for number in range(100):
        loop.call_soon(seen.append, number)
    loop.run(add(0, 0))
    assert seen == list(range(100))


def test_a_wait_that_outlasts_the_liveness_check_goes_on(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.store.loop._LIVENESS_SECONDS", 0.001)

    async def slow() -> int:
        await asyncio.sleep(0.05)
        return 5

    assert loop.run(slow()) == 5


def test_a_synchronous_call_from_the_loop_is_refused(loop: LoopThread) -> None:
    async def inside() -> int:
        return loop.run(add(1, 2))

    async def close_inside() -> None:
        loop.close()

    with pytest.raises(EngineStateError, match="came from its own event loop"):
        loop.run(inside())
    with pytest.raises(EngineStateError, match="from its own thread"):
        loop.run(close_inside())
    assert loop.run(add(1, 2)) == 3


def test_after_close_everything_is_refused() -> None:
    loop = LoopThread()
    loop.close()
    loop.close()
    with pytest.raises(EngineStateError, match="closed"):
        loop.run(add(1, 2))  # the coroutine is closed too: a warning of it would fail this test
    with pytest.raises(EngineStateError, match="closed"):
        loop.submit(add(1, 2))
    called: list[int] = []
    loop.call_soon(called.append, 1)
    assert called == []


def test_close_cancels_and_joins_what_is_left() -> None:
    loop = LoopThread()
    ended: list[str] = []

    async def stubborn() -> None:
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0.01)
            ended.append("stubborn")

    async def spawning() -> None:
        try:
            await for_ever()
        finally:
            children.append(asyncio.get_running_loop().create_task(stubborn()))

    async def failing() -> None:
        try:
            await for_ever()
        finally:
            raise ValueError("nobody waits for this")

    children: list[asyncio.Task[None]] = []
    futures = [loop.submit(each) for each in (for_ever(), stubborn(), spawning(), failing())]
    loop.run(add(0, 0))
    loop.close()
    assert ended in (["stubborn"], ["stubborn", "stubborn"])
    assert all(future.done() for future in futures)
    assert all(child.done() for child in children)


@pytest.mark.parametrize("num_turns", range(8))
def test_close_joins_what_the_end_of_others_calls_back(num_turns: int) -> None:
    """However many turns of the loop later a callback begins another task: it is ended, or never begun."""
    begun: list[asyncio.Task[None]] = []

    def begin(num_turns: int) -> None:
        running = asyncio.get_running_loop()
        if num_turns:
            running.call_soon(begin, num_turns - 1)
        else:
            begun.append(running.create_task(for_ever()))

    async def calling_back() -> None:
        try:
            await for_ever()
        finally:
            begin(num_turns)

    loop = LoopThread()
    loop.submit(calling_back())
    loop.run(add(0, 0))
    loop.close()
    assert all(task.done() for task in begun)


def test_what_was_submitted_before_close_is_not_forgotten() -> None:
    """However the two meet, every future ends, and no coroutine is left unawaited."""
    for _ in range(20):
        loop = LoopThread()
        futures: list[concurrent.futures.Future[int]] = []

        def submit(loop: LoopThread = loop, futures: list[concurrent.futures.Future[int]] = futures) -> None:
            try:
                while True:
                    futures.append(loop.submit(add(1, 2)))
            except EngineStateError:
                pass

        thread = threading.Thread(target=submit)
        thread.start()
        while not futures:
            time.sleep(0)
        loop.close()
        thread.join()
        assert all(future.done() for future in futures)


def test_whoever_waits_when_the_loop_is_closed_gets_an_error() -> None:
    loop = LoopThread()
    errors: list[BaseException] = []
    future = loop.submit(for_ever())

    def wait() -> None:
        try:
            loop.wait(future)
        except EngineStateError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    loop.close()
    thread.join()
    assert "closed while an operation was under way" in str(errors[0])


def test_whoever_waits_when_the_loop_dies_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop ends by an exception that asyncio does not catch; its tasks are cancelled all the same."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    loop = LoopThread()
    future = loop.submit(for_ever())

    def die() -> None:
        raise SystemExit

    loop.call_soon(die)
    with pytest.raises(EngineStateError):
        loop.wait(future)
    loop._thread.join()
    with pytest.raises(EngineStateError, match="closed"):
        loop.run(add(1, 2))
    loop.call_soon(die)
    loop.close()


def test_a_future_that_nobody_will_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a forked child, where the loop's thread does not exist."""
    monkeypatch.setattr("infinity.store.loop._LIVENESS_SECONDS", 0.001)
    loop = LoopThread()
    loop.close()
    with pytest.raises(EngineStateError, match="has died"):
        loop.wait(concurrent.futures.Future())


# Interrupts


class InterruptedFuture(concurrent.futures.Future[str]):
    """The first waits are interrupted, as by Ctrl-C."""

    def __init__(self, *interrupts: type[BaseException]) -> None:
        super().__init__()
        self.interrupts = list(interrupts)
        self.num_waits = 0

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.num_waits += 1
        if self.interrupts:
            raise self.interrupts.pop(0)
        self.set_result("done")
        return super().exception(timeout)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_goes_on_when_the_operation_has_ended(loop: LoopThread, interrupt: type[BaseException]) -> None:
    future = InterruptedFuture(interrupt)
    with pytest.raises(interrupt):
        loop.wait(future)
    assert future.done()
    assert future.num_waits == 2


def test_an_interrupt_hides_no_interrupt_behind_the_operations_error(loop: LoopThread) -> None:
    class Failing(InterruptedFuture):
        def set_result(self, result: str) -> None:
            self.set_exception(ValueError("boom"))

    with pytest.raises(KeyboardInterrupt):
        loop.wait(Failing(KeyboardInterrupt))


def test_a_second_interrupt_goes_on_at_once(loop: LoopThread) -> None:
    future = InterruptedFuture(KeyboardInterrupt, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.wait(future)
    assert not future.done()


def test_ctrl_c_lets_the_operation_end(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    gate, result = loop.run(make_event()), loop._result

    def waiting(future: concurrent.futures.Future[int]) -> int:
        loop.call_soon(gate.set)
        return result(future)

    async def operation() -> int:
        await gate.wait()
        steps.append("begun")
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        steps.append("ended")
        return 0

    monkeypatch.setattr(loop, "_result", waiting)
    with pytest.raises(KeyboardInterrupt):
        loop.run(operation())
    assert steps == ["begun", "ended"]


# The end of the interpreter


def run_program(program: str) -> tuple[int, str, str]:
    """Run a program that must end by itself, with warnings as errors; its exit code and what it printed."""
    ended = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_a_program_may_end_without_closing() -> None:
    program = """
        import asyncio
        from infinity.store.loop import LoopThread
        loop = LoopThread()
        async def for_ever():
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                print("ended")
        loop.submit(for_ever())
        print("end")
    """
    assert run_program(program) == (0, "end\nended\n", "")


def test_what_is_registered_is_closed_at_exit_while_everything_still_works() -> None:
    """Loop, threads and executors; the latest first; whatever one of them raises; and not in a forked child."""
    program = """
        import asyncio, atexit, os, sys, threading
        from concurrent.futures import ThreadPoolExecutor
        from infinity.store.loop import LoopThread, register_exit, unregister_exit
        loop = LoopThread()
        executor = ThreadPoolExecutor(1)
        async def work():
            await asyncio.to_thread(print, "default executor")
        def close():
            loop.run(work())
            executor.submit(print, "executor").result()
            thread = threading.Thread(target=print, args=("thread",))
            thread.start()
            thread.join()
            loop.close()
            print("closed")
        def fail():
            raise ValueError("boom")
        def never():
            print("never")
        atexit.register(print, "atexit")
        register_exit(close)
        register_exit(never)
        register_exit(fail)
        unregister_exit(never)
        unregister_exit(never)
        sys.exit(3)
    """
    code, out, err = run_program(program)
    assert code == 3
    assert out.splitlines() == ["default executor", "executor", "thread", "closed", "atexit"]
    assert err.count("Traceback") == 1
    assert err.endswith("ValueError: boom\n")


def test_registering_is_by_function() -> None:
    def close() -> None:
        raise AssertionError("unregistered")

    register_exit(close)
    register_exit(close)
    unregister_exit(close)
