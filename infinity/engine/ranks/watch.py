"""``Watch``: finds ranks that wait for each other for ever, each on another lane.

A lane compares what ranks are about to do on it. Where a branch of one rank leads to a gather and that of another to a
reduction, each waits on a lane on which the other never comes, and only the time-out would end that, naming one side.
So ranks tell each other, once a second, on what they wait, over a group of their own. If twice in a row all ranks do
nothing but wait for others, and nothing has ended in between, nothing ever will: all are told what each waits for.

What it may cost: a message of some hundred bytes per rank and second. It reads counters of the lanes without locks: a
value that is out of date delays the verdict, since everything has to be the same twice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from infinity.engine.collectives import Collectives
from infinity.engine.ranks.awaited import Awaited
from infinity.errors import RanksError

_SECONDS = 1.0


class Watch:
    """Watches what a rank waits on, from construction to ``close``.

    Args:
        collectives: of all ranks of the job, for nothing else; its own from now on.
        lanes: what this rank may wait on.
    """

    def __init__(self, collectives: Collectives, lanes: Sequence[Awaited]) -> None:
        self._collectives = collectives
        self._lanes = lanes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name="infinity-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, soon: its thread leaves the group when it hears of others, or at once if it waits for nobody."""
        self._ended.set()

    def _main(self) -> None:
        try:
            with contextlib.suppress(RanksError):  # a rank has left: whoever waits for it is told on its lane
                self._watch()
        finally:
            self._collectives.close()

    def _watch(self) -> None:
        before: list[Any] = []
        while not self._ended.wait(_SECONDS):
            now = self._collectives.exchange(self._waits(), "watching")
            if now == before and all(now):
                error = RanksError(f"rank {self._collectives.job_rank} of {len(now)}: {_verdict(now)}")
                for lane in self._lanes:
                    lane.fail(error)
                return
            before = now

    def _waits(self) -> list[list[Any]]:
        """For each lane that somebody waits for, and that waits for other ranks: what for, and all that has ended."""
        num_ended = sum(lane.num_ended for lane in self._lanes)
        return [[lane.waits_for, num_ended] for lane in self._lanes if lane.num_awaited and lane.waits_for is not None]


def _verdict(waits: list[list[list[Any]]]) -> str:
    doing = "; ".join(f"rank {rank} at {own[0][0]!r}" for rank, own in enumerate(waits))
    return (
        f"the ranks wait for each other at different points: {doing}. All ranks must run the same modules in the same "
        "order, and call what reads or changes whole values (state_dict, save_checkpoint, commit, step) together"
    )
