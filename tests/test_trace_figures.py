"""The figures of a step are what its spans say: small steps by hand, and all others against a count of ticks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_trace import MIB, FakeClock, record_step
from infinity.trace import (
    COPY,
    OPTIMIZER,
    READ,
    STALL,
    TRAINING,
    WRITE,
    Bandwidths,
    Recorder,
    RouteStats,
    Span,
    StepMeter,
    StepStats,
    StepTrace,
    UnitStats,
)
from infinity.trace.timeline import Timeline, busy_periods, exclusive_seconds

GIB = 1 << 30


def measure(
    spans: list[Span],
    *,
    start: float = 0.0,
    end: float = 10.0,
    meter: StepMeter | None = None,
    read_bytes: int = 0,
    written_bytes: int = 0,
    **trace: object,
) -> StepStats:
    return (meter or StepMeter()).step_stats(
        StepTrace(7, start, end, spans, **trace),  # type: ignore[arg-type]
        stall_seconds=0.5,
        optimizer_seconds=0.25,
        nvme_read_bytes=read_bytes,
        nvme_written_bytes=written_bytes,
        num_gathers=4,
        num_stalls=1,
    )


def span(track: str, name: str, start: float, end: float, **args: object) -> Span:
    return Span(track, name, start, end, args)


def test_a_step_without_spans_has_figures_all_the_same() -> None:
    stats = measure([])
    assert (stats.step, stats.seconds, stats.stall_seconds, stats.optimizer_seconds) == (7, 10.0, 0.5, 0.25)
    assert (stats.num_gathers, stats.num_stalls) == (4, 1)
    assert (stats.compute_seconds, stats.overlap_share, stats.roofline_seconds, stats.achieved) == (0.0, 1.0, 0.0, 0.0)
    assert (stats.stalls, stats.routes, stats.units) == ({}, {}, {})


def test_computing_counts_once_and_waiting_does_not() -> None:
    stats = measure(
        [
            span(TRAINING, "forward", 1.0, 4.0, unit="a"),
            span(STALL, "read", 2.0, 3.0, unit="b"),
            span(OPTIMIZER, "step", 3.5, 6.0, unit="a"),
            span(READ, "param", 0.0, 2.5, unit="a", num_bytes=1),
            span(WRITE, "param", 5.0, 8.0, unit="a", num_bytes=1),
        ]
    )
    assert stats.compute_seconds == pytest.approx(1.0 + 3.0)  # 1 to 2, 3 to 6
    assert stats.stalls == {"read": 1.0}
    assert stats.overlap_share == pytest.approx((1.0 + 1.0) / 5.5)  # 1 to 2 and 5 to 6, of 0 to 2.5 and 5 to 8
    assert stats.units["a"] == UnitStats(
        forward_seconds=2.0,
        optimizer_seconds=2.5,
        moved_bytes={"nvme_read": {"param": 1}, "nvme_write": {"param": 1}},
    )
    assert stats.units["b"] == UnitStats(stalls={"read": 1.0})


def test_time_belongs_to_the_step_in_which_it_passes() -> None:
    meter = StepMeter()
    tail = span(OPTIMIZER, "step", 8.0, 13.0, unit="a")
    so_far = tail._replace(end_seconds=10.0)
    late_read = span(READ, "param", 9.0, 11.0, unit="a", num_bytes=5)
    first = measure([], meter=meter, unfinished=[so_far])
    second = measure([tail, late_read], start=10.0, end=20.0, meter=meter)
    assert (first.compute_seconds, first.units["a"].optimizer_seconds) == (2.0, 2.0)
    assert (second.compute_seconds, second.units["a"].optimizer_seconds) == (3.0, 3.0)
    assert second.routes["nvme_read"].busy_seconds == 1.0
    assert second.units["a"].moved_bytes == {"nvme_read": {"param": 5}}


def test_bytes_of_a_transfer_under_way_are_not_counted_twice() -> None:
    copy = span(COPY, "host_to_device", 9.0, 10.0, unit="a", num_bytes=5)
    first = measure([], unfinished=[copy])
    second = measure([copy._replace(end_seconds=11.0)], start=10.0, end=20.0)
    assert first.routes == {}
    assert first.units == {}
    assert second.routes["host_to_device"].moved_bytes == 5


def test_work_within_work_goes_to_the_inner_unit() -> None:
    stats = measure(
        [
            span(TRAINING, "forward", 0.0, 10.0, unit="model"),
            span(TRAINING, "forward", 1.0, 5.0, unit="block"),
            span(STALL, "room", 2.0, 3.0, unit="block"),
            span(TRAINING, "backward", 8.0, 9.0),
            span(TRAINING, "outside", 9.5, 10.0, unit="loader"),
        ]
    )
    assert stats.units["model"].forward_seconds == 4.5
    assert stats.units["block"] == UnitStats(forward_seconds=3.0, stalls={"room": 1.0})
    assert stats.units.keys() == {"model", "block"}
    assert stats.compute_seconds == 9.0


def test_routes_have_bytes_busy_time_and_the_best_of_the_run() -> None:
    meter = StepMeter()
    reads = [span(READ, "param", at, at + 1.0, unit="a", num_bytes=32 * MIB) for at in (0.0, 0.5, 4.0)]
    stats = measure(reads, meter=meter)
    rate = 96 * MIB / 2.5 / 1e9
    # A window is the first two, one busy period of 1.5 s; the third one's is not full yet.
    assert stats.routes == {"nvme_read": RouteStats(96 * MIB, 2.5, rate, 64 * MIB / 1.5 / 1e9)}
    fast = span(READ, "param", 12.0, 12.25, unit="a", num_bytes=64 * MIB)
    # It fills the window of the third, which is the better one.
    stats = measure([fast], start=10.0, end=20.0, meter=meter)
    assert stats.routes["nvme_read"].best_gb_s == pytest.approx(96 * MIB / 1.25 / 1e9)
    slow = span(READ, "param", 21.0, 29.0, unit="a", num_bytes=64 * MIB)
    stats = measure([slow], start=20.0, end=30.0, meter=meter)
    assert stats.routes["nvme_read"].best_gb_s == pytest.approx(96 * MIB / 1.25 / 1e9)
    assert stats.routes["nvme_read"].gb_s == pytest.approx(8 * MIB / 1e9)


def test_routes_come_in_a_fixed_order_with_the_copies_last() -> None:
    spans = [
        span(COPY, "host_to_device", 0.0, 1.0, unit="a", kind="param", num_bytes=3),
        span(COPY, "device_to_host", 0.0, 1.0, unit="a", kind="grad", num_bytes=4),
        span(WRITE, "param", 0.0, 1.0, unit="a", num_bytes=1),
        span(READ, "param", 0.0, 1.0, unit="a", num_bytes=2),
    ]
    stats = measure(spans)
    assert list(stats.routes) == ["nvme_read", "nvme_write", "device_to_host", "host_to_device"]
    assert stats.units["a"].moved_bytes["host_to_device"] == {"param": 3}
    assert stats.units["a"].moved_bytes["device_to_host"] == {"grad": 4}


def test_both_directions_at_once_are_judged_where_both_moved() -> None:
    reads = [span(READ, "param", at, at + 1.0, num_bytes=GIB) for at in (1.0, 3.0)]
    mixed = [*reads, span(WRITE, "param", 1.0, 2.0, num_bytes=GIB)]
    alone = [span(WRITE, "param", 5.0, 5.1, num_bytes=GIB)]
    stats = measure([*mixed, *alone], read_bytes=2 * GIB, written_bytes=2 * GIB)
    # reading alone: 1 GiB/s; writing alone: 10; both at once: 2
    assert stats.roofline_seconds == pytest.approx(2.0)
    assert stats.achieved == pytest.approx(0.2)
    stats = measure([*reads, *alone], read_bytes=GIB // 2, written_bytes=30 * GIB)
    assert stats.roofline_seconds == pytest.approx(3.0)  # no bound for both: they never were


def test_the_roofline_is_the_slowest_of_compute_and_the_given_bandwidths() -> None:
    compute = [span(TRAINING, "forward", 0.0, 2.0)]

    def roofline(**given: float) -> float:
        meter = StepMeter(Bandwidths(**given))
        return measure(compute, meter=meter, read_bytes=3 * 10**9, written_bytes=4 * 10**9).roofline_seconds

    assert roofline() == 2.0
    assert roofline(read=1.0) == 3.0
    assert roofline(write=1.0) == 4.0
    assert roofline(both=1.0) == 7.0
    assert roofline(read=100.0, write=100.0, both=100.0) == 2.0
    assert measure(compute, end=1.0).achieved == 1.0  # never more


def test_a_given_bandwidth_goes_before_the_best_seen() -> None:
    read = [span(READ, "param", 0.0, 1.0, num_bytes=GIB)]
    assert measure(read, read_bytes=GIB).roofline_seconds == pytest.approx(1.0)
    given = StepMeter(Bandwidths(read=2 * GIB / 1e9))
    assert measure(read, read_bytes=GIB, meter=given).roofline_seconds == pytest.approx(0.5)


def test_the_figures_of_a_whole_step() -> None:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    trace = record_step(recorder, clock)
    stats = measure(list(trace.spans), start=trace.start_seconds, end=trace.end_seconds)
    assert stats.seconds == pytest.approx(4 * 0.06 + 0.02 + 0.06)
    assert stats.compute_seconds == pytest.approx(4 * 0.06 + 0.04)
    assert stats.stalls == {"read": pytest.approx(0.02)}
    # 20 ms of the first read came before the step. Of what is left all but the last 10 ms of writing lies under
    # compute, and the read that was waited for before anything of it was under the forward before.
    busy = stats.routes["nvme_read"].busy_seconds
    assert busy == pytest.approx(3 * 0.02 + 0.02 + 3 * 0.02)
    assert stats.routes["nvme_write"].busy_seconds == pytest.approx(4 * 0.01)
    assert stats.units["blocks.3"].forward_seconds == pytest.approx(0.02)
    assert stats.units["blocks.3"].backward_seconds == pytest.approx(0.04)
    assert stats.units["blocks.3"].optimizer_seconds == pytest.approx(0.04)
    assert stats.units["blocks.3"].moved_bytes == {
        "nvme_read": {"param": 64 * MIB},
        "nvme_write": {"param": 32 * MIB, "state.exp_avg": 32 * MIB},
    }


def test_figures_are_plain_data() -> None:
    stats = measure([span(READ, "param", 0.0, 1.0, unit="a", num_bytes=4096), span(STALL, "read", 0.0, 1.0, unit="a")])
    document = json.loads(json.dumps(stats.as_dict(), allow_nan=False))
    assert document["routes"]["nvme_read"]["moved_bytes"] == 4096
    assert document["units"]["a"]["stalls"] == {"read": 1.0}
    assert document["nvme_read_bytes"] == 0


def test_units_of_several_steps_add_up() -> None:
    one = UnitStats(1.0, 2.0, 3.0, {"read": 1.0}, {"nvme_read": {"param": 1, "grad": 2}})
    other = UnitStats(1.0, 1.0, 1.0, {"read": 0.5, "room": 2.0}, {"nvme_read": {"grad": 3}, "nvme_write": {"param": 4}})
    assert one + other == UnitStats(
        2.0, 3.0, 4.0, {"read": 1.5, "room": 2.0}, {"nvme_read": {"param": 1, "grad": 5}, "nvme_write": {"param": 4}}
    )
    assert one.moved_bytes == {"nvme_read": {"param": 1, "grad": 2}}


def test_dropped_spans_are_told() -> None:
    assert measure([], num_dropped=3).num_dropped_spans == 3


Interval = st.tuples(st.integers(-3, 23), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair)))
Intervals = st.lists(Interval, max_size=8)


def ticks(intervals: list[tuple[int, int]]) -> set[int]:
    return {tick for start, end in intervals for tick in range(start, end)}


@given(a=Intervals, b=Intervals, c=Intervals)
@settings(max_examples=100, deadline=None)
def test_a_timeline_counts_like_ticks(
    a: list[tuple[int, int]], b: list[tuple[int, int]], c: list[tuple[int, int]]
) -> None:
    line = Timeline(0.0, 20.0, {"a": a, "b": b, "c": c})
    within = set(range(20))
    in_a, in_b, in_c = (ticks(each) & within for each in (a, b, c))
    assert line.seconds(line.busy("a")) == len(in_a)
    assert line.seconds(line.busy("a", "b")) == len(in_a | in_b)
    assert line.seconds(line.busy("a") & ~line.busy("b") | line.busy("c")) == len((in_a - in_b) | in_c)
    assert line.seconds(line.busy("missing")) == 0.0


@given(Intervals)
@settings(max_examples=100, deadline=None)
def test_each_instant_goes_to_who_began_last(intervals: list[tuple[int, int]]) -> None:
    expected = [0] * len(intervals)
    order = sorted(range(len(intervals)), key=lambda index: (intervals[index][0], -intervals[index][1]))
    for tick in ticks(intervals):
        expected[[index for index in order if intervals[index][0] <= tick < intervals[index][1]][-1]] += 1
    assert exclusive_seconds(intervals) == expected


@given(Intervals.filter(lambda intervals: all(end > start for start, end in intervals)))
@settings(max_examples=100, deadline=None)
def test_busy_periods_keep_every_byte_and_no_pause(intervals: list[tuple[int, int]]) -> None:
    transfers = [(start, end, 10 + index, 100 * (index % 2)) for index, (start, end) in enumerate(intervals)]
    periods = busy_periods(transfers)
    assert sum(period[1] for period in periods) == sum(each[2] for each in transfers)
    assert sum(period[2] for period in periods) == sum(each[3] for each in transfers)
    busy = ticks(intervals)
    assert sum(period[0] for period in periods) == len(busy)
    assert len(periods) == len([tick for tick in busy if tick - 1 not in busy])
