"""The three tiers, opened as the engine opens them, and the memory that requests use."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import torch

from infinity.bench.device import Device, open_device
from infinity.bench.pattern import Pattern
from infinity.bench.settings import BenchSettings
from infinity.bench.sizing import Sizes
from infinity.bench.volumes import Volume, open_volumes
from infinity.io.backend import Priority
from infinity.io.completion import call_in_thread
from infinity.io.memory import as_bytes
from infinity.store.directory import JobDirectory
from infinity.store.host import HostTier
from infinity.store.nvme import OpenBackend
from infinity.store.pool import Lease
from infinity.store.shard import ShardKey


@dataclass(frozen=True, slots=True)
class Request:
    """A piece of a file, and of the memory it is written from.

    Attributes:
        volume: whose file.
        offset: byte offset in the file.
        source: ``uint8``, shape ``(n,)``: what belongs there.
    """

    volume: Volume
    offset: int
    source: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Size of the piece."""
        return self.source.numel()

    async def read_into(self, target: torch.Tensor) -> None:
        """Read the piece into host memory of its size.

        Raises:
            StorageError: the read failed.
        """
        await self.volume.backend.read_into(self.volume.file, self.offset, as_bytes(target))

    async def write(self) -> None:
        """Write the piece from its source.

        Raises:
            StorageError: the write failed.
        """
        await self.volume.backend.write_from(self.volume.file, self.offset, as_bytes(self.source))


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

    def requests(self, block_bytes: int) -> list[Request]:
        """All files cut into requests, from each file one in turn."""
        return [
            Request(volume, offset, self.source_of(volume)[offset : min(offset + block_bytes, self.share_bytes)])
            for offset in range(0, self.share_bytes, block_bytes)
            for volume in self.volumes
        ]

    def source_of(self, volume: Volume) -> torch.Tensor:
        """What belongs into a file."""
        start = volume.index * self._source_bytes_each
        return self.source[start : start + self._source_bytes_each]

    async def fill_source(self, pattern: Pattern) -> None:
        """Make ``source`` hold the pattern."""

        def fill() -> None:
            for volume in self.volumes:
                pattern.fill(self.source_of(volume)[: self.share_bytes].numpy(), volume.index, 0)

        await call_in_thread(fill)


@contextlib.asynccontextmanager
async def open_tiers(
    settings: BenchSettings,
    directories: Sequence[JobDirectory],
    sizes: Sizes,
    device: torch.device,
    open_backend: OpenBackend,
) -> AsyncIterator[Tiers]:
    """Open files, host memory and device memory, and close them all.

    Raises:
        StorageError: as ``open_volumes``.
    """
    async with contextlib.AsyncExitStack() as stack:
        volumes = await stack.enter_async_context(open_volumes(settings, directories, sizes.share_bytes, open_backend))
        host = HostTier(
            sizes.total_bytes + sizes.ring_bytes,
            distance=lambda key: 0.0,
            fill=_nothing_below,
            spill=None,
            headroom_bytes=lambda: 0,
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
        memory = await call_in_thread(lambda: open_device(device, sizes.ring_bytes, host))
        yield Tiers(volumes, sizes, source.tensor, landing.tensor, memory)


async def _nothing_below(key: ShardKey, lease: Lease, priority: Priority) -> None:
    raise AssertionError("the benchmark leases host memory directly")
