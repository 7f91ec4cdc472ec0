"""Judges a directory for the NVMe tier."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Iterator, Sequence

from infinity.console.formats import format_bytes
from infinity.doctor.facts import Directory, Place
from infinity.doctor.findings import Finding, good
from infinity.machine.paths import IN_MEMORY, OVERLAID, not_nvme

_LITTLE_ROOM_BYTES = 1 << 30
_BYTES_PER_PARAMETER = 16
_SLOW_READ_GB_S = 1.0
_SLOW_WRITE_GB_S = 0.5


def judge_directory(directory: Directory, place: Place) -> Iterator[Finding]:
    """About one directory: whether it can be used first, and then how well."""
    if directory.fault is not None:
        yield _unusable(directory, place)
        if not directory.exists:
            return
    yield _device(directory, place)
    yield _mount(directory, place)
    if directory.fault is not None:
        return
    yield _direct(directory, place)
    yield good("I/O", f"{directory.backend}; {_race(directory.reasons)}")
    yield _room(directory)
    yield _sharing(directory)
    if directory.bandwidth is not None:
        yield _bandwidth(directory)


def judge_directories(directories: Sequence[Directory]) -> Iterator[Finding]:
    """About several directories together."""
    seen: dict[str, str] = {}
    for directory in directories:
        facts = directory.facts
        if directory.fault is not None:
            continue
        first = seen.setdefault(facts.device or facts.path, facts.path)
        if first != facts.path:
            yield Finding(
                "striping",
                "slow",
                f"{first} and {facts.path} are on one device, {facts.device}",
                "striping over them gains nothing",
                (f"--nvme {shlex.quote(first)}  # or a directory on another drive besides",),
            )


def _unusable(directory: Directory, place: Place) -> Finding:
    path = shlex.quote(directory.facts.path)
    assert directory.fault is not None
    if not directory.exists:
        text, repairs = "does not exist", [f"mkdir -p {path}"]
    elif "ro" in (directory.mount_options or "").split(","):
        text = f"is mounted read-only at {directory.mount_point}"
        repairs = [f"mount -o remount,rw {shlex.quote(directory.mount_point or '')}"]
    elif directory.errno in (errno.ENOSPC, errno.EDQUOT):
        text, repairs = "is full", [f"du -xsh {path}/* | sort -h  # what fills it"]
    elif directory.errno in (errno.EACCES, errno.EPERM, None) and "may not write" in directory.fault:
        text = "may not be written by this user"
        repairs = [f"sudo chown $(id -u) {path}"]
        if place.in_container:
            repairs = ["chown 10001 DIR  # on the host, of the directory that is mounted here; or: docker run --user"]
    else:
        text, repairs = directory.fault, ["# give another directory to --nvme"]
    return Finding("directory", "missing", text, "training keeps its state there", repairs, essential=True)


def _device(directory: Directory, place: Place) -> Finding:
    facts = directory.facts
    parts = [
        f"{facts.filesystem or 'unknown file system'} on {facts.device or 'an unknown device'}",
        *([facts.model] if facts.model else []),
        *([f"scheduler {facts.scheduler}"] if facts.scheduler else []),
    ]
    text = ", ".join(parts)
    why, repair = not_nvme(facts)
    if not why:
        return good("device", text)
    if place.in_container and facts.filesystem in OVERLAID:
        repair = f"docker run -v /mnt/nvme0:{shlex.quote(facts.path)}"
    elif "lsblk" in repair:
        repair = "lsblk -d -o NAME,MODEL,TRAN,SIZE,ROTA  # is there an NVMe drive besides?"
    else:
        repair = f"# {repair}"
    return Finding("device", "slow", text, why, (repair,))


def _mount(directory: Directory, place: Place) -> Finding:
    options = (directory.mount_options or "").split(",")
    text = f"{directory.mount_point or 'unknown'}: {directory.mount_options or 'unknown options'}"
    point = shlex.quote(directory.mount_point or "")
    if "sync" in options or "dirsync" in options:
        why = "every write waits for the device twice"
        return Finding("mount", "slow", text, why, (place.on_host(f"mount -o remount,async {point}"),))
    is_disk = directory.facts.filesystem not in IN_MEMORY
    if (
        is_disk
        and "ro" not in options
        and not {"noatime", "relatime"}.intersection(options)
        and directory.mount_options
    ):
        why = "every read changes the time of the last access, which is written"
        return Finding("mount", "slow", text, why, (place.on_host(f"mount -o remount,noatime {point}"),))
    if {"nobarrier", "barrier=0"}.intersection(options):
        why = "after a loss of power a commit may be damaged: the drive's cache is not flushed"
        return Finding("mount", "slow", text, why, (place.on_host(f"mount -o remount,barrier {point}"),))
    return good("mount", text)


def _direct(directory: Directory, place: Place) -> Finding:
    declared = "" if directory.alignment is None else f", {directory.alignment}-byte alignment (statx)"
    if directory.direct:
        return good("direct I/O", f"O_DIRECT works{declared}")
    path, facts = shlex.quote(directory.facts.path), directory.facts
    refused = next((reason for reason in directory.reasons if reason.startswith("threads, direct")), "")
    why = refused.partition(": ")[2] or "O_DIRECT does not work here"
    if facts.filesystem == "btrfs":
        repair = f"chattr +C {path}  # before the first file is made there"
    elif facts.filesystem in ("ext3", "ext4") and "data=journal" in (directory.mount_options or ""):
        repair = f"umount {directory.mount_point} && mount -o data=ordered {facts.device} {directory.mount_point}"
    elif facts.filesystem == "zfs":
        repair = f"zfs set direct=always {facts.device}"
    elif place.in_container and facts.filesystem in OVERLAID:
        repair = f"docker run -v /mnt/nvme0:{path}"
    else:
        repair = "# give --nvme a directory on a local drive with ext4 or xfs"
    return Finding("direct I/O", "slow", "through the page cache", why, (repair,))


def _race(reasons: Sequence[str]) -> str:
    """What became of io_uring."""
    reason = next((reason for reason in reasons if reason.startswith("uring")), "io_uring was not tried")
    return f"io_uring {reason.partition(': ')[2]}" if reason.startswith("uring") else reason


def _room(directory: Directory) -> Finding:
    free, total = directory.free_bytes or 0, directory.total_bytes or 0
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < _LITTLE_ROOM_BYTES:
        path = shlex.quote(directory.facts.path)
        return Finding(
            "room", "missing", text, "no training state fits", (f"du -xsh {path}/* | sort -h  # what fills it",),
            essential=True,
        )  # fmt: skip
    billions = free / _BYTES_PER_PARAMETER / 1e9
    return good("room", f"{text}: the state of {billions:.2g} billion parameters under AdamW, once")


def _sharing(directory: Directory) -> Finding:
    if directory.clones:
        return good("checkpoints", "share blocks with the state (reflinks)")
    if directory.hard_links:
        return good("checkpoints", "share files with the state (hard links; no reflinks here)")
    why = "a saved checkpoint has to be a copy"
    return Finding("checkpoints", "slow", "neither reflinks nor hard links", why, ("# use xfs, btrfs or ext4",))


def _bandwidth(directory: Directory) -> Finding:
    assert directory.bandwidth is not None
    read, write = directory.bandwidth.read_gb_s, directory.bandwidth.write_gb_s
    text = f"reads {read:.1f} GB/s, writes {write:.1f} GB/s (a moment's measurement)"
    if read >= _SLOW_READ_GB_S and write >= _SLOW_WRITE_GB_S:
        return good("bandwidth", text)
    why = f"less than {_SLOW_READ_GB_S:g} GB/s of reads or {_SLOW_WRITE_GB_S:g} GB/s of writes: the disk sets the pace"
    return Finding("bandwidth", "slow", text, why, (f"infinity bench --nvme {shlex.quote(directory.facts.path)}",))
