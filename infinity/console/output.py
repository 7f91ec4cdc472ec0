"""The files that a command writes its results to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infinity.errors import ConfigError, storage_error

STANDARD_OUTPUT = Path("-")
"""What ``--json`` takes for standard output."""


def check_output(path: Path, flag: str, *, replaced: bool) -> None:
    """Refuse, before any work is done, a file that could not be written at the end.

    Args:
        path: the file.
        flag: what the user gave it to.
        replaced: whether another file will take its place, which must not happen to a device or a pipe.

    Raises:
        ConfigError: the directory is missing, or ``path`` is itself a directory, or no regular file, or the system
            refuses to write there.
    """
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a directory; give a file")
    if replaced and path.exists() and not path.is_file():
        raise ConfigError(f"{flag}: {path} is not a regular file; give another path")
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{flag}: {path} is a link to {path.readlink()}, which does not exist; give another path")
    check_parent(path, flag)
    if not path.exists() or path.is_file():
        _probe(path, flag)


def check_parent(path: Path, flag: str) -> None:
    """Refuse a path that is not in a directory.

    Raises:
        ConfigError: it says which part of the path is missing or is something else.
    """
    above = next(parent for parent in path.parents if parent.exists() or parent.is_symlink())
    if above.is_symlink() and not above.exists():
        raise ConfigError(f"{flag}: {above} is a link to {above.readlink()}, which does not exist; give another path")
    if not above.is_dir():
        raise ConfigError(f"{flag}: {above} is a file, not a directory; give a path in a directory")
    if above != path.parent:
        raise ConfigError(f"{flag}: directory {path.parent} does not exist; create it first")


def _probe(path: Path, flag: str) -> None:
    """Open the file as it will be opened at the end; one that is made for this is removed again."""
    made = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be written ({error.strerror}); give another path") from error
    if made:
        path.unlink(missing_ok=True)


def write_json(document: dict[str, Any], path: Path, flag: str = "--json") -> None:
    """Write a document to a file, or to standard output where ``path`` is ``-``.

    Args:
        document: what to write.
        path: the file.
        flag: what the user gave it to.

    Raises:
        StorageError: the file cannot be written.
    """
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise storage_error(f"writing the file for {flag}", error, path=path) from error


def flag_error(error: ValidationError) -> ConfigError:
    """What pydantic says of fields, in terms of the flags that set them."""
    complaints = [
        f"--{str(item['loc'][0]).replace('_', '-')}: {item['msg'].removeprefix('Value error, ')}, got {item['input']!r}"
        for item in error.errors()
    ]
    return ConfigError(" | ".join(complaints))
