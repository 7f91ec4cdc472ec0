"""The relative speed of NVMe directories: given, assumed equal, or measured at the start of a job.

What is measured is what training does: each directory reads and writes at once, in requests as large as shards, and all
directories work at the same time, because some share a disk, a bus or a controller and are slower together than each
alone. A round moves ``ROUND_BYTES`` in every directory; the median over rounds counts, so that a hiccup does not. It
takes about ``MEASURE_SECONDS``, more only where a single round takes longer than that.

Equal disks must get equal weights, although no two measurements agree: speeds that differ by less than ``NOISE`` count
as equal. So do directories on one file system, which are not measured at all if all are; and a weight can always be
given by hand (``Config.nvme_weights``). A drive whose cache takes the few writes of this measurement faster than it
takes a step's is taken for faster than it is: that costs speed and nothing else.

The memory it takes, ``ROUND_BYTES``, is given back before the first shard is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.errors import storage_error
from infinity.io.backend import Backend, File, Priority
from infinity.io.completion import call_in_thread
from infinity.io.memory import allocate, as_bytes
from infinity.io.tasks import gather_all
from infinity.store.striping import relative

ROUND_BYTES = 32 << 20
"""What a round moves in each directory, half of it each way; a probe file has this size."""

MEASURE_SECONDS = 0.15
"""No round begins later than this after the first."""

NOISE = 0.2
"""Two speeds are equal if the smaller is within this part of the larger."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A directory to be weighed.

    Attributes:
        path: the directory.
        device: its file system, by any number.
        backend: moves bytes there.
    """

    path: Path
    device: int
    backend: Backend


@dataclass(frozen=True, slots=True)
class Weights:
    """How fast directories are, and how that is known.

    Attributes:
        values: relative speed of each directory; the fastest has 1.
        reasons: for each directory, where its weight comes from, in words.
    """

    values: tuple[float, ...]
    reasons: tuple[str, ...]


async def weigh(
    candidates: Sequence[Candidate],
    given: Sequence[float] | None,
    *,
    capacity_bytes: int,
    room_bytes: Mapping[int, int],
) -> Weights:
    """Find the weights of directories.

    Args:
        candidates: the directories, at least one.
        given: their weights, if the user knows them.
        capacity_bytes: what they are to hold together; speed does not matter where that is little.
        room_bytes: what each file system has room for.

    Raises:
        StorageError: a directory failed under the measurement.
    """
    if given is not None:
        return _same_reason(relative(given), "nvme_weights")
    equal = (1.0,) * len(candidates)
    unknown = _why_not_measured(candidates, capacity_bytes, room_bytes)
    if unknown is not None:
        return _same_reason(equal, unknown)
    speeds = await measure([(candidate.backend, candidate.path) for candidate in candidates])
    values = relative(steady(speeds, [candidate.device for candidate in candidates]))
    reasons = tuple(
        f"weight {value:.2g}: {speed / 1e9:.2f} GB/s, reads and writes together, measured while all directories worked"
        for value, speed in zip(values, speeds, strict=True)
    )
    return Weights(values, reasons)


def _same_reason(values: tuple[float, ...], reason: str) -> Weights:
    return Weights(values, tuple(f"weight {value:.2g}: {reason}" for value in values))


def _why_not_measured(
    candidates: Sequence[Candidate], capacity_bytes: int, room_bytes: Mapping[int, int]
) -> str | None:
    devices = [candidate.device for candidate in candidates]
    if len(candidates) == 1:
        return "the only directory"
    if len(set(devices)) == 1:
        return "all directories are on one file system"
    if capacity_bytes < len(candidates) * ROUND_BYTES:
        return "too little state for speed to matter"
    cached = [str(candidate.path) for candidate in candidates if not candidate.backend.direct]
    if cached:
        return (
            f"I/O in {', '.join(cached)} goes through the page cache, so that no short measurement tells its speed; "
            "nvme_weights says what is known"
        )
    crowded = [
        str(each.path) for each in candidates if room_bytes[each.device] < devices.count(each.device) * ROUND_BYTES
    ]
    if crowded:
        return f"{', '.join(crowded)} has no room to measure in"
    return None


def steady(speeds: Sequence[float], devices: Sequence[int]) -> list[float]:
    """Make equal what noise told apart: directories on one device, and speeds that differ by less than ``NOISE``.

    Args:
        speeds: of each directory, in any unit, positive.
        devices: the file system of each.

    Returns:
        For each directory the mean speed of those that count as its equals, in the order of the speeds.
    """
    of_device = {
        device: statistics.fmean(speed for speed, other in zip(speeds, devices, strict=True) if other == device)
        for device in devices
    }
    groups: list[list[int]] = []
    for device in sorted(of_device, key=lambda device: -of_device[device]):
        if groups and of_device[device] >= (1 - NOISE) * of_device[groups[-1][0]]:
            groups[-1].append(device)
        else:
            groups.append([device])
    means = {device: statistics.fmean(of_device[each] for each in group) for group in groups for device in group}
    return [means[device] for device in devices]


async def measure(directories: Sequence[tuple[Backend, Path]]) -> list[float]:
    """Bytes per second of each directory while all work: reads and writes at once, added up.

    Args:
        directories: each with the backend to use there. ``ROUND_BYTES`` in a file of its own are needed in each.

    Raises:
        DiskFullError: no room.
        StorageError: the system reported an error.
    """
    halves = await call_in_thread(_halves)
    rounds: list[list[float]] = [[] for _ in directories]
    async with contextlib.AsyncExitStack() as stack:
        probes = [
            _Probe(backend, await stack.enter_async_context(_probe_file(backend, directory)), *halves)
            for backend, directory in directories
        ]
        await gather_all(probe.initialise() for probe in probes)
        deadline = asyncio.get_running_loop().time() + MEASURE_SECONDS
        await gather_all(probe.repeat(deadline, seconds) for probe, seconds in zip(probes, rounds, strict=True))
    return [ROUND_BYTES / statistics.median(seconds) for seconds in rounds]


def _halves() -> tuple[torch.Tensor, torch.Tensor]:
    """What to write, no two words of it alike (some storage is quick with zeros), and where to read to."""
    source, target = (allocate(ROUND_BYTES // 2, populate=False) for _ in range(2))
    words = source.view(torch.int64)
    torch.arange(len(words), out=words).mul_(0x1E3779B97F4A7C15)
    return source, target


class _Probe:
    """A file of two halves: one is read while the other is written.

    Directories share their memory: what lies in it does not matter.
    """

    def __init__(self, backend: Backend, file: File, source: torch.Tensor, target: torch.Tensor) -> None:
        self._backend = backend
        self._file = file
        self._source = as_bytes(source)
        self._target = as_bytes(target)
        self._half = 0

    async def initialise(self) -> None:
        """Write all of it once: a first write is slower than those that follow."""
        for half in range(2):
            await self._write(half)

    async def repeat(self, deadline: float, seconds: list[float]) -> None:
        """Do rounds until the deadline, at least one, and keep how long each took."""
        clock = asyncio.get_running_loop().time
        while not seconds or clock() < deadline:
            begun = clock()
            await gather_all((self._write(self._half), self._read(1 - self._half)))
            seconds.append(clock() - begun)
            self._half = 1 - self._half

    async def _write(self, half: int) -> None:
        offset = half * len(self._source)
        await self._backend.write_from(self._file, offset, self._source, priority=Priority.DEMAND)

    async def _read(self, half: int) -> None:
        offset = half * len(self._target)
        await self._backend.read_into(self._file, offset, self._target, priority=Priority.DEMAND)


@contextlib.asynccontextmanager
async def _probe_file(backend: Backend, directory: Path) -> AsyncIterator[File]:
    """A reserved file, removed at the end; its name is one that the job directory removes after a crash."""
    path = directory / f".infinity-probe-{secrets.token_hex(8)}"
    file = await backend.open_file(path, create=True)
    try:
        await backend.preallocate(file, ROUND_BYTES)
        yield file
    finally:
        try:
            await file.aclose()
        finally:
            await call_in_thread(lambda: _remove(path))


def _remove(path: Path) -> None:
    """Unlink a file, giving its blocks back at once: XFS would do it later, and they are needed now."""
    try:
        os.truncate(path, 0)
        path.unlink()
    except OSError as error:
        raise storage_error("removal of the probe", error, path=path) from error
