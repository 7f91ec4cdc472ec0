"""Commits of several ranks: at any moment, whoever ends or fails, there is one that all ranks have whole."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fakes_ranks import Group, opened_ranks, paths_of
from fakes_state import KEYS, PAGE, Faults, Rig, content_of, failing
from infinity.engine.persistence.agreement import RanksAgreement
from infinity.engine.persistence.common import RankState, newest_common
from infinity.errors import DirectoryError, ManifestError, NoCommitError, RankFailedError, RanksApartError, StorageError
from infinity.store import striping
from infinity.store.commits import Commit
from infinity.store.pruning import Pruning
from infinity.store.state import open_state


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striping, "STRIPE_BYTES", PAGE)


async def train(rigs: Sequence[Rig], step: int) -> None:
    for rig in rigs:
        for key in KEYS:
            await rig.write(key, content_of(key, step))


async def commit_all(rigs: Sequence[Rig], step: int) -> list[Commit | BaseException]:
    return list(await asyncio.gather(*(rig.commit(step) for rig in rigs), return_exceptions=True))


async def made(rigs: Sequence[Rig], step: int) -> None:
    await train(rigs, step)
    results = await commit_all(rigs, step)
    assert all(isinstance(each, Commit) for each in results), results


def numbers(paths: Sequence[Sequence[Path]]) -> list[list[int]]:
    """The commits of each rank, as its directories have them."""
    return [
        [int(file.name[7:17]) for path in own for file in sorted(path.glob("infinity-state-rank*/commit-*.json"))]
        for own in paths
    ]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):  # of files and threads, which wake nobody
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it has not come")


def agreement_of(rig: Rig) -> RanksAgreement:
    assert isinstance(rig.commits._agreement, RanksAgreement)
    return rig.commits._agreement


async def test_nothing_older_goes_before_all_ranks_have_made_theirs(tmp_path: Path) -> None:
    paths, group = paths_of(tmp_path, 3), Group(3)
    async with opened_ranks(paths, group) as rigs:
        await made(rigs, 1)
        await train(rigs, 2)
        early = [asyncio.ensure_future(rig.commit(2)) for rig in rigs[:2]]
        await until(lambda: all(len(each) == 2 for each in numbers(paths)[:2]))
        assert numbers(paths) == [[1, 2], [1, 2], [1]]
        assert not any(each.done() for each in early)
        assert all(rig.commits.last is not None and rig.commits.last.manifest.number == 1 for rig in rigs)
        await rigs[2].commit(2)
        await asyncio.gather(*early)
        assert numbers(paths) == [[2], [2], [2]]
        for rank, rig in enumerate(rigs):
            assert rig.commits.last is not None
            manifest = rig.commits.last.manifest
            assert (manifest.rank, manifest.world_size) == (rank, 3)
            rig.check_room()


@pytest.mark.parametrize("num_retained", [1, 2])
async def test_what_fails_on_one_rank_fails_on_all_and_training_goes_on(tmp_path: Path, num_retained: int) -> None:
    paths, group = paths_of(tmp_path, 2), Group(2)
    async with opened_ranks(paths, group, num_retained=num_retained) as rigs:
        await made(rigs, 1)
        await train(rigs, 2)
        rigs[1].set_faults(
            lambda operation, name: failing() if operation == "create" and name.startswith("commit-") else None
        )
        told, failed = await commit_all(rigs, 2)
        rigs[1].set_faults(lambda operation, name: None)
        assert isinstance(told, RankFailedError)
        assert isinstance(failed, StorageError)
        assert "rank 1: StorageError" in str(told)
        assert numbers(paths) == [[1], [1]]
        for rig in rigs:
            assert [each.manifest.number for each in rig.commits.all] == [1]
            rig.check_room()
        await made(rigs, 3)
        assert numbers(paths) == ([[3], [3]] if num_retained == 1 else [[1, 3], [1, 3]])
        kept = {each.manifest.number for rig in rigs for each in rig.commits.all}
        assert kept == ({3} if num_retained == 1 else {1, 3})


async def test_a_rank_that_cannot_begin_tells_the_others(tmp_path: Path) -> None:
    paths, group = paths_of(tmp_path, 2), Group(2)
    async with opened_ranks(paths, group) as rigs:
        await made(rigs, 1)
        await train(rigs, 2)
        skipping = asyncio.ensure_future(rigs[1].commits.skip(2, ValueError("no such thing can be kept")))
        with pytest.raises(RankFailedError, match="rank 1: ValueError: no such thing can be kept"):
            await rigs[0].commit(2)
        await skipping
        await made(rigs, 3)
        assert numbers(paths) == [[3], [3]], "numbers stay in step"


async def test_a_rank_that_dies_between_the_phases_leaves_both_commits_to_the_others(tmp_path: Path) -> None:
    paths, group = paths_of(tmp_path, 2), Group(2)
    async with opened_ranks(paths, group) as rigs:
        await made(rigs, 1)
        await train(rigs, 2)
        group.end(1)
        with pytest.raises(RanksApartError, match="start all of them again"):
            await rigs[0].commit(2)
        assert numbers(paths) == [[1, 2], [1]]
        writes = rigs[0].nvme.usage().used_bytes
        with pytest.raises(RanksApartError):
            await rigs[0].commit(3)
        assert numbers(paths) == [[1, 2], [1]], "what can never count is not made"
        assert rigs[0].nvme.usage().used_bytes == writes
    async with opened_ranks(paths, Group(2)) as rigs:
        assert numbers(paths) == [[1], [1]]
        for rig in rigs:
            assert rig.commits.last is not None
            assert await rig.contents(rig.commits.last) == {key: content_of(key, 1) for key in KEYS}
        await made(rigs, 4)
        assert numbers(paths) == [[3], [3]], "the number of what was dropped is not given again"


async def test_a_rank_that_does_not_hear_keeps_both(tmp_path: Path) -> None:
    paths, group = paths_of(tmp_path, 2), Group(2)
    async with opened_ranks(paths, group) as rigs:
        await made(rigs, 1)
        await train(rigs, 2)
        group.deaf[1] = {1}
        heard, lost = await commit_all(rigs, 2)
        assert isinstance(heard, Commit)
        assert isinstance(lost, RanksApartError)
        assert numbers(paths) == [[2], [1, 2]]
    async with opened_ranks(paths, Group(2)) as rigs:
        for rig in rigs:
            assert rig.commits.last is not None
            assert await rig.contents(rig.commits.last) == {key: content_of(key, 2) for key in KEYS}


async def test_a_cancelled_commit_that_all_have_made_counts(tmp_path: Path) -> None:
    paths, group = paths_of(tmp_path, 2), Group(2)
    async with opened_ranks(paths, group) as rigs:
        await made(rigs, 1)
        await train(rigs, 2)
        first = asyncio.ensure_future(rigs[0].commit(2))
        await until(lambda: len(group.log[0]) == 2)
        first.cancel()
        await rigs[1].commit(2)
        with pytest.raises(asyncio.CancelledError):
            await first
        assert numbers(paths) == [[2], [2]]
        assert rigs[0].commits.last is not None
        assert rigs[0].commits.last.manifest.number == 2
        rigs[0].check_room()


async def test_closing_waits_for_a_commit_that_is_under_way(tmp_path: Path) -> None:
    paths, group = paths_of(tmp_path, 2), Group(2)
    async with opened_ranks(paths, group) as rigs:
        await made(rigs, 1)
        await train(rigs, 2)
        first = asyncio.ensure_future(rigs[0].commit(2))
        await until(lambda: len(group.log[0]) == 2)
        closing = asyncio.ensure_future(rigs[0].nvme.aclose())
        await asyncio.sleep(0.05)
        assert not closing.done()
        await rigs[1].commit(2)
        await asyncio.gather(first, closing)
        assert numbers(paths) == [[2], [2]]


async def test_ranks_that_come_to_different_points_all_say_so(tmp_path: Path) -> None:
    paths, group = paths_of(tmp_path, 2), Group(2)
    async with opened_ranks(paths, group) as rigs:
        await made(rigs, 1)
        await train(rigs, 2)
        told = asyncio.ensure_future(agreement_of(rigs[1]).tell("rollback", 1))
        with pytest.raises(RankFailedError, match="rank 0: commit 2 of step 2, rank 1: rollback"):
            await rigs[0].commit(2)
        with pytest.raises(RankFailedError, match="different points"):
            await told
        assert numbers(paths) == [[1], [1]]
        await made(rigs, 3)
        first, second = await asyncio.gather(rigs[0].commit(4), rigs[1].commit(5), return_exceptions=True)
        assert isinstance(first, RankFailedError)
        assert isinstance(second, RankFailedError)
        await made(rigs, 6)


@pytest.mark.parametrize("goes_first", ["mark", "record"])
async def test_a_first_commit_of_one_rank_alone_is_forgotten_in_all_of_its_directories(
    tmp_path: Path, goes_first: str
) -> None:
    """Also when a crash came while it was: with two directories, one has the record and one a mark."""
    paths, group = paths_of(tmp_path, 2, 2), Group(2)
    async with opened_ranks(paths, group) as rigs:
        await train(rigs, 1)
        alone = asyncio.ensure_future(rigs[0].commit(1))
        await until(lambda: len(group.log[0]) == 1)  # its record, and the mark of its other directory, are durable
        group.end(1)
        with pytest.raises(RanksApartError):
            await alone
    assert numbers(paths)[0] == [1]
    [record] = paths[0][0].glob("infinity-state-rank0/commit-*.json")
    [mark] = paths[0][1].glob("infinity-state-rank0/state-*.json")
    (mark if goes_first == "mark" else record).unlink()  # as far as the one before this was able to forget
    for _ in range(2):
        async with opened_ranks(paths, Group(2)) as rigs:
            assert all(rig.commits.last is None for rig in rigs)
    async with opened_ranks(paths, Group(2)) as rigs:
        await made(rigs, 2)


def failing_at(expected: str) -> Faults:
    def faults(operation: str, name: str) -> BaseException | None:
        return failing() if operation == expected else None

    return faults


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_fails_or_ends_there_is_one_that_all_have(tmp_path: Path, seed: int) -> None:
    """Runs one after the other on the same directories: what all have is never older than what any has been told of."""
    draw = random.Random(seed)
    num_ranks, num_retained = draw.choice([2, 3]), draw.choice([1, 2, 3])
    paths, step, known = paths_of(tmp_path, num_ranks, draw.choice([1, 2])), 0, 0
    for _ in range(4):
        group = Group(num_ranks)
        async with opened_ranks(paths, group, num_retained=num_retained) as rigs:
            steps = {None if rig.commits.last is None else rig.commits.last.manifest.engine["step"] for rig in rigs}
            assert len(steps) == 1, "all go on from the same"
            [begun_at] = steps
            assert known == 0 or (begun_at is not None and begun_at >= known)
            step = begun_at or 0
            for _ in range(draw.randrange(1, 5)):
                step += 1
                await train(rigs, step)
                way, rank = draw.choice(["well", "well", "fails", "skips", "deaf", "ends"]), draw.randrange(num_ranks)
                is_last = way in ("deaf", "ends")
                if way == "fails":
                    rigs[rank].set_faults(failing_at(draw.choice(["create", "rename", "sync"])))
                if way == "deaf":
                    group.deaf[group._rounds[0]] = set(draw.sample(range(num_ranks), draw.randrange(1, num_ranks + 1)))
                if way == "ends":
                    group.end(rank)
                results = await asyncio.gather(
                    *(
                        rig.commits.skip(step, ValueError("not here"))
                        if way == "skips" and each == rank
                        else rig.commit(step)
                        for each, rig in enumerate(rigs)
                        if not (way == "ends" and each == rank)
                    ),
                    return_exceptions=True,
                )
                assert all(result is None or isinstance(result, (Commit, StorageError)) for result in results), results
                for rig in rigs:
                    rig.set_faults(lambda operation, name: None)
                if any(isinstance(result, Commit) for result in results):
                    known = step
                if is_last:
                    break
                assert len({isinstance(result, Commit) for result in results if result is not None}) == 1
                assert len({tuple(each.manifest.number for each in rig.commits.all) for rig in rigs}) == 1
                for rig in rigs:
                    rig.check_room()


async def test_a_rank_whose_commits_were_removed_is_no_new_one(tmp_path: Path) -> None:
    paths = paths_of(tmp_path, 2)
    async with opened_ranks(paths, Group(2)) as rigs:
        await made(rigs, 1)
    with Pruning(paths[1]) as pruning:
        pruning.remove([1])
    with pytest.raises(DirectoryError, match=r"rank 1 .* has no commit, and rank 0 has commit 1"):
        async with opened_ranks(paths, Group(2)):
            raise AssertionError("it was opened")
    assert numbers(paths) == [[1], []]


# --- which one ranks go on from


def rank_state(rank: int, commits: list[list[int]], *, state: str = "a", num_ranks: int = 2) -> RankState:
    made_by = [rank, num_ranks] if commits else None
    return RankState(rank, f"/nvme/{rank}", [f"/nvme/{rank}"], state, commits, made_by)


def test_the_newest_common_commit_is_taken() -> None:
    both = [rank_state(0, [[1, 10], [2, 20], [3, 30]]), rank_state(1, [[1, 10], [2, 20], [4, 40]])]
    assert newest_common(both) == 2
    assert newest_common([rank_state(0, []), rank_state(1, [], state="b")]) is None


def test_a_rank_without_commits_was_there_when_the_first_was_not_made_or_is_another() -> None:
    of_the_run = RankState(1, "/nvme/1", ["/nvme/1"], "b", [], None, member_of="a")
    assert newest_common([rank_state(0, [[1, 10]]), of_the_run]) is None
    of_another = RankState(1, "/nvme/1", ["/nvme/1"], "b", [], None, member_of="c")
    with pytest.raises(DirectoryError, match="begin in others, from a checkpoint"):
        newest_common([rank_state(0, [[1, 10]]), of_another])


def test_ranks_that_cannot_go_on_together_are_refused() -> None:
    with pytest.raises(NoCommitError, match=r"rank 0: 1 of step 10 .*; rank 1: 2 of step 20"):
        newest_common([rank_state(0, [[1, 10]]), rank_state(1, [[2, 20]])])
    with pytest.raises(NoCommitError):
        newest_common([rank_state(0, [[1, 10]]), rank_state(1, [[1, 11]])])
    with pytest.raises(DirectoryError, match=r"rank 1 \(/nvme/1\) has no commit, and rank 0 has commit 1"):
        newest_common([rank_state(0, [[1, 10]]), rank_state(1, [])])
    with pytest.raises(ManifestError, match=r"rank 0: a .*rank 1: b"):
        newest_common([rank_state(0, [[1, 10]]), rank_state(1, [[1, 10]], state="b")])
    with pytest.raises(DirectoryError, match=r"load_checkpoint\(\)"):
        newest_common([rank_state(0, [[1, 10]], num_ranks=4), rank_state(1, [[1, 10]], num_ranks=4)])


async def test_all_ranks_have_the_state_of_rank_0(tmp_path: Path) -> None:
    paths = paths_of(tmp_path, 2)
    async with opened_ranks(paths, Group(2)) as rigs:
        assert len({rig.state.state for rig in rigs}) == 1
        await made(rigs, 1)
    states = set()
    for rank, own in enumerate(paths):
        state = open_state(own, rank=rank)
        states.add(state.state)
        state.close()
    assert len(states) == 1
