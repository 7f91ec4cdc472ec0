"""Signals, errors of users' code and accidents of the process under a run with commits: nothing is lost or hangs."""

from __future__ import annotations

import gc
import linecache
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import infinity
from accidents import PlannedError
from fakes_durable import FOR_EVER, Chain, FailingRun, FaultyDisk, check_state, disk, momentum, running  # noqa: F401
from infinity import EngineStateError, InfinityError, StorageError
from parity import smallest

PACKAGE = str(Path(infinity.__file__).parent)
EVERY = int(os.environ.get("INFINITY_INTERRUPTS_EVERY", "251"))
"""How many lines lie between two at which the run is interrupted; a prime, so that each time others are met."""


pytestmark = pytest.mark.usefixtures("one_thread")


class Interrupt:
    """Ctrl-C, by a real signal, when the training thread comes to a certain line of the engine's code.

    Where that is a ``with`` statement which is being left, it comes at the next line: tracing stops there before the
    context has ended, with nothing around that would end it. No signal from outside is seen there: Python looks for one
    after the last call inside, where the statement still holds, and not before its own.

    Args:
        at: how many lines it runs before.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.num_lines = 0
        self._has_come = False

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name == "signals_after":
            return None  # that one has a loop over all signals: most lines would be its own
        last = frame.f_lineno

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "line":
                before, last = last, frame.f_lineno
                self.num_lines += 1
                if self.num_lines >= self.at and not self._has_come and not (last < before and is_with(frame)):
                    self._has_come = True
                    signal.raise_signal(signal.SIGINT)
            return trace

        return trace


def is_with(frame: FrameType) -> bool:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def interrupt_everywhere(tmp_path: Path, disk: FaultyDisk) -> int:  # noqa: F811
    """Ctrl-C at every so many lines of steps and commits; how many came."""
    at, num_interrupted, is_over = 1, 0, False
    with running(tmp_path, disk) as run:
        while not is_over:
            before = run.engine.commit().step
            with Interrupt(at) as interrupt:
                try:
                    run.step()
                    run.engine.commit()
                except KeyboardInterrupt:
                    num_interrupted += 1
            is_over = interrupt.num_lines < at
            if num_interrupted % 8 == 0:
                assert before <= run.check_last_commit(tmp_path) <= before + 1
            run.roll_back()
            assert before <= run.engine.num_steps <= before + 1
            while run.engine.num_steps < before + 1:
                run.step()
            at += EVERY
        check_state(run.engine)
    return num_interrupted


@pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning"
)  # interrupted before it is submitted
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line(tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    assert interrupt_everywhere(tmp_path, disk) > 10
    gc.collect()  # coroutines that were never awaited are told of here, now that nothing of the run is left


def raise_planned(*_: object) -> None:
    raise PlannedError("the user's own")


def in_forward(run: FailingRun) -> Callable[[], None]:
    return run.engine.module.get_submodule("layers.1").register_forward_hook(raise_planned).remove


def in_backward(run: FailingRun) -> Callable[[], None]:
    def hook(module: object, args: object, output: torch.Tensor) -> None:
        output.register_hook(raise_planned)

    return run.engine.module.get_submodule("layers.1").register_forward_hook(hook).remove


def before_the_step(run: FailingRun) -> Callable[[], None]:
    return run.engine.optimizer.register_step_pre_hook(raise_planned).remove


def after_the_step(run: FailingRun) -> Callable[[], None]:
    return run.engine.optimizer.register_step_post_hook(raise_planned).remove


class Counter:
    """Tracked by the engine; ``state_dict`` fails when it is told to."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise_planned()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Loader(Counter):
    """The same, of which the state is taken when ``step()`` returns."""

    def __iter__(self) -> Iterator[None]:
        yield


def in_a_tracked_object(run: FailingRun, kind: type[Counter] = Counter) -> Callable[[], None]:
    counter = kind()
    run.engine.track("counter", counter)
    counter.fails = True

    def repair() -> None:
        counter.fails = False

    return repair


def in_a_tracked_loader(run: FailingRun) -> Callable[[], None]:
    return in_a_tracked_object(run, Loader)


USERS = [in_forward, in_backward, before_the_step, after_the_step, in_a_tracked_object, in_a_tracked_loader]


