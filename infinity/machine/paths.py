"""What is under a path: the mount, the file system and the block device, as the kernel lists them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.machine.files import chosen, is_there, read_integer, read_text

_MOUNTINFO = Path("/proc/self/mountinfo")
_BLOCK_DEVICES = Path("/sys/dev/block")

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
OVERLAID = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs", "unionfs"})
_REMOTE = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "beegfs", "gpfs", "afs", "9p", "virtiofs"}
)
_REMOTE_IN_USER_SPACE = ("fuse.glusterfs", "fuse.sshfs", "fuse.s3", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs")
_MEMORY_DEVICES = ("/dev/zram", "/dev/ram")
VIRTUAL_DEVICES = ("/dev/vd", "/dev/xvd")


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
    mount = mount_of(path, mountinfo=mountinfo)
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


def mount_of(path: Path, *, mountinfo: Path = _MOUNTINFO) -> Mount | None:
    """The mount with the longest mount point above ``path``; of several on one point, the last, which hides others."""
    path = path.resolve()
    found: Mount | None = None
    for mount in parse_mounts(read_text(mountinfo) or ""):
        if path.is_relative_to(mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def parse_mounts(text: str) -> Iterator[Mount]:
    """The mounts in the text of a mountinfo file; lines that are none are passed over."""
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 2:
            continue
        options = ",".join(dict.fromkeys(",".join([fields[5], *rest[2:3]]).split(",")))
        yield Mount(fields[2], _unescape(fields[4]), options, rest[0], _unescape(rest[1]))


def not_nvme(fact: PathFacts) -> tuple[str, str]:
    """What is there instead of local NVMe, and what to do; empty where it is NVMe."""
    filesystem, device = fact.filesystem, fact.device or "its device"
    local = "give a directory on local NVMe"
    if filesystem is None:
        return "the system does not say which file system this is", f"is /proc mounted? Else {local}"
    if filesystem in IN_MEMORY or device.startswith(_MEMORY_DEVICES):
        name = filesystem if filesystem in IN_MEMORY else device
        return f"{name} is memory, not a disk: what is kept here takes RAM, and these figures are the RAM's", local
    if filesystem in OVERLAID:
        return f"{filesystem} is a container's layered file system", "give a directory on a mounted volume"
    if filesystem in _REMOTE or filesystem.startswith(_REMOTE_IN_USER_SPACE):
        return f"{filesystem} is a network or shared file system: expect it to be slow, and others to slow it", local
    if device.startswith(VIRTUAL_DEVICES):
        hint = "ask your provider; local NVMe is often a disk of its own (lsblk)"
        return f"{device} is a virtual disk, which does not say whether it is NVMe underneath", hint
    if fact.rotational:
        return f"{device} is a rotating disk, or says so: expect far less than of NVMe", local
    if fact.nvme is False:
        return f"{device} is not NVMe", local
    if fact.nvme is None:
        return f"the system does not say what device is under {filesystem}, nor whether it is NVMe", "see lsblk"
    if fact.transport is not None and set(fact.transport.split(", ")) - {"pcie"}:
        return f"{device} is NVMe over a network ({fact.transport}): others may slow it", local
    return "", ""


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
    if not is_there(directory):
        return None
    directory = directory.resolve()
    return directory.parent if is_there(directory / "partition") else directory


def _leaves(device: Path) -> Iterator[Path]:
    """The devices that one is made of (RAID, LVM, encryption), or itself."""
    slaves = device / "slaves"
    parts = sorted(slaves.iterdir()) if is_there(slaves) else []
    if not parts:
        yield device
    for part in map(Path.resolve, parts):
        yield from _leaves(part.parent if is_there(part / "partition") else part)


def _of_all(leaves: Sequence[Path], name: str, clean: Callable[[str], str] = str) -> str | None:
    """What the devices say, each thing once."""
    return ", ".join(sorted({clean(text) for leaf in leaves if (text := read_text(leaf / name))})) or None


def _unescape(text: str) -> str:
    """The kernel writes blanks in names as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
