"""What users read: one logger, rank 0 only, and what is to be said but once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from infinity.engine.meeting import place

logger = logging.getLogger("infinity.deepspeed")
"""Says what DeepSpeed's does, at INFO; it writes to standard error where the program has set up no logging."""

_said: set[str] = set()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks.

    Args:
        message: what.
        ranks: which; ``None`` for rank 0, and -1 among them for all.
        level: of ``logging``.
    """
    chosen = (0,) if ranks is None else ranks
    rank = place().rank
    if -1 in chosen or rank in chosen:
        _be_heard()
        logger.log(level, message)


def say_once(message: str) -> None:
    """Log on rank 0, the first time that a message comes in this process."""
    if message not in _said:
        _said.add(message)
        log_dist(message)


def not_needed(what: str, why: str) -> None:
    """Say once that something of DeepSpeed's is taken, and why nothing follows from it."""
    say_once(f"{what}: not needed here: {why}")


def _be_heard() -> None:
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [infinity] %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
