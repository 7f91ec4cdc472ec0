"""``owner.json``: the marker that infinity made a job directory, and what it tells people about its owner.

It is read without trust: whatever is not a marker of this schema, however malformed, counts as none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import psutil

SCHEMA = 1
"""Version of the directory's layout and of ``owner.json``."""

OWNER = "owner.json"
"""The marker's file name."""

OWNER_PARTIAL = "owner.json.partial"
"""What it is called until it takes the place of another."""


def open_mark(directory: int, name: str, flags: int) -> int | None:
    """Open the marker or the lock file; ``None`` when there is no such file that infinity could have made."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.EACCES, errno.ENXIO}:
            return None
        raise


def write_owner(directory: int, rank: int) -> None:
    """Write the marker into an open directory, durably; it must not be there yet."""
    _write(directory, rank, OWNER)
    os.fsync(directory)


def replace_owner(directory: int, rank: int) -> None:
    """Make the marker in an open directory this process's, durably: there is one at any time."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(OWNER_PARTIAL, dir_fd=directory)
    _write(directory, rank, OWNER_PARTIAL)
    os.rename(OWNER_PARTIAL, OWNER, src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)


def _write(directory: int, rank: int, name: str) -> None:
    try:
        version = metadata.version("infinity")
    except metadata.PackageNotFoundError:
        version = "unknown"
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot_id = "unknown"
    owner = {
        "application": "infinity",
        "schema": SCHEMA,
        "version": version,
        "rank": rank,
        "pid": os.getpid(),
        "hostname": socket.gethostname(),
        "boot_id": boot_id,
        "process_start_time": psutil.Process().create_time(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=directory)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(owner, file, indent=2)
        file.flush()
        os.fsync(descriptor)


def read_owner(directory: int) -> dict[str, object] | None:
    """What ``owner.json`` says, or ``None`` if it is not a marker of this schema."""
    descriptor = open_mark(directory, OWNER, os.O_RDONLY)
    if descriptor is None:
        return None
    try:
        owner = json.loads(os.read(descriptor, 1 << 16))
    except (IsADirectoryError, ValueError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    if not isinstance(owner, dict) or owner.get("application") != "infinity" or owner.get("schema") != SCHEMA:
        return None
    return owner


def is_marked(path: Path) -> bool:
    """Whether there is a directory that infinity made; what may not be looked at is none.

    Raises:
        OSError: the system reported an error.
    """
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    try:
        return read_owner(directory) is not None
    finally:
        os.close(directory)