@pytest.mark.parametrize("fail", USERS)
def test_an_error_of_the_users_code(
    fail: Callable[[FailingRun], Callable[[], None]],
    tmp_path: Path,
    disk: FaultyDisk,  # noqa: F811
) -> None:
    with running(tmp_path, disk) as run:
        run.step()
        step = run.engine.commit().step
        repair = fail(run)
        with pytest.raises(PlannedError):
            run.steps(2)
        repair()
        assert step <= run.check_last_commit(tmp_path) <= step + 2
        run.roll_back()
        assert run.engine.num_steps >= step
        for _ in range(2):
            run.step()
        check_state(run.engine)


def fail_with_a_commit_pending(run: FailingRun) -> None:
    run.step()
    run.disk.arm("create", "rename", "unlink", at=0, times=FOR_EVER)
    raise_planned()


def test_the_first_error_is_the_one_that_is_shown(tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    """Also where closing fails then: the commit that waits cannot be made."""
    with running(tmp_path, disk) as run:
        with pytest.raises(PlannedError), run.engine:
            fail_with_a_commit_pending(run)
        assert disk.num_failed
        disk.repair()
        assert run.check_last_commit(tmp_path) == 1


def test_a_commit_that_fails_last_is_told_by_close(tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    with running(tmp_path, disk) as run:
        run.step()
        disk.arm("create", at=0)
        with pytest.raises(StorageError, match=r"writing failed.*commit-"):
            run.engine.close()
        run.engine.close()
        assert run.check_last_commit(tmp_path) == 1


def test_a_directory_that_is_removed_under_a_run(tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    with running(tmp_path, disk) as run:
        [state] = run.directory.glob("infinity-state-*")
        shutil.rmtree(state)
        with pytest.raises(StorageError, match=r"commit-.*ENOENT"):
            run.engine.commit()
        for _ in range(2):  # and each commit that is due says so
            with pytest.raises(StorageError, match=r"commit-.*ENOENT"):
                run.steps(3)
            run.finish()
        check_state(run.engine)
        with pytest.raises(StorageError, match="ENOENT"):
            run.engine.close()


def test_a_directory_that_is_renamed_under_a_run(tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    with running(tmp_path, disk) as run:
        (run.directory).rename(tmp_path / "elsewhere")
        for _ in range(3):
            run.step()
        run.engine.commit()
        run.engine.close()
        run.directory = tmp_path / "elsewhere"
        assert run.check_last_commit(tmp_path) == 4


def test_a_loop_thread_that_dies(tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    with running(tmp_path, disk) as run:
        run.step()
        loop = run.engine._resources.loop
        loop._loop.call_soon_threadsafe(loop._loop.stop)
        loop.waiter.wait(loop._ended, 60)
        with pytest.raises(EngineStateError, match="event loop"):
            run.step()
        with pytest.raises(EngineStateError, match="event loop"):
            run.engine.rollback()
        with pytest.raises(InfinityError):
            run.engine.close()
        assert run.check_last_commit(tmp_path) in (1, 2)


PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[3])
import torch
import infinity
from fakes_durable import FOR_EVER, Chain, FailingRun, build, momentum, smallest

ending, directory = sys.argv[1:3]
config = smallest(Chain, momentum, nvme=directory, durability=1, resume="auto")
engine = FailingRun.start(config)

def step():
    engine.backward(engine(torch.ones(1, 32)))
    engine.step()

for _ in range(3):
    step()
if ending == "fork":
    if os.fork() == 0:
        try:
            engine.commit()
        except infinity.EngineStateError:
            sys.exit(0)
        os._exit(1)
    assert os.wait()[1] == 0
    step()
    engine.close()
elif ending == "raise":
    raise ValueError("boom")
elif ending == "kill":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("ending", "code", "step"), [("exit", 0, 2), ("raise", 1, 2), ("kill", -9, 2), ("fork", 0, 4)])
def test_a_process_that_ends_with_a_commit_pending(ending: str, code: int, step: int, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, ending, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    assert ended.returncode == code, ended.stderr
    if ending != "raise":
        assert not ended.stderr
    config = smallest(Chain, momentum, nvme=tmp_path, durability=1, resume="must")
    with FailingRun.start(config) as engine:
        assert step - 1 <= engine.num_steps <= step + 1
        assert engine.last_commit is not None
        assert engine.last_commit.step == engine.num_steps
