"""Whatever fails while a run with commits goes on: the true cause is raised, the last commit is whole, and it goes on.

Each test lets one operation after the other fail, in one run: the n-th write from now on, then the (n+1)-th. After each
failure the disk is copied as a crash would leave it, and another engine resumes from the copy; then the cause is gone,
and the run goes on, by itself or after ``rollback()``, to the numbers of one that nothing has disturbed.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import infinity
from fakes_durable import FOR_EVER, SMALL, WRITES, FailingRun, FaultyDisk, check_state, disk, running  # noqa: F401
from infinity import DiskFullError, StorageError

EVERY = int(os.environ.get("INFINITY_FAULTS_EVERY", "3"))
"""Which operations fail in turn: all with 1, which takes some minutes."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def fail_each(
    run: FailingRun,
    where: Path,
    *actions: str,
    code: int,
    times: float,
    error: type[BaseException],
    moved_bytes: int | None = None,
) -> Counter[str]:
    """Let one operation after the other fail, until there is none left to fail in two steps; how it went on."""
    ways: Counter[str] = Counter()
    at = 0
    while True:
        num_before = run.engine.commit().step
        run.disk.arm(*actions, at=at, code=code, times=times, moved_bytes=moved_bytes)
        failure: BaseException | None = None
        try:
            for _ in range(2):
                run.step()
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
        at += EVERY


@pytest.mark.parametrize("durability", [1, "checkpoint"])
def test_a_full_disk_at_any_write(durability: int | str, tmp_path: Path, disk: FaultyDisk) -> None:  # noqa: F811
    with running(tmp_path, disk, durability=durability) as run:
        ways = fail_each(run, tmp_path, *WRITES, code=errno.ENOSPC, times=FOR_EVER, error=DiskFullError)
    print(ways)
    assert ways["tried again"]
    assert ways["rolled back"]


@pytest.mark.parametrize("durability", [1, "checkpoint"])
@pytest.mark.parametrize("times", [1, FOR_EVER])
@pytest.mark.parametrize("actions", [("read",), ("write",), ("fdatasync", "fsync"), SMALL])
def test_an_error_at_any_operation(
    actions: tuple[str, ...], times: float, durability: int | str, tmp_path: Path, disk: FaultyDisk  # noqa: F811
) -> None:
    with running(tmp_path, disk, durability=durability) as run:
        ways = fail_each(run, tmp_path, *actions, code=errno.EIO, times=times, error=StorageError)
    print(ways)
    assert ways.total()
