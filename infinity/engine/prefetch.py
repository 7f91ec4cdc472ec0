"""``PrefetchScheduler``: records the order in which training touches shards, and fetches ahead along it.

The training thread says what it needs (``gather``), when it is done (``release``) and where it is (``begin_forward``,
``touch``); the scheduler turns that into demands and, looking ahead, into prefetches in two lanes:

* **training**: the next units into device memory, and the gradients of the units whose backward comes next into host
  memory, along the order of the last cycle. Before the first has been recorded it assumes that units run in the order
  in which the model holds them, and backward the other way round. A unit whose parameters are about to change is not
  gathered ahead: its optimizer step comes first.
* **steps**: the state of the sub-groups that are stepped next, into host memory. The nearest, as many bytes as keep the
  disk busy while one is stepped, may displace what is needed later. Those beyond take only memory that is free:
  displacing residents for them would read each byte once per cycle again that could have stayed.

Training and evaluation have an order each, so that an evaluation between two steps teaches the scheduler nothing wrong.

Threads: the class says which methods are for the training thread (or autograd's) and which run on the loop. Units are
only ever pinned by the owner ``TRAINING``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from infinity.engine.activity import Activity
from infinity.engine.stream import StepStream
from infinity.engine.unit import ACTIVATION, GATHERED, GRAD, GRAD_SUM, PARAM, SAVED, Part, Unit
from infinity.store.device import DeviceTier
from infinity.store.loop import LoopThread
from infinity.store.order import Access, AccessOrder, Recurrence, Reversal, Use
from infinity.store.pool import StreamEvent
from infinity.store.residency import State
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore

TRAINING = "training"

BACKLOG_SHARE = 8
"""What part of host memory gradients may take that wait for their step, before backward waits."""


@dataclass(slots=True)
class SchedulerStatistics:
    """Counters since the start, and the seconds that the training thread waited for units."""

    num_gathers: int = 0
    num_stalls: int = 0
    stall_seconds: float = 0.0


class Orders:
    """The recorded orders of training and evaluation, which of the two is running, and when sub-groups are stepped.

    Args:
        units: all units.
        parts: all parts.
        step_keys: the shards that a step of a part reads.
        under_backward: whether steps begin there.

    Attributes:
        activations: those that are away; they are used when their unit is gathered next, the latest first.
        on_trial: the parts that were stepped on trial: their gradients, and what was saved, are kept until the step.
        look_ahead: called when memory may have room for more; the scheduler's, once there is one.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        parts: Sequence[Part],
        step_keys: Callable[[Part], list[ShardKey]],
        *,
        under_backward: bool = False,
    ) -> None:
        self._units = units
        self._parts = parts
        self._step_keys = {part.index: step_keys(part) for part in parts if part.stepped}
        self._part_of = {(part.unit, part.position): part.index for part in parts}
        self.training = AccessOrder(self._keys_of)
        self.evaluation = AccessOrder(self._keys_of)
        self.current = self.training
        self.activations = Reversal(self.training)
        self.on_trial: set[int] = set()
        self.look_ahead: Callable[[], None] = lambda: None
        forward = [Access(Use.GATHER, unit.index) for unit in units]
        backward = [
            access
            for unit in reversed(units)
            for access in (
                Access(Use.GATHER, unit.index),
                *(Access(Use.GRADIENT, part.index) for part in unit.parts if part.stepped),
            )
        ]
        lap = [Access(Use.FORWARD, 0), *forward, *backward]
        self.training.adopt(lap)
        self.evaluation.adopt([Access(Use.FORWARD, 0), *forward])
        due = {
            access.where: position + 1 if under_backward else len(lap)
            for position, access in enumerate(lap)
            if access.use is Use.GRADIENT
        }
        self.steps = Recurrence(self.training, sorted(due.items(), key=lambda item: (item[1], item[0])))

    def shard_distance(self, key: ShardKey) -> float:
        """How far away training's, or the optimizer's, next use of a shard is."""
        if key.kind == ACTIVATION:
            return self.activations.distance(key)
        part = self._part_of[key.unit, key.part]
        if part in self.on_trial and (key.kind in (GRAD, GRAD_SUM) or key.kind.startswith(SAVED)):
            return float(self.training.num_left)
        return min(self.training.distance(key), self.steps.distance(part))

    def unit_distance(self, unit: int) -> float:
        """How far away the next gather of a unit is, in what is running now."""
        return self.current.distance(unit)

    def next_in_training(self, unit: int) -> float:
        """How far away training's next gather of a unit is."""
        return self.training.distance(unit)

    def _keys_of(self, access: Access) -> Iterable[ShardKey | int]:
        if access.use is Use.GATHER:
            parts = self._units[access.where].parts
            return [access.where, *(part.key(kind) for part in parts for kind in (PARAM, GATHERED))]
        if access.use is Use.GRADIENT:
            return [self._parts[access.where].key(GRAD), self._parts[access.where].key(GRAD_SUM)]
        return []

    def step_keys(self, part: int) -> list[ShardKey]:
        """The shards that a step of a sub-group reads."""
        return self._step_keys[part]


