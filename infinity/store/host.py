"""The host tier: shards in page-aligned RAM under a hard budget, backed by NVMe where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from infinity.io.completion import InFlight
from infinity.io.memory import allocate
from infinity.io.numa import ANYWHERE, Placement
from infinity.io.tasks import call_in_executor
from infinity.store.pool import BufferPool
from infinity.store.residency import Fill, Residency, Spill
from infinity.store.shard import ShardKey
from infinity.trace import TierUsage


class HostTier:
    """Shards in host memory.

    Args:
        budget_bytes: the hard bound.
        distance: how far away a shard's next use is.
        fill: brings a shard in from the tier below.
        spill: writes a shard to the tier below; ``None`` when there is none.
        on_room: told, once per turn of the loop at most, that a prefetch which found no room may find some now.
        pin: register the memory with the accelerator's runtime.
        poison: fill released memory with NaN.
        placement: on which node its memory is to be.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        distance: Callable[[ShardKey], float],
        fill: Fill[ShardKey],
        spill: Spill[ShardKey] | None,
        on_room: Callable[[], None] = lambda: None,
        pin: bool,
        poison: bool,
        placement: Placement = ANYWHERE,
    ) -> None:
        # Pages come at the first touch, on the thread that touches: mapping must not block the loop.
        self.pool = BufferPool(
            "ram",
            budget_bytes,
            lambda size: allocate(size, pin=pin, populate=pin, placement=placement),
            poison=poison,
            recycles=not pin,
        )
        self.residency: Residency[ShardKey] = Residency(
            self.pool, distance=distance, fill=fill, spill=spill, room=on_room
        )
        self._copier = ThreadPoolExecutor(1, "infinity-copy")
        self._copies = InFlight()

    async def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy between two host ``uint8`` tensors of equal size, on a thread of its own and without the GIL.

        However it ends, the thread has then done with both.
        """
        with self._copies:
            await call_in_executor(self._copier, np.copyto, target.numpy(), source.numpy())

    def usage(self) -> TierUsage:
        """Bytes leased now, at most, and allowed."""
        return self.pool.usage()

    async def aclose(self) -> None:
        """Join what moves and give the memory back. Closing twice is harmless."""
        try:
            await self.residency.close()
        finally:
            cancelled = await self._copies.drained()
            self._copier.shutdown()  # its thread is idle
            self.pool.close()
        if cancelled:
            raise asyncio.CancelledError
