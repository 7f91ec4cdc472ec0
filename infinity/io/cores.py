"""Which processors this process may use, and how much of them: affinity, and the quotas of its cgroups.

A container is often given two processors of a machine with sixty-four by a quota of time, of which neither
``os.cpu_count`` nor torch knows anything: torch then computes with sixty-four threads, which use up the quota of a
period together in its first milliseconds, and all wait for the next. The bits of a result can depend on the number of
threads, so that number is the user's: this file only says when it is too large.

A quota is a bound on time, not on processors, and need not be whole. It is rounded up: two threads use 1.5 processors
to the full, at the price of a pause now and then; one thread would leave a third of what was given unused.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch


class OversubscriptionWarning(UserWarning):
    """Torch computes with more threads than this process has processors."""


@dataclass(frozen=True, slots=True)
class Cores:
    """What this process may use.

    Attributes:
        num_allowed: processors that its threads may run on.
        quota: seconds of processor time for each second, together; ``None`` where that is not limited.
    """

    num_allowed: int
    quota: float | None = None

    @property
    def num_usable(self) -> int:
        """How many threads can compute at the same time; at least one."""
        most = self.num_allowed if self.quota is None else min(self.num_allowed, math.ceil(self.quota))
        return max(most, 1)

    def excess(self, num_threads: int) -> str | None:
        """What to tell a user whose torch computes with ``num_threads``; ``None`` where these are not too many."""
        if num_threads <= self.num_usable:
            return None
        limit = f"may run on {self.num_allowed} processors"
        if self.quota is not None and self.quota < self.num_allowed:
            limit = f"has a quota of {self.quota:g} processors (cgroup)"
        return (
            f"torch computes with {num_threads} threads, but this process {limit}: they hold each other up; call "
            f"torch.set_num_threads({self.num_usable}) or set OMP_NUM_THREADS={self.num_usable} "
            "(results may differ in their last bits)"
        )


def find_cores(root: Path = Path("/"), num_allowed: int | None = None) -> Cores:
    """The processors of this process.

    Args:
        root: where ``proc`` and ``sys`` are.
        num_allowed: processors that its threads may run on; ``None``: ask the system.
    """
    quotas = list(_quotas(root))
    return Cores(num_allowed or _num_allowed(), min(quotas, default=None))


def warn_of_excess(cores: Cores | None = None) -> None:
    """Warn with ``OversubscriptionWarning`` where the calling thread's setting for torch is above what can run."""
    excess = (cores or find_cores()).excess(torch.get_num_threads())
    if excess is not None:
        warnings.warn(excess, OversubscriptionWarning, stacklevel=2)


def _num_allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """The quota of each cgroup that this process is in and that has one: its own, and those above."""
    cgroups = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            for group in _upwards(cgroups, name):
                yield from _quota(*_read(group / "cpu.max").split()[:2])
        elif "cpu" in controllers.split(","):
            for mount in dict.fromkeys((controllers, "cpu", "cpu,cpuacct")):
                for group in _upwards(cgroups / mount, name):
                    yield from _quota(_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))


def _upwards(mount: Path, name: str) -> Iterator[Path]:
    """A cgroup and all above it, as far as they can be seen: in a container the mount is often its own cgroup."""
    path = PurePosixPath(name)
    if path.is_absolute() and ".." not in path.parts:
        yield from (mount / group.relative_to("/") for group in (path, *path.parents) if group.name)
    yield mount


def _quota(quota: str = "", period: str = "") -> Iterator[float]:
    """Times are in microseconds; ``max`` (v2) and -1 (v1) are no quota."""
    if re.fullmatch(r"\s*\d+\s*", quota) and re.fullmatch(r"\s*0*[1-9]\d*\s*", period) and int(quota) > 0:
        yield int(quota) / int(period)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
