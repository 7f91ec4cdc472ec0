"""A memory cgroup around a subprocess, on version 1 or 2; says why where none can be made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class NoCgroupError(Exception):
    """No memory cgroup can be made here; the message says why."""


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Yield the ``cgroup.procs`` file of a new cgroup whose memory is limited; removed at the end."""
    controllers = _ROOT / "cgroup.controllers"
    is_v2 = controllers.exists()
    parent = _ROOT if is_v2 else _ROOT / "memory"
    if is_v2 and "memory" not in controllers.read_text().split():
        raise NoCgroupError("cgroup v2 without the memory controller")
    group = parent / f"infinity-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise NoCgroupError(f"cannot make {group}: {error.strerror}") from error
    try:
        limit = group / ("memory.max" if is_v2 else "memory.limit_in_bytes")
        try:
            limit.write_text(str(limit_bytes))
        except OSError as error:
            raise NoCgroupError(f"cannot limit memory in {limit}: {error.strerror}") from error
        yield group / "cgroup.procs"
    finally:
        group.rmdir()
