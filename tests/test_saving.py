"""A saved checkpoint is there whole or not at all: a crash and an error at every system call, live and dead makers."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes_system import Crash, FaultySystem
from infinity.errors import ConfigError, DirectoryError, DiskFullError, StorageError
from infinity.io.memory import allocate, as_bytes
from infinity.io.paths import exchange
from infinity.store import files as files_module
from infinity.store import held as held_module
from infinity.store import owner as owner_module
from infinity.store import partial as partial_module
from infinity.store import saving as saving_module
from infinity.store.finding import list_commits, read_manifest
from infinity.store.manifest import Manifest, StoredTensors, long_checksum
from infinity.store.partial import PartialDirectory, part_name
from infinity.store.saving import NewCheckpoint, check_place
from infinity.store.shard import ShardKey
from infinity.store.stored import StoredCommit

KEY = ShardKey(0, 0, "param")
MODULES = (files_module, held_module, owner_module, partial_module, saving_module)


@pytest.fixture(autouse=True)
def no_descriptor_is_leaked() -> Iterator[None]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture
def without_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the process ends, what was written is there, and need not be waited for."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor: None)


@pytest.fixture(params=["exchange", "two renames"])
def exchanging(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With and without a system that can exchange two names."""
    if request.param == "two renames":
        monkeypatch.setattr(partial_module, "exchange", lambda *_: False)
        return False
    if not can_exchange(tmp_path):
        pytest.skip("this system cannot exchange two names")
    return True


def can_exchange(path: Path) -> bool:
    for name in ("one", "other"):
        (path / name).mkdir()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return exchange(descriptor, "one", "other")
    finally:
        os.close(descriptor)
        for name in ("one", "other"):
            (path / name).rmdir()


def save(path: Path, number: int, *, later: Path | None = None) -> None:
    """A checkpoint of one shard and some tensors, made of its number."""
    tensors = bytes([number]) * 100
    manifest = Manifest(
        state="0" * 32,
        number=number,
        rank=0,
        world_size=1,
        time="2026-01-02T03:04:05+00:00",
        files=[],
        shards=[],
        tensors=StoredTensors(num_bytes=len(tensors), checksum=long_checksum(tensors)),
        engine={},
    )
    shard = allocate(8192)
    shard.fill_(number)
    with NewCheckpoint(path, 8192, later=later) as checkpoint:
        assert checkpoint.path == (later or path)
        checkpoint.add(KEY, "float32", number, as_bytes(shard))
        checkpoint.complete(manifest, tensors)


def saved(path: Path) -> int | None:
    """The number of the checkpoint that is there, every byte of it as it was saved; ``None`` if nothing is."""
    if not path.exists():
        return None
    assert len(list(path.iterdir())) == 4
    [file] = list_commits([path])
    read_manifest(file)
    with StoredCommit.open(path) as commit:
        assert bytes(as_bytes(commit.read(KEY))) == bytes([file.number]) * 8192
    return file.number


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# --- faults at every step


CALLS = (
    *("open", "mkdir", "rename", "unlink", "rmdir", "stat", "fstat", "scandir", "listdir", "statvfs"),
    *("pwrite", "write", "fsync", "fdatasync"),
)


def failing(step: int, error: BaseException, path: Path, number: int) -> BaseException | None:
    """Save with a fault; what came of it, and ``None`` if there are not so many system calls."""
    with pytest.MonkeyPatch.context() as patch:
        system = FaultySystem(CALLS, step, error)
        for module in MODULES:
            patch.setattr(module, "os", system)
        patch.setattr(partial_module, "exchange", system.wrap(vars(partial_module)["exchange"]))
        patch.setattr(fcntl, "flock", system.wrap(fcntl.flock))
        try:
            save(path, number)
        except (Crash, StorageError) as raised:
            return raised
    assert saved(path) == number
    return None if system.num_calls < step else error


