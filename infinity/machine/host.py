"""What the system says of itself: files of /proc and /sys below a root; ``None`` where one is missing."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from infinity.machine.files import chosen, read_integer, read_table, read_text

ROOT = Path("/")

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


def host_facts(root: Path = ROOT) -> Host:
    """What the system says of itself.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    memory = read_table(root / "proc/meminfo")
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
