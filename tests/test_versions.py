"""Versions: held bytes never change, whatever is written, fails, is deleted, or found again by the next process."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fakes_state import KEYS, PAGE, Rig, content_of, make_paths, opened
from infinity.errors import BudgetError, EngineStateError, MismatchError, StorageError
from infinity.io.memory import allocate, as_bytes
from infinity.store import striping
from infinity.store.shard import ShardKey
from infinity.store.versions import Held

CAPACITY_PAGES = 24


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striping, "STRIPE_BYTES", PAGE)


class VersionsMachine(RuleBasedStateMachine):
    """A tier with commits beside a dictionary of what each shard has, and of what each hold and commit has."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp())
        self.stack = contextlib.AsyncExitStack()
        self.live: dict[ShardKey, bytes] = {}
        self.holds: list[tuple[Held, dict[ShardKey, bytes]]] = []
        self.commits: dict[int, dict[ShardKey, bytes]] = {}
        self.step = 0

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    @initialize(num_paths=st.integers(1, 3), num_retained=st.integers(1, 3))
    def open(self, num_paths: int, num_retained: int) -> None:
        self.paths = make_paths(self.root, num_paths)
        self.num_retained = num_retained
        self.rig: Rig = self.run(self._open())

    async def _open(self) -> Rig:
        context = opened(self.paths, capacity_bytes=CAPACITY_PAGES * PAGE, num_retained=self.num_retained)
        return await self.stack.enter_async_context(context)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            while self.holds:
                self.let_go(0)
            for key in list(self.live):
                self.delete(key)
            self.check()
            used_pages = {v: v.num_bytes // PAGE for commit in self.rig.commits.all for v in commit.held.values()}
            assert self.rig.nvme.usage().used_bytes == sum(used_pages.values()) * PAGE, "only commits take room"
            self.run(self.stack.aclose())
        self.loop.close()
        shutil.rmtree(self.root)

    @rule(key=st.sampled_from(KEYS), num_pages=st.integers(1, 3))
    def write(self, key: ShardKey, num_pages: int) -> None:
        self.step += 1
        content = content_of(key, self.step, num_pages)
        try:
            self.run(self.rig.write(key, content))
        except BudgetError:
            assert self._used_pages(without=key) + num_pages > CAPACITY_PAGES
        else:
            self.live[key] = content

    @rule(key=st.sampled_from(KEYS), how=st.sampled_from(["fails", "is cancelled"]))
    def write_in_vain(self, key: ShardKey, how: str) -> None:
        """What was there is undefined then, unless somebody holds it."""
        self.step += 1
        before = self.rig.nvme.versions.live.get(key)
        is_held = before is not None and before.is_held
        self.run(self._write_in_vain(key, content_of(key, self.step, 2), how))
        if not is_held:
            self.live.pop(key, None)
            assert (key in self.rig.nvme) == (before is not None)
            if before is not None:
                self.rig.nvme.delete(key)

    async def _write_in_vain(self, key: ShardKey, content: bytes, how: str) -> None:
        if how == "fails":
            self.rig.set_faults(lambda operation, name: _write_error(operation, name))
            with pytest.raises((StorageError, BudgetError)):
                await self.rig.write(key, content)
            self.rig.set_faults(lambda operation, name: None)
            return
        self.rig.opener.gate.clear()
        writing = asyncio.ensure_future(self.rig.write(key, content))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.sleep(0)
        self.rig.opener.gate.set()
        (outcome,) = await asyncio.gather(writing, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError | BudgetError)

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: ShardKey) -> None:
        self.rig.nvme.delete(key)
        self.live.pop(key, None)

    @rule(keys=st.sets(st.sampled_from(KEYS), min_size=1))
    def hold(self, keys: set[ShardKey]) -> None:
        if keys <= set(self.live):
            self.holds.append((self.rig.nvme.versions.hold(keys), {key: self.live[key] for key in keys}))
        else:
            with pytest.raises(EngineStateError, match="is not in the NVMe tier"):
                self.rig.nvme.versions.hold(keys)

    @precondition(lambda self: self.holds)
    @rule(which=st.integers(0, 5))
    def let_go(self, which: int) -> None:
        held, _ = self.holds.pop(which % len(self.holds))
        self.rig.nvme.versions.let_go(held)

    @precondition(lambda self: self.holds)
    @rule(which=st.integers(0, 5))
    def restore(self, which: int) -> None:
        held, contents = self.holds[which % len(self.holds)]
        self.rig.nvme.versions.restore(held)
        self.live = dict(contents)

    @precondition(lambda self: self.live)
    @rule(tensors=st.sampled_from([None, b"tensors"]))
    def commit(self, tensors: bytes | None) -> None:
        commit = self.run(self.rig.commit(self.step, tensors))
        self.commits[commit.manifest.number] = dict(self.live)
        self._forget_all_but(sorted(self.commits)[-self.num_retained :])

    @precondition(lambda self: self.commits)
    @rule(which=st.integers(0, 2))
    def go_back(self, which: int) -> None:
        number = sorted(self.commits)[which % len(self.commits)]
        commit = self.rig.commits.find(number)
        self.run(self.rig.commits.drop_after(commit))
        self.rig.nvme.versions.restore(commit.held)
        self.live = dict(self.commits[number])
        self._forget_all_but([each for each in self.commits if each <= number])

    @precondition(lambda self: self.commits)
    @rule(order=st.randoms(use_true_random=False))
    def open_again(self, order: Any) -> None:
        """Another process goes on from the last commit, maybe with its directories in another order."""
        self.run(self.stack.aclose())
        order.shuffle(self.paths)
        self.rig = self.run(self._open())
        self.holds.clear()
        self.live = dict(self.commits[max(self.commits)])

    def _forget_all_but(self, numbers: list[int]) -> None:
        self.commits = {number: self.commits[number] for number in numbers}

    def _used_pages(self, without: ShardKey) -> int:
        """What all versions take but for that of a shard that nobody else has."""
        held = [version for held, _ in self.holds for version in held.values()]
        held += [version for commit in self.rig.commits.all for version in commit.held.values()]
        live = [version for key, version in self.rig.nvme.versions.live.items() if key != without]
        return sum(version.num_bytes for version in {id(v): v for v in [*held, *live]}.values()) // PAGE

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "rig"):
            return
        assert set(self.rig.nvme.versions.live) == set(self.live)
        assert {key: self.run(self.rig.read(key)) for key in self.live} == self.live
        for held, contents in self.holds:
            assert {key: self.run(self.rig.read_version(key, held[key])) for key in held} == contents
        assert [commit.manifest.number for commit in self.rig.commits.all] == sorted(self.commits)
        for commit in self.rig.commits.all:
            assert self.run(self.rig.contents(commit)) == self.commits[commit.manifest.number]
        self.rig.check_room(*(held for held, _ in self.holds))