@pytest.mark.usefixtures("without_syncing")
@pytest.mark.parametrize("before", [None, 1])
def test_crash_at_any_step_leaves_the_old_or_the_new_one(tmp_path: Path, before: int | None, exchanging: bool) -> None:
    path, found = tmp_path / "saved", set()
    for step in range(1, 300):
        if before is not None:
            save(path, before)
        outcome = failing(step, Crash(), path, 2)
        found.add(saved(path))
        if not exchanging and before is not None and saved(path) is None:  # between the two renames
            PartialDirectory(path).close()
            assert saved(path) == before
        assert saved(path) in (before, 2), step
        save(path, 3)
        assert saved(path) == 3, step
        assert names(tmp_path) == ["saved"], step
        if outcome is None:
            break
        shutil.rmtree(path)
    assert outcome is None
    assert step > 30
    assert found == ({before, 2} if exchanging or before is None else {before, 2, None})


@pytest.mark.usefixtures("without_syncing")
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_error_at_any_step_is_typed_and_leaves_nothing(tmp_path: Path, exchanging: bool, number: int) -> None:
    path, failed = tmp_path / "saved", 0
    save(path, 1)
    for step in range(1, 300):
        outcome = failing(step, OSError(number, os.strerror(number)), path, 2)
        if isinstance(outcome, StorageError):
            failed += 1
            assert isinstance(outcome, DiskFullError) == (number == errno.ENOSPC)
            assert saved(path) == 1, step
        if outcome is None:
            break
        save(path, 1)  # what an error kept from being removed
        assert names(tmp_path) == ["saved"], step
    assert outcome is None
    assert failed > 15


def test_failed_start_leaves_nothing(tmp_path: Path) -> None:
    def full(directory: int, rank: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_module, "write_owner", full)
        with pytest.raises(DiskFullError, match="the file system is full"):
            save(tmp_path / "saved", 1)
    assert names(tmp_path) == []
    with pytest.raises(DiskFullError, match="a checkpoint takes"):
        NewCheckpoint(tmp_path / "saved", 1 << 60)
    assert names(tmp_path) == []


# --- others' directories


def test_a_live_one_is_left_alone_and_a_dead_one_is_removed(tmp_path: Path) -> None:
    live = PartialDirectory(tmp_path / "saved")
    other = PartialDirectory(tmp_path / "other")
    save(tmp_path / "saved", 1)
    assert names(tmp_path) == sorted(["saved", live.path.name, other.path.name])
    live.put()  # the last one wins
    live.close()
    other.close()
    assert names(tmp_path) == ["saved"]
    assert names(tmp_path / "saved") == ["owner.json"]


def test_what_is_not_all_ours_stays(tmp_path: Path) -> None:
    strangers = {}
    for index, name in enumerate(["notes.txt", "lock", "commit-0000000001.json"]):
        directory = tmp_path / f"saved.{index:016x}.partial"
        directory.mkdir()
        (directory / name).write_text("mine")
        if name != "commit-0000000001.json":  # which has no marker
            (directory / "owner.json").write_text('{"application": "infinity", "schema": 1}')
        strangers[directory] = names(directory)
    (tmp_path / "saved.0123.partial").mkdir()
    (tmp_path / f"saved2.{0:016x}.partial").mkdir()
    (tmp_path / f"saved.{7:016x}.partial").symlink_to(tmp_path / "saved.0123.partial")
    before = names(tmp_path)
    save(tmp_path / "saved", 1)
    assert names(tmp_path) == sorted(["saved", *before])
    assert {directory: names(directory) for directory in strangers} == strangers


@pytest.mark.parametrize("left", ["whole", "half made", "with a stranger"])
def test_parts_of_ranks_go_with_a_dead_one_unless_they_are_not_all_ours(tmp_path: Path, left: str) -> None:
    dead = tmp_path / f"saved.{0:016x}.partial"
    dead.mkdir()
    (dead / "owner.json").write_text('{"application": "infinity", "schema": 1}')
    for rank in range(2):
        part = tmp_path / "made" / part_name(rank, 2)
        part.parent.mkdir(exist_ok=True)
        save(part, rank)
        part.rename(dead / part.name)
    if left == "half made":
        (dead / part_name(1, 2)).rename(dead / f"{part_name(1, 2)}.{3:016x}.partial")
    if left == "with a stranger":
        (dead / part_name(1, 2) / "notes.txt").write_text("mine")
    save(tmp_path / "saved", 1)
    assert names(tmp_path) == sorted(["made", "saved", *([dead.name] if left == "with a stranger" else [])])
    assert left != "with a stranger" or len(names(dead)) == 3


