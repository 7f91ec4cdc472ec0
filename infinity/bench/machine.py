"""What machine this is, as far as the system says: nothing here fails where a file of /proc or /sys is missing."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

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
    """

    path: str
    device: str | None = None
    filesystem: str | None = None
    options: str | None = None
    rotational: bool | None = None
    model: str | None = None
    nvme: bool | None = None


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
    rotational = _read(device / "queue/rotational")
    return PathFacts(
        str(path),
        device=f"/dev/{device.name}",
        filesystem=mount.filesystem,
        options=mount.options,
        rotational=None if rotational is None else rotational == "1",
        model=", ".join(sorted({model for leaf in leaves if (model := _read(leaf / "device/model"))})) or None,
        nvme=all(leaf.name.startswith("nvme") for leaf in leaves),
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
    names = re.findall(r"^\d+:(?:.*\bmemory\b.*)?:(/.*)$", _read(own_cgroup) or "", re.MULTILINE)
    for name in [*names, "/"]:
        for root, limit, usage in (
            (cgroups, "memory.max", "memory.current"),
            (cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            group = root / name.lstrip("/")
            most, used = _read(group / limit), _read(group / usage)
            if most is None or used is None or not most.isdecimal():  # "max"
                continue
            cache = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(group / "memory.stat") or "", re.MULTILINE)
            available.append(int(most) - int(used) + (int(cache[1]) if cache else 0))
    return max(0, min(available))


def cpu_name() -> str:
    """The processor's name."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _mount_of(path: Path, mountinfo: Path) -> Mount | None:
    """The mount with the longest mount point above ``path``; of several on one point, the last, which hides others."""
    found: Mount | None = None
    for mount in parse_mounts(_read(mountinfo) or ""):
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


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return None


def _unescape(text: str) -> str:
    """The kernel writes blanks in names as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
