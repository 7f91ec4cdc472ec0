"""What users write for speeds and endurance: ``3GB/s``, ``600TBW``, ``7e9``, ``45TFLOPS``."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*", re.IGNORECASE)


def _parse(value: object, unit: str, example: str) -> object:
    """A number with a prefix and a unit, both of which may be left out."""
    if isinstance(value, bool):
        raise ValueError(f"expected {example}")
    if not isinstance(value, str):
        return value
    found = _NUMBER.fullmatch(value)
    known = found and re.fullmatch(rf"([KMGTP]?)(I?)(?:{unit})?", found[2], re.IGNORECASE)
    if not found or not known:
        raise ValueError(f"expected {example}")
    base = 1024 if known[2] else 1000
    try:
        return float(found[1]) * base ** _PREFIXES[known[1].upper()]
    except ValueError:
        raise ValueError(f"expected {example}") from None


def _speed(value: object) -> object:
    return _parse(value, "B/S|B|BPS", "bytes per second, such as 3GB/s")


def _endurance(value: object) -> object:
    return _parse(value, "BW|B", "bytes that may be written, such as 600TBW")


def _count(value: object) -> object:
    return _parse(value, "", "a number, such as 7e9 or 7G")


def _operations(value: object) -> object:
    return _parse(value, "FLOPS|FLOP/S", "operations per second, such as 45TFLOPS")


Speed = Annotated[float, BeforeValidator(_speed), Field(gt=0)]
Endurance = Annotated[float, BeforeValidator(_endurance), Field(gt=0)]
Count = Annotated[float, BeforeValidator(_count), Field(ge=1)]
Operations = Annotated[float, BeforeValidator(_operations), Field(gt=0)]
