"""``Awaited``: something on which a rank waits for others, as ``watch.py`` looks at it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Awaited:
    """A lane, or what agrees on commits. Others read these without locks.

    Attributes:
        waits_for: what for, while it waits for other ranks.
        num_ended: how many waits are over.
        num_awaited: how many callers do nothing but wait for it.
    """

    def __init__(self) -> None:
        self.waits_for: str | None = None
        self.num_ended = 0
        self.num_awaited = 0

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """A context in which somebody waits for it, and does nothing else."""
        self.num_awaited += 1
        try:
            yield
        finally:
            self.num_awaited -= 1

    def fail(self, error: BaseException) -> None:
        """Nothing will come of what it waits for. As a rule the others end then, and the wait with them."""
