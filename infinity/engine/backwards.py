"""``Backwards``: the backwards since the last step: which one runs, how many are over, which one is the last.

Those inside ``uncounted`` only add gradients. As a rule one runs at a time. Several may take turns
(``begin_several``): each has a number of its own, gradients are summed in the order of these numbers, and all are over
together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from infinity.errors import EngineStateError


class Backwards:
    """Counts the backwards of a step.

    Args:
        num_in_step: how many there are in a step, if its sub-groups are to be stepped under the last.
        is_binding: whether there may be no more.

    Attributes:
        current: the number of the one that runs, or will run next; numbers only grow.
    """

    def __init__(self, num_in_step: int | None, *, is_binding: bool = True) -> None:
        self.current = 1
        self._is_binding = is_binding
        self._num_in_step = num_in_step
        self._num_done = 0  # since the last step
        self._bringing: set[int] = set()  # those under way that have brought a gradient
        self._at_once = range(0)  # those that take turns
        self._counts = True

    @property
    def is_final(self) -> bool:
        """Whether the one that runs, or has just ended, is the last before a step, or one of several that are."""
        num_open = len(self._at_once) or len(self._bringing)
        return self._counts and self._num_in_step is not None and self._num_done + num_open == self._num_in_step

    @property
    def is_complete(self) -> bool:
        """Whether the step has all its backwards, and can have no more."""
        return self._is_binding and self._num_in_step is not None and self._num_done >= self._num_in_step

    @property
    def last(self) -> int:
        """The number of the one after which no other of those under way comes."""
        return self._at_once[-1] if self._at_once else self.current

    @property
    def position(self) -> int:
        """Which one of the step runs, counted from 1; 0 for one that is not counted."""
        if not self._counts:
            return 0
        return self._num_done + 1 + (self.current - self._at_once.start if self._at_once else 0)

    @property
    def num_in_step(self) -> int | None:
        """How many there are in a step, if that matters."""
        return self._num_in_step

    def note_gradient(self) -> None:
        """The one that runs has brought a gradient."""
        self._bringing.add(self.current)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """A context in which backwards are not counted, and none is the last."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def refuse_uncounted(self, what: str) -> None:
        """Refuse what belongs after all backwards of a step.

        Raises:
            EngineStateError: it is inside ``uncounted``.
        """
        if not self._counts:
            raise EngineStateError(
                f"{what}() was called inside engine.no_sync(), where backwards only add up; run the last backward of a "
                "step, and the step, after the with-block"
            )

    def begin_several(self, count: int) -> range:
        """So many take turns from now on. Returns their numbers: ``current`` is to be the one that runs."""
        self._at_once = range(self.current, self.current + count)
        return self._at_once

    def end_several(self) -> None:
        """All that took turns are over, completely or not."""
        self.current, self._at_once = self.last, range(0)
        self.end()

    def end(self) -> None:
        """The one that runs is over, completely or not; one of several is not over before all are."""
        if not self._at_once:
            self.current += 1
            self._num_done += len(self._bringing) if self._counts else 0
            self._bringing.clear()

    def end_step(self) -> None:
        """What comes next is of another step."""
        self._num_done = 0

    def refuse_more(self, count: int) -> None:
        """Refuse more backwards than are left until the step.

        Raises:
            EngineStateError: ``count`` are too many.
        """
        is_limited = self._counts and self._is_binding
        if is_limited and self._num_in_step is not None and self._num_done + count > self._num_in_step:
            raise EngineStateError(
                f"accumulate() got {count} micro-batches, but accumulation_steps={self._num_in_step} leaves "
                f"{self._num_in_step - self._num_done} backwards until step(); give so many, call step() first, or "
                "leave accumulation_steps unset"
            )

    def refuse_early_steps(self, what: str) -> None:
        """Refuse what needs all gradients of a step, where sub-groups are stepped before all have come.

        Raises:
            EngineStateError: they are.
        """
        if self._is_binding and self._num_in_step is not None:
            raise EngineStateError(
                f"{what} with accumulation_steps={self._num_in_step}: steps begin under backward "
                f"{self._num_in_step}, before the norm of all gradients is known; set max_grad_norm in Config, with "
                "which they wait for it, or leave accumulation_steps unset"
            )
