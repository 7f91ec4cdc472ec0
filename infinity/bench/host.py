"""What the system around a benchmark is like, and what else went on in it: files of /proc and /sys below a root.

Nothing here fails where a file is missing: ``None``, or nothing counted.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

_SECTOR_BYTES = 512
_IO_URING = {0: "allowed", 1: "refused to all but a group and root", 2: "refused"}
_CONTAINERS = ("docker", "kubepods", "containerd", "libpod", "lxc", "garden")


@dataclass(frozen=True, slots=True)
class Host:
    """What stays the same while a benchmark runs; ``None`` where the system does not say.

    Attributes:
        virtualization: what kind of virtual machine this is; ``None``: none known.
        container: what kind of container this is; ``None``: none known.
        numa_nodes: how many memory nodes there are.
        governors: how the processors choose their clock, each kind once.
        on_battery: whether no mains is connected.
        io_uring: whether the kernel's setting allows it (a container may refuse it all the same).
        huge_page_bytes: size of a reserved huge page.
        huge_pages_total: how many are reserved.
        huge_pages_free: how many of them nobody uses.
        transparent_huge_pages: for whom the kernel uses huge pages of itself.
        locked_memory_bytes: the most memory that this process may lock; ``None``: any.
        swap_used_bytes: what has been moved out of memory.
    """

    virtualization: str | None = None
    container: str | None = None
    numa_nodes: int | None = None
    governors: tuple[str, ...] = ()
    on_battery: bool | None = None
    io_uring: str | None = None
    huge_page_bytes: int | None = None
    huge_pages_total: int | None = None
    huge_pages_free: int | None = None
    transparent_huge_pages: str | None = None
    locked_memory_bytes: int | None = None
    swap_used_bytes: int = 0


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


def host_facts(root: Path = ROOT) -> Host:
    """What the system says of itself.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    memory = _table(root / "proc/meminfo")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    swap_kib = [memory.get(name, 0) for name in ("SwapTotal", "SwapFree")]
    governors = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    page_kib = memory.get("Hugepagesize")
    io_uring = read_integer(root / "proc/sys/kernel/io_uring_disabled")
    transparent = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return Host(
        virtualization=_virtualization(root),
        container=_container(root),
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        governors=tuple(sorted({name for file in governors if (name := read_text(file))})),
        on_battery=_on_battery(root / "sys/class/power_supply"),
        io_uring=None if io_uring is None else _IO_URING.get(io_uring),
        huge_page_bytes=None if page_kib is None else page_kib << 10,
        huge_pages_total=memory.get("HugePages_Total"),
        huge_pages_free=memory.get("HugePages_Free"),
        transparent_huge_pages=None if transparent is None else chosen(transparent),
        locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
        swap_used_bytes=(swap_kib[0] - swap_kib[1]) << 10,
    )


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
    own, swapped = os.times(), _table(root / "proc/vmstat")
    io = _table(root / "proc/self/io")
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


def chosen(text: str) -> str:
    """Of a list of choices, as the kernel writes them, the one in brackets."""
    match = re.search(r"\[(.+?)\]", text)
    return match[1] if match else text


def read_integer(*files: Path) -> int | None:
    """The number in the first of the files that has one."""
    for file in files:
        text = read_text(file)
        if text is not None and re.fullmatch(r"-?\d+", text):
            return int(text)
    return None


def read_text(file: Path) -> str | None:
    """What is in a file, without blanks around it; ``None`` where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return None


def _table(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = re.findall(r"^(\w+):?\s+(\d+)", read_text(file) or "", re.MULTILINE)
    return {name: int(number) for name, number in pairs}


def _device_bytes(root: Path) -> Iterator[tuple[str, int]]:
    for line in (read_text(root / "proc/diskstats") or "").splitlines():
        fields = line.split()
        if len(fields) >= 10:
            yield fields[2], (int(fields[5]) + int(fields[9])) * _SECTOR_BYTES


def _virtualization(root: Path) -> str | None:
    names = [read_text(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    if kind := read_text(root / "sys/hypervisor/type"):
        return kind
    if not re.search(r"^flags\s*:.*\bhypervisor\b", read_text(root / "proc/cpuinfo") or "", re.MULTILINE):
        return None
    return " ".join(name for name in names if name) or "a virtual machine"


def _container(root: Path) -> str | None:
    for name, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman"), ("run/systemd/container", None)):
        if (root / name).exists():
            return kind or read_text(root / name)
    groups = read_text(root / "proc/1/cgroup") or ""
    return next((name for name in _CONTAINERS if name in groups), None)


def _on_battery(supplies: Path) -> bool | None:
    mains = [read_integer(kind.parent / "online") for kind in supplies.glob("*/type") if read_text(kind) == "Mains"]
    known = [online for online in mains if online is not None]
    return not any(known) if known else None


def _is_hot(device: Path) -> bool:
    for now in [*device.glob("hwmon*/temp1_input"), *device.glob("hwmon/hwmon*/temp1_input")]:
        temperature, limit = read_integer(now), read_integer(now.parent / "temp1_max")
        if temperature is not None and limit is not None and temperature >= limit > 0:
            return True
    return False
