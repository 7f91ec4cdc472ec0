"""The parts of the benchmark, each alone: patterns, sizes, passes, memory, figures."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fakes_bench import GIB, KIB, MIB
from infinity.bench.figures import Figures, Row, in_order
from infinity.bench.memory import memory_routes
from infinity.bench.passes import ALL, InterruptedRunError, Lane, Limit, Sample, run_pass, run_work
from infinity.bench.pattern import Pattern
from infinity.bench.results import Latency, Run
from infinity.bench.settings import BenchSettings, Point
from infinity.bench.sizing import OWN_BYTES, Flight, Sizes, plan_flight, plan_sizes
from infinity.bench.sweep import grid
from infinity.bench.tiers import Ring
from infinity.console.interrupt import StopRequest
from infinity.errors import BudgetError, ConfigError, DiskFullError, MismatchError, StorageError
from infinity.io.memory import allocate
from infinity.store.directory import JobDirectory

# What is written.


@examples(deadline=None, max_examples=50)
@given(st.integers(0, 1), st.integers(0, 40_000), st.integers(1, 255), st.integers(0, 1 << 40))
def test_a_pattern_sees_any_change(file: int, position: int, flip: int, page: int) -> None:
    pattern, offset = Pattern(3), page * 4096
    data = np.empty(40_008, np.uint8)
    pattern.fill(data, file, offset)
    pattern.check(data, file, offset, path=Path("f"), source="x")
    data[position] ^= flip
    with pytest.raises(MismatchError) as caught:
        pattern.check(data, file, offset, path=Path("f"), source="x")
    assert caught.value.offset == offset + position


def test_a_pattern_differs_everywhere_between_places_files_and_generations() -> None:
    def words(generation: int, file: int, offset: int, num_bytes: int = MIB) -> Any:
        data = np.empty(num_bytes, np.uint8)
        Pattern(generation).fill(data, file, offset)
        return data.view(np.uint64)

    first = words(0, 0, 0, 4 * MIB)
    assert len(np.unique(first)) == len(first)
    assert (first[: MIB // 8] != words(1, 0, 0)).all()
    assert (first[: MIB // 8] != words(0, 1, 0)).all()
    assert (first[MIB // 8 : MIB // 4] == words(0, 0, MIB)).all()


# How much is measured with.


class Disk:
    """What sizing asks of a job directory."""

    def __init__(self, device: int, free_bytes: int) -> None:
        self.path = Path(f"/disk{device}")
        self.device = device
        self.free_bytes = lambda: free_bytes


def plan(*disks: Disk, available_bytes: int = 64 * GIB, **flags: Any) -> Sizes:
    settings = BenchSettings(nvme=["unused"], **flags)
    planned = plan_sizes(settings, cast("list[JobDirectory]", disks), available_bytes)
    assert planned.memory_bytes <= available_bytes - OWN_BYTES
    return planned


def sizes(*disks: Disk, available_bytes: int = 64 * GIB, **flags: Any) -> tuple[int, int]:
    planned = plan(*disks, available_bytes=available_bytes, **flags)
    return planned.share_bytes, planned.ring_bytes


def test_sizes_fit_what_is_free() -> None:
    disk = Disk(1, 100 * GIB)
    assert sizes(disk) == (GIB, 256 * MIB)
    assert sizes(disk, quick=True) == (256 * MIB, 128 * MIB)
    assert sizes(disk, disk) == (512 * MIB, 256 * MIB)
    assert sizes(disk, size="5GiB") == (5 * GIB, 256 * MIB)
    assert sizes(disk, available_bytes=GIB + OWN_BYTES) == (256 * MIB, 256 * MIB)
    assert sizes(Disk(1, 416 * MIB)) == (100 * MIB, 100 * MIB)
    assert sizes(disk, Disk(2, 416 * MIB)) == (100 * MIB, 200 * MIB)
    assert sizes(Disk(1, 816 * MIB), Disk(1, 816 * MIB)) == (100 * MIB, 200 * MIB)
    assert sizes(Disk(1, 80 * MIB)) == (16 * MIB, 32 * MIB)
    assert sizes(Disk(1, 19 * MIB)) == (2 * MIB, 4 * MIB)
    assert sizes(disk, points=("4KiBx1",), size="4KiB") == (4 * KIB, 8 * KIB)


def test_what_cannot_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(DiskFullError, match=r"needs 67.1 MB in each directory; .* has 66.1 MB for each: short by 1"):
        sizes(Disk(1, 79 * MIB), points=("32MiBx2",))
    with pytest.raises(DiskFullError, match="short by"):
        sizes(Disk(1, 100 * MIB), Disk(1, 100 * MIB), size="200MiB")
    with pytest.raises(BudgetError, match=r"in all 1.6 GB; beside 168 MB .* 1.1 GB are free: short by 537 MB"):
        sizes(Disk(1, 100 * GIB), available_bytes=GIB + OWN_BYTES, size="1GiB")
    with pytest.raises(BudgetError):
        sizes(Disk(1, 100 * GIB), available_bytes=OWN_BYTES + 5 * MIB)
    with pytest.raises(ConfigError, match=r"--size: expected at least 67.1 MB, one round"):
        sizes(Disk(1, 100 * GIB), size="63MiB", points=("4MiBx16",))
    with pytest.raises(ConfigError, match=r"--size: expected at least 2.1 MB in each of 2 directories, got 1.0 MB"):
        sizes(Disk(1, 100 * GIB), Disk(2, 100 * GIB), size="1MiB")


def test_requests_are_large_and_keep_every_worker_busy() -> None:
    assert plan_flight(Point(4 * MIB, 8), GIB) == Flight(32 * MIB, 2)
    assert plan_flight(Point(32 * MIB, 2), GIB) == Flight(32 * MIB, 3)
    assert plan_flight(Point(256 * KIB, 1), GIB) == Flight(32 * MIB, 2)
    assert plan_flight(Point(64 * MIB, 1), GIB) == Flight(64 * MIB, 2)
    assert plan_flight(Point(4 * MIB, 8), GIB, largest_bytes=9 * MIB) == Flight(8 * MIB, 5)
    assert plan_flight(Point(64 * KIB, 4), MIB) == Flight(128 * KIB, 3)


@given(st.sampled_from(grid(GIB)), st.integers(1, 4 * GIB), st.integers(1, 64 * MIB))
def test_requests_are_whole_blocks_and_cover_the_queue_beside_the_one_that_ends(
    point: Point, share_bytes: int, largest_bytes: int
) -> None:
    flight = plan_flight(point, share_bytes, largest_bytes)
    assert flight.request_bytes % point.block_bytes == 0
    assert (flight.num_requests - 1) * flight.request_bytes >= point.round_bytes


# What a pass is.


def lane(depth: int, log: list[str], name: str = "x", *, most: int = 1000, fail_at: int | None = None) -> Lane:
    async def move() -> int:
        log.append(name)
        number = len(log)
        await asyncio.sleep(0)
        if number == fail_at:
            raise StorageError("no", path="f")
        return 10

    return Lane(name, depth, most, move)


async def test_a_pass_moves_one_round_however_short_its_time() -> None:
    log: list[str] = []
    sample = await run_pass([lane(3, log)], Limit(seconds=0.0), StopRequest())
    assert (len(log), sample.direction_bytes, len(sample.latency)) == (3, {"x": 30}, 3)
    sample = await run_pass([lane(3, log)], Limit(0.0, min_requests=7), StopRequest())
    assert sample.num_requests == [7]
    sample = await run_pass([lane(3, log, most=2)], Limit(), StopRequest())
    assert sample.num_requests == [2]


async def test_a_lane_that_is_through_ends_the_pass() -> None:
    log: list[str] = []
    sample = await run_pass([lane(1, log, "slow", most=20), lane(4, log, "fast", most=20)], Limit(), StopRequest())
    slow, fast = sample.num_requests
    assert fast == 20
    assert 4 <= slow <= 6
    assert sample.direction_bytes == {"slow": 10 * slow, "fast": 200}
    run = sample.as_run()
    assert (run.num_bytes, run.direction_bytes) == (10 * slow + 200, sample.direction_bytes)


async def test_every_lane_goes_to_its_end_where_that_is_asked_for() -> None:
    log: list[str] = []
    sample = await run_pass([lane(1, log, "slow", most=20), lane(4, log, "fast", most=20)], ALL, StopRequest())
    assert sample.num_requests == [20, 20]
    limit = Limit(seconds=0.0, min_requests=7, together=False)
    sample = await run_pass([lane(1, log, "slow", most=20), lane(4, log, "fast", most=5)], limit, StopRequest())
    assert sample.num_requests == [7, 5]


async def test_lanes_of_one_direction_count_together() -> None:
    log: list[str] = []
    sample = await run_pass([lane(1, log), lane(2, log)], Limit(seconds=0.0), StopRequest())
    assert sample.num_requests == [1, 2]
    run = sample.as_run()
    assert (run.num_bytes, run.direction_bytes) == (30, {})


async def test_an_error_ends_the_pass_and_finish_is_not_called() -> None:
    log: list[str] = []

    async def finish() -> None:
        log.append("finish")

    with pytest.raises(StorageError):
        await run_pass([lane(2, log, fail_at=5)], Limit(), StopRequest(), finish)
    assert "finish" not in log
    assert len(log) <= 6
    sample = await run_pass([lane(2, log, most=2)], Limit(), StopRequest(), finish)
    assert log[-1] == "finish"
    assert sample.seconds > 0


async def test_a_signal_ends_a_pass_after_the_requests_in_flight() -> None:
    stop, ended = StopRequest(), []

    async def move() -> int:
        stop.signal = signal.SIGINT
        await asyncio.sleep(0)
        ended.append(True)
        return 1

    with pytest.raises(InterruptedRunError):
        await run_pass([Lane("x", 1, 100, move)], Limit(), stop)
    assert ended == [True]


async def test_work_is_done_on_one_other_thread_once_before_the_clock_runs() -> None:
    threads: list[threading.Thread] = []

    def start() -> Any:
        def work() -> int:
            threads.append(threading.current_thread())
            return 7

        return work

    sample = await run_work("work", start, 0.0, StopRequest())
    assert len(threads) == 2
    assert len(set(threads)) == 1
    assert threads[0] is not threading.main_thread()
    assert (sample.direction_bytes, sample.num_requests, len(sample.latency)) == ({"work": 7}, [1], 1)
    assert sample.as_run().direction_bytes == {}
    sample = await run_work("work", start, 0.01, StopRequest())
    assert 0.01 <= sample.seconds < 5
    assert sample.direction_bytes["work"] == 7 * sample.num_requests[0]


async def test_a_signal_ends_work_after_the_piece_in_progress() -> None:
    stop = StopRequest()

    def start() -> Any:
        numbers = itertools.count()

        def work() -> int:
            if next(numbers) == 3:
                stop.signal = signal.SIGTERM
            return 1

        return work

    with pytest.raises(InterruptedRunError):
        await run_work("work", start, 1e9, stop)


def test_a_ring_uses_its_places_in_turn() -> None:
    ring = Ring(allocate(4096 * 4), 4096)
    with ring.place(4096) as first:
        addresses = [first.data_ptr()]
        for _ in range(3):
            with ring.place(100) as place:
                addresses.append(place.data_ptr())
                assert place.numel() == 100
    assert len(set(addresses)) == 4


# Work on host memory.


def test_what_the_memory_routes_do_is_what_they_say() -> None:
    source, target = allocate(MIB), allocate(64 * MIB)
    Pattern(0).fill(source.numpy(), 0, 0)
    memcpy, optimizer, checksum = memory_routes(source, target)
    copy = memcpy.start()
    assert [copy() for _ in range(64)] == [MIB] * 64
    assert memcpy.size_bytes == 64 * MIB
    assert all(torch.equal(source, piece) for piece in target.split(MIB))

    step = optimizer.start()
    pieces = target.split(optimizer.piece_bytes)
    assert len(pieces) == 4
    assert [step() for _ in range(4)] == [optimizer.piece_bytes] * 4
    for piece in pieces:
        parameter, gradient, first, second = piece.view(torch.float32).split(optimizer.piece_bytes // 16)
        expected = torch.nn.Parameter(torch.full_like(parameter, 0.01))
        expected.grad = torch.full_like(parameter, 0.01)
        reference = torch.optim.AdamW([expected], lr=1e-4)
        state = {"step": torch.tensor(0.0), "exp_avg": expected.grad.clone(), "exp_avg_sq": expected.grad.clone()}
        reference.state[expected] = state
        reference.step()
        assert torch.equal(parameter, expected)
        assert torch.equal(gradient, expected.grad)
        assert torch.equal(first, state["exp_avg"])
        assert torch.equal(second, state["exp_avg_sq"])

    assert checksum.start()() == checksum.piece_bytes == MIB
    assert memcpy.start()() == MIB
    optimizer.start()  # whatever others left in the memory, it is ordinary numbers again
    assert (target.view(torch.float32) == 0.01).all()


# What becomes of the figures.


def test_repeats_become_one_result_and_results_come_in_the_order_of_routes() -> None:
    def sample(read: int, seconds: float) -> Sample:
        result = Sample({"read": read, "write": read}, [1, 1], seconds, cpu_seconds=0.5)
        result.latency.add(0.010)
        return result

    final, swept = Figures(), Figures()
    both = Row("b", "threads", MIB, 8, GIB, verified=True)
    alone = Row("b", "threads", MIB, 8, GIB, verified=True, path="/x")
    peer = Row("b", "fio", MIB, 8, GIB, reference=True)
    look = Row("b", "threads", MIB, 4, GIB, verified=True)
    first = Row("a", "words", MIB, 1, GIB)
    final.add_peer(peer, Run(10**9, 1.0, 0.1), Latency(0.001, 0.5))
    final.add_peer(peer, Run(10**9, 1.0, 0.1), Latency(0.002, 0.1))
    for repeat in range(3):
        final.add(both, sample(10**9 * (repeat + 1), 1.0))
    final.add(alone, sample(10**9, 1.0))
    final.add(first, Sample({"copy": 10**9}, [1], 1.0, 0.5))
    swept.add(look, sample(10**9, 1.0))
    swept.add(both, sample(10**9, 1.0))
    results = in_order(final, swept, ("a", "b"))
    assert [(r.route, r.backend, r.queue_depth, r.path) for r in results] == [
        ("a", "words", 1, None),
        ("b", "threads", 8, None),
        ("b", "threads", 8, "/x"),
        ("b", "fio", 8, None),
        ("b", "threads", 4, None),
    ]
    document = results[1].as_document()
    assert document["gb_s"] == {"median": 4.0, "min": 2.0, "max": 6.0}
    assert document["gb_s_each"] == {"read": 2.0, "write": 2.0}
    assert document["latency_ms"]["p50"] == pytest.approx(10, rel=0.1)
    assert document["verified"] is True
    assert results[0].latency is None
    assert results[0].verified is None
    assert results[3].reference
    assert results[3].latency == Latency(0.001, 0.5)
