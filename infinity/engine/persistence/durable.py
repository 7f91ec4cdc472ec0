"""``Durable``: when commits are made, and how a run goes back to one.

A commit that is due after a step goes beside training, in three parts (``capture.py``):

    step() returns            random states and data positions are taken
       the loop               waits until all sub-groups are stepped, writes what is newer in memory, holds the bytes
    the engine is used again  hyper-parameters, schedulers and buffers are taken, before that use changes anything
       the loop               makes the held bytes durable, and writes the record

so it runs under the next forward. The next change of state, an optimizer step as a rule, waits for it: at any time
there are the bytes of the commits that are kept and those that training has now, and never a third kind.

With several ranks each makes its own, and a commit counts when all have made theirs (``store/agreement.py``); what one
cannot do fails on all, and all go back to the same one.

A commit that fails leaves the one before, and training may go on: the error is raised by whoever comes next to change
state, once, and the next commit that is due is tried as if nothing had been.

All but coroutines belongs to the training thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from infinity.engine.persistence.agreement import Ranks
from infinity.engine.persistence.capture import Capture, Taken
from infinity.engine.persistence.checkpoint import CheckpointSaver
from infinity.engine.persistence.documents import Reader, Writer
from infinity.engine.persistence.durability import CommitInfo, Durability
from infinity.engine.persistence.joined import open_stored
from infinity.engine.persistence.making import Making
from infinity.engine.persistence.pending import Pending
from infinity.engine.persistence.saving_together import check_together, save_together
from infinity.engine.persistence.snapshot import Snapshot, snapshot_of
from infinity.engine.persistence.stored_state import StoredState
from infinity.engine.persistence.together import Together
from infinity.engine.prefetch import PrefetchScheduler
from infinity.errors import DirectoryError, EngineStateError, NoCommitError, UncertainCommitError
from infinity.io.completion import call_in_thread
from infinity.store.commits import Commit, Commits
from infinity.store.linking import link
from infinity.store.loop import LoopThread
from infinity.store.manifest import manifest_name
from infinity.store.state import OpenState
from infinity.store.store import TieredStore
from infinity.store.stored import load_tensors
from infinity.store.versions import Held
from infinity.trace import Recorder


class Durable(Durability):
    """Commits, when asked for, or after every so many steps.

    Args:
        loop: the loop thread.
        store: the shards.
        scheduler: brings nothing in while shards get other bytes.
        commits: those there are.
        state: the state directories.
        capture: takes and gives back what is beside shards.
        recorder: is told of each commit.
        stepped: ends when no sub-group is on its way, or raises what a step failed with.
        every: after how many steps one is due; ``None``: when asked for.
        ranks: all of the run's; ``commits`` agrees with the same.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        scheduler: PrefetchScheduler,
        commits: Commits,
        state: OpenState,
        capture: Capture,
        recorder: Recorder,
        *,
        stepped: Callable[[], Awaitable[None]],
        every: int | None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(Together(loop, ranks, state.files.path))
        self._loop = loop
        self._store = store
        self._scheduler = scheduler
        self._commits = commits
        self._state = state
        self._capture_of = weakref.ref(capture)  # it has the user's objects, which lead to the engine
        self._making = Making(store, commits, self._capture_of, recorder, stepped=stepped)
        self._every = every
        self._pending: Pending | None = None
        self._error: BaseException | None = None
        self._found: tuple[Commit, Snapshot, Taken] | None = None
        self._first = 0  # the commit before which there is no way back

    @property
    def _capture(self) -> Capture:
        capture = self._capture_of()
        assert capture is not None, "the engine has been forgotten"
        return capture

    def resume(self, leave: Callable[[], None]) -> bool:
        """Go on from the newest commit.

        Raises:
            ModelError: it is of another model or optimizer.
            StorageError: it could not be read.
        """
        commit = self._commits.last
        if commit is None:
            return False
        (snapshot, taken, _), alike = self.together.tell(
            "resuming", lambda: self._look_into(commit), lambda found: found[2]
        )
        self._found = commit, snapshot, taken
        if not all(alike):
            return False
        leave()
        self._give_back(commit, snapshot, taken)
        return True

    def begin(self, load: Callable[[StoredState], None]) -> None:
        """Set the random states of the commit that was found: what has been drawn since does not count.

        A state that had to be stored anew is committed, since the one that was found cannot be gone back to.

        Raises:
            StorageError: it could not be read or written.
        """
        found, self._found = self._found, None
        if found is None:
            return
        commit, snapshot, taken = found
        if self.last is not None:
            self._capture.restore_random(taken)
            return
        with contextlib.ExitStack() as stack:
            stored = self.together.do("resuming", lambda: stack.enter_context(self._open(commit, snapshot)))
            self.together.do("resuming", lambda: load(stored))
        self.num_steps = snapshot.step
        self.begin_anew()  # until all ranks have done so, what others may still read here stays

    def _open(self, commit: Commit, snapshot: Snapshot) -> StoredState:
        """A commit, all of it: of other ranks, too, if it is divided among them."""
        own = [directory.path for directory in self._state.directories]
        is_divided = any(slot.count is not None for part in snapshot.parts for slot in part.slots)
        for directory in self._state.of_ranks if is_divided else ():
            if not directory.is_dir():
                raise DirectoryError(
                    "the state must be stored anew for these settings, for which each rank has to see the directories "
                    "of all, and this one is not seen here: start with the settings of then; or have them save a "
                    "checkpoint to a file system that the hosts share, and load that",
                    path=directory,
                )
        return open_stored(self._state.of_ranks if is_divided else own, commit.manifest.number, lock=False)

    def begin_anew(self) -> None:
        """The state is that of another run, or time: commit it, and forget that there is a way back from here.

        Raises:
            StorageError: it could not be written; the commit before stands.
        """
        self._first = self.commit().number

    def at_boundary(self) -> None:
        """A step and whatever follows it are over, and the next batch has not been fetched: take all now."""
        pending = self._pending
        if pending is not None and pending.made is None:
            writer = Writer("a")
            pending.moments, pending.writers = [self._capture.at_step(writer)], [writer]
            self.proceed()

    def end_step(self) -> None:
        """Begin a commit if one is due."""
        if self._every is not None and self.num_steps % self._every == 0:
            self._begin()

    def proceed(self) -> None:
        """Take the rest of what a commit needs, and have its record written.

        Raises:
            ModelError: something cannot be kept; there is no such commit.
        """
        pending = self._pending
        if pending is None or pending.made is not None:
            return
        writer = Writer("n")
        try:
            pending.moments.append(self._capture.at_next_use(writer))
        except BaseException as error:
            self._pending = None
            with contextlib.suppress(EngineStateError):  # the loop has ended, and with it all that is held
                self._loop.submit(self._making.let_go(pending.held))
                self._loop.run(self._commits.skip(pending.step, error))
            raise
        pending.writers.append(writer)
        pending.made = self._loop.submit(self._making.make(pending))

    def join(self) -> None:
        """Wait for a commit that is under way.

        Raises:
            StorageError: what is left of one that is no more cannot be removed; its bytes take room until it is.
        """
        self.proceed()
        if self._pending is not None and self._pending.made is not None:
            self._await(self._pending, self._pending.made)
        if not self._commits.is_tidy:
            self._loop.run(self._commits.tidy())

    def _await(self, pending: Pending, made: concurrent.futures.Future[tuple[Commit, int]]) -> None:
        begun = time.perf_counter()
        try:
            with self.together.ranks.awaited():
                commit, written_bytes = self._loop.wait(made)  # an interrupt leaves it pending
        except Exception as error:
            is_uncertain = isinstance(error, UncertainCommitError)
            self._pending, self._error = None, (error.__cause__ or error) if is_uncertain else error
            return
        self._pending = None
        ended = time.perf_counter()
        self.last = CommitInfo(
            commit.manifest.number,
            pending.step,
            commit.manifest.num_bytes,
            written_bytes,
            ended - pending.begun,
            ended - begun,
        )

    def check(self) -> None:
        """Raise what a commit has failed with, once; of one that has ended.

        Raises:
            StorageError: it could not be written; the one before stands.
        """
        pending = self._pending
        if pending is not None and pending.made is not None and pending.made.done():
            self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def commit(self) -> CommitInfo:
        """Make one now.

        Raises:
            ModelError: something cannot be kept.
            StorageError: it could not be written; the one before stands.
        """
        self.join()
        self.check()
        self._begin()
        self.join()
        self.check()
        assert self.last is not None
        return self.last

    def save(self, saver: CheckpointSaver, path: str | os.PathLike[str]) -> CommitInfo:
        """Make a commit, and a checkpoint that shares its bytes where the file system allows that; else copy them.

        Raises:
            ModelError: something cannot be kept.
            StorageError: the system reported an error; what was at ``path`` stays.
        """
        place = check_together(self.together, path)
        info, begun = self.commit(), time.perf_counter()
        commit, nvme = self._commits.find(info.number), self._store.nvme
        assert nvme is not None

        def write(place: Path, later: Path | None) -> int:
            if self._loop.run(link(nvme, self._state, commit, place, later=later)):
                return 0
            return saver.save(place, step=info.step, state=self._state.state, number=info.number, later=later)

        num_bytes = save_together(self.together, place, write)
        seconds = time.perf_counter() - begun
        return dataclasses.replace(
            info,
            written_bytes=info.written_bytes + num_bytes,
            seconds=info.seconds + seconds,
            wait_seconds=info.wait_seconds + seconds,
        )

    def find(self, *, steps: int | None) -> Commit:
        """The commit from which training has taken so many steps; ``None``: the newest. The same on all ranks.

        Raises:
            NoCommitError: it is not kept, or never was.
            RankFailedError: it is not kept on another rank, or another is chosen there.
        """
        return self.together.same("rollback", lambda: self._find(steps), lambda commit: commit.manifest.number)

    def _find(self, steps: int | None) -> Commit:
        if steps is None and self._commits.last is not None:
            return self._commits.last
        reachable = [each for each in self._commits.all if each.manifest.number >= self._first]
        found = {snapshot_of(each.manifest, self._path(each)).step: each for each in reachable}
        if steps is None:
            raise NoCommitError("rollback(): no commit has been made yet", path=self._state.files.path)
        if self.num_steps - steps not in found:
            there = ", ".join(f"rollback(steps={self.num_steps - step})" for step in sorted(found)) or "none yet"
            raise NoCommitError(
                f"rollback(steps={steps}): no commit is kept of step {self.num_steps - steps}; there are: {there}. "
                "More are kept with retained_commits in Config",
                path=self._state.files.path,
            )
        return found[self.num_steps - steps]

    def restore(self, commit: Commit, recover: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        """Go back to a commit of this engine's layout: those after it are removed.

        Raises:
            ModelError: it is of another model or optimizer; nothing has been changed.
            NoCommitError: it is of another layout; nothing has been changed.
            StorageError: the system reported an error, or the commit is damaged; later commits stay.
        """
        snapshot, taken = self.together.do("rollback", lambda: self._check(commit))
        try:
            recover()
            self._pending = self._error = None
            self._give_back(commit, snapshot, taken)
            self._loop.run(self._commits.drop_after(commit))
        except BaseException as error:
            fail(error)
            raise
        self._capture.restore_random(taken)

    def _check(self, commit: Commit) -> tuple[Snapshot, Taken]:
        """Refuse a commit to which there is no way back; nothing is changed."""
        snapshot, taken, is_alike = self._look_into(commit)
        if not is_alike:
            raise NoCommitError(
                f"commit {commit.manifest.number} was made with other budgets or another precision, and its shards "
                "cannot serve as they are: start with the settings of then, and resume",
                path=self._path(commit),
            )
        self._loop.run(self._commits.check(commit))
        return snapshot, taken

    def _give_back(self, commit: Commit, snapshot: Snapshot, taken: Taken) -> None:
        """Make shards and all else what they were, but for random states."""
        self._loop.run(self._restore(commit.held))
        self._capture.restore_states(snapshot, taken)
        self._capture.restore(taken)
        self.num_steps = snapshot.step
        self.last = CommitInfo(commit.manifest.number, snapshot.step, commit.manifest.num_bytes)

    async def _restore(self, held: Held) -> None:
        async with self._scheduler.replacing():
            await self._store.restore(held)

    def _look_into(self, commit: Commit) -> tuple[Snapshot, Taken, bool]:
        """What a commit of this model keeps beside shards, and whether these can serve as they are."""
        snapshot, taken = self._read(commit)
        self._capture.check(snapshot, taken)
        return snapshot, taken, self._capture.has_layout_of(snapshot)

    def _read(self, commit: Commit) -> tuple[Snapshot, Taken]:
        """What a commit keeps beside shards.

        Raises:
            ManifestError: its record is damaged.
            StorageError: it could not be read.
        """
        path = self._path(commit)
        content = self._loop.run(call_in_thread(lambda: self._state.read_tensors(commit.manifest)))
        snapshot = snapshot_of(commit.manifest, path)
        return snapshot, self._capture.read(snapshot, Reader({} if content is None else load_tensors(content, path)))

    def _path(self, commit: Commit) -> Any:
        return self._state.files.path / manifest_name(commit.manifest.number)

    def _begin(self) -> None:
        assert self._pending is None, "a commit is under way"
        writer, begun = Writer("a"), time.perf_counter()
        try:
            moment = self._capture.at_step(writer)
        except BaseException as error:
            with contextlib.suppress(EngineStateError):
                self._loop.run(self._commits.skip(self.num_steps, error))
            raise
        held = self._loop.submit(self._making.hold())
        self._pending = Pending(self.num_steps, begun, [writer], [moment], held)
