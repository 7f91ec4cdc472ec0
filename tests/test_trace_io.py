"""When a transfer moved is told apart from when it stood in line: by every backend, and by the NVMe tier per shard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import fakes_io
from fakes_io import BLOCK_BYTES, KINDS, Rig, buffer, noise
from fakes_store import FakeOpener
from infinity.errors import StorageError
from infinity.io.backend import DIRECT_ALIGNMENT, Timing, Transfer
from infinity.io.open import open_backend
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey
from infinity.store.volumes import OpenBackend
from infinity.trace import READ, WRITE, Recorder, ShardSpans, StepMeter

PAGE = DIRECT_ALIGNMENT


@pytest.fixture(params=KINDS, ids=str)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    async with fakes_io.rig_for(request.param, tmp_path) as rig:
        yield rig


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
async def test_a_request_is_timed_from_its_first_block_to_its_last(rig: Rig, write: bool) -> None:
    gate = rig.gate("read", "write")
    backend = rig.backend(gate, num_workers=1)
    rig.path.write_bytes(noise(8 * BLOCK_BYTES))
    file = await backend.open_file(rig.path)
    move = backend.write_many if write else backend.read_many
    timings = [Timing(), Timing()]

    async def transfer(index: int, num_blocks: int) -> None:
        # Apart from the other in the file, so that no block has bytes of both.
        memory = buffer(num_blocks * BLOCK_BYTES)
        await move([Transfer(file, 4 * index * BLOCK_BYTES, memory)], timing=timings[index])

    asked = time.perf_counter()
    first = asyncio.ensure_future(transfer(0, 1))
    await gate.arrival()
    second = asyncio.ensure_future(transfer(1, 2))
    await fakes_io.spin()
    released = time.perf_counter()
    gate.let_one_pass()
    await first
    await gate.arrival()
    half = time.perf_counter()
    gate.let_one_pass()
    await gate.arrival()
    gate.open()
    await second
    ended = time.perf_counter()
    assert asked <= timings[0].start_seconds <= released <= timings[0].end_seconds <= half
    # The second stood in line until the only worker was free, and its blocks came one after the other.
    assert released <= timings[0].end_seconds <= timings[1].start_seconds <= half
    assert half <= timings[1].end_seconds <= ended


async def test_nothing_to_move_leaves_a_timing_as_it_was(rig: Rig) -> None:
    backend = rig.backend()
    timing = Timing()
    await backend.read_many([], timing=timing)
    assert timing == Timing()


@asynccontextmanager
async def opened(parent: Path, num_paths: int, opener: OpenBackend, recorder: Recorder) -> AsyncIterator[NvmeTier]:
    paths = [parent / f"nvme{index}" for index in range(num_paths)]
    for path in paths:
        path.mkdir()
    tier = await NvmeTier.open(
        paths,
        capacity_bytes=4 << 20,
        backend_name="threads",
        num_threads=2,
        block_bytes=1 << 20,
        weights=[1.0] * num_paths,
        observe=ShardSpans(recorder, ["embedding", "blocks.0"]),
        open_backend=opener,
    )
    try:
        yield tier
    finally:
        await tier.aclose()


def names(recorder: Recorder) -> Sequence[tuple[str, str, str, int]]:
    return [(span.track, span.name, span.args["unit"], span.args["num_bytes"]) for span in recorder.end_step().spans]


@pytest.mark.parametrize("num_paths", [1, 2])
@pytest.mark.parametrize("opener", [open_backend, FakeOpener()], ids=["threads", "fake"])
async def test_each_transfer_of_a_shard_is_one_span(tmp_path: Path, opener: OpenBackend, num_paths: int) -> None:
    recorder = Recorder()
    key, num_bytes = ShardKey(1, 2, "state.exp_avg"), 2 << 20
    async with opened(tmp_path, num_paths, opener, recorder) as tier:
        recorder.start()
        begun = time.perf_counter()
        memory = buffer(num_bytes, fill=noise(num_bytes))
        await tier.write(key, memory)
        await tier.read(key, memory)
        await tier.read(key, memory)
        ended = time.perf_counter()
    step = recorder.end_step()
    assert [(span.track, span.name) for span in step.spans] == [(WRITE, key.kind), (READ, key.kind), (READ, key.kind)]
    at = begun
    for span in step.spans:
        assert {**span.args, "queued_seconds": 0} == {
            "unit": "blocks.0",
            "part": 2,
            "num_bytes": num_bytes,
            "queued_seconds": 0,
        }
        assert span.args["queued_seconds"] >= 0
        assert at <= span.start_seconds <= span.end_seconds <= ended
        at = span.end_seconds
    stats = StepMeter().step_stats(
        step,
        stall_seconds=0.0,
        optimizer_seconds=0.0,
        nvme_read_bytes=0,
        nvme_written_bytes=0,
        num_gathers=0,
        num_stalls=0,
    )
    assert stats.units["blocks.0"].moved_bytes == {
        "nvme_write": {"state.exp_avg": num_bytes},
        "nvme_read": {"state.exp_avg": 2 * num_bytes},
    }


async def test_a_transfer_that_fails_or_is_cancelled_is_no_span(tmp_path: Path) -> None:
    opener, recorder = FakeOpener(), Recorder()
    key = ShardKey(0, 0, "param")
    async with opened(tmp_path, 1, opener, recorder) as tier:
        await tier.write(key, buffer(PAGE))
        assert names(recorder) == [(WRITE, "param", "embedding", PAGE)]
        [backend] = opener.backends
        backend.faults = lambda operation, path: StorageError("failed", path=path) if operation == "read" else None
        with pytest.raises(StorageError):
            await tier.read(key, buffer(PAGE))
        backend.faults = lambda operation, path: None
        opener.gate.clear()
        task = asyncio.ensure_future(tier.read(key, buffer(PAGE)))
        await fakes_io.until(lambda: backend.num_waiting > 0)
        task.cancel()
        opener.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert names(recorder) == []
        await tier.read(key, buffer(PAGE))
        assert names(recorder) == [(READ, "param", "embedding", PAGE)]
