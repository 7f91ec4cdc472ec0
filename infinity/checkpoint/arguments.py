"""What users write for a commit and for the directories of a state."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from infinity.engine.persistence.joined import open_stored
from infinity.engine.persistence.stored_state import StoredState

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
    paths: Sequence[Path],
    number: int | None,
    console: Console,
    *,
    lock: bool = True,
    memory_bytes: int = 0,
    is_whole: bool = True,
) -> Iterator[StoredState]:
    """A commit as long as the context lasts; says which newer ones cannot be used.

    Raises:
        InfinityError: as for ``open_checkpoint``.
    """
    with open_stored(paths, number, lock=lock, memory_bytes=memory_bytes, is_whole=is_whole) as state:
        for error in state.commit.passed_over:
            say(console, f"warning: passed over: {error}", "yellow")
        yield state
