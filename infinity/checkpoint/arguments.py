"""What users write for a commit and for the directories of a state."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from infinity.engine.persistence.stored_state import StoredState
from infinity.store.stored import StoredCommit

_NUMBERED = re.compile(r"(?P<path>.+)@(?P<number>\d{1,15})")


def parse_commit(text: str) -> tuple[Path, int | None]:
    """``DIR`` or ``DIR@NUMBER``; what exists under its whole name is that."""
    match = _NUMBERED.fullmatch(text)
    if match is None or Path(text).exists():
        return Path(text), None
    return Path(match["path"]), int(match["number"])


def say(console: Console, message: str, style: str | None = None) -> None:
    """One line, as it is."""
    console.print(message, style=style, soft_wrap=True, markup=False, highlight=False)


@contextlib.contextmanager
def opened(
    paths: Sequence[Path], number: int | None, console: Console, *, lock: bool = True, memory_bytes: int = 0
) -> Iterator[StoredState]:
    """A commit as long as the context lasts; says which newer ones cannot be used.

    Raises:
        InfinityError: as for ``StoredCommit.open`` and ``StoredState``.
    """
    with StoredCommit.open(paths, number, lock=lock) as commit:
        for error in commit.passed_over:
            say(console, f"warning: passed over: {error}", "yellow")
        yield StoredState(commit, memory_bytes=memory_bytes)
