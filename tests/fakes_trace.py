"""A clock that tests move, and a synthetic step: what an engine would have recorded of a small model."""

from __future__ import annotations

from infinity.trace import OPTIMIZER, READ, STALL, TRAINING, WRITE, Recorder, StepTrace

MIB = 1 << 20


class FakeClock:
    """Seconds that pass when they are told to; starts late, as ``time.perf_counter`` does."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def record_step(recorder: Recorder, clock: FakeClock, *, num_units: int = 4, num_bytes: int = 32 * MIB) -> StepTrace:
    """A step in which nearly everything overlaps; takes 60 ms for each unit and 80 more.

    Each unit: forward 20 ms, backward 40 ms, a read of 20 ms before each, its optimizer 40 ms after its backward, then
    two writes of 10 ms side by side. Training waits once, 20 ms before the first backward.
    """
    start = clock.now
    names = [f"blocks.{index}" for index in range(num_units)]
    order = [("forward", 0.02, name) for name in names] + [("backward", 0.04, name) for name in reversed(names)]
    at = start
    for name, seconds, unit in order:
        recorder.record(READ, "param", at - 0.02, at, unit=unit, part=0, num_bytes=num_bytes, queued_seconds=0.0)
        if (name, unit) == ("backward", names[-1]):
            recorder.record(STALL, "read", at, at + 0.02, unit=unit)
            at += 0.02
        recorder.record(TRAINING, name, at, at + seconds, unit=unit)
        at += seconds
        if name == "backward":
            recorder.record(OPTIMIZER, "step", at, at + 0.04, unit=unit, part=0)
            for kind in ("param", "state.exp_avg"):
                recorder.record(WRITE, kind, at + 0.04, at + 0.05, unit=unit, part=0, num_bytes=num_bytes)
            recorder.record("counter", "host", at, at, value=num_bytes)
    clock.now = at + 0.06
    return recorder.end_step()
