"""``StepAccount``: what a step has cost, from counters that only ever grow."""

from __future__ import annotations

import time

from infinity.engine.prefetch import PrefetchScheduler
from infinity.store.store import TieredStore
from infinity.trace import Recorder, StepMeter, StepStats


class StepAccount:
    """Takes stock at the end of each step. Made when the first one begins.

    Args:
        store: counts what is moved.
        scheduler: counts gathers and waits.
        recorder: knows who did what when.
    """

    def __init__(self, store: TieredStore, scheduler: PrefetchScheduler, recorder: Recorder) -> None:
        self._store = store
        self._scheduler = scheduler
        self._recorder = recorder
        self._meter = StepMeter()
        self._mark = self._counters()
        recorder.start()

    def end_step(self, begun_seconds: float) -> StepStats:
        """The figures of the step that ends now.

        Args:
            begun_seconds: when ``step()`` was called, as ``time.perf_counter`` tells it.
        """
        mark = self._counters()
        since = {name: value - self._mark[name] for name, value in mark.items()}
        self._mark = mark
        return self._meter.step_stats(
            self._recorder.end_step(),
            stall_seconds=since["stall_seconds"],
            optimizer_seconds=time.perf_counter() - begun_seconds,
            nvme_read_bytes=int(since["read_bytes"]),
            nvme_written_bytes=int(since["written_bytes"]),
            num_gathers=int(since["num_gathers"]),
            num_stalls=int(since["num_stalls"]),
        )

    def _counters(self) -> dict[str, float]:
        moved, waited = self._store.statistics(), self._scheduler.statistics
        return {
            "read_bytes": moved.read_bytes,
            "written_bytes": moved.written_bytes,
            "stall_seconds": waited.stall_seconds,
            "num_gathers": waited.num_gathers,
            "num_stalls": waited.num_stalls,
        }
