"""Where a command writes its results: files, and the streams that a person or a program reads."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from rich.console import Console

from infinity.errors import ConfigError, InfinityError, storage_error

STANDARD_OUTPUT = Path("-")
"""What ``--json`` takes for standard output."""


class OutputError(InfinityError, OSError):
    """Standard output or standard error cannot be written: its disk is full, or whoever read it has gone.

    Attributes:
        errno: the system's error number; ``EPIPE`` where the reader wants no more.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the output cannot be written ({error.strerror}); send it elsewhere")
        self.errno = error.errno

    def __str__(self) -> str:
        return str(self.args[0])


class OutputConsole(Console):
    """A console that raises ``OutputError``."""

    def __exit__(self, *error: Any) -> None:
        """Whatever is shown ends here."""
        with checked(self.file):
            super().__exit__(*error)

    def on_broken_pipe(self) -> None:
        """The reader has gone: rich would end the process with the exit code of an error of ours."""
        raise


@contextlib.contextmanager
def checked(stream: IO[str]) -> Iterator[None]:
    """While something is written to a stream.

    Raises:
        OutputError: it cannot be written. What is left goes nowhere, instead of failing again when the process ends.
    """
    try:
        yield
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # no file of the system
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)
        raise OutputError(error) from error


def is_plain(console: Console) -> bool:
    """Whether only lines of ASCII without colours are to be shown: to no terminal, or to one that knows no more."""
    return not console.is_terminal or not console.encoding.lower().startswith("utf")


def tolerate_any_text() -> None:
    """Show what the user's encoding has no character for, as in names of files, by its number."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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
    try:
        _check_output(path, flag, replaced=replaced)
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be written ({error.strerror}); give another path") from error


def _check_output(path: Path, flag: str, *, replaced: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a directory; give a file")
    if replaced and path.exists() and not path.is_file():
        raise ConfigError(f"{flag}: {path} is not a regular file; give another path")
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{flag}: {path} is a link to {path.readlink()}, which does not exist; give another path")
    check_parent(path, flag)
    if not path.exists() or path.is_file():
        _probe(path)


def check_parent(path: Path, flag: str) -> None:
    """Refuse a path that is not in a directory.

    Raises:
        ConfigError: it says which part of the path is missing or is something else.
        OSError: the system does not let us look.
    """
    above = next(parent for parent in path.parents if parent.exists() or parent.is_symlink())
    if above.is_symlink() and not above.exists():
        raise ConfigError(f"{flag}: {above} is a link to {above.readlink()}, which does not exist; give another path")
    if not above.is_dir():
        raise ConfigError(f"{flag}: {above} is a file, not a directory; give a path in a directory")
    if above != path.parent:
        raise ConfigError(f"{flag}: directory {path.parent} does not exist; create it first")


def _probe(path: Path) -> None:
    """Open the file as it will be opened at the end; one that is made for this is removed again."""
    made = not path.exists()
    path.open("ab").close()
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
        OutputError: standard output cannot.
    """
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if path == STANDARD_OUTPUT:
        with checked(sys.stdout):
            sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise storage_error(f"writing the file for {flag}", error, path=path) from error


def flag_error(error: ValidationError) -> ConfigError:
    """What pydantic says of fields, in terms of the flags that set them."""
    complaints = [
        f"--{str(item['loc'][0]).replace('_', '-')}: {_complaint(item)}, got {item['input']!r}"
        for item in error.errors()
    ]
    return ConfigError(" | ".join(complaints))


def _complaint(item: ErrorDetails) -> str:
    if item["type"] in ("byte_size", "byte_size_unit"):
        return "expected a size such as 512MiB or 2GB"
    return item["msg"].removeprefix("Value error, ")
