"""How figures are written for a person."""

from __future__ import annotations

import math


def format_bytes(num_bytes: float) -> str:
    """Bytes in decimal units (MB = 1e6, GB = 1e9), to three digits or so."""
    unit, size = _unit_of(num_bytes)
    return f"{_round(num_bytes / size)} {unit}"


def format_share(num_bytes: float, of_bytes: float) -> str:
    """``used/budget``, both in the unit of the budget."""
    unit, size = _unit_of(of_bytes)
    return f"{_round(num_bytes / size)}/{_round(of_bytes / size)} {unit}"


def _unit_of(num_bytes: float) -> tuple[str, float]:
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next(((unit, size) for unit, size in units if num_bytes >= size), ("B", 1.0))


def _round(value: float) -> str:
    return f"{value:.{0 if value >= 100 or value == int(value) else 1}f}"


def format_seconds(seconds: float) -> str:
    """A duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_figure(value: float) -> str:
    """A figure to three digits, never in powers of ten: ``0.00123``, ``1.23``, ``123``, ``12,345``."""
    return (
        f"{value:,.0f}" if value >= 100 else f"{value:.{max(2 - math.floor(math.log10(value)), 0)}f}" if value else "0"
    )
