"""How fast the disk is for a mix of reads and writes, measured through the same tier as training uses."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.config import Config
from infinity.io.backend import Priority
from infinity.io.memory import allocate, as_bytes
from infinity.io.tasks import gather_all
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey

GB = 1e9
SHARD_BYTES = 16 << 20
NUM_SHARDS = 16
NUM_BUFFERS = 8


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """GB/s of reads alone, of writes alone, and of both together where both go on at once."""

    read: float
    write: float
    both: float

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """How long a mix takes at least: what can go both ways at once does, the rest goes alone."""
        paired = min(read_bytes, written_bytes)
        together = 2 * paired / self.both + (read_bytes - paired) / self.read + (written_bytes - paired) / self.write
        return together / GB


def median_bandwidth(measured: Sequence[Bandwidth]) -> Bandwidth:
    """The median of each direction."""
    return Bandwidth(
        statistics.median(one.read for one in measured),
        statistics.median(one.write for one in measured),
        statistics.median(one.both for one in measured),
    )


def measure_bandwidth(directory: Path, config: Config) -> Bandwidth:
    """Move shards of 16 MiB, eight in flight, 256 MiB each way, with the I/O settings of ``config``."""
    return asyncio.run(_measure(directory, config))


async def _measure(directory: Path, config: Config) -> Bandwidth:
    tier = await NvmeTier.open(
        [directory],
        capacity_bytes=2 * NUM_SHARDS * SHARD_BYTES,
        backend_name=config.io_backend,
        num_threads=config.io_num_threads,
        block_bytes=config.io_block_bytes,
    )
    try:
        buffers = [as_bytes(allocate(SHARD_BYTES)) for _ in range(NUM_BUFFERS)]
        old = [ShardKey(0, number, "old") for number in range(NUM_SHARDS)]
        new = [ShardKey(0, number, "new") for number in range(NUM_SHARDS)]

        async def move(write: bool, keys: list[ShardKey], lane: int, lanes: int) -> None:
            for key in keys[lane::lanes]:
                if write:
                    await tier.write(key, buffers[lane], priority=Priority.DEMAND)
                else:
                    await tier.read(key, buffers[len(buffers) - 1 - lane])

        async def timed(*directions: tuple[bool, list[ShardKey]]) -> float:
            lanes = len(buffers) // len(directions)
            begun = time.perf_counter()
            await gather_all(move(write, keys, lane, lanes) for write, keys in directions for lane in range(lanes))
            return len(directions) * NUM_SHARDS * SHARD_BYTES / GB / (time.perf_counter() - begun)

        for keys in (old, new):  # initialised once: first writes into reserved space are slower
            await timed((True, keys))
        return Bandwidth(
            read=await timed((False, old)),
            write=await timed((True, new)),
            both=await timed((False, old), (True, new)),
        )
    finally:
        await tier.aclose()
