"""What a reader of the figures should know: why they may be worse, or look better, than the machine is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infinity.bench.machine import PathFacts
from infinity.console.formats import format_bytes

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_OVERLAID = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs", "unionfs"})
_REMOTE = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "beegfs", "gpfs", "afs", "9p", "virtiofs"}
)
_REMOTE_IN_USER_SPACE = ("fuse.glusterfs", "fuse.sshfs", "fuse.s3", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs")
_MEMORY_DEVICES = ("/dev/zram", "/dev/ram")
_VIRTUAL_DEVICES = ("/dev/vd", "/dev/xvd")
_BUSY_LOAD_PER_CORE = 0.5
_LITTLE_MEMORY_BYTES = 2 << 30


def machine_cautions(load: float, num_cores: int, available_bytes: int) -> Iterator[str]:
    """About the machine.

    Args:
        load: runnable and waiting tasks, averaged over a minute, before the benchmark adds its own.
        num_cores: processors.
        available_bytes: host memory that is free.
    """
    if load > _BUSY_LOAD_PER_CORE * num_cores:
        yield f"the machine is busy: load average {load:.2f} on {num_cores} cores; figures may be low and uneven"
    if available_bytes < _LITTLE_MEMORY_BYTES:
        yield f"little host memory is free: {format_bytes(available_bytes)}; it bounds what can be measured"


def path_cautions(facts: Sequence[PathFacts]) -> Iterator[str]:
    """About the directories that were given."""
    for fact in facts:
        yield from (f"{fact.path}: {caution}" for caution in _cautions(fact))
    seen: dict[str, str] = {}
    for fact in facts:
        first = seen.setdefault(fact.device or fact.path, fact.path)
        if first != fact.path:
            yield f"{first} and {fact.path} are on one device, {fact.device}: striping over them gains nothing"


def _cautions(fact: PathFacts) -> Iterator[str]:
    filesystem, device = fact.filesystem, fact.device or "its device"
    if filesystem is None:
        yield "the system does not say which file system this is"
    elif filesystem in _IN_MEMORY:
        yield f"{filesystem} is memory, not a disk: what is kept here takes RAM, and these figures are the RAM's"
    elif filesystem in _OVERLAID:
        yield f"{filesystem} is a container's layered file system: give a directory on a mounted volume"
    elif filesystem in _REMOTE or filesystem.startswith(_REMOTE_IN_USER_SPACE):
        yield f"{filesystem} is a network or shared file system: expect it to be slow, and others to slow it"
    elif device.startswith(_MEMORY_DEVICES):
        yield f"{device} is memory, not a disk: what is kept here takes RAM, and these figures are the RAM's"
    elif device.startswith(_VIRTUAL_DEVICES):
        yield f"{device} is a virtual disk, which does not say whether it is NVMe underneath"
    elif fact.rotational:
        yield f"{device} is a rotating disk, or says so: expect far less than of NVMe"
    elif fact.nvme is False:
        yield f"{device} is not NVMe"
    elif fact.nvme is None:
        yield f"the system does not say what device is under {filesystem}, nor whether it is NVMe"
