"""Saved activations away from the device: in host memory and on NVMe from forward to backward.

While the engine's forward runs, what autograd saves and is no weight comes to ``Offload.keep`` (``saved.py``). A large
tensor is copied into a shard of the store, and its own memory goes as soon as the model has no more use for it. In
backward it is read back into memory of its own, while those that are needed next are on their way.

Guarantees
    * The same numbers: what backward gets has the bytes, dtype, strides and offset of what forward saved.
    * What is kept is storages, since these are what autograd would keep alive: tensors that share one (query, key and
      value of one projection, an input that several nodes save) are one shard. It comes back once for all nodes of the
      unit whose backward runs; a unit that saves it too (a skip, an encoder's output) reads it again.
    * An activation changed in place between forward and backward is an error. Its version counter outlives its memory.
      (What changes it past that counter, as ``x.data`` does, PyTorch does not see either.)
    * ``Config.activation_bytes`` bounds what is away, and is reserved on NVMe from the start (in host memory where
      there is none). What finds no room in it, or is larger than host memory, stays where it is, as without offload: a
      batch that is larger than foreseen may still fit the device, and if not, PyTorch says so.
    * A shard lives as long as a saved tensor stands for it, and no longer: whether backward has used it up, the graph
      was dropped, or an exception has ended forward. Its end is posted to the loop, and never waited for.

Deadlock (``store/pool.py``): a demand for room is made in forward, outside of backward, when the training thread holds
nothing in host memory. Reading back into the CPU's memory needs no room there; on an accelerator, open gradients are
let go before. Reading ahead takes what nobody needs sooner.

Forward does not wait for the disk while that keeps up: when an activation has been put, what will have to leave for the
next two is written already, at most an eighth of host memory. (Where forward ends there, so much was written in vain.)

What stays where it is: tensors smaller than ``SMALL_BYTES``; parameters, buffers, and other leaves that want gradients;
views of what did not come out of the graph, such as a batch cut out of a data set; what hooks outside ours have taken
(a checkpoint's); and what a recomputation under backward saves, which is used at once.

On an accelerator all copies block: PyTorch then orders them with the stream that computes. Rejected: copies on a stream
of their own, until there is hardware to prove them on; one shard for each saved tensor (three copies of an input that
three nodes save); a limit on how much is brought back at a time (backward asks for one node's tensors together).
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.engine.activity import Activity
from infinity.engine.prefetch import TRAINING, Orders, SchedulerStatistics
from infinity.engine.saved import KeepInPlace, Kept, refuse_change
from infinity.engine.tape import is_dense
from infinity.engine.unit import ACTIVATION, Unit
from infinity.errors import BudgetError, EngineStateError
from infinity.io.backend import Priority
from infinity.io.memory import PAGE_BYTES, allocate, round_up
from infinity.store.loop import LoopThread
from infinity.store.pool import Lease
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore
from infinity.trace import TierUsage

SMALL_BYTES = 64 << 10
"""Smaller storages stay: moving one costs two turns of the loop, whatever its size."""

_AHEAD_BYTES = 64 << 20
_AHEAD_SHARE = 8
_IN_PLACE = KeepInPlace()


class ActivationShards:
    """Activations in the store. Everything but ``usage`` belongs to the loop thread.

    Args:
        store: where they go.
        orders: learns when they are needed.
        budget_bytes: the most that they may take.
    """

    def __init__(self, store: TieredStore, orders: Orders, budget_bytes: int) -> None:
        self._store = store
        self._due = orders.activations
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self._peak_bytes = 0
        self._largest_bytes = 0
        self._keys: dict[int, ShardKey] = {}  # by number
        self._numbers: list[int] = []  # those that can be read, in the order in which they came
        self._open: ShardKey | None = None
        self._going: set[asyncio.Task[None]] = set()

    def usage(self) -> TierUsage:
        """Bytes away now, at most, and allowed; safe from any thread."""
        return TierUsage(self._used_bytes, self._peak_bytes, self._budget_bytes)

    async def put(self, key: ShardKey, num_bytes: int) -> Lease | None:
        """Pin host memory for a new activation, until ``written``; ``None`` if there is no room for it.

        Raises:
            StorageError: what must leave to make room could not be written.
        """
        while self._used_bytes + num_bytes > self._budget_bytes and self._going:
            await asyncio.wait(self._going)
        if self._used_bytes + num_bytes > self._budget_bytes:
            return None
        self._used_bytes += num_bytes
        self._largest_bytes = max(self._largest_bytes, num_bytes)
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        self._keys[key.part] = key
        self._due.add(key, key.unit)
        try:
            lease = await self._store.put(key, num_bytes, owner=TRAINING)
        except BaseException as error:
            self._forget(key, num_bytes)
            if isinstance(error, BudgetError):
                return None
            raise
        self._open = key
        return lease

    def written(self, key: ShardKey, *, whole: bool) -> None:
        """An activation was written, whole or not, if it was ever put. Others will follow, so make ready for them."""
        if self._open == key:
            self._open = None
            self._store.release(key, owner=TRAINING, dirty=whole)
            bisect.insort(self._numbers, key.part)
            ahead_bytes = min(2 * self._largest_bytes, self._store.host.pool.budget_bytes // _AHEAD_SHARE)
            self._store.host.residency.write_ahead(ahead_bytes, beyond=self._due.distance(key))

    def look_ahead(self, key: ShardKey) -> None:
        """This one is needed, and those that came before it are needed next: bring them in, if nobody loses by it."""
        num_bytes, at = 0, bisect.bisect_left(self._numbers, key.part)
        for number in reversed(self._numbers[:at]):
            before = self._keys[number]
            if num_bytes >= _AHEAD_BYTES or not self._store.prefetch(before):
                return
            num_bytes += self._store.num_bytes(before)

    def drop(self, key: ShardKey) -> None:
        """No saved tensor stands for this one any more."""
        at = bisect.bisect_left(self._numbers, key.part)
        if at < len(self._numbers) and self._numbers[at] == key.part:
            del self._numbers[at]
        if key in self._store:
            task = asyncio.get_running_loop().create_task(self._delete(key))
            self._going.add(task)
            task.add_done_callback(self._going.discard)

    async def _delete(self, key: ShardKey) -> None:
        num_bytes = self._store.num_bytes(key)
        with contextlib.suppress(EngineStateError):  # the tiers are closed: it is gone already
            await self._store.forget(key)
        self._forget(key, num_bytes)

    def _forget(self, key: ShardKey, num_bytes: int) -> None:
        self._used_bytes -= num_bytes
        self._due.discard(key)
        del self._keys[key.part]


class _Shard:
    """A storage that is away.

    Attributes:
        key: its name in the store.
        names: of the unit that saved it, if any.
        num_bytes: its size there.
        storage_bytes: its size.
        device: where it was.
        known: storages that hold its bytes, as long as somebody else uses them: where it was, and where it came back.
    """

    __slots__ = ("__weakref__", "device", "key", "known", "names", "num_bytes", "storage_bytes")

    def __init__(self, key: ShardKey, storage: torch.UntypedStorage, unit: Unit | None) -> None:
        self.key = key
        self.names = [] if unit is None else [unit.name]
        self.storage_bytes = storage.nbytes()
        self.num_bytes = round_up(self.storage_bytes, PAGE_BYTES)
        self.device = storage.device
        self.known = [StorageWeakRef(storage)]

    def find(self) -> torch.UntypedStorage | None:
        """A storage that holds its bytes now."""
        for each in self.known:
            storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(each.cdata)
            if storage is not None and storage.nbytes() >= self.storage_bytes:  # else somebody has resized it
                return storage
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Away:
    """A saved tensor whose storage is away; ``offset`` in elements, ``counter`` shares its version counter."""

    offload: Offload
    shard: _Shard
    counter: torch.Tensor
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    def unpack(self) -> torch.Tensor:
        """See ``Kept``.

        Raises:
            EngineStateError: it was changed in place, or the engine is closed.
            StorageError: it could not be read.
        """
        refuse_change(self.counter, self.version, self.size)
        storage = self.offload.bring(self.shard)
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = torch._neg_view(tensor) if self.neg else tensor
        return tensor.conj() if self.conj else tensor


class Offload:
    """A ``Keeper`` that sends large activations away. Belongs to the threads that run the model and autograd's hooks.

    Args:
        loop: the loop thread.
        store: where the shards are.
        shards: those of activations.
        activity: told of waits.
        statistics: adds them up.
        staying: tensors that stay where they are in any case: the model's buffers.
        let_go: unpins what the training thread holds in host memory.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        shards: ActivationShards,
        activity: Activity,
        statistics: SchedulerStatistics,
        *,
        staying: Iterable[torch.Tensor],
        let_go: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._store = store
        self._shards = shards
        self._activity = activity
        self._statistics = statistics
        self._staying = frozenset(each.untyped_storage().data_ptr() for each in staying if is_dense(each))
        self._let_go = let_go
        self._number = itertools.count()
        self._away: weakref.WeakValueDictionary[tuple[int, int], _Shard] = weakref.WeakValueDictionary()
        self._unit = 0
        self._brought: weakref.WeakKeyDictionary[_Shard, torch.UntypedStorage] = weakref.WeakKeyDictionary()

    def keep(self, tensor: torch.Tensor, unit: Unit | None) -> Kept:
        """See ``Keeper``.

        Raises:
            StorageError: what must leave to make room could not be written.
        """
        self._brought.clear()
        storage = self._storage_of(tensor)
        if storage is None:
            return _IN_PLACE.keep(tensor, unit)
        known = storage._cdata, tensor._version  # as long as the shard lives, no other storage takes the address
        shard = self._away.get(known) or self._send(storage, unit)
        if shard is None:
            return _IN_PLACE.keep(tensor, unit)
        self._away[known] = shard
        counter = tensor.detach()
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return _Away(
            self,
            shard,
            counter,
            tensor._version,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def bring(self, shard: _Shard) -> torch.UntypedStorage:
        """The bytes of a shard: where somebody still has them, or else read back.

        Raises:
            EngineStateError: the engine is closed.
            StorageError: they could not be read.
        """
        if shard.key.unit != self._unit:
            self._brought.clear()
            self._unit = shard.key.unit
        storage = shard.find()
        if storage is None:
            storage = (self._read if shard.device.type == "cpu" else self._upload)(shard).untyped_storage()
            shard.known[1:] = [StorageWeakRef(storage)]
            self._brought[shard] = storage
        return storage

    def _storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """The storage of a tensor that is to go away."""
        if type(tensor) is not torch.Tensor or not is_dense(tensor) or tensor.is_meta or tensor.is_inference():
            return None
        if (tensor.requires_grad and tensor.is_leaf) or torch._C._current_graph_task_id() != -1:
            return None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a batched tensor of torch.vmap has no storage of its own
            return None
        if storage.nbytes() < SMALL_BYTES or storage.data_ptr() in self._staying:
            return None
        return storage if tensor.requires_grad or 2 * tensor.nbytes >= storage.nbytes() else None

    def _send(self, storage: torch.UntypedStorage, unit: Unit | None) -> _Shard | None:
        """Copy a storage into a new shard; ``None`` if there is no room for it."""
        shard = _Shard(ShardKey(unit.index if unit else 0, next(self._number), ACTIVATION), storage, unit)
        key, whole = shard.key, False
        try:
            with self._waiting(shard, "room"):
                lease = self._loop.run(self._shards.put(key, shard.num_bytes))
            if lease is None:
                return None
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            lease.tensor[: shard.storage_bytes].copy_(source)
            whole = True
        finally:
            self._loop.call_soon(lambda: self._shards.written(key, whole=whole))
            end = weakref.finalize(shard, self._loop.call_soon, self._shards.drop, key)
            end.atexit = False  # the tiers go as a whole
        return shard

    def _read(self, shard: _Shard) -> torch.Tensor:
        """Its bytes, in memory of their own on the CPU: from NVMe straight there."""
        target = allocate(shard.num_bytes, populate=False)
        with self._waiting(shard, "read"):
            reading = self._loop.submit(
                self._store.read_past(shard.key, target, priority=Priority.DEMAND, owner=TRAINING)
            )
            self._loop.call_soon(self._shards.look_ahead, shard.key)
            self._loop.wait(reading)
        return target

    def _upload(self, shard: _Shard) -> torch.Tensor:
        """Its bytes on the accelerator, through host memory."""
        self._let_go()
        with self._waiting(shard, "read"):
            fetching = self._loop.submit(self._store.fetch(shard.key, owner=TRAINING))
            self._loop.call_soon(self._shards.look_ahead, shard.key)
            lease = self._loop.wait(fetching)
        try:
            target = torch.empty(shard.num_bytes, dtype=torch.uint8, device=shard.device)
            return target.copy_(lease.tensor)
        finally:
            self._loop.call_soon(lambda: self._store.release(shard.key, owner=TRAINING))

    @contextlib.contextmanager
    def _waiting(self, shard: _Shard, cause: str) -> Iterator[None]:
        begun = time.perf_counter()
        with self._activity.waiting(*shard.names) as causes:
            yield
            ended = time.perf_counter()
            causes.append((cause, ended))
        self._statistics.stall_seconds += ended - begun
