"""Commits: each is whole or is not there, whatever fails, is cancelled, is missing or has moved."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes_state import KEYS, PAGE, FaultyFiles, Rig, content_of, failing, make_paths, names_below, opened
from infinity.errors import DiskFullError, ManifestError, NoCommitError, StorageError, UncertainCommitError
from infinity.store import striping
from infinity.store.commits import Commit
from infinity.store.manifest import DATA_NAME, MARK_NAME, manifest_name, tensors_name
from infinity.store.shard import ShardKey
from infinity.store.state import open_state


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striping, "STRIPE_BYTES", PAGE)


@pytest.fixture(params=[1, 3])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    return make_paths(tmp_path, request.param)


async def train(rig: Rig, step: int, keys: list[ShardKey] = KEYS) -> None:
    for key in keys:
        await rig.write(key, content_of(key, step))


async def assert_is(rig: Rig, step: int, changed: list[ShardKey] = KEYS) -> None:
    """The last commit is that of a step, whole; shards that had not changed are of step 1."""
    assert rig.commits.last is not None
    assert rig.commits.last.manifest.engine == {"step": step}
    expected = {key: content_of(key, step if key in changed else 1) for key in KEYS}
    assert await rig.contents(rig.commits.last) == expected
    rig.check_room()


def disk_step(paths: list[Path]) -> int | None:
    """Of the newest commit on the disk, in a copy, as a run after a crash would find it."""
    copies = []
    for path in paths:
        copy = path.with_name(f"{path.name}-copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        copies.append(copy)
    state = open_state(copies)
    try:
        return state.manifests[-1].engine["step"] if state.manifests else None
    finally:
        state.close()
        for copy in copies:
            shutil.rmtree(copy)


# --- what is kept


@pytest.mark.parametrize("num_retained", [1, 2, 3])
async def test_so_many_commits_are_kept_and_found_again(paths: list[Path], num_retained: int) -> None:
    async with opened(paths, num_retained=num_retained) as rig:
        for step in range(1, 6):
            await train(rig, step)
            commit = await rig.commit(step)
            assert commit.manifest.number == step
            assert rig.commits.last is commit
            await assert_is(rig, step)
        kept = list(range(6 - num_retained, 6))
        assert [commit.manifest.number for commit in rig.commits.all] == kept
        for commit in rig.commits.all:
            step = commit.manifest.engine["step"]
            assert await rig.contents(commit) == {key: content_of(key, step) for key in KEYS}
        assert rig.nvme.usage().used_bytes == num_retained * len(KEYS) * 2 * PAGE
    expected = sorted(name for number in kept for name in (manifest_name(number), tensors_name(number)))
    assert [name for name in names_below(paths[0]) if not DATA_NAME.fullmatch(name)] == expected
    assert all(len(names_below(path)) == 1 for path in paths[1:])
    async with opened(paths, num_retained=num_retained) as rig:
        assert [commit.manifest.number for commit in rig.commits.all] == kept
        await assert_is(rig, 5)
        await train(rig, 6)
        assert (await rig.commit(6)).manifest.number == 6
        await assert_is(rig, 6)


async def test_what_does_not_change_is_there_once(paths: list[Path]) -> None:
    async with opened(paths, num_retained=3) as rig:
        await train(rig, 1)
        await rig.commit(1)
        for step in (2, 3):
            await train(rig, step, KEYS[:1])
            await rig.commit(step)
        assert rig.nvme.usage().used_bytes == (len(KEYS) + 2) * 2 * PAGE
        generations = {shard.key: shard.generation for shard in rig.commits.all[-1].manifest.shards}
        assert generations == dict.fromkeys(KEYS, 1) | {KEYS[0]: 3}
    async with opened(paths, num_retained=1) as rig:
        assert rig.nvme.usage().used_bytes == (len(KEYS) + 2) * 2 * PAGE
        await assert_is(rig, 3, KEYS[:1])
        await train(rig, 4, KEYS[:1])
        await rig.commit(4)
        assert rig.nvme.usage().used_bytes == len(KEYS) * 2 * PAGE
        await assert_is(rig, 4, KEYS[:1])


async def test_going_back_removes_what_came_after(paths: list[Path]) -> None:
    async with opened(paths, num_retained=3) as rig:
        for step in (1, 2, 3):
            await train(rig, step)
            await rig.commit(step)
        await rig.commits.drop_after(rig.commits.find(1))
        rig.nvme.versions.restore(rig.commits.find(1).held)
        assert disk_step(paths) == 1
        assert [await rig.read(key) for key in KEYS] == [content_of(key, 1) for key in KEYS]
        await train(rig, 7)
        assert (await rig.commit(7)).manifest.number == 4, "numbers are not used again"
        with pytest.raises(NoCommitError, match="no commit 3; commits there are: 1, 4"):
            rig.commits.find(3)
    async with opened(paths, num_retained=3) as rig:
        assert [commit.manifest.number for commit in rig.commits.all] == [1, 4]
        await assert_is(rig, 7)


async def test_directories_without_a_commit_go_and_with_one_stay(paths: list[Path]) -> None:
    async with opened(paths) as rig:
        await train(rig, 1)
    assert all(list(path.iterdir()) == [] for path in paths)
    async with opened(paths) as rig:
        await train(rig, 1)
        await rig.commit(1)
    assert all(names_below(path) for path in paths)


# --- faults

OPERATIONS = [
    "fsync",
    "sync 0",  # data files' names
    f"create {tensors_name(2)}.partial",
    f"rename {tensors_name(2)}",
    "sync 1",
    f"create {manifest_name(2)}.partial",
    f"rename {manifest_name(2)}",
    "sync 2",
]


def once(what: str, number: int) -> Callable[[str, str], BaseException | None]:
    """A fault of one operation, the first or a later one of its kind."""
    operation, _, rest = what.partition(" ")
    left = [int(rest) if operation == "sync" else 0]

    def faults(called: str, name: str) -> BaseException | None:
        if called != operation or (operation not in ("sync", "fsync") and name != rest):
            return None
        left[0] -= 1
        error = failing(number)
        if left[0] != -1:
            return None
        return error if called != "fsync" else StorageError("fsync failed", path=name, errno=number)

    return faults


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("what", OPERATIONS)
async def test_a_commit_that_fails_leaves_the_one_before_and_may_be_tried_again(
    what: str, number: int, paths: list[Path]
) -> None:
    if what.startswith("sync"):
        what = f"sync {int(what[-1]) - 1 + len(paths)}" if what != "sync 0" else what
    async with opened(paths, capacity_bytes=2 * len(KEYS) * 2 * PAGE) as rig:
        await train(rig, 1)
        await rig.commit(1)
        rig.state._is_durable = False  # as at the first commit of a run that has resumed
        await train(rig, 2)
        rig.set_faults(once(what, number))
        with pytest.raises(DiskFullError if number == errno.ENOSPC and what != "fsync" else StorageError) as caught:
            await rig.commit(2)
        assert not isinstance(caught.value, UncertainCommitError)
        await assert_is(rig, 1)
        assert disk_step(paths) == 1
        assert manifest_name(2) not in names_below(paths[0])
        assert rig.nvme.usage().used_bytes == 2 * len(KEYS) * 2 * PAGE
        assert (await rig.commit(2)).manifest.number == 3
        await assert_is(rig, 2)
        await train(rig, 3)
        await rig.commit(3)
    async with opened(paths) as rig:
        await assert_is(rig, 3)


@pytest.mark.parametrize("what", [*OPERATIONS[2:4], *OPERATIONS[5:]])
async def test_a_commit_in_doubt_keeps_its_bytes_until_its_record_is_gone(what: str, paths: list[Path]) -> None:
    """Nothing works any more after the fault, so that its record cannot be removed."""
    async with opened(paths, capacity_bytes=3 * len(KEYS) * 2 * PAGE) as rig:
        await train(rig, 1)
        await rig.commit(1)
        await train(rig, 2)
        first = once("sync 1" if what == "sync 2" else what, errno.EIO)
        is_broken = [False]

        def faults(operation: str, name: str) -> BaseException | None:
            is_broken[0] = is_broken[0] or first(operation, name) is not None
            return failing() if is_broken[0] and operation in ("create", "rename", "unlink", "sync") else None

        rig.set_faults(faults)
        with pytest.raises(UncertainCommitError, match=r"commit 2 failed .* its bytes are kept"):
            await rig.commit(2)
        await assert_is(rig, 1)
        may_be_there = disk_step(paths)
        assert may_be_there == (2 if what == "sync 2" else 1)
        await train(rig, 3)
        with pytest.raises(StorageError):
            await rig.commit(3)
        assert disk_step(paths) == may_be_there, "what was written since has not touched it"
        rig.check_room()
        rig.set_faults(lambda operation, name: None)
        await rig.commit(3)
        await assert_is(rig, 3)
        assert rig.nvme.usage().used_bytes == len(KEYS) * 2 * PAGE, "all else has been let go"
    async with opened(paths) as rig:
        await assert_is(rig, 3)
        assert names_below(paths[0])[:2] == [manifest_name(4), tensors_name(4)], "what was left has gone"


@pytest.mark.parametrize("operation", ["unlink", "sync"])
async def test_an_older_commit_that_cannot_be_removed_keeps_its_bytes(operation: str, paths: list[Path]) -> None:
    async with opened(paths, capacity_bytes=3 * len(KEYS) * 2 * PAGE) as rig:
        await train(rig, 1)
        await rig.commit(1)
        await train(rig, 2)
        is_made = [False]

        def faults(called: str, name: str) -> BaseException | None:
            is_made[0] = is_made[0] or (called, name) == ("unlink", manifest_name(1))
            return failing() if is_made[0] and called == operation else None

        rig.set_faults(faults)
        commit = await rig.commit(2)
        assert rig.commits.all == (commit,), "this one is made all the same"
        await assert_is(rig, 2)
        assert rig.nvme.usage().used_bytes == 2 * len(KEYS) * 2 * PAGE
        with pytest.raises(StorageError):
            await rig.commits.tidy()
        with pytest.raises(StorageError):
            await rig.commit(3)
        await assert_is(rig, 2)
        rig.set_faults(lambda operation, name: None)
        await rig.commits.tidy()
        assert rig.nvme.usage().used_bytes == len(KEYS) * 2 * PAGE
    async with opened(paths) as rig:
        await assert_is(rig, 2)


async def test_the_first_commit_that_fails_leaves_a_state_as_good_as_new(paths: list[Path]) -> None:
    for what in OPERATIONS:
        name = what.replace("0000000002", "0000000001")
        async with opened(paths) as rig:
            await train(rig, 1)
            rig.set_faults(once(name, errno.EIO))
            with pytest.raises(StorageError):
                await rig.commit(1)
            assert rig.commits.last is None
            assert disk_step(paths) is None
    async with opened(paths) as rig:
        assert rig.commits.last is None
        assert all(len(names_below(path)) == 1 for path in paths)
    assert all(list(path.iterdir()) == [] for path in paths)


# --- cancellation


@pytest.mark.parametrize("fails", [None, "rename", "sync"])
@pytest.mark.parametrize("after", range(12))
async def test_a_commit_cancelled_anywhere_is_made_or_is_not(after: int, fails: str | None, tmp_path: Path) -> None:
    """Cancelled while a certain call of the file system runs, which then ends well or not."""
    paths = make_paths(tmp_path, 2)
    async with opened(paths) as rig:
        await train(rig, 1)
        await rig.commit(1)
        await train(rig, 2)
        loop = asyncio.get_running_loop()
        making = asyncio.ensure_future(rig.commit(2))
        calls = [0]

        def faults(operation: str, name: str) -> BaseException | None:
            calls[0] += 1
            if calls[0] == after + 1:
                if operation == "fsync":  # on the loop itself
                    making.cancel()
                else:
                    asyncio.run_coroutine_threadsafe(_cancel(making), loop).result()
            return failing() if operation == fails and calls[0] > after and operation != "fsync" else None

        rig.set_faults(faults)
        (outcome,) = await asyncio.gather(making, return_exceptions=True)
        rig.set_faults(lambda operation, name: None)
        assert isinstance(outcome, asyncio.CancelledError) or calls[0] <= after or fails is not None
        rig.check_room()
        last = rig.commits.last
        assert last is not None
        step = last.manifest.engine["step"]
        await assert_is(rig, step)
        on_disk = disk_step(paths)
        assert on_disk == step or (on_disk == 2 and fails is not None), "it may be there where it is in doubt"
        await train(rig, 3)
        if on_disk == 2:
            assert disk_step(paths) == 2
        await rig.commit(3)
        await assert_is(rig, 3)
        assert rig.nvme.usage().used_bytes == len(KEYS) * 2 * PAGE
    async with opened(paths) as rig:
        await assert_is(rig, 3)


async def _cancel(task: asyncio.Future[Commit]) -> None:
    task.cancel()


async def test_closing_waits_for_a_commit_that_is_being_made(tmp_path: Path) -> None:
    paths = make_paths(tmp_path, 1)
    loop = asyncio.get_running_loop()
    async with opened(paths) as rig:
        await train(rig, 1)
        begun = asyncio.Event()
        closing: list[asyncio.Future[None]] = []

        def faults(operation: str, name: str) -> BaseException | None:
            if operation == "create" and name.startswith(manifest_name(1)):
                loop.call_soon_threadsafe(begun.set)
                while not closing:
                    os.sched_yield()
            return None

        rig.set_faults(faults)
        making = asyncio.ensure_future(rig.commit(1))
        await begun.wait()
        ending = asyncio.ensure_future(rig.nvme.aclose())
        await asyncio.sleep(0)
        closing.append(ending)
        await asyncio.gather(making, ending)
    async with opened(paths) as rig:
        await assert_is(rig, 1)


# --- what is found


def data_files(path: Path) -> Iterator[Path]:
    return (each for each in (path / "infinity-state-rank0").iterdir() if DATA_NAME.fullmatch(each.name))


@pytest.fixture
async def committed(tmp_path: Path) -> list[Path]:
    """Three directories with two commits."""
    paths = make_paths(tmp_path, 3)
    async with opened(paths, num_retained=2) as rig:
        for step in (1, 2):
            await train(rig, step)
            await rig.commit(step)
    return paths


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 1, 0), (1, 0, 2)])
async def test_directories_may_change_their_order(order: tuple[int, ...], committed: list[Path]) -> None:
    paths = [committed[index] for index in order]
    async with opened(paths, num_retained=2) as rig:
        await assert_is(rig, 2)
        await train(rig, 3)
        await rig.commit(3)
    async with opened(committed, num_retained=2) as rig:
        await assert_is(rig, 3)
    assert all(len(list(data_files(path))) == 1 for path in committed)


async def test_data_files_are_found_wherever_they_are_now(committed: list[Path]) -> None:
    (moved,) = data_files(committed[1])
    moved.rename(committed[2] / "infinity-state-rank0" / moved.name)
    async with opened(committed, num_retained=2) as rig:
        await assert_is(rig, 2)
        await train(rig, 3)
        await rig.commit(3)
        await assert_is(rig, 3)
    async with opened(committed) as rig:
        await assert_is(rig, 3)


async def test_a_missing_data_file_is_named_and_nothing_is_removed(committed: list[Path]) -> None:
    (missing,) = data_files(committed[1])
    before = [names_below(path) for path in committed]
    with pytest.raises(StorageError, match=f"commit 1 needs data file {missing.name}.*give all NVMe directories"):
        open_state([committed[0], committed[2]])
    assert [names_below(path) for path in committed] == before
    aside = missing.rename(missing.with_name("aside"))
    with pytest.raises(StorageError, match=f"needs data file {missing.name}"):
        open_state(committed)
    aside.rename(missing)
    async with opened(committed) as rig:
        await assert_is(rig, 2)


async def test_a_data_file_that_was_cut_is_refused(committed: list[Path]) -> None:
    (cut,) = data_files(committed[1])
    os.truncate(cut, PAGE)
    with pytest.raises(StorageError, match="the data file was cut short"):
        open_state(committed)
    assert cut.exists()


@pytest.mark.parametrize("name", [manifest_name(2), tensors_name(2)])
@pytest.mark.parametrize("damage", ["flip", "cut"])
async def test_a_damaged_record_is_named_and_nothing_is_removed(name: str, damage: str, committed: list[Path]) -> None:
    path = committed[0] / "infinity-state-rank0" / name
    whole = path.read_bytes()
    content = bytearray(whole)
    content[len(content) // 2] ^= 1
    path.write_bytes(content if damage == "flip" else content[:-3])
    before = [names_below(path) for path in committed]
    with pytest.raises(ManifestError, match="a commit is damaged"):
        open_state(committed)
    assert [names_below(path) for path in committed] == before
    path.write_bytes(whole)
    async with opened(committed, num_retained=2) as rig:
        await assert_is(rig, 2)


async def test_a_directory_of_a_run_is_not_taken_for_a_new_one(committed: list[Path], tmp_path: Path) -> None:
    """Where the commits are is not mounted, as it seems: a start without them removes nothing."""
    (empty,) = make_paths(tmp_path / "empty", 1)
    before = [names_below(path) for path in committed]
    for paths in ([empty, *committed[1:]], [committed[2]]):
        with pytest.raises(ManifestError, match="data of a run whose commits are in another directory"):
            open_state(paths)
    assert [names_below(path) for path in committed] == before
    assert list(empty.iterdir()) == []
    async with opened(committed) as rig:
        await assert_is(rig, 2)


async def test_a_mark_that_a_crash_has_lost_is_made_at_the_next_start(committed: list[Path]) -> None:
    directories = [path / "infinity-state-rank0" for path in committed]
    marks = [{path.name for path in each.iterdir() if MARK_NAME.fullmatch(path.name)} for each in directories]
    assert [len(names) for names in marks] == [0, 1, 1]
    (directories[2] / marks[2].pop()).unlink()
    async with opened(committed) as rig:
        await assert_is(rig, 2)
    with pytest.raises(ManifestError, match="data of a run whose commits are in another directory"):
        open_state(committed[2:])


async def test_the_commits_of_two_runs_are_not_mixed(committed: list[Path], tmp_path: Path) -> None:
    others = make_paths(tmp_path / "others", 1)
    async with opened(others) as rig:
        await train(rig, 5)
        await rig.commit(5)
    before = names_below(others[0])
    with pytest.raises(ManifestError, match="has commits too, of another run"):
        open_state([*committed, *others])
    assert names_below(others[0]) == before
    async with opened(others) as rig:
        await assert_is(rig, 5)


async def test_what_others_have_linked_is_never_written(committed: list[Path], tmp_path: Path) -> None:
    links = {}
    for path in committed:
        (file,) = data_files(path)
        link = tmp_path / file.name
        link.hardlink_to(file)
        links[link] = file.read_bytes()
    async with opened(committed, num_retained=1) as rig:
        await assert_is(rig, 2)
        for step in (3, 4, 5):
            await train(rig, step)
            await rig.commit(step)
            await assert_is(rig, step)
    assert {link: link.read_bytes() for link in links} == links
    async with opened(committed) as rig:
        await assert_is(rig, 5)
        assert [len(names) for names in map(names_below, committed)] == [3, 1, 1], "what nobody needs is gone"


async def test_what_a_crash_left_is_removed(committed: list[Path]) -> None:
    directory = committed[1] / "infinity-state-rank0"
    left = ["shards-0123456789abcdef.bin", "commit-0000000009.json.partial", "commit-0000000007.safetensors"]
    for name in [*left, ".infinity-probe-0123456789abcdef"]:
        (directory / name).write_bytes(b"left")
    (directory / "notes.txt").write_bytes(b"a stranger's")
    async with opened(committed) as rig:
        await assert_is(rig, 2)
    (kept,) = data_files(committed[1])
    assert names_below(committed[1]) == ["notes.txt", kept.name]


async def test_the_order_of_calls_is_that_of_the_protocol(tmp_path: Path) -> None:
    (path,) = make_paths(tmp_path, 1)
    async with opened([path]) as rig:
        await train(rig, 1)
        await rig.commit(1)
        assert isinstance(rig.files, FaultyFiles)
        rig.files.log = []
        await train(rig, 2)
        await rig.commit(2)
        calls = [f"{operation} {name}".strip() for operation, name in rig.files.log]
    assert [call for call in calls if not (call.startswith("unlink") and call.endswith(".partial"))] == [
        f"create {tensors_name(2)}.partial",
        f"rename {tensors_name(2)}",
        "sync",
        f"create {manifest_name(2)}.partial",
        f"rename {manifest_name(2)}",
        "sync",
        f"unlink {manifest_name(1)}",
        "sync",
        f"unlink {tensors_name(1)}",
    ]
