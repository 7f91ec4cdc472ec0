"""Training as the residency sees it, in virtual time: forward, backward and steps over a disk of a given speed.

Nothing is computed and nothing is stored: shards are sizes, arithmetic and transfers are delays on a loop whose clock
jumps to the next event. So a hundred steps take a second, and come out the same each time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from infinity.io.backend import Priority
from infinity.io.memory import PAGE_BYTES
from infinity.store.optimum import Touch
from infinity.store.order import Access, AccessOrder, Recurrence, Use
from infinity.store.pool import BufferPool, Lease
from infinity.store.residency import Residency

PAGE = PAGE_BYTES
Key = tuple[int, str]


class _Jumps(selectors.SelectSelector):
    """A selector that never waits: it moves the clock instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and nothing is on its way"
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when there is nothing else to do."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now


def run_virtually(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run it on a loop of its own, in no time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


class Disk:
    """Moves one transfer at a time, the most urgent first.

    Args:
        pages_per_second: how fast, in either direction.

    Attributes:
        read_pages: read so far.
        written_pages: written so far.
        busy_seconds: time in which it moved something.
    """

    def __init__(self, pages_per_second: float) -> None:
        self._speed = pages_per_second
        self._queue: list[tuple[Priority, int, int, bool, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None
        self.read_pages = self.written_pages = 0
        self.busy_seconds = 0.0

    async def move(self, num_bytes: int, priority: Priority, *, write: bool) -> None:
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._numbers), num_bytes // PAGE, write, done))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        await done

    async def _work(self) -> None:
        while self._queue:
            _, _, pages, write, done = heapq.heappop(self._queue)
            await asyncio.sleep(pages / self._speed)
            self.busy_seconds += pages / self._speed
            if write:
                self.written_pages += pages
            else:
                self.read_pages += pages
            if not done.done():
                done.set_result(None)
        self._task = None


@dataclass(frozen=True)
class Model:
    """Units of one part each, and how they are trained.

    Attributes:
        num_units: how many.
        pages: of each kind of shard of a unit: ``param`` is read by forward, backward and step, which also changes it;
            ``grad`` is made by backward and deleted by the step; the rest is the step's alone.
        schedule: when sub-groups are stepped: under ``backward``, in the tail under the next forward as all gradients
            are needed first (``tail``), or before ``step`` returns (``serial``).
        seconds: of compute per unit: forward, backward, step.
    """

    num_units: int
    pages: dict[str, int]
    schedule: str = "backward"
    seconds: tuple[float, float, float] = (1.0, 2.0, 0.2)

    @property
    def state_pages(self) -> int:
        return self.num_units * sum(self.pages.values())

    @property
    def step_kinds(self) -> list[str]:
        return [kind for kind in self.pages if kind != "grad"]

    def cycle(self) -> list[list[tuple[Key, bool, bool]]]:
        """One cycle, access by access: keys with whether they are read and written."""
        accesses: list[list[tuple[Key, bool, bool]]] = []

        def step(unit: int) -> None:
            accesses.append([((unit, "grad"), True, False)] + [((unit, kind), True, True) for kind in self.step_kinds])
            accesses.append([((unit, "grad"), False, False)])

        units = range(self.num_units)
        for unit in units:
            if self.schedule == "tail":
                step(unit)
            accesses.append([((unit, "param"), True, False)])
        for unit in reversed(units):
            accesses.append([((unit, "param"), True, False)])
            accesses.append([((unit, "grad"), False, True)])
            if self.schedule == "backward":
                step(unit)
        if self.schedule == "serial":
            for unit in units:
                step(unit)
        return accesses

    def touches(self) -> list[Touch]:
        """The same as a trace."""
        return [
            Touch(key, self.pages[key[1]] * PAGE, reads, writes)
            for access in self.cycle()
            for key, reads, writes in access
        ]


@dataclass
class Cycle:
    """What one cycle took and moved."""

    seconds: float
    read_pages: int
    written_pages: int
    resident_pages: int
    busy_seconds: float

    @property
    def moved_pages(self) -> int:
        return self.read_pages + self.written_pages


class Training:
    """Training, its optimizer beside it, and a look-ahead that fetches for both, as the engine has them.

    Args:
        model: what is trained.
        ram_pages: host memory.
        disk_speed: pages per second.
        ahead_pages: how far the look-ahead may displace for the optimizer.
        depth: how many units ahead parameters are fetched.
    """

    def __init__(self, model: Model, ram_pages: int, *, disk_speed: float, ahead_pages: int, depth: int = 2) -> None:
        self.model = model
        self.disk = Disk(disk_speed)
        self.pool = BufferPool("ram", ram_pages * PAGE, lambda size: torch.empty(size, dtype=torch.uint8))
        self.residency: Residency[Key] = Residency(
            self.pool, distance=self.distance, fill=self._fill, spill=self._spill, room=self._look_soon
        )
        self.order = AccessOrder(self._keys_of)
        units = range(model.num_units)
        lap = [Access(Use.GATHER, unit) for unit in units]
        for unit in reversed(units):
            lap += [Access(Use.GATHER, unit), Access(Use.GRADIENT, unit)]
        self.order.adopt(lap)
        due = [
            (access.where, float(position + 1 if model.schedule == "backward" else len(lap)))
            for position, access in enumerate(lap)
            if access.use is Use.GRADIENT
        ]
        self.steps = Recurrence(self.order, sorted(due, key=lambda item: (item[1], item[0])))
        self._ahead_pages = ahead_pages
        self._depth = depth
        self._exists: set[Key] = {(unit, kind) for unit in units for kind in model.step_kinds}
        self._jobs: list[int] = []
        self._pending: set[int] = set()
        self._changed = asyncio.Event()
        self._asked = False
        self._in_need_order = False

    async def run(self, num_cycles: int) -> list[Cycle]:
        """Train; what each cycle took and moved."""
        loop = asyncio.get_running_loop()
        stream = loop.create_task(self._stream())
        cycles = []
        try:
            for _ in range(num_cycles):
                before = (loop.time(), self.disk.read_pages, self.disk.written_pages, self.disk.busy_seconds)
                await self._cycle()
                after = (loop.time(), self.disk.read_pages, self.disk.written_pages, self.disk.busy_seconds)
                seconds, read, written, busy = (b - a for a, b in zip(before, after, strict=True))
                resident = (self.pool.budget_bytes - self.pool.free_bytes) // PAGE
                cycles.append(Cycle(seconds, int(read), int(written), resident, busy))
        finally:
            stream.cancel()
            await asyncio.wait([stream])
            await self.residency.quiesce()
            await self.residency.close()
            self.pool.close()
        return cycles

    def distance(self, key: Key) -> float:
        return min(self.order.distance(key), self.steps.distance(key[0]))

    # Training

    async def _cycle(self) -> None:
        forward, backward, _ = self.model.seconds
        units = range(self.model.num_units)
        for unit in units:
            await self._gather(unit, forward)
        for unit in reversed(units):
            await self._gather(unit, backward)
            self.order.access(Access(Use.GRADIENT, unit))
            key = (unit, "grad")
            await self.residency.reserve(key, self._bytes(key), owner="training")
            self._exists.add(key)
            self.residency.release(key, owner="training", dirty=True)
            if self.model.schedule == "backward":
                self._submit([unit])
            self._look_soon()
        if self.model.schedule != "backward":
            self._submit(units)
        self._in_need_order = True
        self.order.end_cycle()
        self.steps.end_lap()
        if self.model.schedule == "serial":
            for unit in units:
                await self._ready(unit)
        self._look_soon()

    async def _gather(self, unit: int, seconds: float) -> None:
        self.order.access(Access(Use.GATHER, unit))
        self._look_soon()
        await self._ready(unit)
        key = (unit, "param")
        await self.residency.fetch(key, self._bytes(key), owner="training")
        await asyncio.sleep(seconds)
        self.residency.release(key, owner="training")

    # The optimizer

    def _submit(self, units: Iterable[int]) -> None:
        self._in_need_order = False
        self._jobs += units
        self._pending.update(units)
        self._changed.set()

    async def _ready(self, unit: int) -> None:
        while unit in self._pending:
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _stream(self) -> None:
        while True:
            while not self._jobs:
                await self._change()
            job = self._jobs[0]
            if self._in_need_order:
                job = min(self._jobs, key=lambda unit: (self.order.distance(unit), unit))
            self._jobs.remove(job)
            keys = [(job, "grad"), *((job, kind) for kind in self.model.step_kinds)]
            await asyncio.gather(
                *(self.residency.fetch(key, self._bytes(key), owner="optimizer", update=True) for key in keys)
            )
            self.steps.happened(job)
            self._look_soon()
            await asyncio.sleep(self.model.seconds[2])
            for key in keys:
                self.residency.release(key, owner="optimizer", dirty=key[1] != "grad")
            await self.residency.discard((job, "grad"))
            self._exists.discard((job, "grad"))
            self._pending.discard(job)
            self._changed.set()

    # The look-ahead

    def _look_soon(self) -> None:
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._asked = False
        num_units = 0
        for access in self.order.upcoming():
            key = (access.where, "param" if access.use is Use.GATHER else "grad")
            if access.use is Use.GATHER:
                if num_units >= self._depth or access.where in self._pending:
                    break
                num_units += 1
            if key in self._exists:
                if not self.residency.prefetch(key, self._bytes(key)):
                    break
            else:
                self.residency.prepare(key, self._bytes(key))
        num_pages = 0
        jobs = list(self._jobs)
        for unit in [*jobs, *(unit for unit in self.steps.upcoming() if unit not in jobs)]:
            for kind in self.model.pages:
                key = (unit, kind)
                if key in self._exists and not self.residency.prefetch(
                    key, self._bytes(key), displace=num_pages <= self._ahead_pages
                ):
                    return
                num_pages += self.model.pages[kind]

    # Bytes

    def _bytes(self, key: Key) -> int:
        return self.model.pages[key[1]] * PAGE

    def _keys_of(self, access: Access) -> list[Any]:
        if access.use is Use.GATHER:
            return [access.where, (access.where, "param")]
        return [(access.where, "grad")]

    async def _fill(self, key: Key, lease: Lease, priority: Priority) -> None:
        await self.disk.move(lease.size_bytes, priority, write=False)

    async def _spill(self, key: Key, lease: Lease, priority: Priority) -> None:
        await self.disk.move(lease.size_bytes, priority, write=True)


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