def _write_error(operation: str, name: str) -> StorageError | None:
    return StorageError("write failed", path=name) if operation == "write" else None


TestVersions = VersionsMachine.TestCase
TestVersions.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


# --- who is under way


async def test_who_reads_an_old_version_is_not_disturbed_by_a_write(tmp_path: Path) -> None:
    key = KEYS[0]
    async with opened(make_paths(tmp_path, 2)) as rig:
        await rig.write(key, content_of(key, 1))
        held = rig.nvme.versions.hold([key])
        rig.opener.gate.clear()
        reading = asyncio.ensure_future(rig.read_version(key, held[key]))
        await asyncio.sleep(0)
        writing = asyncio.ensure_future(rig.write(key, content_of(key, 2)))
        await asyncio.sleep(0)
        with pytest.raises(EngineStateError, match="is not in the NVMe tier: flush it first"):
            rig.nvme.versions.hold([key])
        with pytest.raises(EngineStateError, match=r"restore of .* under way"):
            rig.nvme.versions.restore(held)
        rig.nvme.versions.let_go(held)
        rig.opener.gate.set()
        assert await reading == content_of(key, 1)
        await writing
        assert await rig.read(key) == content_of(key, 2)
        assert rig.nvme.usage().used_bytes == 2 * PAGE


async def test_bytes_let_go_while_they_are_read_are_not_given_to_others(tmp_path: Path) -> None:
    key, other = KEYS[:2]
    async with opened(make_paths(tmp_path, 1), capacity_bytes=4 * PAGE) as rig:
        await rig.write(key, content_of(key, 1))
        held = rig.nvme.versions.hold([key])
        await rig.write(key, content_of(key, 2))
        rig.opener.gate.clear()
        reading = asyncio.ensure_future(rig.read_version(key, held[key]))
        await asyncio.sleep(0)
        rig.nvme.versions.let_go(held)
        with pytest.raises(BudgetError):
            await rig.write(other, content_of(other, 1))
        rig.opener.gate.set()
        assert await reading == content_of(key, 1)
        await rig.write(other, content_of(other, 1))
        assert await rig.read(key) == content_of(key, 2)


@pytest.mark.parametrize("is_held", [False, True])
async def test_a_shard_that_nobody_holds_is_written_in_place(is_held: bool, tmp_path: Path) -> None:
    key = KEYS[0]
    async with opened(make_paths(tmp_path, 1)) as rig:
        await rig.write(key, content_of(key, 1))
        places = list(rig.nvme.versions.live[key].places())
        held = rig.nvme.versions.hold([key]) if is_held else {}
        await rig.write(key, content_of(key, 2))
        assert (list(rig.nvme.versions.live[key].places()) == places) == (not is_held)
        rig.nvme.versions.let_go(held)
        assert rig.nvme.usage().used_bytes == 2 * PAGE


async def test_what_was_changed_on_the_disk_is_found_when_it_is_first_read(tmp_path: Path) -> None:
    (path,) = make_paths(tmp_path, 1)
    key = KEYS[0]
    async with opened([path]) as rig:
        await rig.write(key, content_of(key, 1))
        commit = await rig.commit(1)
        ((volume, extent),) = commit.held[key].places()
        file, offset = volume.file.path, extent.offset
    content = bytearray(file.read_bytes())
    content[offset + 5000] ^= 1
    file.write_bytes(content)
    async with opened([path]) as rig:
        with pytest.raises(MismatchError, match=f"{key}: what is on the disk is not what was written there"):
            await rig.nvme.read(key, as_bytes(allocate(2 * PAGE)))
        await rig.write(key, content_of(key, 2))
        assert await rig.read(key) == content_of(key, 2)
