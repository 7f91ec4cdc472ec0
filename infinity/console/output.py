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
        ConfigError: the directory is missing, or ``path`` is itself a directory, or no regular file.
    """
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a directory; give a file")
    if replaced and path.exists() and not path.is_file():
        raise ConfigError(f"{flag}: {path} is not a regular file; give another path")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag}: directory {path.parent} does not exist; create it first")


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
