"""``StopRequest``: Ctrl-C and SIGTERM end a run after the step in progress, and a second one ends it at once.

``ended_by_signals`` is for what has no steps: all that it does is undone.

The handler only notes the signal, or raises: printing from it could meet a print in progress. Closing is shielded,
since what closes the engine must itself not be cut short.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """While entered, the handler of SIGINT, SIGTERM and SIGHUP; main thread only.

    Attributes:
        signal: the last one that came, or ``None``.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._shielded = False
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        self._former = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended; 0 if none came."""
        return 0 if self.signal is None else 128 + self.signal

    def shield(self) -> None:
        """From now on note signals, but raise for none."""
        self._shielded = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.signal is not None
        self.signal = signal.Signals(number)
        if again and not self._shielded:
            self._shielded = True
            raise KeyboardInterrupt


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """A signal that ends the process lets it clean up first."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    former = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)
