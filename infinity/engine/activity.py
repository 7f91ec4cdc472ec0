"""``Activity``: what the training thread does, as spans that neither overlap nor leave a gap.

From the first forward on, each instant of the training thread is one of: the forward or backward of a unit (or of what
lies between units, under the name ``model``), something outside the model (a loss, a loader, the user's own code), or a
wait, named by its cause; or what it does aside, which is none of these. A recomputation under backward counts as
backward.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from infinity.trace.spans import STALL, TRAINING, Recorder

_MODEL = "model"


class Activity:
    """Follows the training thread (and autograd's: only one of the two runs at a time).

    Args:
        recorder: is told of each span when it ends.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._phase = "outside"
        self._unit = _MODEL
        self._since: float | None = None

    def switch(self, phase: str, unit: str = _MODEL) -> None:
        """From now on ``phase`` (``forward``, ``backward``, ``outside``) of ``unit`` runs."""
        now = time.perf_counter()
        if self._since is not None:
            self._recorder.record(TRAINING, self._phase, self._since, now, unit=self._unit)
        self._phase, self._unit, self._since = phase, unit, now

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """The training thread does something else meanwhile, which is recorded where it is done."""
        self.switch(self._phase, self._unit)
        try:
            yield
        finally:
            self._since = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self, what: str = _MODEL) -> Iterator[list[tuple[str, float]]]:
        """The training thread waits for a unit; whoever knows why adds each cause, with the time at which it ended."""
        causes: list[tuple[str, float]] = []
        phase, unit = self._phase, self._unit
        self.switch(phase, unit)
        begun = self._since
        try:
            yield causes
        finally:
            assert begun is not None
            for cause, ended in causes:
                self._recorder.record(STALL, cause, begun, ended, unit=what)
                begun = ended
            self._since = begun
            self.switch(phase, unit)
