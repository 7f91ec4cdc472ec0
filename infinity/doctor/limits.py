"""Judges what this process is allowed: locked memory, open files, /dev/shm, io_uring."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from infinity.console.formats import format_bytes
from infinity.doctor.computing import memlock_repairs
from infinity.doctor.facts import Accelerator, Limits, Place
from infinity.doctor.findings import Finding, good
from infinity.io.ring import Refusal

_ENOUGH_FILES = 4096
_MANY_FILES = 65536
_ENOUGH_SHM_BYTES = 1 << 30


def judge_limits(limits: Limits, accelerator: Accelerator, place: Place) -> Iterator[Finding]:
    """About the limits of this process."""
    if limits.locked_bytes is None:
        yield good("memlock", "unlimited")
    elif accelerator.name is not None:
        why = "NCCL over InfiniBand, and some drivers for pinned memory, count against it"
        yield Finding("memlock", "slow", format_bytes(limits.locked_bytes), why, memlock_repairs(place))
    else:
        yield good("memlock", f"{format_bytes(limits.locked_bytes)}; nothing is locked on the CPU")
    yield _open_files(limits, place)
    yield _shared_memory(limits, place)


def _open_files(limits: Limits, place: Place) -> Finding:
    def words(number: int) -> str:
        return "unlimited" if number == sys.maxsize else str(number)

    text = f"{words(limits.num_files)}, at most {words(limits.max_files)}"
    if limits.num_files >= _ENOUGH_FILES:
        return good("open files", text)
    why = "data loaders and many ranks run out of descriptors"
    if limits.max_files >= _ENOUGH_FILES:
        return Finding("open files", "slow", text, why, (f"ulimit -n {min(limits.max_files, _MANY_FILES)}",))
    shell = f"echo '* - nofile {_MANY_FILES}' >> /etc/security/limits.conf  # then log in again"
    container = f"docker run --ulimit nofile={_MANY_FILES}"
    return Finding("open files", "slow", text, why, (container if place.in_container else shell,))


def _shared_memory(limits: Limits, place: Place) -> Finding:
    why = "workers of a DataLoader, and NCCL between the ranks of a machine, exchange tensors in it"
    container = "docker run --shm-size 8g"
    if limits.shm_bytes is None:
        command = container if place.in_container else "mount -t tmpfs -o size=8G,mode=1777 tmpfs /dev/shm"
        return Finding("/dev/shm", "missing", "none", why, (command,))
    text = format_bytes(limits.shm_bytes)
    if limits.shm_bytes >= _ENOUGH_SHM_BYTES:
        return good("/dev/shm", text)
    command = container if place.in_container else "mount -o remount,size=8G /dev/shm"
    return Finding("/dev/shm", "slow", text, why, (command,))


def judge_uring(refusal: Refusal | None, place: Place) -> Iterator[Finding]:
    """About io_uring, without which worker threads do the same."""
    if refusal is None:
        yield good("io_uring", "allowed; a short race in each directory says whether it pays")
        return
    why = "training does direct I/O on worker threads, which is as fast with large blocks"
    if refusal.command is None:
        repairs: tuple[str, ...] = (f"# {refusal.repair}",)
    elif refusal.command.startswith("ulimit -l"):
        repairs = memlock_repairs(place)
    else:
        is_host = refusal.command.startswith("sysctl")
        repairs = (place.on_host(refusal.command) if is_host else refusal.command,)
    yield Finding("io_uring", "slow", refusal.reason, why, repairs)
