"""How much data to measure with: bounded by what the file systems and the host memory have free."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.bench.settings import BenchSettings, Point
from infinity.bench.sweep import grid
from infinity.console.formats import format_bytes
from infinity.errors import BudgetError, ConfigError, DiskFullError
from infinity.io.memory import HUGE_PAGE_BYTES, PAGE_BYTES, round_up
from infinity.store.directory import JobDirectory
from infinity.store.volumes import MARGIN_BYTES

_RING_BYTES, _QUICK_RING_BYTES = 256 << 20, 128 << 20
MAX_REQUEST_BYTES = 32 << 20
"""Of a request; a block may be larger."""

OWN_BYTES = 160 << 20
"""What the program itself grows by while it measures: libraries that it loads late, threads, a picture."""

_LEAST_SWEEP_BYTES = 2 << 20
_AUTO_FRACTION = 4
"""Without ``--size``, at most this part of what is free is taken."""


@dataclass(frozen=True, slots=True)
class Flight:
    """How traffic is cut into requests: large ones, as the engine's, of which the I/O backend cuts blocks.

    Attributes:
        request_bytes: size of a request.
        num_requests: how many per directory are outstanding, so that no worker of the backend is ever without a block.
    """

    request_bytes: int
    num_requests: int

    @property
    def num_bytes(self) -> int:
        """Memory of all requests of a directory."""
        return self.request_bytes * self.num_requests


def plan_flight(point: Point, share_bytes: int, largest_bytes: int = MAX_REQUEST_BYTES) -> Flight:
    """Cut the traffic of one directory.

    Args:
        point: block size and queue depth.
        share_bytes: size of the file, which is to be at least a few requests.
        largest_bytes: of a request; a block is the least.
    """
    block_bytes = point.block_bytes
    wanted_bytes = min(largest_bytes, share_bytes // 8)
    request_bytes = max(1, wanted_bytes // block_bytes) * block_bytes
    return Flight(request_bytes, -(-point.round_bytes // request_bytes) + 1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of everything.

    Attributes:
        share_bytes: of each directory's file.
        ring_bytes: of the host memory that is read into, and of the device memory; more than processor caches hold.
        num_directories: how many files.
    """

    share_bytes: int
    ring_bytes: int
    num_directories: int

    @property
    def total_bytes(self) -> int:
        """Of all files, and of the host memory they are written from."""
        return self.share_bytes * self.num_directories

    @property
    def memory_bytes(self) -> int:
        """Host memory in all, where the device tier is a part of it."""
        return self.total_bytes + 2 * self.ring_bytes


def plan_sizes(settings: BenchSettings, directories: Sequence[JobDirectory], available_bytes: int) -> Sizes:
    """Choose sizes that fit, or refuse.

    Args:
        settings: what was asked for.
        directories: where the files will be.
        available_bytes: host memory that can be had without hurting others.

    Raises:
        ConfigError: ``--size`` is too little to measure with.
        DiskFullError: a file system has too little room for ``--size``, or for one round of requests.
        BudgetError: the same for host memory.
    """
    num = len(directories)
    available_bytes = max(0, available_bytes - OWN_BYTES)
    least = _sizes(settings, num, max((point.round_bytes for point in settings.points), default=_LEAST_SWEEP_BYTES))
    if settings.size is not None:
        wanted = _sizes(settings, num, round_up(-(-settings.size // num), PAGE_BYTES))
        if wanted.share_bytes < least.share_bytes:
            each = f" in each of {num} directories" if num > 1 else ""
            raise ConfigError(
                f"--size: expected at least {format_bytes(least.share_bytes)}{each}"
                f"{', one round of the largest of --points' if settings.points else ''}, got "
                f"{format_bytes(settings.size)}; give more{', or smaller --points' if settings.points else ''}"
            )
        _check_disks(directories, wanted)
        _check_memory(wanted, available_bytes)
        return wanted
    _check_disks(directories, least)
    _check_memory(least, available_bytes)
    affordable_bytes = min(
        settings.largest_auto_bytes // num,
        available_bytes // _AUTO_FRACTION // num,
        *(_free_share_bytes(directories, directory) // _AUTO_FRACTION for directory in directories),
    )
    affordable_bytes -= affordable_bytes % HUGE_PAGE_BYTES
    return _sizes(settings, num, max(affordable_bytes, least.share_bytes))


def _sizes(settings: BenchSettings, num_directories: int, share_bytes: int) -> Sizes:
    total_bytes = share_bytes * num_directories
    points = settings.points or grid(share_bytes)
    flight_bytes = max(plan_flight(point, share_bytes).num_bytes for point in points) * num_directories
    ring_bytes = round_up(
        max(flight_bytes, min(total_bytes, _QUICK_RING_BYTES if settings.quick else _RING_BYTES)), PAGE_BYTES
    )
    return Sizes(share_bytes, ring_bytes, num_directories)


def _free_share_bytes(directories: Sequence[JobDirectory], directory: JobDirectory) -> int:
    """The most that each of the directories on one file system can have."""
    num_sharing = sum(other.device == directory.device for other in directories)
    return max(0, directory.free_bytes() - MARGIN_BYTES) // num_sharing


def _check_disks(directories: Sequence[JobDirectory], sizes: Sizes) -> None:
    for directory in directories:
        free_bytes = _free_share_bytes(directories, directory)
        if free_bytes < sizes.share_bytes:
            raise DiskFullError(
                f"the benchmark needs {format_bytes(sizes.share_bytes)} in each directory; beside "
                f"{format_bytes(MARGIN_BYTES)} to spare, the file system has {format_bytes(free_bytes)} for each: "
                f"short by {format_bytes(sizes.share_bytes - free_bytes)}. Free space, or give a smaller --size, "
                "smaller --points or another directory",
                path=directory.path,
                errno=errno.ENOSPC,
            )


def _check_memory(sizes: Sizes, available_bytes: int) -> None:
    if sizes.memory_bytes > available_bytes:
        raise BudgetError(
            f"the benchmark needs {format_bytes(sizes.total_bytes)} of host memory to write from and 2 x "
            f"{format_bytes(sizes.ring_bytes)} to read into, in all {format_bytes(sizes.memory_bytes)}; beside "
            f"{format_bytes(OWN_BYTES)} for the program {format_bytes(available_bytes)} are free: short by "
            f"{format_bytes(sizes.memory_bytes - available_bytes)}. Free memory, or give a smaller --size or smaller "
            "--points"
        )
