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
    * While a demand waits for room, no prefetch takes any.
    * A cancelled wait loses nothing: fills and writes are tasks of this class, joined in ``close``.

``owner`` names who pins (training, optimizer, ...), and is one thread of control: an owner that waits for room releases
nothing meanwhile. A demand that finds nothing on the move, and everything pinned by owners that wait, would wait for
ever; it raises ``BudgetError`` instead.

Everything here belongs to the loop thread. The caller orders the calls for one key: nobody changes or discards what
another holds, nor holds a resident to change it during a ``flush``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic

from infinity.errors import BudgetError, EngineStateError
from infinity.io.backend import Priority
from infinity.io.tasks import gather_all
from infinity.store.pool import BufferPool, Lease, StreamEvent, lease_bytes
from infinity.store.resident import K, Leavers, ResidencyStatistics, Resident, State
from infinity.store.waiting import Demands, too_small

__all__ = ["Fill", "Residency", "ResidencyStatistics", "Spill", "State"]

Fill = Callable[[K, Lease, Priority], Coroutine[Any, Any, None]]
Spill = Callable[[K, Lease], Coroutine[Any, Any, None]]


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
        self._residents: dict[K, Resident[K]] = {}
        self._leavers: Leavers[K] = Leavers(distance, dirty=spill is not None)
        self._writing_bytes = 0
        self._demands = Demands(pool)
        self._write_ahead_failed = False
        self._closed = False

    def __contains__(self, key: K) -> bool:
        return key in self._residents

    def state_of(self, key: K) -> State | None:
        """The state of a resident, or ``None``."""
        resident = self._residents.get(key)
        return None if resident is None else resident.state

    async def fetch(
        self, key: K, num_bytes: int, *, owner: str, update: bool = False, priority: Priority = Priority.DEMAND
    ) -> Lease:
        """Pin ``key``, bringing its bytes in if they are not resident. A demand: it may wait and evict.

        Args:
            key: what to fetch.
            num_bytes: its size.
            owner: who pins it.
            update: the caller will change the bytes; waits for a write in flight first.
            priority: of the transfer, if there is one.

        Raises:
            BudgetError: it can never fit beside what its owner holds.
            StorageError: its bytes cannot be brought in, or room cannot be made.
            EngineStateError: this is closed, now or while the call waited.
        """
        hit = key in self._residents
        while True:
            self._check_open()
            resident = self._residents.get(key)
            if resident is None:
                lease = await self._make_room(key, num_bytes, owner)
                if lease is not None:
                    self._start_fill(key, lease, priority)
            elif resident.state is State.FILLING or (update and resident.state is State.WRITING):
                await self._join(resident)
                if resident.error is not None:
                    raise resident.error
            else:
                self._pin(resident, owner)
                self.statistics.num_hits += hit
                self.statistics.num_misses += not hit
                return resident.lease

    def prefetch(self, key: K, num_bytes: int, *, priority: Priority = Priority.PREFETCH) -> bool:
        """Start to bring ``key`` in if that takes nothing from anyone sooner; never waits.

        Returns:
            Whether it is resident or on its way.
        """
        if key in self._residents:
            return True
        lease = self._room_for_prefetch(key, num_bytes)
        if lease is None:
            return False
        self._start_fill(key, lease, priority)
        return True

    async def reserve(self, key: K, num_bytes: int, *, owner: str) -> Lease:
        """Pin memory for ``key`` whose content the caller will write whole; what it held before is void.

        If it is then released without being dirty, nothing of it stays resident.

        Raises:
            BudgetError: it can never fit beside what its owner holds.
            StorageError: room cannot be made.
            EngineStateError: this is closed, now or while the call waited.
        """
        while True:
            self._check_open()
            resident = self._residents.get(key)
            if resident is None:
                lease = await self._make_room(key, num_bytes, owner)
                if lease is not None:
                    self._residents[key] = Resident(key, lease, State.CLEAN)
            elif resident.state in (State.FILLING, State.WRITING):
                await self._join(resident)
            else:
                self._pin(resident, owner)
                resident.state = State.CLEAN
                resident.void = True
                return resident.lease

    def release(self, key: K, *, owner: str, dirty: bool = False, after: StreamEvent | None = None) -> None:
        """Unpin ``key``; harmless after ``close``, which has already taken everything back.

        Args:
            key: what was pinned by ``fetch`` or ``reserve``.
            owner: who pinned it.
            dirty: its bytes changed.
            after: accelerator work that still reads the memory.
        """
        if self._closed:
            return
        resident = self._residents[key]
        resident.unpin(owner)
        if dirty:
            assert resident.state is not State.WRITING, f"{key} changed while it was written"
            resident.state = State.DIRTY
            resident.void = False
        if after is not None:
            resident.after = after
        self._settle_down(resident)
        self._write_ahead()

    def release_all(self, *, owner: str) -> None:
        """Unpin everything that ``owner`` holds; for cleaning up after an interrupted operation."""
        for resident in list(self._residents.values()):
            if resident.pins.pop(owner, 0):
                self._settle_down(resident)

    async def discard(self, key: K) -> None:
        """Let ``key`` go without writing it; its bytes are void. Nothing happens when it is not resident."""
        while (resident := self._residents.get(key)) is not None:
            if resident.task is not None:
                await asyncio.wait([resident.task])
                continue
            assert not resident.held, f"{key} discarded while in use by {dict(resident.pins)}"
            self._remove(resident)

    async def settle(self) -> None:
        """Wait until nothing is on its way in. Errors are left to whoever fetches next."""
        while tasks := [r.task for r in self._residents.values() if r.state is State.FILLING and r.task is not None]:
            await asyncio.wait(tasks)

    async def quiesce(self) -> None:
        """Wait until nothing is on its way in or out. Errors are left to whoever fetches or flushes next."""
        while tasks := [resident.task for resident in self._residents.values() if resident.task is not None]:
            await asyncio.wait(tasks)

    async def flush(self) -> None:
        """Write every dirty resident back.

        Raises:
            StorageError: the first write that failed; what it held stays dirty and readable.
        """
        if self._spill is None:
            return
        tasks = []
        for resident in self._residents.values():
            if resident.state is State.DIRTY:
                tasks.append(self._start_write(resident))
            elif resident.state is State.WRITING and resident.task is not None:
                tasks.append(resident.task)
        await gather_all(_written(task) for task in tasks)

    async def close(self) -> None:
        """Cancel and join what is on the move, then give every lease back. Closing twice is harmless.

        Whoever still waits in here gets an ``EngineStateError``. A cancelled call ends only when all of this is done.
        """
        self._closed = True
        cancelled = False
        for resident in self._residents.values():
            if resident.task is not None:
                resident.task.cancel()
        while any(resident.task is not None for resident in self._residents.values()):
            try:
                await self.quiesce()
            except asyncio.CancelledError:
                cancelled = True
        for resident in list(self._residents.values()):
            self._remove(resident)
        if cancelled:
            raise asyncio.CancelledError

    # Room

    async def _make_room(self, key: K, num_bytes: int, owner: str) -> Lease | None:
        """Memory for a demand; ``None`` if ``key`` has become resident in the meantime."""
        if lease_bytes(num_bytes) > self.pool.budget_bytes:
            raise self._too_small(key, num_bytes)
        with self._demands.enter(owner, num_bytes):
            while key not in self._residents:
                self._check_open()
                lease = self.pool.acquire_nowait(num_bytes)
                if lease is not None:
                    return lease
                victim = self._leavers.needed_last()
                if victim is None:
                    if self._stuck():
                        raise self._too_small(key, num_bytes)
                    await self._demands.change()
                elif victim.state is State.CLEAN:
                    self._evict(victim)
                else:
                    await _written(self._start_write(victim))
        return None

    def _room_for_prefetch(self, key: K, num_bytes: int) -> Lease | None:
        if self._closed or self._demands:
            return None
        missing_bytes = lease_bytes(num_bytes) - self.pool.free_bytes
        victims = self._leavers.clean_after(self._distance(key), missing_bytes) if missing_bytes > 0 else []
        if victims is None:
            return None
        for victim in victims:
            self._evict(victim)
        try:
            return self.pool.acquire_nowait(num_bytes)
        except MemoryError:  # for a demand this is an error; ahead of need it is only too early
            return None

    def _evict(self, resident: Resident[K]) -> None:
        self._remove(resident)
        self.statistics.num_evictions += 1

    def _remove(self, resident: Resident[K]) -> None:
        del self._residents[resident.key]
        self._rank(resident)
        resident.lease.release(resident.after)
        self._demands.look_again()

    def _stuck(self) -> bool:
        """Whether nothing is left that could make room: all who hold memory wait for room, and none can have it."""
        residents = self._residents.values()
        if any(r.task is not None or r.num_joined for r in residents):
            return False
        waiting = self._demands.owners
        return not self._demands.any_fits and all(owner in waiting for r in residents for owner in r.pins)

    def _too_small(self, key: K, num_bytes: int) -> BudgetError:
        rooted = State.DIRTY if self._spill is None else None
        staying = [r for r in self._residents.values() if r.held or r.state is rooted]
        return too_small(self.pool, str(key), num_bytes, {str(r.key): r.size_bytes for r in staying})

    # Movement

    def _start_fill(self, key: K, lease: Lease, priority: Priority) -> None:
        resident = self._residents[key] = Resident(key, lease, State.FILLING)

        def end(error: BaseException | None) -> None:
            resident.error = error
            if error is None:
                resident.state = State.CLEAN
            else:
                self._remove(resident)

        self._start(resident, self._fill(key, lease, priority), end)

    def _start_write(self, resident: Resident[K]) -> asyncio.Task[None]:
        assert self._spill is not None

        def end(error: BaseException | None) -> None:
            self._writing_bytes -= resident.size_bytes
            self._write_ahead_failed = error is not None
            if error is None:
                resident.state = State.CLEAN
                self.statistics.num_write_backs += 1
            else:
                resident.state = State.DIRTY

        resident.state = State.WRITING
        self._writing_bytes += resident.size_bytes
        return self._start(resident, self._spill(resident.key, resident.lease), end)

    def _start(
        self, resident: Resident[K], movement: Coroutine[Any, Any, None], end: Callable[[BaseException | None], None]
    ) -> asyncio.Task[None]:
        """Begin a movement. ``end`` runs before anyone who waits for the task, also if it was cancelled unbegun."""

        def ended(task: asyncio.Task[None]) -> None:
            resident.task = None
            end(_failure(task))
            self._settle_down(resident)

        resident.task = asyncio.get_running_loop().create_task(movement)
        resident.task.add_done_callback(ended)
        self._rank(resident)
        return resident.task

    async def _join(self, resident: Resident[K]) -> None:
        """Wait for a movement, holding the resident so that it cannot leave between its end and our turn."""
        assert resident.task is not None
        resident.num_joined += 1
        try:
            await asyncio.wait([resident.task])
        finally:
            resident.num_joined -= 1
            self._settle_down(resident)

    def _pin(self, resident: Resident[K], owner: str) -> None:
        resident.pins[owner] += 1
        self._rank(resident)

    def _settle_down(self, resident: Resident[K]) -> None:
        """Something let go of the resident: it may leave now, and whoever waits for room looks again."""
        if resident.void and not resident.held:
            self._remove(resident)
        self._rank(resident)
        self._demands.look_again()

    def _rank(self, resident: Resident[K]) -> None:
        self._leavers.update(resident, present=self._residents.get(resident.key) is resident)

    def _write_ahead(self) -> None:
        """Start to write the dirty residents needed last, until enough is free, clean or on its way out."""
        if self._spill is None or self._write_ahead_failed:
            return
        ready_bytes = self.pool.free_bytes + self._leavers.clean_bytes + self._writing_bytes
        missing_bytes = self._headroom_bytes() - ready_bytes
        if missing_bytes > 0:
            for resident in self._leavers.dirty_last(missing_bytes):
                self._start_write(resident)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStateError(f"the {self.pool.name} tier is closed")


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    if task.cancelled():
        return EngineStateError("a transfer was cancelled: the engine is closing")
    return task.exception()


async def _written(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
    error = _failure(task)
    if error is not None:
        raise error
