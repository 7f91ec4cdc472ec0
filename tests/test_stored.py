"""Commits are read without an engine: all values, no more memory than a part's, and faults by name."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch

from infinity.engine.persistence.stored_state import StoredState
from infinity.errors import (
    DirectoryError,
    DirectoryInUseError,
    ManifestError,
    MismatchError,
    NoCommitError,
    ShortTransferError,
    StorageError,
)
from infinity.store.finding import find_directories
from infinity.store.manifest import manifest_name, tensors_name
from infinity.store.shard import ShardKey
from infinity.store.stored import StoredCommit
from states_on_disk import PAGE, TIED, Expected, StateWriter, flat_bits

EMBEDDING = ShardKey(0, 0, "param")


@pytest.fixture
def writer(tmp_path: Path) -> StateWriter:
    made = StateWriter([tmp_path / "a" / "infinity-state-rank0", tmp_path / "b" / "infinity-state-rank0"])
    made.write(1)
    made.write(2, changed=[0, 2])
    return made


def read_all(state: StoredState) -> Expected:
    lazy = state.optimizer_state_dict["state"]
    names = [name for names in state.param_names for name in names]
    return Expected(
        dict(state.weights), dict(state.compute_weights), {names[i]: dict(each) for i, each in lazy.items()}
    )


def assert_same(got: Expected, expected: Expected) -> None:
    for what in ("weights", "computing"):
        ours, theirs = getattr(got, what), getattr(expected, what)
        assert set(ours) == set(theirs)
        for name, value in ours.items():
            assert (value.dtype, value.shape) == (theirs[name].dtype, theirs[name].shape)
            assert flat_bits(value) == flat_bits(theirs[name]), f"{what} {name}"
    assert set(got.states) == set(expected.states)
    for name, state in got.states.items():
        assert set(state) == set(expected.states[name])
        for key, value in state.items():
            other = expected.states[name][key]
            assert flat_bits(value) == flat_bits(other) if isinstance(value, torch.Tensor) else value == other


@pytest.mark.parametrize("number", [1, 2, None])
def test_everything_is_read_as_it_was_written(writer: StateWriter, number: int | None) -> None:
    with StoredCommit.open(writer.directories, number) as commit:
        state = StoredState(commit)
        assert_same(read_all(state), writer.expected[number or 2])
        assert state.step == (number or 2)
        assert flat_bits(state.weights["head.weight"]) == flat_bits(state.weights["embedding.weight"])
        assert set(state.buffers) == {"norm.count", "norm.scratch"}
        assert state.tracked["scheduler"]["last_epoch"] == (number or 2)
        assert state.random["python"] == (3, (1, 2))


@pytest.mark.parametrize("block_bytes", [PAGE, 4 * PAGE, 1 << 20])
def test_blocks_are_the_shard(writer: StateWriter, block_bytes: int) -> None:
    with StoredCommit.open(writer.directories) as commit:
        for key in commit.shards:
            whole = commit.read(key).numpy().tobytes()
            for start, stop in ((0, len(whole)), (12, len(whole) - 4), (PAGE - 4, PAGE), (len(whole) // 2, None)):
                blocks = commit.blocks(key, start, stop, block_bytes=block_bytes)
                assert b"".join(map(bytes, blocks)) == whole[start:stop]


def test_each_shard_is_read_once_by_who_goes_in_order(writer: StateWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoredCommit.open(writer.directories) as commit:
        state = StoredState(commit, memory_bytes=0)
        read, kept = [], []

        def count(key: ShardKey) -> torch.Tensor:
            read.append(key)
            kept.append(sum(shard.numel() for _, shard in state._shards._kept.values()))
            return StoredCommit.read(commit, key)

        monkeypatch.setattr(commit, "read", count)
        for name in [name for name in state.weights if name not in TIED]:
            state.weights[name]
        assert len(read) == len(set(read)) > len(writer.sketches)
        sizes = [
            sum(shard.num_bytes for key, shard in commit.shards.items() if key[:2] == part)
            for part in {key[:2] for key in commit.shards}
        ]
        assert 0 < max(kept) < max(sizes)


def test_a_directory_is_found_by_itself_or_by_what_holds_it(writer: StateWriter) -> None:
    above = [directory.parent for directory in writer.directories]
    assert find_directories(above) == find_directories(writer.directories) == writer.directories


def test_where_no_state_is(writer: StateWriter, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoCommitError, match="neither a state directory"):
        StoredCommit.open(tmp_path / "empty")
    with pytest.raises(DirectoryError, match="not a directory that exists"):
        StoredCommit.open(tmp_path / "missing")
    with pytest.raises(NoCommitError, match="no commit 7; there are: 2, 1"):
        StoredCommit.open(writer.directories, 7)
    with pytest.raises(NoCommitError, match="nothing has been committed"):
        StoredCommit.open(writer.directories[1])
    (writer.directories[0].parent / "infinity-state-rank1").mkdir()
    assert len(find_directories(writer.directories[0].parent)) == 2


def test_two_states_are_not_mixed(writer: StateWriter, tmp_path: Path) -> None:
    other = StateWriter([tmp_path / "other"])
    other.write(1)
    with pytest.raises(DirectoryError, match="both hold commits"):
        StoredCommit.open([*writer.directories, *other.directories])


def test_nobody_reads_what_a_job_may_prune_and_no_job_starts_while_it_is_read(writer: StateWriter) -> None:
    lock = writer.directories[1] / "lock"
    lock.touch()
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DirectoryInUseError, match="belongs to process"):
            StoredCommit.open(writer.directories)
        with StoredCommit.open(writer.directories, lock=False) as commit:
            assert commit.manifest.number == 2
    with lock.open() as starter:
        first, second = StoredCommit.open(writer.directories), StoredCommit.open(writer.directories)
        with first, second, pytest.raises(BlockingIOError):
            fcntl.flock(starter, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(starter, fcntl.LOCK_EX | fcntl.LOCK_NB)


def flip(path: Path, offset: int, bit: int = 1) -> None:
    with path.open("r+b") as file:
        [value] = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([value ^ bit]), offset)


def test_one_wrong_bit_is_found_and_named(writer: StateWriter) -> None:
    with StoredCommit.open(writer.directories) as commit:
        shard = commit.shard(EMBEDDING)
        extent = shard.extents[-1]
        path = commit.file(shard, extent)
        flip(path, extent.offset + extent.num_bytes - 1)
        for read in (lambda: commit.read(EMBEDDING), lambda: list(commit.blocks(EMBEDDING))):
            with pytest.raises(MismatchError, match=f"unit 0 part 0 param is damaged: expected.*{path}") as error:
                read()
            assert (error.value.path, error.value.offset) == (path, extent.offset)
        with pytest.raises(MismatchError):
            StoredState(commit).compute_weights["embedding.weight"]


def test_a_file_that_ends_early(writer: StateWriter) -> None:
    with StoredCommit.open(writer.directories) as commit:
        shard = commit.shard(EMBEDDING)
        extent = shard.extents[0]
        for size in (extent.offset + extent.num_bytes - 1, extent.offset, 0):
            os.truncate(commit.file(shard, extent), size)
            for read in (lambda: commit.read(EMBEDDING), lambda: list(commit.blocks(EMBEDDING))):
                with pytest.raises(ShortTransferError, match="unit 0 part 0 param is not whole") as error:
                    read()
                assert error.value.offset == extent.offset


def test_a_file_that_is_missing(writer: StateWriter) -> None:
    with StoredCommit.open(writer.directories[:1]) as commit:
        state = StoredState(commit)
        with pytest.raises(StorageError, match=f"searched: {writer.directories[0]}.*was in {writer.directories[1]}"):
            dict(state.weights)


@pytest.mark.parametrize("name", [manifest_name(2), tensors_name(2)])
def test_a_damaged_commit_is_none(writer: StateWriter, name: str) -> None:
    flip(writer.directories[0] / name, 60)
    with StoredCommit.open(writer.directories) as commit:
        assert commit.manifest.number == 1
        assert [error.path.name for error in commit.passed_over] == [name]
        assert_same(read_all(StoredState(commit)), writer.expected[1])
    with pytest.raises(ManifestError, match="damaged"):
        StoredCommit.open(writer.directories, 2)
    (writer.directories[0] / tensors_name(1)).unlink()
    with pytest.raises(NoCommitError, match=r"no commit can be used; of the newest: .*damaged"):
        StoredCommit.open(writer.directories)


def test_what_is_no_regular_file_is_not_waited_for(writer: StateWriter) -> None:
    for name in (manifest_name(2), tensors_name(1)):
        (writer.directories[0] / name).unlink()
        os.mkfifo(writer.directories[0] / name)
    with pytest.raises(NoCommitError, match="expected a regular file"):
        StoredCommit.open(writer.directories)


def test_a_commit_that_was_not_finished_is_none(writer: StateWriter) -> None:
    whole = writer.directories[0] / manifest_name(2)
    whole.rename(whole.with_name(f"{whole.name}.partial"))
    with StoredCommit.open(writer.directories) as commit:
        assert commit.manifest.number == 1
        assert commit.passed_over == []
