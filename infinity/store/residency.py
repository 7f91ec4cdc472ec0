"""What stays where: the shards resident in one pool of memory, and who must leave when room is needed.

One ``Residency`` serves host memory (shards, written back to NVMe when they leave dirty), another serves device memory
(gathered units, always clean). Every resident has one state and one owner, this class:

    FILLING  -> CLEAN            its bytes are on the way in
    CLEAN   <-> DIRTY            equal to, or newer than, the copy in the tier below
    DIRTY    -> WRITING -> CLEAN its bytes are on the way out; it may be read meanwhile, not changed

Guarantees
    * A pinned resident stays. An unpinned one may leave at any time.
    * Who must leave is whoever is needed last by the recorded order (Belady's rule); a prefetch evicts only what is
      needed later than itself, and nothing that is dirty.
    * Dirty residents that would have to leave soon are written ahead of need, so that a demand rarely waits for a
      write; if everything fits, nothing is ever written.
    * A failed fill leaves nothing resident; a failed write leaves the resident dirty and readable, and the error goes
      to the demand that needs the room.
    * A cancelled wait loses nothing: fills and writes are tasks of this class, joined in ``close``.

``owner`` names who pins (training, optimizer, ...). A demand that finds everything pinned by its own owner, and nothing
on the move, could wait for ever; it raises ``BudgetError`` instead.

Everything here belongs to the loop thread.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from infinity.errors import BudgetError
from infinity.io.backend import Priority
from infinity.store.pool import BufferPool, Lease, StreamEvent

K = TypeVar("K", bound=Hashable)

Fill = Callable[[K, Lease, Priority], Awaitable[None]]
Spill = Callable[[K, Lease], Awaitable[None]]


class State(enum.Enum):
    """Where a resident's bytes stand against the tier below."""

    FILLING = "filling"
    CLEAN = "clean"
    DIRTY = "dirty"
    WRITING = "writing"


@dataclass(slots=True, eq=False)
class _Resident(Generic[K]):
    key: K
    lease: Lease
    state: State
    pins: Counter[str] = field(default_factory=Counter)
    task: asyncio.Task[None] | None = None
    error: BaseException | None = None
    after: StreamEvent | None = None

    @property
    def num_bytes(self) -> int:
        return self.lease.num_bytes

    @property
    def idle(self) -> bool:
        return not self.pins and self.state in (State.CLEAN, State.DIRTY)

    def unpin(self, owner: str) -> None:
        assert self.pins[owner] > 0, f"{self.key} released more often than fetched by {owner}"
        self.pins[owner] -= 1
        if not self.pins[owner]:
            del self.pins[owner]


@dataclass(slots=True)
class ResidencyStatistics:
    """Counters since the start: fetches that found their bytes resident or not, evictions and write-backs."""

    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    num_write_backs: int = 0


