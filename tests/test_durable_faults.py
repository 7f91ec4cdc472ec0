"""Whatever fails while a run with commits goes on: the true cause is raised, the last commit is whole, and it goes on.

Each test lets one operation after the other fail, in one run: the n-th write from now on, then the (n+1)-th. After each
failure the disk is copied as a crash would leave it, and another engine resumes from the copy; then the cause is gone,
and the run goes on, by itself or after ``rollback()``, to the numbers of one that nothing has disturbed.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections import Counter
from pathlib import Path

import pytest

import infinity
from fakes_durable import (
    FOR_EVER,
    SMALL,
    WRITES,
    FailingRun,
    FaultyDisk,
    FaultySyscalls,
    batch,
    check_state,
    disk,  # noqa: F401
    running,
)
from infinity import DiskFullError, StorageError
from infinity.errors import MismatchError, NoCommitError, NonFiniteError, NonFiniteWarning, ShortTransferError

EVERY = int(os.environ.get("INFINITY_FAULTS_EVERY", "5"))
"""Which operations fail in turn: all with 1, which takes some minutes."""


pytestmark = pytest.mark.usefixtures("one_thread")


def fail_each(
    run: FailingRun,
    where: Path,
    *actions: str,
    times: float,
    error: type[BaseException],
    code: int = errno.EIO,
    moved_bytes: int | None = None,
    every: int = EVERY,
) -> Counter[str]:
    """Let one operation after the other fail, until there is none left to fail in two steps; how it went on."""
    ways: Counter[str] = Counter()
    at = 0
    while True:
        num_before = run.engine.commit().step
        run.disk.arm(*actions, at=at, code=code, times=times, moved_bytes=moved_bytes)
        failure: BaseException | None = None
        try:
            run.steps(2)
            run.engine.commit()
        except infinity.InfinityError as raised:
            failure = raised
        num_failed = run.disk.num_failed
        assert (failure is not None) <= (num_failed > 0)
        step = run.check_last_commit(where)
        assert num_before <= step <= num_before + 2
        if failure is not None:
            assert isinstance(failure, error), repr(failure)
            ways[run.recover()] += 1
        elif num_failed:
            ways["none"] += 1
        while run.engine.num_steps < num_before + 2:
            run.step()
        if not num_failed:
            check_state(run.engine)
            return ways
        at += every


@pytest.mark.parametrize("durability", [1, "checkpoint"])
def test_a_full_disk_at_any_write(durability: int | str, tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    with running(tmp_path, disk, durability=durability) as run:
        ways = fail_each(run, tmp_path, *WRITES, code=errno.ENOSPC, times=FOR_EVER, error=DiskFullError)
    assert ways["tried again"] + ways["rolled back"] > 1


@pytest.mark.parametrize("durability", [1, "checkpoint"])
@pytest.mark.parametrize("times", [1, FOR_EVER])
@pytest.mark.parametrize("actions", [("read",), ("write",), ("fdatasync", "fsync"), SMALL])
def test_an_error_at_any_operation(
    actions: tuple[str, ...],
    times: float,
    durability: int | str,
    tmp_path: Path,
    disk: FaultyDisk,  # noqa: F811
) -> None:
    with running(tmp_path, disk, durability=durability) as run:
        ways = fail_each(run, tmp_path, *actions, code=errno.EIO, times=times, error=StorageError)
    assert ways.total()


@pytest.mark.parametrize("action", ["read", "write"])
def test_a_transfer_that_moves_a_part_is_continued(action: str, tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    with running(tmp_path, disk) as run:
        disk.arm(action, at=0, times=FOR_EVER, moved_bytes=4096)
        for _ in range(2):
            run.step()
        run.engine.commit()
        assert disk.num_failed
        assert run.check_last_commit(tmp_path) == 3
        check_state(run.engine)


@pytest.mark.parametrize("action", ["read", "write"])
def test_a_transfer_that_moves_nothing(action: str, tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    with running(tmp_path, disk) as run:
        ways = fail_each(run, tmp_path, action, times=FOR_EVER, error=ShortTransferError, moved_bytes=0, every=4)
    assert ways["rolled back"]


def test_what_is_read_back_is_checked(tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Bits that are lost are found, whichever read brings them first, and named; and the run goes on without them."""
    reads = itertools.count()
    at = 0
    with running(tmp_path, disk, verify="always") as run:
        for at in range(0, 12, EVERY):
            before = run.engine.commit().step
            reads = itertools.count()
            monkeypatch.setattr(FaultySyscalls, "flip", staticmethod(lambda reads=reads, at=at: next(reads) >= at))
            found = None
            try:
                run.steps(2)
                run.engine.commit()
            except MismatchError as error:
                found = error
            if found is None:
                assert next(reads) <= at, "a lost bit was not seen"
            else:
                assert re.search(r"unit \d+ part \d+ \S+: .* expected to have checksum \w+, and have \w+", str(found))
                assert found.path.name.startswith("shards-")
                assert found.offset is not None
            monkeypatch.undo()
            run.roll_back()
            while run.engine.num_steps < before + 2:
                run.step()
        check_state(run.engine)


def test_rollback_by_steps(tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    with running(tmp_path, disk, retained_commits=3) as run:
        for _ in range(4):
            run.step()
        assert run.engine.num_steps == 5
        with pytest.raises(NoCommitError, match=r"of step 1; there are: rollback\(steps=2\), .*rollback\(steps=0\)"):
            run.engine.rollback(steps=4)
        assert run.engine.rollback(steps=2).step == 3
        check_state(run.engine)
        with pytest.raises(NoCommitError):
            run.engine.rollback(steps=1)
        for _ in range(3):
            run.step()
        assert run.engine.rollback(steps=0).step == 6
        assert run.check_last_commit(tmp_path) == 6
        run.step()
        check_state(run.engine)


def test_rollback_before_the_first_commit(tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    with FailingRun(tmp_path, disk, durability="checkpoint").engine as engine:
        with pytest.raises(NoCommitError, match="no commit has been made yet"):
            engine.rollback()
        with pytest.raises(NoCommitError, match="none yet"):
            engine.rollback(steps=0)


def poison(run: FailingRun) -> None:
    """A step whose gradient has a NaN."""
    loss = run.engine(batch(run.engine.num_steps))
    handle = run.engine.module.get_parameter("layers.1.weight").register_hook(lambda gradient: gradient * float("nan"))
    run.engine.backward(loss)
    handle.remove()
    run.engine.step()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_is_not_finite_is_undone(overlap: bool, tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    with running(tmp_path, disk, on_nonfinite="rollback", overlap=overlap) as run:
        run.step()
        with pytest.warns(
            NonFiniteWarning, match=r"layers\.1\.weight .* in step 3: went back to commit \d+, of step 2"
        ):
            poison(run)
        assert run.engine.num_steps == 2
        for _ in range(3):
            run.step()
        check_state(run.engine)


def test_a_step_that_is_not_finite_is_refused(tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    with running(tmp_path, disk, on_nonfinite="error") as run:
        run.step()
        with pytest.raises(NonFiniteError, match=r"layers\.1\.weight .* in step 3; nothing has been stepped"):
            poison(run)
        check_state(run.engine)
        run.engine.rollback()
        for _ in range(2):
            run.step()
        check_state(run.engine)
