"""A pool of memory under a hard budget, and the leases that own pieces of it.

Guarantees
    * Bytes mapped (leased, plus free blocks kept for reuse) never exceed the budget.
    * A lease is exactly as large as asked, rounded up to a page. There is no arena to fragment: what fits by arithmetic
      fits in fact, because the system's page tables do the defragmenting.
    * Memory is not touched by the pool while it is leased; in debug mode it is filled with NaN when it comes back.

Why no deadlock
    Two rules, and nothing else, carry the whole argument. A *demand* may wait; it is made only by someone who, while
    waiting, holds no more than the start-up arithmetic (``engine/budget.py``) allowed for. A *prefetch* never waits: it
    takes what is free now (``acquire_nowait``) or what no one needs sooner, else nothing. So what a demand waits for
    is a transfer in flight or a lease whose holder is not waiting.

Rejected: one arena with a first-fit allocator (loses 10-20% of the budget to fragmentation, or needs evictions that no
use order asks for); fixed slots (a 1 MB shard pins a 200 MB slot).

Where nothing free has the size that is asked for, as a rule when a full pool trades shards of one size for those of
another, what must be unmapped for it gives its pages to the new block. Pages of the system's would have to be cleared.

A block may carry an *event*: work on an accelerator's stream that still reads it. The event travels with the block to
its next lease, whose filler makes its own stream wait for it; a host thread waits only where the block is unmapped.

All methods belong to the loop thread; ``statistics`` may be called from any.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.io.memory import HUGE_PAGE_BYTES, PAGE_BYTES, drop_pages, move_pages, round_up
from infinity.trace import TierUsage

_POISON = 0xFF
"""Every float format reads this byte pattern as NaN, but for the ``fnuz`` variants of float8."""

_MAX_RUNS = 4096
"""In how many pieces at most the pages of a pool may come to lie: the system keeps a record of each, and no process may
have more than 65530 of these."""


def lease_bytes(num_bytes: int) -> int:
    """What a lease of ``num_bytes`` takes of the budget: whole pages."""
    return max(round_up(num_bytes, PAGE_BYTES), PAGE_BYTES)


class StreamEvent(Protocol):
    """What the pool needs of ``torch.Event``."""

    def synchronize(self) -> None:
        """Wait on the host until the event has happened."""


@dataclass(slots=True)
class Block:
    """Memory that the pool mapped; ``after`` is accelerator work that may still read it."""

    tensor: torch.Tensor
    after: StreamEvent | None = None


class Lease:
    """An owned piece of a pool, until ``release``.

    Attributes:
        num_bytes: how many bytes were asked for.
        size_bytes: how many of the budget it takes.
        tensor: ``uint8``, shape ``(num_bytes,)``, page aligned on the host.
        after: an event that must have happened before the memory is written, or ``None``.
    """

    __slots__ = ("_block", "_pool", "num_bytes", "size_bytes")

    def __init__(self, pool: BufferPool, block: Block, num_bytes: int) -> None:
        self._pool = pool
        self._block: Block | None = block
        self.num_bytes = num_bytes
        self.size_bytes = block.tensor.numel()

    @property
    def tensor(self) -> torch.Tensor:
        """The memory. Asking after ``release`` is a bug in the engine, not in the user's code."""
        assert self._block is not None, "lease used after release"
        return self._block.tensor[: self.num_bytes]

    @property
    def after(self) -> StreamEvent | None:
        """Accelerator work that may still read the memory."""
        assert self._block is not None, "lease used after release"
        return self._block.after

    def release(self, after: StreamEvent | None = None) -> None:
        """Give the memory back; ``after`` is the last work that reads it. Releasing twice is harmless.

        Without ``after`` the block keeps the event it came with: whoever leased it may never have waited for that.
        """
        block, self._block = self._block, None
        if block is not None:
            if after is not None:
                block.after = after
            self._pool.take_back(block)


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counters of a pool: bytes now and at most, and how often memory had to be mapped anew."""

    budget_bytes: int
    leased_bytes: int
    cached_bytes: int
    peak_bytes: int
    num_leases: int
    num_maps: int


class BufferPool:
    """Leases of exact size under one hard budget.

    Args:
        name: for messages ("host", "device").
        budget_bytes: the bound on leased and cached bytes together.
        allocate: maps memory: number of bytes (a multiple of a page) to a ``uint8`` tensor.
        poison: fill returned memory with NaN.
        recycles: blocks are host memory of ``io.memory.allocate``, not pinned, so that their pages can be moved.
    """

    def __init__(
        self,
        name: str,
        budget_bytes: int,
        allocate: Callable[[int], torch.Tensor],
        *,
        poison: bool = False,
        recycles: bool = False,
    ) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self._allocate = allocate
        self._poison = poison
        self._recycles = recycles
        self._run_bytes = round_up(max(budget_bytes // _MAX_RUNS, 1), HUGE_PAGE_BYTES)
        self._free: OrderedDict[int, list[Block]] = OrderedDict()  # by size, least recently used size first
        self._leased_bytes = 0
        self._cached_bytes = 0
        self._peak_bytes = 0
        self._num_leases = 0
        self._num_maps = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that can be leased now."""
        return self.budget_bytes - self._leased_bytes

    def acquire_nowait(self, num_bytes: int) -> Lease | None:
        """A lease of ``num_bytes`` if the budget has room now, else ``None``.

        Raises:
            MemoryError: the budget has room but the system does not.
        """
        size = lease_bytes(num_bytes)
        if size > self.free_bytes:
            return None
        block = self._reuse(size)
        if block is not None:
            if size in self._free:
                self._free.move_to_end(size)
        else:
            block = self._map(size)
        self._leased_bytes += size
        self._num_leases += 1
        self._peak_bytes = max(self._peak_bytes, self._leased_bytes + self._cached_bytes)
        return Lease(self, block, num_bytes)

    def take_back(self, block: Block) -> None:
        """End a lease: only ``Lease.release`` calls this."""
        size = block.tensor.numel()
        if self._poison:
            self._fill_with_nan(block)
        self._leased_bytes -= size
        self._cached_bytes += size
        self._num_leases -= 1
        self._free.setdefault(size, []).append(block)
        self._free.move_to_end(size)

    def statistics(self) -> PoolStatistics:
        """A snapshot of the counters."""
        return PoolStatistics(
            budget_bytes=self.budget_bytes,
            leased_bytes=self._leased_bytes,
            cached_bytes=self._cached_bytes,
            peak_bytes=self._peak_bytes,
            num_leases=self._num_leases,
            num_maps=self._num_maps,
        )

    def usage(self) -> TierUsage:
        """The same as the figures every tier reports."""
        return TierUsage(self._leased_bytes, self._peak_bytes, self.budget_bytes)

    def close(self) -> None:
        """Unmap every free block. Leases still out keep theirs until they end."""
        self._trim(0)

    def _reuse(self, size: int) -> Block | None:
        blocks = self._free.get(size)
        if not blocks:
            return None
        block = blocks.pop()
        if not blocks:
            del self._free[size]
        self._cached_bytes -= size
        return block

    def _map(self, size: int) -> Block:
        """A new block, of pages of those that have to be unmapped for it as far as they serve."""
        keep_bytes = self.budget_bytes - self._leased_bytes - size
        spare = self._trim(keep_bytes)
        tensor = self._allocate(size)
        self._num_maps += 1
        filled_bytes = 0
        for block in spare if self._recycles else ():
            moved_bytes = move_pages(block.tensor, tensor[filled_bytes:], run_bytes=self._run_bytes)
            filled_bytes += moved_bytes
            self._keep(block.tensor[moved_bytes:], keep_bytes - self._cached_bytes)
        return Block(tensor)

    def _keep(self, rest: torch.Tensor, most_bytes: int) -> None:
        """Have the rest of an unmapped block, up to so many bytes of it, be the first to give its pages to another."""
        size = min(rest.numel(), most_bytes) // self._run_bytes * self._run_bytes
        if size:
            drop_pages(rest[size:])
            self._free.setdefault(size, []).append(Block(rest[:size]))
            self._free.move_to_end(size, last=False)
            self._cached_bytes += size

    def _trim(self, keep_bytes: int) -> list[Block]:
        """Take out free blocks, least recently used sizes first, until at most ``keep_bytes`` are cached."""
        spare = []
        while self._cached_bytes > keep_bytes:
            block = self._reuse(next(iter(self._free)))
            assert block is not None
            if block.after is not None:
                block.after.synchronize()
            spare.append(block)
        return spare

    @staticmethod
    def _fill_with_nan(block: Block) -> None:
        if block.after is not None:
            block.after.synchronize()
            block.after = None
        with contextlib.suppress(RuntimeError):  # a device that is gone has nothing left to poison
            block.tensor.fill_(_POISON)
