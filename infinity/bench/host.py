"""What else went on in the system while a benchmark ran: counters in files of /proc and /sys below a root.

Nothing here fails where a file is missing: nothing is counted.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from infinity.machine.files import read_integer, read_table, read_text
from infinity.machine.host import ROOT

_SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Observation:
    """Counters at one moment; two of them say what went on in between (see ``run_cautions``).

    Attributes:
        seconds: ``time.perf_counter()``.
        busy_cpu_seconds: CPU time of everybody.
        own_cpu_seconds: CPU time of this process and of its children that have ended.
        stolen_cpu_seconds: CPU time that the hypervisor gave to others.
        num_cores: processors.
        device_bytes: read from and written to each block device by everybody, by its name.
        own_io_bytes: read and written by this process and by its children that have ended.
        swapped_bytes: moved between memory and swap.
        num_throttles: how often a processor was slowed down to cool.
        hot: devices whose temperature is at the maker's limit.
    """

    seconds: float
    busy_cpu_seconds: float = 0.0
    own_cpu_seconds: float = 0.0
    stolen_cpu_seconds: float = 0.0
    num_cores: int = 1
    device_bytes: Mapping[str, int] | None = None
    own_io_bytes: int | None = None
    swapped_bytes: int = 0
    num_throttles: int = 0
    hot: tuple[str, ...] = ()


def observe(devices: Iterable[str], root: Path = ROOT) -> Observation:
    """The counters now.

    Args:
        devices: names of block devices (``"nvme0n1"``; ``"/dev/nvme0n1"`` will do).
        root: where ``proc`` and ``sys`` are.
    """
    names = [name.removeprefix("/dev/") for name in devices]
    cpu = re.search(r"^cpu +(.+)$", read_text(root / "proc/stat") or "", re.MULTILINE)
    ticks = [int(part) for part in cpu[1].split()] if cpu else []
    ticks += [0] * (8 - len(ticks))
    user, nice, system, _idle, _wait, interrupt, soft_interrupt, stolen = ticks[:8]
    tick = os.sysconf("SC_CLK_TCK")
    own, swapped = os.times(), read_table(root / "proc/vmstat")
    io = read_table(root / "proc/self/io")
    throttles = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
    return Observation(
        seconds=time.perf_counter(),
        busy_cpu_seconds=(user + nice + system + interrupt + soft_interrupt) / tick,
        own_cpu_seconds=own.user + own.system + own.children_user + own.children_system,
        stolen_cpu_seconds=stolen / tick,
        num_cores=os.cpu_count() or 1,
        device_bytes={name: total for name, total in _device_bytes(root) if name in names},
        own_io_bytes=io["read_bytes"] + io["write_bytes"] if "read_bytes" in io else None,
        swapped_bytes=(swapped.get("pswpin", 0) + swapped.get("pswpout", 0)) * os.sysconf("SC_PAGE_SIZE"),
        num_throttles=sum(read_integer(file) or 0 for file in throttles),
        hot=tuple(name for name in names if _is_hot(root / "sys/class/block" / name / "device")),
    )


def _device_bytes(root: Path) -> Iterator[tuple[str, int]]:
    for line in (read_text(root / "proc/diskstats") or "").splitlines():
        fields = line.split()
        if len(fields) >= 10:
            yield fields[2], (int(fields[5]) + int(fields[9])) * _SECTOR_BYTES


def _is_hot(device: Path) -> bool:
    for now in [*device.glob("hwmon*/temp1_input"), *device.glob("hwmon/hwmon*/temp1_input")]:
        temperature, limit = read_integer(now), read_integer(now.parent / "temp1_max")
        if temperature is not None and limit is not None and temperature >= limit > 0:
            return True
    return False