class Residency(Generic[K]):
    """The residents of one pool.

    Args:
        pool: the memory and its budget.
        distance: how far away the next use of a key is (``AccessOrder.distance``).
        fill: brings a key's bytes into a lease.
        spill: writes a key's bytes to the tier below; ``None`` where residents are never dirty or have nowhere to go.
        headroom_bytes: how much to keep free or clean by writing ahead, asked anew each time.
    """

    def __init__(
        self,
        pool: BufferPool,
        *,
        distance: Callable[[K], float],
        fill: Fill[K],
        spill: Spill[K] | None = None,
        headroom_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.pool = pool
        self.statistics = ResidencyStatistics()
        self._distance = distance
        self._fill = fill
        self._spill = spill
        self._headroom_bytes = headroom_bytes
        self._residents: dict[K, _Resident[K]] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._write_ahead_failed = False

    def __contains__(self, key: K) -> bool:
        return key in self._residents

    def state_of(self, key: K) -> State | None:
        """The state of a resident, or ``None``."""
        resident = self._residents.get(key)
        return None if resident is None else resident.state

    async def fetch(self, key: K, num_bytes: int, *, owner: str, update: bool = False) -> Lease:
        """Pin ``key``, bringing its bytes in if they are not resident. A demand: it may wait and evict.

        Args:
            key: what to fetch.
            num_bytes: its size.
            owner: who pins it.
            update: the caller will change the bytes; waits for a write in flight first.

        Raises:
            BudgetError: it can never fit beside what its owner holds.
            StorageError: its bytes cannot be brought in, or room cannot be made.
        """
        hit = key in self._residents
        while True:
            resident = self._residents.get(key)
            if resident is None:
                lease = await self._make_room(key, num_bytes, owner)
                if key in self._residents:
                    lease.release()
                    continue
                resident = self._start_fill(key, lease, Priority.DEMAND)
            if resident.state is State.FILLING or (update and resident.state is State.WRITING):
                await self._join(resident, owner)
                if self._residents.get(key) is not resident:
                    assert resident.error is not None
                    raise resident.error
                continue
            resident.pins[owner] += 1
            self.statistics.num_hits += hit
            self.statistics.num_misses += not hit
            return resident.lease

    def prefetch(self, key: K, num_bytes: int) -> bool:
        """Start to bring ``key`` in if that takes nothing from anyone sooner; never waits.

        Returns:
            Whether it is resident or on its way.
        """
        if key in self._residents:
            return True
        lease = self._room_for_prefetch(key, num_bytes)
        if lease is None:
            return False
        self._start_fill(key, lease, Priority.PREFETCH)
        return True

    async def reserve(self, key: K, num_bytes: int, *, owner: str) -> Lease:
        """Pin memory for ``key`` whose content the caller will write whole; what it held before is void.

        Raises:
            BudgetError: it can never fit beside what its owner holds.
            StorageError: room cannot be made.
        """
        while True:
            resident = self._residents.get(key)
            if resident is None:
                lease = await self._make_room(key, num_bytes, owner)
                if key in self._residents:
                    lease.release()
                    continue
                resident = self._residents[key] = _Resident(key, lease, State.CLEAN)
            elif resident.state in (State.FILLING, State.WRITING):
                await self._join(resident, owner)
                continue
            resident.pins[owner] += 1
            return resident.lease

    def release(self, key: K, *, owner: str, dirty: bool = False, after: StreamEvent | None = None) -> None:
        """Unpin ``key``.

        Args:
            key: what was pinned by ``fetch`` or ``reserve``.
            owner: who pinned it.
            dirty: its bytes changed.
            after: accelerator work that still reads the memory.
        """
        resident = self._residents[key]
        resident.unpin(owner)
        if dirty:
            assert resident.state is not State.WRITING, f"{key} changed while it was written"
            resident.state = State.DIRTY
        if after is not None:
            resident.after = after
        self._changed()
        if self._spill is not None:
            self._write_ahead()

    def release_all(self, *, owner: str) -> None:
        """Unpin everything that ``owner`` holds; for cleaning up after an interrupted operation."""
        for resident in self._residents.values():
            resident.pins.pop(owner, None)
        self._changed()

    async def discard(self, key: K) -> None:
        """Let ``key`` go without writing it; its bytes are void. Nothing happens when it is not resident."""
        while (resident := self._residents.get(key)) is not None:
            if resident.task is not None:
                await asyncio.wait([resident.task])
                continue
            assert not resident.pins, f"{key} discarded while pinned by {dict(resident.pins)}"
            self._evict(resident)

    async def settle(self) -> None:
        """Wait until nothing is on its way in. Errors are left to whoever fetches next."""
        while tasks := [r.task for r in self._residents.values() if r.state is State.FILLING and r.task is not None]:
            await asyncio.wait(tasks)

    async def flush(self) -> None:
        """Write every dirty resident back.

        Raises:
            StorageError: the first write that failed; what it held stays dirty and readable.
        """
        if self._spill is None:
            return
        for resident in list(self._residents.values()):
            if resident.state is State.DIRTY:
                self._start_write(resident)
        for resident in list(self._residents.values()):
            if resident.state is State.WRITING:
                await self._written(resident)

    async def close(self) -> None:
        """Cancel and join what is on the move, then give every lease back."""
        tasks = [resident.task for resident in self._residents.values() if resident.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for resident in list(self._residents.values()):
            self._evict(resident)
        self._changed()

    # Room

    async def _make_room(self, key: K, num_bytes: int, owner: str) -> Lease:
        while True:
            lease = self.pool.acquire_nowait(num_bytes)
            if lease is not None:
                return lease
            victim = max(
                (r for r in self._residents.values() if r.idle and self._may_leave(r)),
                key=self._age,
                default=None,
            )
            if victim is None:
                self._refuse_if_stuck(key, num_bytes, owner)
                await self._change()
            elif victim.state is State.CLEAN:
                self._evict(victim)
            else:
                self._start_write(victim)
                await self._written(victim)

    def _room_for_prefetch(self, key: K, num_bytes: int) -> Lease | None:
        lease = self.pool.acquire_nowait(num_bytes)
        if lease is not None:
            return lease
        distance = self._distance(key)
        later = [r for r in self._residents.values() if r.idle and r.state is State.CLEAN and self._age(r) > distance]
        later.sort(key=self._age, reverse=True)
        victims, room = [], self.pool.free_bytes
        for resident in later:
            if room >= num_bytes:
                break
            victims.append(resident)
            room += resident.lease.tensor.numel()
        if room < num_bytes:
            return None
        for resident in victims:
            self._evict(resident)
        return self.pool.acquire_nowait(num_bytes)

    def _age(self, resident: _Resident[K]) -> float:
        return self._distance(resident.key)

    def _may_leave(self, resident: _Resident[K]) -> bool:
        return resident.state is State.CLEAN or self._spill is not None

    def _evict(self, resident: _Resident[K]) -> None:
        del self._residents[resident.key]
        resident.lease.release(resident.after)
        self.statistics.num_evictions += 1
        self._changed()

    def _refuse_if_stuck(self, key: K, num_bytes: int, owner: str) -> None:
        residents = self._residents.values()
        moving = any(r.task is not None for r in residents)
        held_by_others = any(other != owner for r in residents for other in r.pins)
        if moving or held_by_others:
            return
        pinned = sorted((r for r in residents if r.pins), key=lambda r: -r.num_bytes)
        held = ", ".join(f"{r.key} ({r.num_bytes} bytes)" for r in pinned[:8]) or "nothing"
        needed = num_bytes + sum(r.num_bytes for r in pinned)
        raise BudgetError(
            f"{self.pool.name} budget of {self.pool.budget_bytes} bytes is too small: {key} needs {num_bytes} bytes"
            f" while in use at the same time: {held}{', ...' if len(pinned) > 8 else ''};"
            f" raise it to at least {needed} bytes"
        )

    # Movement

    def _start_fill(self, key: K, lease: Lease, priority: Priority) -> _Resident[K]:
        resident = self._residents[key] = _Resident(key, lease, State.FILLING)
        self._start(resident, self._run_fill(resident, priority))
        return resident

    async def _run_fill(self, resident: _Resident[K], priority: Priority) -> None:
        try:
            await self._fill(resident.key, resident.lease, priority)
        except BaseException as error:
            resident.error = error
            self._evict(resident)
            if not isinstance(error, Exception):
                raise
        else:
            resident.state = State.CLEAN

    def _start_write(self, resident: _Resident[K]) -> None:
        resident.state = State.WRITING
        resident.error = None
        self._start(resident, self._run_write(resident))

    async def _run_write(self, resident: _Resident[K]) -> None:
        assert self._spill is not None
        try:
            await self._spill(resident.key, resident.lease)
        except BaseException as error:
            resident.error = error
            resident.state = State.DIRTY
            self._write_ahead_failed = True
            if not isinstance(error, Exception):
                raise
        else:
            resident.state = State.CLEAN
            self._write_ahead_failed = False
            self.statistics.num_write_backs += 1

    async def _written(self, resident: _Resident[K]) -> None:
        assert resident.task is not None
        await asyncio.wait([resident.task])
        if resident.error is not None:
            raise resident.error

    def _start(self, resident: _Resident[K], movement: Coroutine[Any, Any, None]) -> None:
        def end(_: asyncio.Task[None]) -> None:
            resident.task = None
            self._changed()

        resident.task = asyncio.get_running_loop().create_task(movement)
        resident.task.add_done_callback(end)

    async def _join(self, resident: _Resident[K], owner: str) -> None:
        """Wait for a movement, holding the resident so that it cannot leave between its end and our turn."""
        assert resident.task is not None
        resident.pins[owner] += 1
        try:
            await asyncio.wait([resident.task])
        finally:
            resident.unpin(owner)

    def _write_ahead(self) -> None:
        """Start to write the dirty residents needed last, until enough is free, clean or on its way out."""
        if self._write_ahead_failed:
            return
        residents = self._residents.values()
        ready = self.pool.free_bytes + sum(
            r.num_bytes for r in residents if r.state is State.WRITING or (r.idle and r.state is State.CLEAN)
        )
        headroom = self._headroom_bytes()
        if ready >= headroom:
            return
        for resident in sorted(
            (r for r in residents if r.idle and r.state is State.DIRTY), key=self._age, reverse=True
        ):
            self._start_write(resident)
            ready += resident.num_bytes
            if ready >= headroom:
                return

    def _changed(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
