"""Gathers that all ranks plan alike: which units are in device memory, which come next, and which must leave for them.

On one rank a prefetch is a guess that costs nothing when it is wrong or comes late. Over ranks it is a collective, in
which all must take part in the same order. So nothing here may depend on what is ready when: each decision is made at a
demand, a point of the program that is the same on all ranks, from what is the same on all ranks: the recorded order,
what was demanded, released and stepped before, and the budget, which is that of all. What differs in time (a
read, a step that has yet to end) is waited for by the collective, on the lane.

A unit is *planned* from the moment when its gather is decided to the moment when another is decided to take its place,
and pinned for so long; thus memory below (``store/residency.py``) never has to choose.

In stages 1 and 2 the gathered unit is kept as a shard beside the slices until a step changes it, so that other gathers
of it need no collective. Whether there is one is known from the program too.

Rejected: to let ranks prefetch as they find room, and to ask the others at each demand (a round trip before every
gather, and no overlap).
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from infinity.engine.collectives import Collectives
from infinity.engine.prefetch import Orders
from infinity.engine.ranks.lane import Lane
from infinity.engine.stream import StepStream
from infinity.engine.unit import GATHERED, PARAM, Part, Unit
from infinity.errors import BudgetError
from infinity.store.device import DeviceTier, Piece
from infinity.store.order import Use
from infinity.store.pool import lease_bytes
from infinity.store.store import TieredStore

_OWNER = "ranks"


class _Bringing:
    """A gather that is under way.

    Attributes:
        ready: this rank's slices are in ``buffer``.
        done: so are all others; ``None`` where no collective is needed.
        waits: a step changes the unit first.
        task: all of it.
    """

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits
        self.ready: Future[None] = Future()
        self.buffer: torch.Tensor | None = None
        self.done: Future[None] | None = None
        self.task: asyncio.Task[None] | None = None

    def fail(self, error: BaseException) -> None:
        """This rank cannot take part."""
        if not self.ready.done():
            self.ready.set_exception(error)


class PlannedGathers:
    """What is in device memory, and what is on its way. Belongs to the loop thread; ``lane`` is called from there.

    Args:
        units: all units.
        stored: all parts as this rank stores them: its slices.
        device: where they are gathered.
        store: keeps gathered units in stages 1 and 2.
        orders: what comes next.
        stream: the steps that change units.
        lane: runs the collectives.
        collectives: the lane's.
        budget_bytes: the device memory of each rank.
        depth: how many units ahead may be gathered.
        keeps: whether gathered units are kept as shards.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        stored: Sequence[Part],
        device: DeviceTier,
        store: TieredStore,
        orders: Orders,
        stream: StepStream,
        lane: Lane,
        collectives: Collectives,
        *,
        budget_bytes: int,
        depth: int,
        keeps: bool,
    ) -> None:
        self._units = units
        self._stored = stored
        self._device = device
        self._store = store
        self._orders = orders
        self._stream = stream
        self._lane = lane
        self._collectives = collectives
        self._budget_bytes = budget_bytes
        self._depth = depth
        self._keeps = keeps
        self._planned: dict[int, _Bringing] = {}
        self._in_use: Counter[int] = Counter()
        self._ahead: set[int] = set()  # planned, and not demanded since
        self._kept: set[int] = set()
        self._filling: dict[int, _Bringing] = {}
        self._clearing: dict[int, asyncio.Task[None]] = {}
        self._last: asyncio.Task[None] | None = None
        for unit in units:
            self._register(unit.index)
        device.complete = self._complete
        stream.changing = self.forget

    def demand(self, unit: int) -> None:
        """A unit is needed now: plan it, and what comes next.

        Raises:
            BudgetError: it does not fit beside what is in use.
        """
        if unit not in self._planned:
            leaving = self._room_for(unit, beyond=None)
            if leaving is None:
                raise BudgetError(f"hbm: unit {self._units[unit].name} does not fit beside what is in use")
            self._begin(unit, leaving)
        self._ahead.discard(unit)
        self._in_use[unit] += 1
        self._plan_ahead()

    async def arrived(self, unit: int) -> None:
        """Wait until a planned unit is in device memory.

        Raises:
            RanksError: another rank has ended, has failed or does something else.
            StorageError: a shard could not be read.
        """
        task = self._planned[unit].task
        assert task is not None
        with self._lane.awaited():
            await asyncio.shield(task)

    def release(self, unit: int) -> None:
        """One use of it has ended."""
        self._in_use[unit] -= 1

    def release_all(self) -> None:
        """All uses have ended, whatever was interrupted."""
        self._in_use.clear()

    def forget(self, units: Iterable[int]) -> None:
        """Units are about to change: what was gathered of them is void."""
        stale = sorted(set(units))
        for unit in stale:
            self._ahead.discard(unit)
        leaving = [unit for unit in stale if unit in self._planned]
        kept = [part for unit in stale if unit in self._kept for part in self._units[unit].parts]
        self._kept.difference_update(stale)
        gone = [(unit, self._planned.pop(unit)) for unit in leaving]
        if gone or kept:
            self._chain(functools.partial(self._clear, gone, kept, stale))
            assert self._last is not None
            self._clearing.update(dict.fromkeys(stale, self._last))

    async def forgotten(self, unit: int) -> None:
        """Wait until nothing is left of a unit that was forgotten."""
        if (clearing := self._clearing.pop(unit, None)) is not None:
            await asyncio.wait([clearing])

    async def settle(self) -> None:
        """Wait until nothing is on its way, in or out."""
        while self._last is not None and not self._last.done():
            await asyncio.wait([self._last])
        for bringing in list(self._planned.values()):
            if bringing.task is not None:
                await asyncio.wait([bringing.task])

    async def invalidate_all(self) -> None:
        """All units have become stale."""
        self.release_all()
        self.forget(unit.index for unit in self._units)
        await self.settle()

    async def invalidate(self, unit: int) -> None:
        """One has."""
        self.forget([unit])
        await self.settle()

    # Planning: no awaits, and nothing that depends on time

    def _plan_ahead(self) -> None:
        order, num_units = self._orders.current, 0
        is_training = order is self._orders.training
        for ahead, access in enumerate(order.upcoming()):
            if num_units >= self._depth or (is_training and ahead >= order.num_left):
                return
            if access.use is not Use.GATHER:
                continue
            unit = access.where
            if unit not in self._planned:
                leaving = self._room_for(unit, beyond=order.distance(unit))
                if leaving is None:
                    return
                self._begin(unit, leaving)
                self._ahead.add(unit)
            num_units += 1

    def _room_for(self, unit: int, *, beyond: float | None) -> list[int] | None:
        """Who must leave for a unit; ``None``: those who may, needed later than ``beyond``, do not make enough room."""
        distance = self._orders.unit_distance
        missing_bytes = self._size(unit) + sum(map(self._size, self._planned)) - self._budget_bytes
        leaving = []
        for other in sorted(self._planned, key=lambda each: (-distance(each), each)):
            if missing_bytes <= 0:
                break
            is_spare = not self._in_use[other] and (
                beyond is None or (other not in self._ahead and distance(other) > beyond)
            )
            if is_spare:
                leaving.append(other)
                missing_bytes -= self._size(other)
        return leaving if missing_bytes <= 0 else None

    def _size(self, unit: int) -> int:
        return lease_bytes(self._units[unit].num_bytes)

    def _begin(self, unit: int, leaving: Sequence[int]) -> None:
        bringing = _Bringing(waits=self._stream.is_pending(unit))  # a step that comes later does not wait for this
        if unit not in self._kept:
            whole = self._units[unit]
            bringing.done = self._lane.submit(
                f"all-gather of unit {whole.name}",
                lambda: self._gather(whole, bringing),
                ready=bringing.ready,
            )
        gone = [(other, self._planned.pop(other)) for other in leaving]
        self._ahead.difference_update(leaving)
        self._planned[unit] = bringing
        if self._keeps:
            self._kept.add(unit)
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        bringing.task = asyncio.ensure_future(self._bring(unit, bringing, opened))
        bringing.task.add_done_callback(_ignore)
        self._chain(functools.partial(self._open, unit, bringing, gone, opened))

    # Doing it, in the order in which it was planned

    def _chain(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        before = self._last

        async def run() -> None:
            if before is not None:
                await asyncio.wait([before])
            await step()

        self._last = asyncio.ensure_future(run())
        self._last.add_done_callback(_ignore)

    async def _open(
        self, unit: int, bringing: _Bringing, gone: Sequence[tuple[int, _Bringing]], opened: asyncio.Future[None]
    ) -> None:
        """Make room for a unit, and let it take it once no step changes it any more."""
        try:
            for other, its in gone:
                await self._drop(other, its)
            if bringing.waits:
                await self._stream.ready(unit)
        except BaseException as error:
            bringing.fail(error)
            if not opened.done():
                opened.set_exception(error)
            raise
        opened.set_result(None)
        await asyncio.sleep(0)  # it takes its room before whoever comes next

    async def _bring(self, unit: int, bringing: _Bringing, opened: asyncio.Future[None]) -> None:
        try:
            await opened
            self._filling[unit] = bringing
            await self._device.gather(unit, owner=_OWNER)
        except BaseException as error:
            bringing.fail(error)
            raise

    async def _drop(self, unit: int, bringing: _Bringing) -> None:
        assert bringing.task is not None
        await asyncio.wait([bringing.task])
        if bringing.task.exception() is None:
            self._device.release(unit, owner=_OWNER, after=None)
            await self._device.invalidate(unit)

    async def _clear(self, gone: Sequence[tuple[int, _Bringing]], kept: Sequence[Part], stale: Sequence[int]) -> None:
        for unit, bringing in gone:
            await self._drop(unit, bringing)
        for part in kept:
            await self._store.delete(part.key(GATHERED))
        for unit in stale:
            self._register(unit)

    async def _complete(self, unit: int, buffer: torch.Tensor) -> None:
        """This rank's slices are in ``buffer``: have the others' come, and keep the whole where that is due."""
        bringing = self._filling.pop(unit)
        if bringing.done is None:
            return
        bringing.buffer = buffer
        bringing.ready.set_result(None)
        await _ended(asyncio.wrap_future(bringing.done))
        bringing.buffer = None
        if self._keeps:
            await self._keep(self._units[unit], buffer)

    def _gather(self, unit: Unit, bringing: _Bringing) -> None:
        """On the lane."""
        buffer = bringing.buffer
        assert buffer is not None
        for part in unit.parts:
            self._collectives.gather_in_place(buffer[part.start : part.stop], phase=f"all-gather of unit {unit.name}")
        if buffer.device.type != "cpu":
            torch.accelerator.current_stream(buffer.device).synchronize()

    async def _keep(self, unit: Unit, buffer: torch.Tensor) -> None:
        for part in unit.parts:
            key = part.key(GATHERED)
            lease = await self._store.put(key, part.param_bytes, owner=_OWNER)
            is_kept = False
            try:
                await self._store.host.copy(buffer[part.start : part.stop], lease.tensor)
                is_kept = True
            finally:
                self._store.release(key, owner=_OWNER, dirty=is_kept)
        pieces = [Piece(part.key(GATHERED), part.start, part.stop) for part in unit.parts]
        self._device.register(unit.index, unit.num_bytes, pieces)

    def _register(self, unit: int) -> None:
        """Its bytes are this rank's slices, and what the others send."""
        slices = [self._stored[part.index] for part in self._units[unit].parts]
        pieces = [Piece(part.key(PARAM), part.start, part.stop) for part in slices]
        self._device.register(unit, self._units[unit].num_bytes, pieces)


async def _ended(future: asyncio.Future[None]) -> None:
    """Wait for the lane even when cancelled: it writes into memory until then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # nobody is left to be told
        raise cancelled
    future.result()


def _ignore(task: asyncio.Task[None]) -> None:
    """Whoever needs it is told: nobody else has to be."""
    if not task.cancelled():
        task.exception()