def test_a_checkpoint_of_ranks_is_replaced_if_it_holds_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    for stranger in (None, "notes.txt"):
        partial = PartialDirectory(place)
        for rank in range(2):
            save(partial.path / part_name(rank, 2), 1, later=place / part_name(rank, 2))
        partial.put()
        partial.close()
        assert names(tmp_path) == ["saved"]
        assert names(place) == ["owner.json", part_name(0, 2), part_name(1, 2)]
        if stranger is None:
            save(place, 1)
            assert saved(place) == 1
        else:
            (place / part_name(1, 2) / stranger).write_text("mine")
            with pytest.raises(DirectoryError, match="something else"):
                save(place, 1)
            (place / part_name(1, 2) / stranger).unlink()
            (place / part_name(3, 4)).symlink_to(tmp_path)
            with pytest.raises(DirectoryError, match="something else"):
                save(place, 1)


def test_directory_taken_for_a_dead_one_before_it_was_locked_is_made_again(tmp_path: Path) -> None:
    real_flock = fcntl.flock
    swept: list[list[str]] = []

    def flock(descriptor: int, operation: int) -> None:
        if not swept:
            swept.append(names(tmp_path))
            PartialDirectory(tmp_path / "saved").close()
        real_flock(descriptor, operation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        save(tmp_path / "saved", 1)
    assert len(swept) == 1
    assert saved(tmp_path / "saved") == 1
    assert names(tmp_path) == ["saved"]


def test_without_flock_only_the_maker_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = PartialDirectory(tmp_path / "saved")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    save(tmp_path / "saved", 1)
    save(tmp_path / "saved", 2)
    assert saved(tmp_path / "saved") == 2
    assert names(tmp_path) == sorted(["saved", left.path.name])
    left.close()


# --- short writes


def test_short_write_is_continued_until_the_system_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = os.pwrite, [1000, 3096, 1]

    def short(descriptor: int, memory: memoryview, offset: int) -> int:
        written = real(descriptor, memory, offset)
        return sizes.pop() if sizes else written

    def write_little(descriptor: int, memory: memoryview, offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return 512

    monkeypatch.setattr(os, "pwrite", short)
    save(tmp_path / "saved", 1)
    assert not sizes
    assert saved(tmp_path / "saved") == 1
    monkeypatch.setattr(os, "pwrite", write_little)
    with pytest.raises(DiskFullError, match="the file system is full"):
        save(tmp_path / "saved", 2)
    monkeypatch.setattr(os, "pwrite", real)
    assert saved(tmp_path / "saved") == 1


# --- where it may be


@pytest.mark.parametrize("path", [None, b"saved", "", "sav\0ed", 7, "~no such user/saved"])
def test_what_is_no_path(path: object) -> None:
    with pytest.raises(ConfigError, match="save_checkpoint: expected a path"):
        check_place(path)


def test_places_that_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "saved", 1)
    (tmp_path / "inside").symlink_to("saved")
    for path, message in {
        Path("/"): "give its name",
        tmp_path / "saved" / "..": "give its name",
        tmp_path: "something else",
        tmp_path / "infinity-state-rank0": "the name of a run's own directory",
        tmp_path / "infinity-rank12": "the name of a run's own directory",
        tmp_path / "saved" / "more": f"{tmp_path}/saved is a state directory or a checkpoint",
        tmp_path / "inside" / "more": f"{tmp_path}/saved is a state directory or a checkpoint",
        tmp_path / "missing" / "more": "mkdir -p",
    }.items():
        with pytest.raises(DirectoryError, match=message):
            check_place(path)
    assert names(tmp_path) == ["inside", "saved"]


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_place("~/saved") == tmp_path / "saved"