class PrefetchScheduler:
    """Demands and prefetches of units and shards.

    Args:
        loop: the loop thread.
        store: shards in host memory and on NVMe.
        device: gathered units.
        orders: the recorded orders.
        units: all units.
        parts: all parts.
        stream: the sub-groups on their way through the optimizer.
        depth: how many units ahead may be gathered.
        activity: what the training thread does; told of its waits.
        ahead_bytes: how many bytes of sub-groups may be read ahead by displacing what is needed later; 0: none.
        backlog_bytes: how many bytes of gradients may wait for their step before backward waits for it.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        device: DeviceTier,
        orders: Orders,
        units: Sequence[Unit],
        parts: Sequence[Part],
        stream: StepStream,
        activity: Activity,
        *,
        depth: int,
        ahead_bytes: int,
        backlog_bytes: int,
    ) -> None:
        self.statistics = SchedulerStatistics()
        self._loop = loop
        self._store = store
        self._device = device
        self._orders = orders
        self._units = units
        self._parts = parts
        self._stream = stream
        self._activity = activity
        stream.stepping = self._begin_part
        self._depth = depth
        self._ahead_bytes = ahead_bytes
        self._backlog_bytes = backlog_bytes
        self._asked = False
        self._is_halted = False
        self._complete_at: int | None = None  # evictions when all that steps need was last found resident

    # The training thread

    def start(self) -> None:
        """All shards have their values: from now on they may be fetched ahead."""
        self._orders.look_ahead = self.look_ahead_soon

    @contextlib.asynccontextmanager
    async def replacing(self) -> AsyncIterator[None]:
        """A context in which all shards get other bytes: nobody brings any in ahead, and gathered units are dropped."""
        self._is_halted = True
        try:
            await self._device.residency.settle()
            await self._store.host.residency.quiesce()
            yield
        finally:
            await self._invalidate_all()
            self._is_halted = False
            self.look_ahead_soon()

    def begin_forward(self, *, training: bool) -> None:
        """A forward pass of the whole model begins."""
        self._loop.call_soon(self._begin_forward, training)

    def gather(self, unit: Unit, *, in_backward: bool) -> torch.Tensor:
        """Wait until a unit is in device memory, and pin it: ``uint8``, shape ``(unit.num_bytes,)``.

        Backward also waits until steps have kept up with it: where the disk is slower than its arithmetic, gradients
        would take the room of the state that steps need, or, with little memory, go to NVMe and back.

        Raises:
            BudgetError: it does not fit beside the units in use.
            StorageError: a shard could not be read.
        """
        with self._activity.waiting(unit.name) as causes:
            buffer, stalled = self._loop.run(self._gather(unit.index, causes, in_backward=in_backward))
        self.statistics.num_gathers += 1
        if stalled:
            self.statistics.num_stalls += 1
            self.statistics.stall_seconds += stalled
        return buffer

    def release(self, unit: Unit) -> None:
        """Unpin a unit; its memory may be used again after the work submitted so far."""
        self._loop.call_soon(self._release, unit.index, self._device.compute_event())

    def release_all(self) -> None:
        """Unpin every unit and gradient shard: after an interrupted forward or backward."""
        self._loop.call_soon(self._release_all, self._device.compute_event())

    # The loop thread

    async def _gather(
        self, unit: int, causes: list[tuple[str, float]], *, in_backward: bool
    ) -> tuple[torch.Tensor, float]:
        """The unit's memory, and for how many seconds it had to be waited for."""
        begun = time.perf_counter()
        residency = self._device.residency
        self._orders.current.access(Access(Use.GATHER, unit))
        self._plan(unit)
        self.look_ahead_soon()
        is_behind = in_backward and self._stream.backlog_bytes > self._backlog_bytes
        if is_behind or self._stream.is_pending(unit):
            if is_behind:
                await self._stream.until_backlog(self._backlog_bytes)
            await self._stream.ready(unit)
            causes.append(("optimizer", time.perf_counter()))
        was_resident, room_seconds = residency.state_of(unit) is State.CLEAN, residency.statistics.room_seconds
        demand = asyncio.ensure_future(self._demand(unit))
        await asyncio.sleep(0)  # the demand takes its room and its place in the queue first
        self._look_ahead()
        buffer = await demand
        if not was_resident:
            room_seconds = residency.statistics.room_seconds - room_seconds
            ended = time.perf_counter()
            begun_reading = min((causes[-1][1] if causes else begun) + room_seconds, ended)
            causes += [("room", begun_reading)] if room_seconds else []
            causes.append(("read", ended))
        return buffer, causes[-1][1] - begun if causes else 0.0

    def _plan(self, unit: int) -> None:
        """A unit is about to be demanded; called in the order of the program, before anything else is done for it."""

    async def _invalidate_all(self) -> None:
        await self._device.invalidate_all()

    async def _demand(self, unit: int) -> torch.Tensor:
        return await self._device.gather(unit, owner=TRAINING)

    def _release(self, unit: int, after: StreamEvent | None) -> None:
        self._device.release(unit, owner=TRAINING, after=after)
        self.look_ahead_soon()

    def _release_all(self, after: StreamEvent | None) -> None:
        if after is not None:
            after.synchronize()
        self._device.residency.release_all(owner=TRAINING)
        self._store.host.residency.release_all(owner=TRAINING)

    def _begin_forward(self, training: bool) -> None:
        orders = self._orders
        if not training:
            orders.evaluation.end_cycle()
        orders.current = orders.training if training else orders.evaluation
        orders.current.access(Access(Use.FORWARD, 0))
        self._look_ahead()

    def touch(self, use: Use, where: int) -> None:
        """Record an access that is no gather (loop thread)."""
        self._orders.training.access(Access(use, where))
        self.look_ahead_soon()

    def _begin_part(self, part: Part) -> None:
        """A sub-group's shards are in memory and it is being stepped: time to read the next ones."""
        self._orders.steps.happened(part.index)
        self._complete_at = None  # one that had been left out may be expected again
        self._look_ahead()

    def end_cycle(self) -> None:
        """The step is complete: what was recorded predicts the next cycle (loop thread)."""
        self._orders.current = self._orders.training
        self._orders.training.end_cycle()
        self._orders.steps.end_lap()
        self.look_ahead_soon()

    def look_ahead_soon(self) -> None:
        """Look ahead once what is going on now has been dealt with; asking often costs nothing (loop thread)."""
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._look_ahead)

    def _look_ahead(self) -> None:
        self._asked = False
        if not self._is_halted:
            self._look_along_training()
            self._look_along_steps()

    def _look_along_training(self) -> None:
        orders, num_units, has_room = self._orders, 0, True
        for ahead, access in enumerate(orders.current.upcoming()):
            if access.use is Use.GATHER:
                unit = access.where
                crosses = orders.current is orders.training and ahead >= orders.training.num_left
                if num_units >= self._depth or not self._prefetch_unit(unit, crosses):
                    return
                num_units += 1
            elif access.use is Use.GRADIENT and has_room:
                has_room = self._prefetch_gradients(self._parts[access.where])

    def _prefetch_unit(self, unit: int, beyond_step: bool) -> bool:
        """Start to gather a unit that comes next, unless its parameters will change; whether it is on its way."""
        return not self._will_change(unit, beyond_step) and self._device.prefetch(unit)

    def _will_change(self, unit: int, beyond_step: bool) -> bool:
        """Whether a unit will be stepped before it is gathered next."""
        if self._stream.is_pending(unit):
            return True
        if not beyond_step:
            return False
        steps = self._orders.steps
        half_lap = len(self._orders.training) / 2
        return any(part.stepped and steps.distance(part.index) < half_lap for part in self._units[unit].parts)

    def _look_along_steps(self) -> None:
        num_evictions = self._store.host.residency.statistics.num_evictions
        if self._complete_at == num_evictions:  # what comes is resident from the start
            return
        num_bytes = 0
        for part in self._next_steps():
            keys = [key for key in self._orders.step_keys(part) if key in self._store]
            displace = 0 < self._ahead_bytes >= num_bytes
            if not all(self._store.prefetch(key, displace=displace) for key in keys):
                return
            num_bytes += sum(self._store.num_bytes(key) for key in keys)
        self._complete_at = self._store.host.residency.statistics.num_evictions

    def _next_steps(self) -> Iterable[int]:
        """Sub-groups in the order in which they will be stepped: those on the way, then as in the last cycle."""
        waiting = [part.index for part in self._stream.parts]
        yield from waiting
        taken = set(waiting)
        yield from (part for part in self._orders.steps.upcoming() if part not in taken)

    def _prefetch_gradients(self, part: Part) -> bool:
        """Bring in gradients that others will be added to, or take memory for those that will be the first.

        Returns:
            Whether there was room: else there is none for those that come later either.
        """
        known = [part.key(kind) for kind in (GRAD, GRAD_SUM) if part.key(kind) in self._store]
        if known or not part.stepped:
            return all(self._store.prefetch(key) for key in known)
        return self._store.prepare(part.key(GRAD), part.param_bytes)
