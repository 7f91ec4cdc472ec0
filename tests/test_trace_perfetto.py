"""A trace file keeps the rules of the Trace Event Format, so that Perfetto and Chrome show what was recorded."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_trace import MIB, FakeClock, record_step
from infinity.errors import StorageError
from infinity.trace import OPTIMIZER, READ, TRAINING, Recorder, Span, StepTrace
from infinity.trace.perfetto import trace_events, write_trace

Event = dict[str, Any]


def broken_rules(events: list[Event]) -> list[str]:
    """What the format, or the programs that show it, would not take."""
    named = [event for event in events if event.get("ph") == "M"]
    timed = [event for event in events if event.get("ph") != "M"]
    complaints = ["metadata after events"] if events[: len(named)] != named else []
    complaints += [
        f"no pid, tid or name: {event}"
        for event in events
        if type(event.get("pid")) is not int or type(event.get("tid")) is not int or not event.get("name")
    ]
    complaints += [
        f"no name in {event}"
        for event in named
        if event["name"] in ("process_name", "thread_name") and not isinstance(event["args"]["name"], str)
    ]
    complaints += [complaint for event in timed for complaint in broken_by(event)]
    times = [event["ts"] for event in timed]
    if times != sorted(times):
        complaints.append("not sorted by time")
    names = threads_of(events)
    slices = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            slices[event["tid"]].append(event)
    complaints += [f"thread {thread} has no name" for thread in slices if thread not in names.values()]
    complaints += [f"slices of {thread} neither follow nor enclose" for thread in slices if not nest(slices[thread])]
    return complaints


def broken_by(event: Event) -> list[str]:
    """What is wrong with a slice or a counter by itself."""
    complaints = []
    if event["ph"] not in ("X", "C"):
        complaints.append(f"unknown phase {event['ph']}")
    if not (math.isfinite(event["ts"]) and event["ts"] >= 0):
        complaints.append(f"time {event['ts']}")
    if event["ph"] == "C" and not all(isinstance(value, (int, float)) for value in event["args"].values()):
        complaints.append(f"counter that is no number: {event}")
    if event["ph"] == "X" and not event.get("dur", -1) >= 0:
        complaints.append(f"no duration: {event}")
    return complaints


def nest(slices: list[Event]) -> bool:
    """Whether slices of one thread follow or enclose one another."""
    enclosing: list[float] = []
    for event in slices:
        end = event["ts"] + event.get("dur", 0.0)
        while enclosing and enclosing[-1] <= event["ts"] + 1e-3:
            enclosing.pop()
        if enclosing and end > enclosing[-1] + 1e-3:
            return False
        enclosing.append(end)
    return True


def threads_of(events: list[Event]) -> dict[str, int]:
    return {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}


@pytest.fixture
def steps() -> list[StepTrace]:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    return [record_step(recorder, clock), record_step(recorder, clock)]


def test_the_rules_are_kept_and_tracks_stand_side_by_side(steps: list[StepTrace]) -> None:
    events = trace_events(steps)
    assert broken_rules(events) == []
    assert list(threads_of(events)) == ["steps", "read", "training", "stall", "optimizer", "write", "write 2"]
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert list(order.values()) == sorted(order.values())


def test_every_span_is_there_in_its_place(steps: list[StepTrace]) -> None:
    events = trace_events(steps)
    thread = threads_of(events)["training"]
    forward = [event for event in events if event["tid"] == thread and event["name"] == "forward blocks.2"]
    assert len(forward) == len(steps)
    # The first read begins 20 ms before the first step, and blocks.2 is computed from 40 to 60 ms.
    assert (forward[0]["ts"], forward[0]["dur"]) == (pytest.approx(60_000), pytest.approx(20_000))
    assert forward[0]["cat"] == "training"
    num_slices = sum(event["ph"] == "X" and event["cat"] != "steps" for event in events)
    assert num_slices == sum(span.track != "counter" for step in steps for span in step.spans)
    read = next(event for event in events if event.get("cat") == READ)
    assert read["args"] == {"unit": "blocks.0", "part": 0, "num_bytes": 32 * MIB, "queued_seconds": 0.0}
    marks = [event for event in events if event.get("cat") == "steps"]
    assert [event["name"] for event in marks] == ["step 1", "step 2"]
    assert marks[1]["ts"] == pytest.approx(marks[0]["ts"] + marks[0]["dur"])


def test_levels_are_counters(steps: list[StepTrace]) -> None:
    counters = [event for event in trace_events(steps) if event["ph"] == "C"]
    assert len(counters) == 8
    assert {(event["name"], event["args"]["value"]) for event in counters} == {("host", 32 * MIB)}


def test_work_nests_on_one_thread_and_transfers_do_not() -> None:
    def spans(track: str) -> list[Span]:
        return [Span(track, "x", start, end, {}) for start, end in ((0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (4.5, 4.6))]

    events = trace_events([StepTrace(1, 0.0, 5.0, [*spans(READ), *spans(TRAINING), *spans(OPTIMIZER)])])
    assert broken_rules(events) == []
    assert list(threads_of(events)) == ["steps", "read", "read 2", "training", "training 2", "optimizer", "optimizer 2"]


def test_a_trace_without_steps_is_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_trace(file, [])
    document = json.loads(file.read_text())
    assert [event["name"] for event in document["traceEvents"]] == ["process_name"]


def test_the_file_is_strict_json_with_the_events(steps: list[StepTrace], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text("older and longer" * 10_000)
    write_trace(file, steps)
    document = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert document["traceEvents"] == trace_events(steps)
    assert document["displayTimeUnit"] == "ms"


def test_a_file_that_cannot_be_written_is_a_typed_error(steps: list[StepTrace], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="writing the trace failed"):
        write_trace(tmp_path / "missing" / "trace.json", steps)


TRACKS = ("training", "read", "write", "stall", "counter", "elsewhere")
Spans = st.lists(
    st.tuples(st.sampled_from(TRACKS), st.integers(-5, 30), st.integers(0, 10)).map(
        lambda each: Span(each[0], "x", each[1] / 8, (each[1] + each[2]) / 8, {"value": 1})
    ),
    max_size=25,
)


@given(Spans)
@settings(max_examples=100, deadline=None)
def test_the_rules_are_kept_whatever_was_recorded(spans: list[Span]) -> None:
    events = trace_events([StepTrace(1, 0.0, 4.0, spans)])
    assert broken_rules(events) == []
    assert sum(event["ph"] == "X" for event in events) == 1 + sum(span.track != "counter" for span in spans)


def test_the_rules_of_this_file_find_what_breaks_them(steps: list[StepTrace]) -> None:
    good = trace_events(steps)
    slices = [index for index, event in enumerate(good) if event["ph"] == "X"]

    def with_change(index: int, **change: Any) -> list[Event]:
        return [{**event, **change} if at == index else event for at, event in enumerate(good)]

    assert broken_rules(with_change(slices[3], ts=-1.0))
    assert broken_rules(with_change(slices[3], dur=-1.0))
    assert broken_rules(with_change(slices[3], tid="main"))
    assert broken_rules(with_change(slices[3], tid=99))
    assert broken_rules(with_change(slices[3], ph="B"))
    assert broken_rules(good[::-1])
    forward = next(index for index, event in enumerate(good) if event["name"] == "forward blocks.2")
    assert broken_rules(with_change(forward, dur=good[forward]["dur"] * 1.5))
