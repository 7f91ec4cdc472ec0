"""``PrefetchScheduler``: records the order in which training touches shards, and fetches ahead along it.

The training thread says what it needs (``gather``), when it is done (``release``) and where it is (``begin_forward``,
``touch``); the scheduler turns that into demands and, looking ahead along the order of the last cycle, into prefetches:
the next units into device memory, the gradients of the units whose backward comes next, and the state of the next
sub-groups into host memory. Before the first cycle has been recorded it assumes that units run in the order in which
the model holds them, and backward the other way round.

Training and evaluation have an order each, so that an evaluation between two steps teaches the scheduler nothing wrong.

Threads: the class says which methods are for the training thread (or autograd's) and which run on the loop. Units are
only ever pinned by the owner ``TRAINING``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from infinity.engine.unit import GRAD, GRAD_SUM, PARAM, Part, Unit
from infinity.store.device import DeviceTier
from infinity.store.loop import LoopThread
from infinity.store.order import Access, AccessOrder, Use
from infinity.store.pool import StreamEvent
from infinity.store.residency import State
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore

TRAINING = "training"
OPTIMIZER = "optimizer"
_SUB_GROUPS_AHEAD = 2


@dataclass(slots=True)
class SchedulerStatistics:
    """Counters since the start, and the seconds that the training thread waited for shards."""

    num_gathers: int = 0
    num_stalls: int = 0
    stall_seconds: float = 0.0


class Orders:
    """The recorded orders of training and evaluation, and which of the two is running."""

    def __init__(
        self, units: Sequence[Unit], parts: Sequence[Part], step_keys: Callable[[Part], list[ShardKey]]
    ) -> None:
        self._units = units
        self._parts = parts
        self._step_keys = step_keys
        self.training = AccessOrder(self._keys_of)
        self.evaluation = AccessOrder(self._keys_of)
        self.current = self.training
        forward = [Access(Use.GATHER, unit.index) for unit in units]
        backward = [
            access
            for unit in reversed(units)
            for access in (
                Access(Use.GATHER, unit.index),
                *(Access(Use.GRADIENT, part.index) for part in unit.parts if part.stepped),
            )
        ]
        steps = [Access(Use.STEP, part.index) for part in parts if part.stepped]
        self.training.adopt([Access(Use.FORWARD, 0), *forward, *backward, *steps])
        self.evaluation.adopt([Access(Use.FORWARD, 0), *forward])

    def shard_distance(self, key: ShardKey) -> float:
        """How far away training's next use of a shard is."""
        return self.training.distance(key)

    def unit_distance(self, unit: int) -> float:
        """How far away the next gather of a unit is, in what is running now."""
        return self.current.distance(unit)

    def _keys_of(self, access: Access) -> Iterable[ShardKey | int]:
        if access.use is Use.GATHER:
            return [access.where, *(part.key(PARAM) for part in self._units[access.where].parts)]
        if access.use is Use.GRADIENT:
            return [self._parts[access.where].key(GRAD), self._parts[access.where].key(GRAD_SUM)]
        if access.use is Use.STEP:
            return self.step_keys(access.where)
        return []

    def step_keys(self, part: int) -> list[ShardKey]:
        """The shards that a step of a sub-group reads."""
        return self._step_keys(self._parts[part])


class PrefetchScheduler:
    """Demands and prefetches of units and shards.

    Args:
        loop: the loop thread.
        store: shards in host memory and on NVMe.
        device: gathered units.
        orders: the recorded orders.
        units: all units.
        parts: all parts.
        depth: how many units ahead may be gathered.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        device: DeviceTier,
        orders: Orders,
        units: Sequence[Unit],
        parts: Sequence[Part],
        *,
        depth: int,
    ) -> None:
        self.statistics = SchedulerStatistics()
        self._loop = loop
        self._store = store
        self._device = device
        self._orders = orders
        self._units = units
        self._parts = parts
        self._depth = depth
        self._stepping = False

    # The training thread

    def begin_forward(self, *, training: bool) -> None:
        """A forward pass of the whole model begins."""
        self._loop.call_soon(self._begin_forward, training)

    def gather(self, unit: Unit) -> torch.Tensor:
        """Wait until a unit is in device memory, and pin it: ``uint8``, shape ``(unit.num_bytes,)``.

        Raises:
            BudgetError: it does not fit beside the units in use.
            StorageError: a shard could not be read.
        """
        start = time.perf_counter()
        buffer, was_resident = self._loop.run(self._gather(unit.index))
        self.statistics.num_gathers += 1
        if not was_resident:
            self.statistics.num_stalls += 1
            self.statistics.stall_seconds += time.perf_counter() - start
        return buffer

    def release(self, unit: Unit) -> None:
        """Unpin a unit; its memory may be used again after the work submitted so far."""
        self._loop.call_soon(self._release, unit.index, self._device.compute_event())

    def release_all(self) -> None:
        """Unpin every unit and gradient shard: after an interrupted forward or backward."""
        self._loop.call_soon(self._release_all, self._device.compute_event())

    # The loop thread

    async def _gather(self, unit: int) -> tuple[torch.Tensor, bool]:
        was_resident = self._device.residency.state_of(unit) is State.CLEAN
        self._orders.current.access(Access(Use.GATHER, unit))
        demand = asyncio.ensure_future(self._device.gather(unit, owner=TRAINING))
        await asyncio.sleep(0)  # the demand takes its room and its place in the queue first
        self._look_ahead()
        buffer = await demand
        self._look_ahead()
        return buffer, was_resident

    def _release(self, unit: int, after: StreamEvent | None) -> None:
        self._device.release(unit, owner=TRAINING, after=after)
        self._look_ahead()

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
        self._look_ahead()

    async def begin_step(self) -> None:
        """The optimizer is about to change parameters: nothing may be on its way into device memory."""
        self._stepping = True
        self._orders.current = self._orders.training
        await self._device.residency.settle()

    def end_step(self, *, complete: bool) -> None:
        """The step is over; a complete one ends the cycle of the recorded order (loop thread)."""
        self._stepping = False
        if complete:
            self._orders.training.end_cycle()
            self._look_ahead()
        else:
            self._orders.training.abandon_cycle()

    def _look_ahead(self) -> None:
        num_units = num_steps = 0
        for access in self._orders.current.upcoming():
            if access.use is Use.STEP:
                num_steps += 1
                if num_steps > _SUB_GROUPS_AHEAD or not self._prefetch_state(access.where):
                    return
            elif access.use is Use.GRADIENT:
                self._prefetch_gradients(self._parts[access.where])
            elif access.use is Use.GATHER:
                # Beyond a step, and while one runs, parameters are about to change.
                if num_steps or self._stepping or num_units >= self._depth or not self._device.prefetch(access.where):
                    return
                num_units += 1

    def _prefetch_state(self, part: int) -> bool:
        keys = [key for key in self._orders.step_keys(part) if key in self._store]
        return all(self._store.prefetch(key) for key in keys)

    def _prefetch_gradients(self, part: Part) -> None:
        for kind in (GRAD, GRAD_SUM):
            if part.key(kind) in self._store:
                self._store.prefetch(part.key(kind))
