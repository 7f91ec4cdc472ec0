"""How much memory and what processor there are."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from infinity.machine.files import read_text

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def available_memory_bytes(*, own_cgroup: Path = _OWN_CGROUP, cgroups: Path = _CGROUPS) -> int:
    """Host memory that can be had without swapping: the machine's, or what its cgroup leaves this process."""
    available = [psutil.virtual_memory().available]
    for limit, usage in _limited(own_cgroup, cgroups):
        used = read_text(usage)
        if used is None:
            continue
        stat = read_text(usage.parent / "memory.stat") or ""
        cache = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
        available.append(limit - int(used) + (int(cache[1]) if cache else 0))
    return max(0, min(available))


def memory_limit_bytes(*, own_cgroup: Path = _OWN_CGROUP, cgroups: Path = _CGROUPS) -> int | None:
    """The most memory that the cgroups of this process let it have; ``None`` where they limit nothing."""
    limit = min((limit for limit, _ in _limited(own_cgroup, cgroups)), default=None)
    return None if limit is None or limit >= psutil.virtual_memory().total else limit


def _limited(own_cgroup: Path, cgroups: Path) -> Iterator[tuple[int, Path]]:
    """The limit of each cgroup of this process that has one, in bytes, and the file with what it uses."""
    names = re.findall(r"^\d+:(?:.*\bmemory\b.*)?:(/.*)$", read_text(own_cgroup) or "", re.MULTILINE)
    for name in [*names, "/"]:
        for root, limit, usage in (
            (cgroups, "memory.max", "memory.current"),
            (cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            group = root / name.lstrip("/")
            most = read_text(group / limit)
            if most is not None and most.isdecimal():  # not "max"
                yield int(most), group / usage


def cpu_name() -> str:
    """The processor's name."""
    match = re.search(r"^model name\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()
