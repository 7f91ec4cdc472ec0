"""Traces of steps as JSON that ui.perfetto.dev and chrome://tracing open: the "Trace Event Format".

A track is a thread of one process. Slices of one thread must follow or enclose one another, so transfers that run at
the same time are dealt out to as many threads as it takes: ``read``, ``read 2``, … Work that does nest, a wait within a
forward, stays on its thread. Times are microseconds from the start of the first step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from infinity.errors import storage_error
from infinity.trace.spans import COMMIT, COPY, COUNTER, OPTIMIZER, READ, STALL, TRAINING, WRITE, Span, StepTrace

_PROCESS = 1
_STEPS = "steps"
_ORDER = (_STEPS, READ, COPY, TRAINING, STALL, OPTIMIZER, WRITE, COMMIT)
"""Tracks from top to bottom; others come below."""

_MICROSECONDS = 1e6


def trace_events(steps: Sequence[StepTrace]) -> list[dict[str, Any]]:
    """The events of a trace: names of threads first, then slices and counters by time, enclosing slices first.

    Args:
        steps: complete ones, in order.
    """
    if not steps:
        return [_name("process_name", 0, name="infinity")]
    marks = [Span(_STEPS, f"step {each.step}", each.start_seconds, each.end_seconds, _about(each)) for each in steps]
    spans = [*marks, *(span for each in steps for span in each.spans)]
    # What began before the first step has its place left of it: no time of a trace is negative.
    zero = min(span.start_seconds for span in spans)
    tracks = sorted({span.track for span in spans} - {COUNTER}, key=_rank)
    names = [_name("process_name", 0, name="infinity")]
    events = [_counter(span, zero) for span in spans if span.track == COUNTER]
    thread = 0
    for track in tracks:
        for number, lane in enumerate(_lanes([span for span in spans if span.track == track])):
            thread += 1
            names.append(_name("thread_name", thread, name=track if number == 0 else f"{track} {number + 1}"))
            names.append(_name("thread_sort_index", thread, sort_index=thread))
            events += [_slice(span, thread, zero) for span in lane]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return names + events


def write_trace(path: Path, steps: Sequence[StepTrace]) -> None:
    """Write the trace of some steps.

    Args:
        path: the file; one that is there is replaced.
        steps: complete ones, in order.

    Raises:
        StorageError: the file cannot be written.
    """
    document = {"traceEvents": trace_events(steps), "displayTimeUnit": "ms", "otherData": {"producer": "infinity"}}
    try:
        path.write_text(json.dumps(document, allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise storage_error("writing the trace", error, path=path) from error


def _rank(track: str) -> tuple[int, str]:
    return _ORDER.index(track) if track in _ORDER else len(_ORDER), track


def _about(step: StepTrace) -> dict[str, Any]:
    return {"num_spans": len(step.spans), "num_dropped_spans": step.num_dropped}


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Deal spans of one track out so that in each lane they follow or enclose one another."""
    lanes: list[list[Span]] = []
    running: list[list[Span]] = []  # of each lane, from the outermost inwards
    for span in sorted(spans, key=lambda span: (span.start_seconds, -span.end_seconds)):
        for lane, open_spans in zip(lanes, running, strict=True):
            while open_spans and open_spans[-1].end_seconds <= span.start_seconds:
                open_spans.pop()
            if not open_spans or (_may_nest(span) and span.end_seconds <= open_spans[-1].end_seconds):
                lane.append(span)
                open_spans.append(span)
                break
        else:
            lanes.append([span])
            running.append([span])
    return lanes


def _may_nest(span: Span) -> bool:
    """Whether within another span of its track it is a part of that; a transfer within another is none of it."""
    return span.track not in (READ, WRITE, COPY)


def _slice(span: Span, thread: int, zero: float) -> dict[str, Any]:
    unit = span.args.get("unit")
    return {
        "ph": "X",
        "name": span.name if unit is None else f"{span.name} {unit}",
        "cat": span.track,
        "ts": (span.start_seconds - zero) * _MICROSECONDS,
        "dur": (span.end_seconds - span.start_seconds) * _MICROSECONDS,
        "pid": _PROCESS,
        "tid": thread,
        "args": dict(span.args),
    }


def _counter(span: Span, zero: float) -> dict[str, Any]:
    return {
        "ph": "C",
        "name": span.name,
        "ts": (span.start_seconds - zero) * _MICROSECONDS,
        "pid": _PROCESS,
        "tid": 0,
        "args": {"value": span.args["value"]},
    }


def _name(kind: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": args}
