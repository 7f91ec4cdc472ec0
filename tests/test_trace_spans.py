"""The recorder keeps what all threads report, step by step, and no more than it may."""

from __future__ import annotations

import sys
import threading

import pytest

from fakes_trace import FakeClock
from infinity.trace import HOST_TO_DEVICE, READ, Recorder, ShardSpans, Span


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_a_step_has_the_spans_that_ended_in_it(clock: FakeClock) -> None:
    recorder = Recorder(clock=clock)
    recorder.record("training", "forward", 1000.0, 1001.0, unit="a")
    clock.now = 1002.0
    first = recorder.end_step()
    recorder.record("training", "backward", 1001.5, 1003.0, unit="a")
    clock.now = 1004.0
    second = recorder.end_step()
    assert (first.step, first.start_seconds, first.end_seconds, first.seconds) == (1, 1000.0, 1002.0, 2.0)
    assert first.spans == [Span("training", "forward", 1000.0, 1001.0, {"unit": "a"})]
    assert (second.step, second.start_seconds, second.end_seconds) == (2, 1002.0, 1004.0)
    assert second.spans == [Span("training", "backward", 1001.5, 1003.0, {"unit": "a"})]


def test_only_the_last_complete_steps_are_kept(clock: FakeClock) -> None:
    recorder = Recorder(clock=clock)
    assert not recorder.steps
    for _ in range(3):
        recorder.end_step()
    assert [each.step for each in recorder.steps] == [3]
    recorder.keep_steps = 2
    for _ in range(3):
        recorder.end_step()
    assert [each.step for each in recorder.steps] == [5, 6]


def test_what_is_too_much_is_counted_and_the_next_step_begins_empty(clock: FakeClock) -> None:
    recorder = Recorder(max_spans=3, clock=clock)
    for number in range(5):
        recorder.record("read", str(number), 0.0, 1.0)
    first = recorder.end_step()
    assert [span.name for span in first.spans] == ["0", "1", "2"]
    assert first.num_dropped == 2
    recorder.record("read", "5", 0.0, 1.0)
    second = recorder.end_step()
    assert [span.name for span in second.spans] == ["5"]
    assert second.num_dropped == 0


def test_what_a_context_encloses_is_a_span_also_where_it_raises(clock: FakeClock) -> None:
    recorder = Recorder(clock=clock)

    def work() -> None:
        with recorder.span("optimizer", "step", unit="a", part=3):
            clock.now += 0.5
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert recorder.end_step().spans == [Span("optimizer", "step", 1000.0, 1000.5, {"unit": "a", "part": 3})]


def test_a_step_knows_of_what_is_still_open(clock: FakeClock) -> None:
    recorder = Recorder(clock=clock)
    clock.now = 1001.0
    with recorder.span("optimizer", "step", unit="a"):
        clock.now = 1003.0
        first = recorder.end_step()
        clock.now = 1004.0
    second = recorder.end_step()
    assert first.spans == []
    assert first.unfinished == [Span("optimizer", "step", 1001.0, 1003.0, {"unit": "a"})]
    assert second.spans == [Span("optimizer", "step", 1001.0, 1004.0, {"unit": "a"})]
    assert second.unfinished == []


def test_what_came_before_the_start_is_no_part_of_the_first_step(clock: FakeClock) -> None:
    recorder = Recorder(clock=clock)
    recorder.record("write", "param", 1000.0, 1001.0)
    clock.now = 1005.0
    recorder.start()
    clock.now = 1006.0
    step = recorder.end_step()
    assert (step.step, step.start_seconds, step.spans) == (1, 1005.0, [])


def test_no_span_of_several_threads_is_lost_while_steps_end() -> None:
    recorder = Recorder(keep_steps=1 << 20)
    num_threads, num_spans = 4, 2000

    def work(thread: int) -> None:
        for number in range(num_spans):
            if number % 2:
                recorder.record("read", "x", 0.0, 1.0, thread=thread, number=number)
            else:
                with recorder.span("read", "x", thread=thread, number=number):
                    pass

    threads = [threading.Thread(target=work, args=(index,)) for index in range(num_threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet everywhere
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            recorder.end_step()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    recorder.end_step()
    seen = [(span.args["thread"], span.args["number"]) for step in recorder.steps for span in step.spans]
    assert sorted(seen) == [(thread, number) for thread in range(num_threads) for number in range(num_spans)]
    assert all(step.num_dropped == 0 for step in recorder.steps)


def test_a_transfer_becomes_a_span_of_its_unit_and_the_tiers_are_noted(clock: FakeClock) -> None:
    recorder = Recorder(clock=clock)
    levels = iter([111, 222, 222])
    observe = ShardSpans(recorder, ["embedding", "blocks.0"])
    observe.add_gauge("host", lambda: next(levels))
    clock.now = 1003.0
    observe(READ, (1, 4, "state.exp_avg"), 1001.0, 1002.0, num_bytes=4096, queued_seconds=0.25)
    observe(READ, (0, 0, "param"), 1001.0, 1002.5, num_bytes=8192, queued_seconds=0.0)
    spans = recorder.end_step().spans
    args = {"unit": "blocks.0", "part": 4, "num_bytes": 4096, "queued_seconds": 0.25}
    assert spans[0] == Span("read", "state.exp_avg", 1001.0, 1002.0, args)
    assert spans[1] == Span("counter", "host", 1003.0, 1003.0, {"value": 111})
    assert spans[2].args["unit"] == "embedding"
    observe(HOST_TO_DEVICE, (1, 0, "param"), 1001.0, 1002.0, num_bytes=4096, queued_seconds=0.0)
    [copy] = recorder.end_step().spans  # and no level, since it is what it was
    assert (copy.track, copy.name, copy.args["kind"]) == ("copy", "host_to_device", "param")
    assert spans[3].args == {"value": 222}
