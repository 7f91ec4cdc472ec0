"""A crash at any moment leaves a commit that was made, whole; `bench/crash_states.py` tries many more states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from crash_states import Trial, record, workplace
from lib_crash_runs import RUNS, Run
from lib_crash_states import Chosen, Crashes, Disk, Tally

from infinity.store.files import DirectoryFiles
from infinity.store.versions import Version
from infinity.store.volumes import Volumes

BY_NAME = {run.name: run for run in RUNS}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def root() -> Iterator[Path]:
    with workplace(None) as path:
        yield path


def tried(run: Run, root: Path, num_states: int, *, resume_every: int = 0, crash_every: int = 0) -> Tally:
    log, states = record(run, root)
    tally = Tally()
    trial = Trial(run, log, states, root, tally)
    trial.draw(num_states, seed=7, resume_every=resume_every, crash_every=crash_every)
    return tally


def test_every_state_of_a_short_run_is_a_commit(root: Path) -> None:
    run = BY_NAME["every step"]
    log, states = record(run, root)
    tally = Tally()
    Trial(run, log, states, root, tally).exhaust(2, stride=3)
    assert tally.lost == []
    assert tally.num_states > log.num_events / 3
    assert 0 < tally.num_commits < tally.num_states, "some crashes come before the first commit"


@pytest.mark.parametrize("name", [run.name for run in RUNS])
def test_states_at_random_are_commits_and_resume_bit_for_bit(name: str, root: Path) -> None:
    tally = tried(BY_NAME[name], root, 40, resume_every=10, crash_every=4)
    assert tally.lost == []
    assert tally.num_states > 40, "what was resumed has crashed again"
    assert tally.num_resumed >= 4


@contextlib.contextmanager
def broken(what: str) -> Iterator[None]:
    """A store that leaves out what its commits need."""

    async def no_sync(self: Volumes) -> None:
        pass

    def no_directory_sync(self: DirectoryFiles) -> None:
        pass

    patches: dict[str, tuple[type, str, object]] = {
        "data is not made durable": (Volumes, "sync", no_sync),
        "directories are not made durable": (DirectoryFiles, "_sync", no_directory_sync),
        "held bytes are written over": (Version, "is_held", property(lambda self: False)),
    }
    with mock.patch.object(*patches[what]):
        yield


@pytest.mark.parametrize(
    "what", ["data is not made durable", "directories are not made durable", "held bytes are written over"]
)
def test_a_store_that_leaves_out_what_commits_need_is_found_out(what: str, root: Path) -> None:
    run = Run("found out", ("step",) * 3, 1, {"durability": 1})
    log, states = record(run, root)
    with broken(what):
        (root / "again").mkdir()
        log, _ = record(run, root / "again")
    tally = Tally()
    Trial(run, log, states, root, tally).draw(150, seed=3)
    assert tally.lost != []


def test_the_disk_at_the_end_is_what_the_run_has_left(root: Path) -> None:
    run = BY_NAME["every step"]
    log, _ = record(run, root)
    crashes = Crashes(log)
    pending = crashes.pending(log.num_events)
    assert all(op.kind == "unlink" and op.name.endswith(".safetensors") for op in pending)
    disk: Disk = crashes.disk(log.num_events, Chosen({id(op): 1 for op in pending}))
    (made,) = disk.materialise(_made(root / "made"))
    expected = root / "recorded" / "nvme0"
    files = {path.relative_to(made): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    assert files == {path.relative_to(expected): path.read_bytes() for path in expected.rglob("*") if path.is_file()}


def _made(path: Path) -> Path:
    path.mkdir()
    return path
