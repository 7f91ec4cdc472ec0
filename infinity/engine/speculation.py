"""``Speculation``: steps that begin under backward before it is known whether gradients will be clipped or skipped.

Whether a step is to be at all, and with which gradients, is known when all norms are. To wait for them leaves NVMe idle
under backward, and leaves all that a step moves to the next forward. So sub-groups are stepped *on trial* as soon as
their gradients are final, as if nothing was to be clipped, and the guess is checked at ``step()``:

* It holds, as in most steps of most runs: what was stepped stays, the others follow. What was saved is let go.
* It does not (gradients are clipped, have overflowed, or are not finite), or somebody wants the model or the gradients
  as they were in the meantime (another forward or backward, ``state_dict``, ``zero_grad``, another learning rate), or
  backward was interrupted: everything is put back, bit for bit, and what follows is what would have been without.

So the numbers are always those of waiting, and nothing is refused that waiting allows. Before a sub-group is stepped on
trial, all that its step changes is saved:

* A shard whose bytes are on NVMe is *held* there (``versions.py``): it is written elsewhere next. That moves nothing.
* One that is newer in host memory is copied, within the budget, if that takes memory from nobody sooner.
* Gradients and small states are left by the step as they were (``SubGroupStepper.step``).

A sub-group of which more than half would have to be copied, or for which there is no room, waits for ``step()``.

What it can gain: what NVMe moves for a step, and on accelerators the arithmetic too, beside backward. It gains nothing
where state stays in host memory (all would be copied, and nothing is moved), where the next forward hides the step
anyway, or where most steps are undone: an undone one has moved its bytes in vain. So a step begins on trial only while
less than half of the last ones have been clipped or skipped, whether they were tried or not; and where a loop itself
has undone one, only after some others.

Why nobody ever sees a weight on trial: a unit is released when its step begins, and whoever gathers it again undoes the
trial before (``OptimizerSteps.check`` and ``before_gather``).

Rejected: writing what is newer in memory first (bytes that waiting would not move); an undo log of differences (as many
bytes as the old ones); guessing from the norms that have come so far (they come while the steps do).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from infinity.config import Config
from infinity.engine.budget import Plan
from infinity.engine.prefetch import Orders
from infinity.engine.shadow import Shadow
from infinity.engine.stream import Job, Step, StepStream
from infinity.engine.substep import PartState, SubGroupStepper
from infinity.engine.unit import Part, PartGradients, saved_kind, state_kind
from infinity.store.loop import LoopThread
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore
from infinity.store.versions import Held

_OWNER = "speculation"

_NUM_REMEMBERED = 16
"""The steps by which the next one is judged; so many wait, too, after somebody has undone one by what he did."""


def pays_to_speculate(plan: Plan, config: Config) -> bool:
    """Whether a step moves anything that could be moved under backward."""
    return config.speculation == "auto" and bool(config.nvme) and plan.state_bytes > config.ram


def speculated_bytes(plan: Plan) -> int:
    """What may be saved at the same time, for which NVMe needs room beside all else: half of weights and states."""
    return plan.committed_bytes // 2


@dataclass(slots=True, eq=False)
class _Savepoint:
    """All that a step of one sub-group changes, as it was.

    Attributes:
        gradients: with which it is stepped.
        state: what the stepper knew.
        held: shards that are kept on NVMe.
        copies: the shards in which the others are kept.
        is_stepped: whether the step has ended.
    """

    gradients: PartGradients
    state: PartState
    held: Held = field(default_factory=dict)
    copies: dict[ShardKey, ShardKey] = field(default_factory=dict)
    is_stepped: bool = False


class Trial:
    """One step that has begun on trial. Belongs to the loop thread.

    Args:
        store: the shards.
        stepper: steps sub-groups.
        stream: on which they are.
        plan: which shards there are.
        orders: told what is kept until the step.
        limit_bytes: the most that may be saved.

    Attributes:
        has_begun: whether any sub-group has been stepped.
        waiting: those that could not be saved.
    """

    def __init__(
        self,
        store: TieredStore,
        stepper: SubGroupStepper,
        stream: StepStream,
        plan: Plan,
        orders: Orders,
        limit_bytes: int,
    ) -> None:
        self._store = store
        self._stepper = stepper
        self._stream = stream
        self._plan = plan
        self._orders = orders
        self._left_bytes = limit_bytes
        self._savepoints: list[_Savepoint] = []
        self._is_over = asyncio.Event()
        self.has_begun = False
        self.waiting: list[PartGradients] = []

    async def attempt(self, job: Step, pinned: Callable[[], None]) -> None:
        """Step a sub-group on trial, or have it wait; as usual once the guess has proved right.

        Raises:
            ModelError: the optimizer cannot be stepped sub-group by sub-group.
            StorageError: a shard could not be read or written.
        """
        gradients = job.gradients
        savepoint = await self._save(gradients) if not self._is_over.is_set() else None
        if self._is_over.is_set():
            if savepoint is not None:
                await self._let_go(savepoint)
            await self._stepper.step(gradients, job.shadow, pinned)
        elif savepoint is None:
            self.waiting.append(gradients)
        else:
            self._savepoints.append(savepoint)
            self.has_begun = True
            await self._stepper.step(gradients, job.shadow, pinned, tentative=True)
            savepoint.is_stepped = True
            if self._is_over.is_set():
                await self._store.delete(gradients.key)

    async def accept(self) -> None:
        """The guess was right: let go of what was saved. What is on its way is stepped as usual."""
        self._is_over.set()
        self._orders.on_trial.clear()
        for savepoint in self._savepoints:
            await self._let_go(savepoint)
            if savepoint.is_stepped:
                await self._store.delete(savepoint.gradients.key)

    async def undo(self) -> None:
        """Put everything back. Where that fails, the stream has failed."""
        self._stream.withdraw()
        await self._stream.drain()
        self._is_over.set()
        self._orders.on_trial.clear()
        # On the stream: so nobody gathers a unit, or reads it ahead, before it is as it was.
        restoring = [_Restore(each.gradients, self, each) for each in self._savepoints]
        self._stream.submit(restoring, in_order_of_need=False)
        await self._stream.drain()
        for savepoint in self._savepoints:
            await self._let_go(savepoint)

    async def restore(self, savepoint: _Savepoint) -> None:
        """Put a sub-group back.

        Raises:
            StorageError: a shard could not be read, or what must leave not be written.
        """
        part, held, copies = savepoint.gradients.part, savepoint.held, savepoint.copies
        for key in self._keys(part):
            if key not in held and key not in copies:  # it has come to be on trial
                await self._store.forget(key)
        while held:
            await self._store.put_back(*held.popitem())
        for key, copy in copies.items():
            await self._copy(copy, key)
        self._stepper.adopt({part.index: savepoint.state})

    def _keys(self, part: Part) -> list[ShardKey]:
        """The shards that a step of a part changes."""
        states = map(state_kind, self._stepper.state_of(part).shards)
        keys = [part.key(kind) for kind in (*self._plan.format_of(part).at_most(part), *states)]
        return [key for key in keys if key in self._store]

    async def _save(self, gradients: PartGradients) -> _Savepoint | None:
        """Save a sub-group, if that costs little."""
        store, part = self._store, gradients.part
        sizes = {key: store.num_bytes(key) for key in self._keys(part)}
        total_bytes = sum(sizes.values())
        if total_bytes > self._left_bytes:
            return None
        self._orders.on_trial.add(part.index)
        savepoint = _Savepoint(gradients, self._stepper.state_of(part).copy())
        savepoint.held = {key: version for key in sizes if (version := store.hold_clean(key)) is not None}
        newer = [key for key in sizes if key not in savepoint.held]
        is_saved = 2 * sum(sizes[key] for key in newer) <= total_bytes
        try:
            for key in newer if is_saved else ():
                copy = key._replace(kind=saved_kind(key.kind))
                is_saved = is_saved and store.prepare(copy, sizes[key])
                if is_saved:
                    savepoint.copies[key] = copy
                    await self._copy(key, copy)
        except BaseException:
            is_saved = False
            raise
        finally:
            if not is_saved:
                self._orders.on_trial.discard(part.index)
                await self._let_go(savepoint)
        if not is_saved:
            return None
        self._left_bytes -= total_bytes
        return savepoint

    async def _copy(self, key: ShardKey, to: ShardKey) -> None:
        """Copy a shard's bytes to another; its own are void before."""
        store, is_copied = self._store, False
        target = (await store.put(to, store.num_bytes(key), owner=_OWNER)).tensor
        try:
            source = (await store.fetch(key, owner=_OWNER)).tensor
            try:
                await store.host.copy(source, target)
                is_copied = True
            finally:
                store.release(key, owner=_OWNER)
        finally:
            store.release(to, owner=_OWNER, dirty=is_copied)

    async def _let_go(self, savepoint: _Savepoint) -> None:
        if self._store.nvme is not None:
            self._store.nvme.versions.let_go(savepoint.held)
        savepoint.held.clear()
        while savepoint.copies:
            await self._store.forget(savepoint.copies.popitem()[1])


