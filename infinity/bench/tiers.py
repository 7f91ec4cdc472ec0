"""The three tiers, and the memory that requests use."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence

import torch

from infinity.bench.device import Device, open_device
from infinity.bench.pattern import Pattern
from infinity.bench.sizing import Sizes
from infinity.bench.volumes import Volume
from infinity.io.backend import Priority
from infinity.io.completion import call_in_thread
from infinity.store.host import HostTier
from infinity.store.pool import Lease
from infinity.store.shard import ShardKey


class Ring:
    """Memory in places of one size, used in turn, so that a processor cache never holds the next.

    Args:
        memory: ``uint8``, at least as large as all places in use at once.
        place_bytes: size of a place.
    """

    def __init__(self, memory: torch.Tensor, place_bytes: int) -> None:
        self._memory = memory
        self._place_bytes = place_bytes
        self._free = deque(range(0, memory.numel() - place_bytes + 1, place_bytes))

    @contextlib.contextmanager
    def place(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """The place that was free longest: ``uint8``, shape ``(num_bytes,)``."""
        assert num_bytes <= self._place_bytes
        start = self._free.popleft()
        try:
            yield self._memory[start : start + num_bytes]
        finally:
            self._free.append(start)


class Tiers:
    """Files, host memory and device memory; made by ``open_tiers``.

    Attributes:
        volumes: the files.
        share_bytes: how much of each file is used.
        source: host memory that holds what belongs into all files.
        landing: host memory that is read into.
        device: the device tier.
    """

    def __init__(
        self, volumes: Sequence[Volume], sizes: Sizes, source: torch.Tensor, landing: torch.Tensor, device: Device
    ) -> None:
        self.volumes = volumes
        self.share_bytes = sizes.share_bytes
        self.source = source
        self.landing = landing
        self.device = device
        self._source_bytes_each = sizes.share_bytes

    @property
    def size_bytes(self) -> int:
        """Used bytes of all files."""
        return self.share_bytes * len(self.volumes)

    def source_of(self, volume: Volume) -> torch.Tensor:
        """What belongs into a file."""
        start = volume.index * self._source_bytes_each
        return self.source[start : start + self.share_bytes]

    async def fill_source(self, pattern: Pattern, start: int = 0, stop: int | None = None) -> None:
        """Make ``source`` hold the pattern, or these bytes of each file's part."""

        def fill() -> None:
            for volume in self.volumes:
                pattern.fill(self.source_of(volume)[start:stop].numpy(), volume.index, start)

        await call_in_thread(fill)


@contextlib.asynccontextmanager
async def open_tiers(volumes: Sequence[Volume], sizes: Sizes, device: torch.device) -> AsyncIterator[Tiers]:
    """Take host memory and device memory, and give them back."""
    async with contextlib.AsyncExitStack() as stack:
        host = HostTier(
            sizes.total_bytes + sizes.ring_bytes,
            distance=lambda key: 0.0,
            fill=_nothing_below,
            spill=None,
            pin=device.type == "cuda",
            poison=False,
        )
        stack.push_async_callback(host.aclose)
        source, landing = await call_in_thread(
            lambda: [host.pool.acquire_nowait(size) for size in (sizes.total_bytes, sizes.ring_bytes)]
        )
        assert source is not None
        assert landing is not None
        stack.callback(source.release)
        stack.callback(landing.release)
        await call_in_thread(landing.tensor.zero_)  # its pages come at the first touch, which is not to be timed
        memory = await call_in_thread(lambda: open_device(device, sizes.ring_bytes, host))
        yield Tiers(volumes, sizes, source.tensor, landing.tensor, memory)


async def _nothing_below(key: ShardKey, lease: Lease, priority: Priority) -> None:
    raise AssertionError("the benchmark leases host memory directly")
