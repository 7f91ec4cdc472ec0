"""The directories given to ``--nvme``: made if only their last component is missing, and then removed at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from infinity.console.output import check_parent
from infinity.errors import ConfigError, DirectoryError, StorageError, storage_error


@contextlib.contextmanager
def nvme_directories(
    paths: Sequence[Path],
    say: Callable[[str], None],
    *,
    kept: bool = False,
    share: Callable[[list[str]], list[list[str]]] = lambda created: [created],
) -> Iterator[None]:
    """Create the missing ones of ``paths`` for as long as the context lasts.

    Several processes may be given the same; whichever leaves last removes what any of them has created.

    Args:
        paths: directories that are there, or whose parent is, or comes before.
        say: told each directory that is created.
        kept: a state may be left in them at the end, and then they stay.
        share: tells the others what this process has created, and returns what each has.

    Raises:
        DirectoryError: the parent of one is missing or no directory, or one is a link to nowhere.
        StorageError: one cannot be created, or be looked at.
    """
    created: list[Path] = []
    try:
        for path in paths:
            try:
                made = _make(path)
            except StorageError:
                raise
            except ConfigError as error:
                raise DirectoryError(str(error), path=path) from None
            except OSError as error:
                raise storage_error("creating the directory for --nvme", error, path=path) from error
            if made:
                created.append(path)
        created = sorted({Path(path) for each in share([str(path) for path in created]) for path in each})
        for path in created:
            if path.parent not in created:
                say(f"created {path}" + ("" if kept else ", to be removed at the end"))
        yield
    finally:
        for path in reversed(created):  # what is in another comes first
            with contextlib.suppress(OSError):  # not empty: it holds a state, or files of someone else, which stay
                path.rmdir()


def _make(path: Path) -> bool:
    """Create a directory, unless something is there; whether it did."""
    if path.exists():
        return False
    if path.is_symlink():
        raise DirectoryError(f"--nvme: a link to {path.readlink()}, which does not exist; create that", path=path)
    check_parent(path, "--nvme")
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:  # by another process
        return False
    return True