@dataclass(frozen=True, slots=True)
class _Attempt(Step):
    """A sub-group to step on trial."""

    trial: Trial

    @property
    def backlog_bytes(self) -> int:
        """Nothing that backward should wait for: gradients stay until the step, whether it has begun or not."""
        return 0

    async def run(self, stepper: SubGroupStepper, pinned: Callable[[], None]) -> None:
        """See ``Trial.attempt``."""
        await self.trial.attempt(self, pinned)


@dataclass(frozen=True, slots=True)
class _Restore(Job):
    """A sub-group to put back."""

    trial: Trial
    savepoint: _Savepoint

    async def run(self, stepper: SubGroupStepper, pinned: Callable[[], None]) -> None:
        """See ``Trial.restore``."""
        await self.trial.restore(self.savepoint)


class Speculation:
    """Whether steps begin on trial, and the one that has. Belongs to the training thread (and autograd's).

    Args:
        loop: the loop thread.
        begin: makes a trial.

    Attributes:
        num_begun: how many steps have begun on trial.
        num_undone: how many of them were undone.
        reclaim: called when a trial is undone: gradients that were handed over wait again.
    """

    def __init__(self, loop: LoopThread, begin: Callable[[], Trial]) -> None:
        self._loop = loop
        self._begin = begin
        self._trial: Trial | None = None
        self._units: set[int] = set()  # on trial
        self._refuted: deque[bool] = deque(maxlen=_NUM_REMEMBERED)  # of the last steps, whether the guess was wrong
        self._num_to_wait = 0
        self._was_undone = False  # since the last step
        self.num_begun = 0
        self.num_undone = 0
        self.reclaim: Callable[[], None] = lambda: None

    @property
    def pays(self) -> bool:
        """Whether a step should begin on trial. The first never does: nothing is known, and its states are new."""
        is_left_alone = not (self._num_to_wait or self._was_undone)
        return is_left_alone and 2 * sum(self._refuted) < len(self._refuted)

    def is_on_trial(self, unit: int) -> bool:
        """Whether a part of a unit may have been stepped on trial."""
        return unit in self._units

    def jobs(self, gradients: Sequence[PartGradients], shadow: Shadow) -> list[Job]:
        """Jobs on trial for a step that has begun, or begins."""
        if self._trial is None:
            self._trial = self._begin()
        self._units.update(each.part.unit for each in gradients)
        return [_Attempt(each, shadow, self._trial) for each in gradients]

    def accept(self) -> list[PartGradients]:
        """The guess was right. Returns the sub-groups that have yet to be stepped and are not on their way."""
        trial, self._trial = self._trial, None
        self._units.clear()
        if trial is None:
            return []
        self._loop.run(trial.accept())
        self.num_begun += trial.has_begun
        return trial.waiting

    def undo(self) -> None:
        """Put everything back, as if the step had not begun; nothing where it has not."""
        trial, self._trial = self._trial, None
        self._units.clear()
        if trial is not None:
            self._was_undone = True
            try:
                self._loop.run(trial.undo())
            finally:
                self.reclaim()
                self.num_begun += trial.has_begun
                self.num_undone += trial.has_begun

    def note(self, refuted: bool) -> None:
        """A step is about to be taken or skipped: remember whether it was, or would have been, guessed wrongly.

        If it was undone for another reason, somebody has done what he may do in every step: wait for some of them.
        """
        self._refuted.append(refuted)
        interfered = self._was_undone and not refuted
        self._num_to_wait = _NUM_REMEMBERED if interfered else max(self._num_to_wait - 1, 0)
        self._was_undone = False
