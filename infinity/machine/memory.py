"""How much memory and what processor there are."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import psutil

from infinity.machine.files import read_text

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def available_memory_bytes(*, own_cgroup: Path = _OWN_CGROUP, cgroups: Path = _CGROUPS) -> int:
    """Host memory that can be had without swapping: the machine's, or what its cgroup leaves this process."""
    available = [psutil.virtual_memory().available]
    names = re.findall(r"^\d+:(?:.*\bmemory\b.*)?:(/.*)$", read_text(own_cgroup) or "", re.MULTILINE)
    for name in [*names, "/"]:
        for root, limit, usage in (
            (cgroups, "memory.max", "memory.current"),
            (cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            group = root / name.lstrip("/")
            most, used = read_text(group / limit), read_text(group / usage)
            if most is None or used is None or not most.isdecimal():  # "max"
                continue
            cache = re.search(r"^(?:total_)?inactive_file (\d+)$", read_text(group / "memory.stat") or "", re.MULTILINE)
            available.append(int(most) - int(used) + (int(cache[1]) if cache else 0))
    return max(0, min(available))


def cpu_name() -> str:
    """The processor's name."""
    match = re.search(r"^model name\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()
