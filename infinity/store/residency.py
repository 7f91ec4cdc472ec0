"""What stays where: the shards resident in one pool of memory, and who must leave when room is needed.

One ``Residency`` serves host memory (shards, written back to NVMe when they leave dirty), another serves device memory
(gathered units, always clean). Every resident has one state and one owner, this class:

    FILLING  -> CLEAN            its bytes are on the way in
    CLEAN   <-> DIRTY            equal to, or newer than, the copy in the tier below
    DIRTY    -> WRITING -> CLEAN its bytes are on the way out; it may be read meanwhile, not changed

Guarantees
    * A pinned resident stays. An unpinned one may leave at any time.
    * Who must leave is whoever is needed last by the recorded order (Belady's rule), clean or dirty. A prefetch makes
      room only of what is needed later than itself; what is dirty of that it has written, to find room another time.
    * Nothing is written but to make room for somebody sooner. So while everything fits nothing ever is, and what stays
      until its next use is not written in between.
    * A write that a demand waits for goes before all prefetches, and all that it needs begin at once.
    * A failed fill leaves nothing resident; a failed write leaves the resident dirty and readable, and the error goes
      to the demand that needs the room.
    * While a demand waits for room, no prefetch takes any.
    * A cancelled wait loses nothing: movements (``moving.py``) are joined in ``close``.

Why the distance alone decides, and not what leaving costs, though a dirty resident is written and read again and a
clean one only read: with shards of one size this reads the fewest bytes that can be read, and what is written is read
again, so no policy moves less than half of it (``tests/test_residency_optimum.py``). Finding the least is NP-hard
(Beckmann et al., Writeback-Aware Caching, 2020), and on training's orders little is left to find (``optimum.py``).

Rejected: writing ahead until a fixed amount is clean or free (whatever is kept clean is written once per cycle although
it stays); taking a nearer clean one because that is quick (it is read back sooner, and the dirty ones are left over).

``owner`` names who pins, and is one thread of control: who waits for room releases nothing meanwhile. A demand that
finds nothing on the move, and all pinned by owners that wait, raises ``BudgetError`` instead of waiting for ever.

All belongs to the loop thread. The caller orders the calls for one key: nobody changes or discards what another holds,
nor holds a resident to change it during a ``flush``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic

from infinity.errors import EngineStateError
from infinity.io.backend import Priority
from infinity.io.tasks import gather_all
from infinity.store.moving import Fill, Movements, Spill, raise_failed, written
from infinity.store.pool import BufferPool, Lease, StreamEvent, lease_bytes
from infinity.store.resident import K, Leavers, ResidencyStatistics, Resident, State
from infinity.store.waiting import Demands, Notice, too_small

__all__ = ["Fill", "Residency", "ResidencyStatistics", "Spill", "State"]


class Residency(Generic[K]):
    """The residents of one pool.

    Args:
        pool: the memory and its budget.
        distance: how far away the next use of a key is.
        fill: brings a key's bytes into a lease.
        spill: writes them to the tier below; ``None`` where residents are never dirty or have nowhere to go.
        room: told, once per turn of the loop at most, that a prefetch which found no room may find some now.
    """

    def __init__(
        self,
        pool: BufferPool,
        *,
        distance: Callable[[K], float],
        fill: Fill[K],
        spill: Spill[K] | None = None,
        room: Callable[[], None] = lambda: None,
    ) -> None:
        self.pool = pool
        self.statistics = ResidencyStatistics()
        self._distance = distance
        self._residents: dict[K, Resident[K]] = {}
        self._leavers: Leavers[K] = Leavers(distance, dirty=spill is not None)
        self._moving: Movements[K] = Movements(fill, spill, begun=self._rank, ended=self._has_moved)
        self._demands = Demands(pool)
        self._room = Notice(lambda: None if self._closed else room())
        self._closed = False

    def __contains__(self, key: K) -> bool:
        return key in self._residents

    def state_of(self, key: K) -> State | None:
        """The state of a resident, or ``None``."""
        return self._residents[key].state if key in self._residents else None

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
            resident = self._find(key)
            if resident is None:
                lease = await self._make_room(key, num_bytes, owner)
                if lease is not None:
                    self._fill(key, lease, priority)
            elif resident.state is State.FILLING or (update and resident.state is State.WRITING):
                await self._join(resident)
                if resident.error is not None:
                    raise resident.error
            else:
                self._pin(resident, owner)
                self.statistics.num_hits += hit
                self.statistics.num_misses += not hit
                return resident.lease

    def prefetch(
        self, key: K, num_bytes: int, *, displace: bool = True, priority: Priority = Priority.PREFETCH
    ) -> bool:
        """Start to bring ``key`` in if that takes nothing from anyone sooner; never waits.

        Args:
            key: what to bring in.
            num_bytes: its size.
            displace: whether it may take the place of what is needed later, or have it written so that another try
                may, after ``room``; else it takes only free memory.
            priority: of the transfer, if there is one.

        Returns:
            Whether it is resident or on its way.
        """
        if self._find(key) is not None:
            return True
        lease = self._room_ahead(key, num_bytes, displace=displace)
        if lease is None:
            return False
        self._fill(key, lease, priority)
        return True

    def prepare(self, key: K, num_bytes: int) -> bool:
        """Take memory ahead for a key that will be reserved soon, as a prefetch does; whether it has memory."""
        if key in self._residents:
            return True
        lease = self._room_ahead(key, num_bytes, displace=True)
        if lease is None:
            return False
        resident = self._residents[key] = Resident(key, lease, State.CLEAN, void=True)
        self._rank(resident)
        return True

    def write_ahead(self, num_bytes: int, *, beyond: float) -> None:
        """Begin to write what is needed later than ``beyond`` and will have to leave when so many bytes are wanted."""
        if not (self._closed or self._demands):
            self._write_ahead(self._leavers.needed_last(num_bytes - self.pool.free_bytes, beyond=beyond))

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

    def release_all(self, *, owner: str) -> None:
        """Unpin everything that ``owner`` holds; for cleaning up after an interrupted operation."""
        for resident in list(self._residents.values()):
            if resident.pins.pop(owner, 0):
                self._settle_down(resident)

    async def discard(self, key: K) -> None:
        """Let ``key`` go without writing it, if it is resident; its bytes are void."""
        while (resident := self._residents.get(key)) is not None:
            if resident.task is not None:
                await asyncio.wait([resident.task])
                continue
            assert not resident.held, f"{key} discarded while in use by {dict(resident.pins)}"
            self._remove(resident)
            self._tell_room()

    async def settle(self) -> None:
        """Wait until nothing is on its way in. Errors are left to whoever fetches next."""
        while tasks := [r.task for r in self._residents.values() if r.state is State.FILLING and r.task is not None]:
            await asyncio.wait(tasks)

    async def quiesce(self) -> None:
        """Wait until nothing is on its way in or out. Errors are left to whoever fetches or flushes next."""
        while tasks := [resident.task for resident in self._residents.values() if resident.task is not None]:
            await asyncio.wait(tasks)

    async def flush(self, belongs: Callable[[K], bool] = lambda key: True) -> None:
        """Write every dirty resident back that belongs to what is flushed.

        Raises:
            StorageError: the first write that failed; what it held stays dirty and readable.
        """
        if not self._moving.can_write:
            return
        tasks = []
        for resident in filter(lambda resident: belongs(resident.key), self._residents.values()):
            if resident.state is State.DIRTY:
                tasks.append(self._moving.write(resident, Priority.BACKGROUND))
            elif resident.state is State.WRITING and resident.task is not None:
                tasks.append(resident.task)
        await gather_all(written(task) for task in tasks)

    async def close(self) -> None:
        """Cancel and join what is on the move, then give every lease back. Closing twice is harmless.

        Whoever still waits in here gets an ``EngineStateError``. A cancelled call ends only when all of this is done.
        """
        self._closed, cancelled = True, False
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

    def _find(self, key: K) -> Resident[K] | None:
        """The resident with the bytes of ``key``; memory that was only prepared for it is given up."""
        resident = self._residents.get(key)
        if resident is not None and resident.void and not resident.held:
            self._remove(resident)
            return None
        return resident

    async def _make_room(self, key: K, num_bytes: int, owner: str) -> Lease | None:
        """Memory for a demand; ``None`` if ``key`` has become resident in the meantime."""
        if lease_bytes(num_bytes) > self.pool.budget_bytes:
            raise too_small(self.pool, key, num_bytes, self._staying())
        writes: list[asyncio.Task[None]] = []
        begun = time.perf_counter()
        try:
            with self._demands.enter(owner, num_bytes):
                while key not in self._residents:
                    self._check_open()
                    lease = self.pool.acquire_nowait(num_bytes)
                    if lease is not None:
                        return lease
                    raise_failed(writes)
                    victims = self._leavers.needed_last(self._demands.missing_bytes)
                    if not victims and self._demands.are_in_vain(self._residents.values()):
                        raise too_small(self.pool, key, num_bytes, self._staying())
                    if not self._clear(victims, writes):
                        await self._demands.change()
        finally:
            self.statistics.room_seconds += time.perf_counter() - begun
            self._tell_room()
        return None

    def _clear(self, victims: list[Resident[K]], writes: list[asyncio.Task[None]]) -> bool:
        """Let clean ones leave and begin to write dirty ones; whether there is more room already."""
        dirty = [victim for victim in victims if victim.state is State.DIRTY]
        writes += [self._moving.write(victim, Priority.DEMAND, leaving=True) for victim in dirty]
        return self._evict([victim for victim in victims if victim.state is State.CLEAN])

    def _room_ahead(self, key: K, num_bytes: int, *, displace: bool) -> Lease | None:
        """Memory for what is needed later than now, if there is some that nobody needs sooner."""
        if self._closed or self._demands:
            return None
        missing_bytes = lease_bytes(num_bytes) - self.pool.free_bytes
        if missing_bytes > 0 and not (displace and self._displace(self._distance(key), missing_bytes)):
            return None
        try:
            return self.pool.acquire_nowait(num_bytes)
        except MemoryError:  # for a demand this is an error; ahead of need it is only too early
            return None

    def _displace(self, distance: float, num_bytes: int) -> bool:
        """Let those leave who are needed last, and later than ``distance``; or begin to write those that are dirty."""
        victims = self._leavers.needed_last(num_bytes, beyond=distance)
        if sum(victim.size_bytes for victim in victims) < num_bytes:
            return False
        if all(victim.state is State.CLEAN for victim in victims):
            return self._evict(victims)
        self._write_ahead(victims)
        return False

    def _write_ahead(self, victims: list[Resident[K]]) -> None:
        for victim in victims:
            if victim.state is State.DIRTY and not self._moving.last_write_failed:
                self._moving.write(victim, Priority.PREFETCH, leaving=True)

    def _evict(self, residents: list[Resident[K]]) -> bool:
        for resident in residents:
            self._remove(resident)
        self.statistics.num_evictions += len(residents)
        return bool(residents)

    def _remove(self, resident: Resident[K]) -> None:
        del self._residents[resident.key]
        self._rank(resident)
        resident.lease.release(resident.after)
        self._demands.look_again()

    def _staying(self) -> list[Resident[K]]:
        """Those that nothing can make leave."""
        rooted = None if self._moving.can_write else State.DIRTY
        return [resident for resident in self._residents.values() if resident.held or resident.state is rooted]

    def _tell_room(self) -> None:
        """Room may have come to be; while demands wait it is theirs."""
        if not (self._closed or self._demands):
            self._room.give()

    def _fill(self, key: K, lease: Lease, priority: Priority) -> None:
        resident = self._residents[key] = Resident(key, lease, State.FILLING)
        self._moving.fill(resident, priority)

    def _has_moved(self, resident: Resident[K]) -> None:
        self.statistics.num_write_backs = self._moving.num_written
        if resident.error is None:
            self._settle_down(resident)
        else:  # nobody is told of room: whoever tries again at once would fail again
            self._remove(resident)

    async def _join(self, resident: Resident[K]) -> None:
        """Wait for a movement, holding the resident so that it cannot leave between its end and our turn."""
        assert resident.task is not None
        resident.num_joined += 1
        self._rank(resident)
        try:
            await asyncio.wait([resident.task])
        finally:
            resident.num_joined -= 1
            self._settle_down(resident)

    def _pin(self, resident: Resident[K], owner: str) -> None:
        resident.pins[owner] += 1
        resident.leaving = False
        self._rank(resident)

    def _settle_down(self, resident: Resident[K]) -> None:
        """Something let go of the resident: it may leave now, and whoever waits for room looks again."""
        if resident.void and not resident.held:
            self._remove(resident)
        self._rank(resident)
        self._demands.look_again()
        self._tell_room()

    def _rank(self, resident: Resident[K]) -> None:
        self._leavers.update(resident, present=self._residents.get(resident.key) is resident)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStateError(f"the {self.pool.name} tier is closed")
