"""A configuration as it was given: read, its ``"auto"`` values completed, every key looked up, values taken from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from infinity.config import read_json
from infinity.deepspeed_json.keys import KEY_OF, SECTIONS, names_in
from infinity.deepspeed_json.notes import Note, closest
from infinity.errors import ConfigError

_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}
_SHOWN = 4
_DEEPEST = 32


def load(source: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """The configuration as a dictionary of its own.

    Raises:
        ConfigError: it is neither a dictionary nor the path of a JSON file with an object, or sections are nested as
            deep as none are.
    """
    if isinstance(source, Mapping):
        return _own(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"DeepSpeed configuration: expected a dictionary or a path, got {type(source).__name__}")
    try:
        document = read_json(source)
    except ConfigError as error:
        if not isinstance(error.__cause__, json.JSONDecodeError):
            raise
        hint = "comments and names without quotes, which DeepSpeed takes, are not JSON: take them out"
        raise ConfigError(f"{error}; {hint}") from error.__cause__
    if not isinstance(document, dict):
        raise ConfigError(f"DeepSpeed configuration {source}: expected an object, got {type(document).__name__}")
    return _own(document)


def _own(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value, str(name), 1) for name, value in document.items()}


def _copied(value: Any, path: str, depth: int) -> Any:
    """Sections and lists copied; what else there is stays."""
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if depth > _DEEPEST:
        top = path.partition(".")[0]
        raise ConfigError(f"DeepSpeed configuration: {top}: nested deeper than {_DEEPEST} sections; leave that out")
    if isinstance(value, Mapping):
        return {name: _copied(each, f"{path}.{name}", depth + 1) for name, each in value.items()}
    return [_copied(each, path, depth + 1) for each in value]


def complete(document: dict[str, Any], auto: Mapping[str, Any]) -> list[Note]:
    """Put values in the place of ``"auto"``, and take out what says nothing: ``"auto"`` without a value, ``null``.

    Args:
        document: changed in place.
        auto: the values, by dotted key.
    """
    return list(_complete(document, "", auto))


def _complete(section: dict[str, Any], path: str, auto: Mapping[str, Any]) -> Iterator[Note]:
    for name, value in list(section.items()):
        key = f"{path}.{name}" if path else str(name)
        if value == "auto" and auto.get(key) is not None:
            section[name] = auto[key]
        elif value is None or value == "auto":
            del section[name]
            yield Note(key, value, "default", "it says nothing, and its default counts")
        elif isinstance(value, dict):
            yield from _complete(value, key, auto)


def check(document: Mapping[str, Any]) -> list[Note]:
    """Look up every key.

    Raises:
        ConfigError: some are unknown, or ask for what cannot be done; it names them.
    """
    notes: list[Note] = []
    complaints: list[str] = []
    _check(document, "", notes, complaints)
    if complaints:
        rest = f" | and {len(complaints) - _SHOWN} more" if len(complaints) > _SHOWN else ""
        raise ConfigError("DeepSpeed configuration: " + " | ".join(complaints[:_SHOWN]) + rest)
    return notes


def _check(section: Mapping[str, Any], path: str, notes: list[Note], complaints: list[str]) -> None:
    for name, value in section.items():
        dotted = f"{path}.{name}" if path else str(name)
        key = None if "." in str(name) else KEY_OF.get(dotted)
        if key is None and dotted in SECTIONS and "." not in str(name):
            if isinstance(value, Mapping):
                _check(value, dotted, notes, complaints)
            elif dotted == "zero_optimization" and isinstance(value, bool):
                notes.append(Note(dotted, value, "honoured", "Config.stage: 1 where true"))
            else:
                complaints.append(f"{dotted}: expected a section, {{...}}, got {value!r}")
        elif key is None:
            complaints.append(f"unknown key {dotted!r}{_nearest(str(name), path)}")
        elif isinstance(value, Mapping) and not key.is_open and not dotted.endswith(".params"):
            complaints.append(f"{dotted}: expected a value, got a section")
        elif key.fate == "refused" and key.asks(value):
            complaints.append(f"{dotted} = {_short(value)} is not supported: {key.why}")
        elif key.fate == "refused":
            notes.append(Note(dotted, value, "not needed", "it asks for nothing"))
        else:
            notes.append(Note(dotted, value, key.fate, key.why))


def _nearest(name: str, path: str) -> str:
    """What may have been meant by an unknown name: one of its section, or the same name in another."""
    here = closest(name, names_in(path))
    elsewhere = [dotted for dotted in KEY_OF if dotted.rpartition(".")[2] == name]
    if here or not elsewhere:
        return here or f"; no such key in {path!r}" * bool(path)
    return f"; did you mean {elsewhere[0]!r}?"


def _short(value: object) -> str:
    return "{...}" if isinstance(value, Mapping) else repr(value)


@dataclass(frozen=True, slots=True)
class Given:
    """Values of a document by dotted key; ``None`` where one is not given.

    Strings that are numbers or truth values are taken as such: DeepSpeed's own tuner writes them.

    Raises (each):
        ConfigError: the value is not what it must be.
    """

    document: Mapping[str, Any]

    def raw(self, dotted: str) -> Any:
        """As it stands there."""
        found: Any = self.document
        for name in dotted.split("."):
            if not isinstance(found, Mapping):
                return None
            found = found.get(name)
        return found

    def flag(self, dotted: str) -> bool | None:
        """True or false."""
        value = self.raw(dotted)
        if value is None or isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word in _TRUE | _FALSE:
            return word in _TRUE
        raise wrong(dotted, "true or false", value)

    def number(self, dotted: str, *, least: float = 0.0) -> float | None:
        """A number."""
        value = self.raw(dotted)
        if value is None:
            return None
        try:
            if isinstance(value, bool):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise wrong(dotted, "a number", value) from None
        if not least <= number < float("inf"):
            raise wrong(dotted, f"a number of {least:g} or more", value)
        return number

    def count(self, dotted: str, *, least: int = 0) -> int | None:
        """A whole number, also as ``5e8``."""
        number = self.number(dotted, least=float("-inf"))
        if number is None:
            return None
        if number < least or number != int(number):
            raise wrong(dotted, f"a whole number of {least} or more", self.raw(dotted))
        return int(number)

    def word(self, dotted: str, known: tuple[str, ...]) -> str | None:
        """One of a few words."""
        value = self.raw(dotted)
        if value is None or value in known:
            return None if value is None else str(value)
        raise wrong(dotted, f"one of {', '.join(known)}", value)


def wrong(dotted: str, expected: str, value: object) -> ConfigError:
    """An error that says what was expected of a key."""
    return ConfigError(f"DeepSpeed configuration: {dotted}: expected {expected}, got {value!r}")
