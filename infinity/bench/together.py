"""Each rank's NVMe while all others use theirs: what a rank has in training, where several share a disk or a bus."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infinity.bench.passes import InterruptedRunError
from infinity.bench.results import GB, Result, Run
from infinity.config import BackendName, Config
from infinity.console.directories import nvme_directories
from infinity.engine.collectives import Collectives
from infinity.io.backend import Priority
from infinity.io.memory import allocate, as_bytes
from infinity.io.tasks import gather_all
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey

READ, WRITE = "all nvme->host", "all host->nvme"

_SHARD_BYTES = 16 << 20
_NUM_BUFFERS = 4
_MOST_SHARDS = 16


def measure_together(
    collectives: Collectives,
    paths: Sequence[Path],
    *,
    size_bytes: int,
    repeats: int,
    backend: BackendName,
    stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[str], object] = lambda step: None,
) -> tuple[list[Result], list[dict[str, Any]]]:
    """Have all ranks read, and then write, at the same time, each its own file.

    Every rank calls it. A figure of all is the sum of their bytes over the time of the slowest.

    Args:
        collectives: theirs.
        paths: this rank's directories, created where only the last component is missing; ranks may share them.
        size_bytes: about what each rank's file holds.
        repeats: timed runs of each direction; rank 0's count.
        backend: the I/O backend.
        stop: whether this rank has been asked to stop; one is enough.
        on_step: told what goes on.

    Returns:
        The same on every rank: the figures of all together, and those of each.

    Raises:
        InterruptedRunError: a rank was asked to stop.
        RanksError: another rank has ended.
        StorageError: a directory cannot be used.
    """

    def share(created: list[str]) -> list[list[str]]:
        facts = collectives.exchange(created, "telling each other which directories were created")
        own = collectives.hosts[collectives.rank]
        return [fact for fact, host in zip(facts, collectives.hosts, strict=True) if host == own]

    def agree(fact: Any, phase: str) -> list[Any]:
        answers = collectives.exchange([fact, bool(stop())], phase)
        if any(stopped for _, stopped in answers):
            raise InterruptedRunError
        return [fact for fact, _ in answers]

    with nvme_directories(paths, lambda words: None, share=share):
        num_shards = max(1, min(size_bytes // _SHARD_BYTES, _MOST_SHARDS))
        timed = asyncio.run(_measure(collectives.rank, paths, num_shards, repeats, backend, agree, on_step))
    documents = [
        {
            "rank": rank,
            "host": host,
            "nvme": fact["paths"],
            "read_gb_s": statistics.median(fact[READ]),
            "write_gb_s": statistics.median(fact[WRITE]),
        }
        for rank, (host, fact) in enumerate(zip(collectives.hosts, timed[2], strict=True))
    ]
    return [
        Result(name, backend, _block_bytes(), _NUM_BUFFERS, collectives.num_ranks * num_shards * _SHARD_BYTES, runs)
        for name, runs in zip((READ, WRITE), timed[:2], strict=True)
    ], documents


async def _measure(
    rank: int,
    paths: Sequence[Path],
    num_shards: int,
    repeats: int,
    backend: BackendName,
    agree: Callable[[Any, str], list[Any]],
    on_step: Callable[[str], object],
) -> tuple[list[Run], list[Run], list[dict[str, Any]]]:
    """Each direction's runs of all ranks together, and each rank's GB/s in each run."""
    defaults = Config(nvme=tuple(paths))
    tier = await NvmeTier.open(
        paths,
        capacity_bytes=num_shards * _SHARD_BYTES,
        backend_name=backend,
        num_threads=defaults.io_num_threads,
        block_bytes=defaults.io_block_bytes,
        rank=rank,
    )
    buffers = [as_bytes(allocate(_SHARD_BYTES)) for _ in range(_NUM_BUFFERS)]
    for number, buffer in enumerate(buffers):  # no zeros, which some disks do not store
        np.frombuffer(buffer, np.uint64)[:] = np.random.default_rng(number).integers(0, 1 << 63, _SHARD_BYTES // 8)

    async def read(key: ShardKey, lane: int) -> None:
        await tier.read(key, buffers[lane])

    async def write(key: ShardKey, lane: int) -> None:
        await tier.write(key, buffers[lane], priority=Priority.DEMAND)

    async def go(move: Callable[[ShardKey, int], Awaitable[None]]) -> tuple[float, float]:
        async def lane(index: int) -> None:
            for number in range(index, num_shards, _NUM_BUFFERS):
                await move(ShardKey(0, number, "shard"), index)

        began, cpu_began = time.perf_counter(), time.process_time()
        await gather_all(lane(index) for index in range(_NUM_BUFFERS))
        return time.perf_counter() - began, time.process_time() - cpu_began

    try:
        await go(write)  # the first into reserved space is slower
        [repeats, *_] = agree(repeats, "agreeing on what to measure of all ranks' NVMe")
        runs: dict[str, list[Run]] = {READ: [], WRITE: []}
        own: dict[str, Any] = {"paths": [str(path) for path in paths], READ: [], WRITE: []}
        for repeat in range(repeats):
            for name, move in ((READ, read), (WRITE, write)):
                on_step(f"{name}, {repeat + 1} of {repeats}")
                agree(None, f"starting {name}")
                seconds, cpu_seconds = await go(move)
                own[name].append(num_shards * _SHARD_BYTES / seconds / GB)
                all_of_them = agree([seconds, cpu_seconds, num_shards], f"ending {name}")
                runs[name].append(
                    Run(
                        num_bytes=sum(each[2] for each in all_of_them) * _SHARD_BYTES,
                        seconds=max(each[0] for each in all_of_them),
                        cpu_seconds=sum(each[1] for each in all_of_them),
                    )
                )
        return runs[READ], runs[WRITE], agree(own, "telling each other how fast NVMe was")
    finally:
        await tier.aclose()


def _block_bytes() -> int:
    return int(Config.model_fields["io_block_bytes"].default)
