"""``Note``: what became of a key; and ``Key``, what becomes of it by its name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["honoured", "not needed", "refused"]


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one key of a configuration.

    Attributes:
        key: with the sections around it: ``"zero_optimization.stage"``.
        value: what it says.
        what: ``"honoured"``; ``"not needed"``, where nothing has to follow from it here; ``"default"``, where it says
            ``"auto"`` or ``null`` and so nothing.
        why: in a few words.
    """

    key: str
    value: object
    what: Literal["honoured", "not needed", "default"]
    why: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.what}: {self.why}"


def is_on(value: object) -> bool:
    """Whether a value asks for something: all but ``false``, 0, an empty section, and one that is not enabled."""
    if isinstance(value, dict):
        return bool(value) and is_on(value.get("enabled", True))
    if isinstance(value, str):
        return value.strip().lower() not in {"", "false", "0"}
    return bool(value)


def other_than(*usual: object) -> Callable[[Any], bool]:
    """Whether a value is none of these."""
    return lambda value: value not in usual


def on_within(*names: str) -> Callable[[Any], bool]:
    """Whether a section turns one of these on, which are off where it does not have them."""
    return lambda value: any(is_on(value.get(name)) for name in names) if isinstance(value, dict) else is_on(value)


def more_than_one(*names: str) -> Callable[[Any], bool]:
    """Whether a section has a size other than 0 and 1 under one of these dotted names."""

    def size_of(value: Any, name: str) -> Any:
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def asks(value: Any) -> bool:
        return (
            any(size_of(value, name) not in (None, 0, 1) for name in names) if isinstance(value, dict) else is_on(value)
        )

    return asks


@dataclass(frozen=True, slots=True)
class Key:
    """What becomes of a key.

    Attributes:
        name: with the sections around it.
        fate: of a value that asks for something.
        why: what it does here, why nothing has to, or what to do instead.
        asks: of a refused one, whether a value asks for something; the others ask for what is so anyway.
        is_open: everything inside it is its own, and looked at no further.
    """

    name: str
    fate: Fate
    why: str
    asks: Callable[[Any], bool] = is_on
    is_open: bool = False


def honoured(name: str, why: str) -> Key:
    """A key that something follows from."""
    return Key(name, "honoured", why)


def not_needed(name: str, why: str, *, is_open: bool = False) -> Key:
    """A key from which nothing has to follow."""
    return Key(name, "not needed", why, is_open=is_open)


def refused(name: str, why: str, *, asks: Callable[[Any], bool] = is_on, is_open: bool = False) -> Key:
    """A key that is refused where it asks for something."""
    return Key(name, "refused", why, asks, is_open)


def closest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name; nothing where none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""
