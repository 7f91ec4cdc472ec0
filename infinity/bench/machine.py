"""What is under a path, and what machine this is: nothing here fails where a file of /proc or /sys is missing."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from infinity.bench.host import chosen, host_facts, read_integer, read_text
from infinity.io.open import Choice

_MOUNTINFO = Path("/proc/self/mountinfo")
_BLOCK_DEVICES = Path("/sys/dev/block")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of /proc/self/mountinfo.

    Attributes:
        number: device number as ``major:minor``.
        point: where it is mounted.
        options: of the mount and of the file system.
        filesystem: its type.
        source: what is mounted.
    """

    number: str
    point: str
    options: str
    filesystem: str
    source: str


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What is under a path; ``None`` where the system does not say.

    Attributes:
        path: the path.
        device: the block device, or what else is mounted.
        filesystem: its type.
        options: of the mount and of the file system.
        rotational: whether it is a disk that turns.
        model: the maker's name for it.
        nvme: whether it is NVMe.
        scheduler: how the kernel orders requests.
        transport: how NVMe is attached: ``"pcie"``, or ``"tcp"``, ``"rdma"``, ``"fc"`` over a network.
        firmware: the drive's.
        write_cache: ``"write back"`` where the device keeps writes in memory of its own until it is told to flush.
        largest_request_bytes: the most that the kernel asks for at once; larger blocks are split.
        numa_node: the processor socket that it is attached to.
    """

    path: str
    device: str | None = None
    filesystem: str | None = None
    options: str | None = None
    rotational: bool | None = None
    model: str | None = None
    nvme: bool | None = None
    scheduler: str | None = None
    transport: str | None = None
    firmware: str | None = None
    write_cache: str | None = None
    largest_request_bytes: int | None = None
    numa_node: int | None = None

    def describe(self) -> str:
        """What is there, in one line."""
        parts = [
            f"{self.filesystem or 'unknown file system'} on {self.device or 'an unknown device'}",
            *([f"model {self.model}"] if self.model else []),
            *([f"scheduler {self.scheduler}"] if self.scheduler else []),
            *([f"attached by {self.transport}"] if self.transport else []),
            *([f"mounted {self.options}"] if self.options else []),
        ]
        return ", ".join(parts)


def path_facts(path: Path, *, mountinfo: Path = _MOUNTINFO, block_devices: Path = _BLOCK_DEVICES) -> PathFacts:
    """Find the mount and the block device under a path.

    Args:
        path: an existing path.
        mountinfo: the kernel's list of mounts.
        block_devices: where block devices are listed by number.
    """
    mount = _mount_of(path.resolve(), mountinfo)
    if mount is None:
        return PathFacts(str(path))
    device = _block_device(mount, block_devices)
    if device is None:
        return PathFacts(str(path), device=mount.source, filesystem=mount.filesystem, options=mount.options)
    leaves = list(_leaves(device))
    rotational = read_text(device / "queue/rotational")
    largest_kib = read_integer(device / "queue/max_sectors_kb")
    nodes = {read_integer(leaf / "device/numa_node", leaf / "device/device/numa_node") for leaf in leaves} - {None, -1}
    return PathFacts(
        str(path),
        device=f"/dev/{device.name}",
        filesystem=mount.filesystem,
        options=mount.options,
        rotational=None if rotational is None else rotational == "1",
        model=_of_all(leaves, "device/model"),
        nvme=all(leaf.name.startswith("nvme") for leaf in leaves),
        scheduler=_of_all(leaves, "queue/scheduler", chosen),
        transport=_of_all(leaves, "device/transport"),
        firmware=_of_all(leaves, "device/firmware_rev"),
        write_cache=read_text(device / "queue/write_cache"),
        largest_request_bytes=None if largest_kib is None else largest_kib << 10,
        numa_node=nodes.pop() if len(nodes) == 1 else None,
    )


def parse_mounts(text: str) -> Iterator[Mount]:
    """The mounts in the text of a mountinfo file; lines that are none are passed over."""
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 2:
            continue
        options = ",".join(dict.fromkeys(",".join([fields[5], *rest[2:3]]).split(",")))
        yield Mount(fields[2], _unescape(fields[4]), options, rest[0], _unescape(rest[1]))


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


def machine_document(facts: Sequence[PathFacts], choices: Sequence[Choice], device: str) -> dict[str, Any]:
    """The machine as JSON holds it.

    Args:
        facts: of each directory.
        choices: of each directory, which I/O backend and why.
        device: name of the device tier.
    """
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "ram": psutil.virtual_memory().total,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        **asdict(host_facts()),
        "paths": [
            {**asdict(fact), "backend": choice.name, "direct": choice.direct, "reasons": list(choice.reasons)}
            for fact, choice in zip(facts, choices, strict=True)
        ],
    }


def matmul_tflops(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.15) -> float:
    """How many 1e12 operations per second the device multiplies matrices at: the best of what fits the time.

    Args:
        device: where; torch's own setting of threads and of reduced precision holds.
        dtype: of the matrices.
        seconds: about how long; a slow device takes at least three products.
    """
    size = 512 if device.type == "cpu" else 4096
    left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    best = float("inf")
    end = time.perf_counter() + seconds
    num_done = 0
    while num_done < 3 or time.perf_counter() < end:
        _synchronize(device)
        began = time.perf_counter()
        torch.mm(left, right, out=product)
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
        num_done += 1
    return 2 * size**3 / best / 1e12


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _mount_of(path: Path, mountinfo: Path) -> Mount | None:
    """The mount with the longest mount point above ``path``; of several on one point, the last, which hides others."""
    found: Mount | None = None
    for mount in parse_mounts(read_text(mountinfo) or ""):
        if path.is_relative_to(mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _block_device(mount: Mount, block_devices: Path) -> Path | None:
    """The whole device under a mount, as a directory of sysfs."""
    number = mount.number
    if number.startswith("0:") and mount.source.startswith("/dev/"):  # btrfs shows a number of its own
        try:
            device = Path(mount.source).stat().st_rdev
        except OSError:
            return None
        number = f"{os.major(device)}:{os.minor(device)}"
    directory = block_devices / number
    if not directory.exists():
        return None
    directory = directory.resolve()
    return directory.parent if (directory / "partition").exists() else directory


def _leaves(device: Path) -> Iterator[Path]:
    """The devices that one is made of (RAID, LVM, encryption), or itself."""
    slaves = device / "slaves"
    parts = sorted(slaves.iterdir()) if slaves.is_dir() else []
    if not parts:
        yield device
    for part in map(Path.resolve, parts):
        yield from _leaves(part.parent if (part / "partition").exists() else part)


def _of_all(leaves: Sequence[Path], name: str, clean: Callable[[str], str] = str) -> str | None:
    """What the devices say, each thing once."""
    return ", ".join(sorted({clean(text) for leaf in leaves if (text := read_text(leaf / name))})) or None


def _unescape(text: str) -> str:
    """The kernel writes blanks in names as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
