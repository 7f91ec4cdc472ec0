"""``StepStream``: sub-groups on their way through the optimizer, one after the other, beside training.

Guarantees
    * A job (one sub-group with its gradients and the hyper-parameters of its step) is stepped exactly once, or, after a
      failure, not at all: the first error ends the stream, and everyone who waits or comes later is told.
    * Whoever gathers a unit first waits until none of its parts is on the way (``ready``).
    * One job at a time holds memory, and it holds no more than the start-up arithmetic counted for a step
      (``engine/budget.py``); the state of those that come next is read ahead by the scheduler.

Which job is next: one whose unit training waits for; or else, under backward, the one that came first; and once the
step is complete, the one whose unit training needs soonest, unless the order of steps is to be that of the jobs. So the
tail of a step runs in the order in which the next forward asks for it, and whatever is left over runs under that
forward. No order changes a number: each sub-group is stepped with its own gradients and with hyper-parameters that were
copied when its step began.

Rejected: several jobs at once (arithmetic is bound by memory, and a second job's shards would take the room of shards
that stay resident); a priority for each job given at submission (what training needs next is known only later).

Everything here belongs to the loop thread.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from infinity.engine.shadow import Shadow
from infinity.engine.substep import SubGroupStepper
from infinity.engine.unit import Part, PartGradients
from infinity.errors import EngineStateError


def half_way(error: BaseException) -> EngineStateError:
    """What everyone is told once a step has failed."""
    cause = "the store's event loop has ended" if isinstance(error, asyncio.CancelledError) else error
    return EngineStateError(
        f"an optimizer step, or a change of weights, failed half-way, so the state is no longer whole: {cause}; "
        "go back to a commit with engine.rollback(), or start again from your last saved state"
    )


@dataclass(frozen=True, slots=True)
class Job(ABC):
    """One sub-group that is to change.

    Attributes:
        gradients: its own.
    """

    gradients: PartGradients

    @property
    def part(self) -> Part:
        """Which sub-group."""
        return self.gradients.part

    @property
    def backlog_bytes(self) -> int:
        """The gradients that go with it."""
        return self.gradients.num_bytes

    @abstractmethod
    async def run(self, stepper: SubGroupStepper, pinned: Callable[[], None]) -> None:
        """Change it; ``pinned`` is called when all shards are in memory.

        Raises:
            ModelError: the optimizer cannot be stepped sub-group by sub-group.
            StorageError: a shard could not be read or written.
        """


@dataclass(frozen=True, slots=True)
class Step(Job):
    """One sub-group to step.

    Attributes:
        shadow: steps it, with the hyper-parameters of its step.
    """

    shadow: Shadow

    async def run(self, stepper: SubGroupStepper, pinned: Callable[[], None]) -> None:
        """See ``SubGroupStepper.step``."""
        await stepper.step(self.gradients, self.shadow, pinned)


class StepStream:
    """The jobs that are waiting, and the one that runs.

    Args:
        stepper: steps one sub-group.
        invalidate: drops what was gathered of a unit, which is about to change.
        unit_distance: how far away training's next gather of a unit is.

    Attributes:
        stepping: called when the shards of a job are all in memory and its arithmetic begins.
        changing: called with the units that jobs which have come will change.
        error: what ended it.
    """

    def __init__(
        self,
        stepper: SubGroupStepper,
        invalidate: Callable[[int], Awaitable[None]],
        *,
        unit_distance: Callable[[int], float],
    ) -> None:
        self._stepper = stepper
        self._invalidate = invalidate
        self._unit_distance = unit_distance
        self._jobs: list[Job] = []
        self._pending: Counter[int] = Counter()  # parts on the way, by unit
        self._awaited: Counter[int] = Counter()  # who waits, by unit
        self._in_order_of_need = False
        self._task: asyncio.Task[None] | None = None
        self._changed: asyncio.Future[None] | None = None
        self._closed = False
        self._told = False
        self.stepping: Callable[[Part], None] = lambda part: None
        self.changing: Callable[[set[int]], None] = lambda units: None
        self.error: BaseException | None = None

    @property
    def parts(self) -> Sequence[Part]:
        """What waits for its turn, in the order in which it will have it, as far as can be said now."""
        return [job.part for job in sorted(self._jobs, key=self._turn)]  # stable: equals in the order they came in

    def is_pending(self, unit: int) -> bool:
        """Whether a part of the unit is on the way."""
        return self._pending[unit] > 0

    def submit(self, jobs: Iterable[Job], *, in_order_of_need: bool) -> None:
        """Take in jobs of one step.

        Args:
            jobs: in their order.
            in_order_of_need: from now on, step first what training needs first.
        """
        self._in_order_of_need = in_order_of_need
        if self._closed or self.error is not None:
            return
        jobs = list(jobs)
        for job in jobs:
            assert all(job.part is not other.part for other in self._jobs), f"part {job.part.index} stepped twice"
            self._jobs.append(job)
            self._pending[job.part.unit] += 1
        self.changing({job.part.unit for job in jobs})
        if self._jobs and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def ready(self, unit: int) -> None:
        """Wait until no part of a unit is on the way.

        Raises:
            EngineStateError: a step failed half-way.
        """
        self._awaited[unit] += 1
        try:
            while self._pending[unit] and self.error is None:
                await self._change()
        finally:
            self._awaited[unit] -= 1
        self.check()

    @property
    def backlog_bytes(self) -> int:
        """The gradients of what waits for its turn."""
        return sum(job.backlog_bytes for job in self._jobs)

    async def until_backlog(self, num_bytes: int) -> None:
        """Wait until no more gradients than so many bytes wait for their turn, or the stream has ended."""
        while self.backlog_bytes > num_bytes and self.error is None:
            await self._change()

    def withdraw(self) -> None:
        """Drop what has not begun."""
        for job in self._jobs:
            self._pending[job.part.unit] -= 1
        self._jobs.clear()
        self._tell()

    async def drain(self) -> None:
        """Wait until nothing is on the way. What failed is left in ``error``."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def stepped(self) -> None:
        """Wait until nothing is on the way, and all went well.

        Raises:
            EngineStateError: a step failed half-way.
        """
        await self.drain()
        if self.error is not None:
            raise half_way(self.error) from self.error

    async def reset(self) -> None:
        """All state will be another: drop what has not begun, wait for what has, and forget what failed."""
        self._jobs.clear()
        await self.drain()
        self._pending.clear()
        self.error, self._told = None, False

    async def aclose(self) -> None:
        """Drop what has not begun and wait for what has."""
        self._closed = True
        self._jobs.clear()
        await self.drain()

    def check(self) -> None:
        """Raise what ended the stream, the first time as it was.

        Raises:
            EngineStateError: a step failed half-way.
        """
        error = self.error
        if error is not None and not self._told and isinstance(error, Exception):
            self._told = True
            raise error
        if error is not None:
            raise half_way(error) from error

    async def _change(self) -> None:
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    async def _run(self) -> None:
        try:
            while self._jobs:
                job = min(self._jobs, key=self._turn)
                self._jobs.remove(job)
                await self._step(job)
                self._pending[job.part.unit] -= 1
                self._tell()
        except BaseException as error:
            self.error = error
            self._jobs.clear()
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._task = None
            self._tell()

    def _turn(self, job: Job) -> tuple[bool, float, int]:
        """What comes first has the least; of equals it is the one that came first."""
        unit = job.part.unit
        needed = (self._unit_distance(unit), job.part.index) if self._in_order_of_need else (0.0, 0)
        return not self._awaited[unit], *needed

    async def _step(self, job: Job) -> None:
        part = job.part
        await self._invalidate(part.unit)
        await job.run(self._stepper, lambda: self.stepping(part))

    def _tell(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)
