"""The files of the NVMe tier, one in each directory: opened together, placed into, closed together.

Room: each file is preallocated to its share of the capacity and never grows. The shares follow the directories' speed
where their file systems have room for that; where one has not, the others take more, and a capacity that all of them
together cannot hold is refused. Shares add up to the capacity, in whole pages, and a shard is placed wherever room is:
in the pieces that suit the directories' speed (``striping.py``) as far as these fit, the rest elsewhere. So whatever
fits the capacity by arithmetic fits in fact.

Everything belongs to the event loop that awaited ``open``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from infinity.config import BackendName
from infinity.errors import DiskFullError
from infinity.io.backend import DIRECT_ALIGNMENT, Backend, File, IOStatistics
from infinity.io.completion import call_in_thread
from infinity.io.holes import punch
from infinity.io.open import Choice
from infinity.io.tasks import gather_all
from infinity.store.directory import JobDirectory, open_directories
from infinity.store.held import typed_errors
from infinity.store.shard import Extent, ExtentAllocator
from infinity.store.speeds import Candidate, weigh
from infinity.store.state import OpenState, new_file_name
from infinity.store.striping import cut, divide_capacity

MARGIN_BYTES = 16 << 20
"""What must stay free on a file system beyond our files: its own metadata for them, and other people's logs."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Files:
    """Data files of one directory.

    Attributes:
        active: the one to be written on.
        active_bytes: its size, where it exists.
        retired: names and sizes of those that are only read.
    """

    active: str
    active_bytes: int | None = None
    retired: Mapping[str, int] = dataclasses.field(default_factory=dict)


def _files_of(state: OpenState | None, num_directories: int) -> list[_Files]:
    if state is None:
        return [_Files("shards.bin")] * num_directories
    found = []
    for index, directory in enumerate(state.directories):
        sizes = {
            name: os.stat(name, dir_fd=directory.descriptor).st_size
            for name, place in state.places.items()
            if place == index
        }
        active = state.active_file(index)
        active_bytes = None if active is None else sizes.pop(active) // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        found.append(_Files(active or new_file_name(), active_bytes, sizes))
    return found


class OpenBackend(Protocol):
    """The signature of ``infinity.io.open.open_backend``."""

    async def __call__(
        self, name: BackendName, directory: Path, *, num_threads: int, block_bytes: int
    ) -> tuple[Backend, Choice]:
        """Open the best backend for ``directory`` that ``name`` allows, and say why it was chosen."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Volume:
    """One directory's file, the backend that moves its bytes, and the directory's relative speed."""

    backend: Backend
    file: File
    allocator: ExtentAllocator
    weight: float

    @property
    def load(self) -> float:
        """What it holds, in terms of the time that takes to move."""
        return self.allocator.used_bytes / self.weight


class Volumes:
    """All volumes of a tier: empty until ``open``; ``close`` closes what there is, however ``open`` ended.

    Attributes:
        choices: for each job directory, which backend was chosen and why, and the weight it got and why.
    """

    def __init__(self) -> None:
        self.choices: dict[Path, Choice] = {}
        self._directories: list[JobDirectory] = []
        self._backends: list[Backend] = []
        self._volumes: list[Volume] = []  # one for each directory
        self._retired: list[Volume] = []  # that are only read: somebody else has links to their files

    async def open(
        self,
        paths: Sequence[Path],
        *,
        capacity_bytes: int,
        weights: Sequence[float] | None,
        backend_name: BackendName,
        num_threads: int,
        block_bytes: int,
        rank: int,
        open_backend: OpenBackend,
        state: OpenState | None,
    ) -> None:
        """Make a job directory below each of ``paths``, and in each a file for its share of ``capacity_bytes``.

        Arguments and errors are those of ``NvmeTier.open``.
        """
        if state is None:
            await call_in_thread(lambda: self._directories.extend(open_directories(paths, rank=rank)))
        else:
            self._directories.extend(state.directories)
        found = await call_in_thread(lambda: _files_of(state, len(self._directories)))
        free_bytes, devices = await call_in_thread(lambda: self._survey(found))
        room_bytes = {device: max(0, free - MARGIN_BYTES) for device, free in free_bytes.items()}
        if divide_capacity(capacity_bytes, (1.0,) * len(devices), devices, room_bytes) is None:
            self._refuse(capacity_bytes, capacity_bytes - sum(room_bytes.values()), free_bytes, devices)
        for directory in self._directories:
            backend, choice = await open_backend(
                backend_name, directory.path, num_threads=num_threads, block_bytes=block_bytes
            )
            self._backends.append(backend)
            self.choices[directory.path] = choice
        weighed = await weigh(
            [Candidate(*each) for each in zip(self.choices, devices, self._backends, strict=True)],
            weights,
            capacity_bytes=capacity_bytes,
            room_bytes=room_bytes,
        )
        shares = divide_capacity(capacity_bytes, weighed.values, devices, room_bytes)
        assert shares is not None, "room does not depend on weights"
        for directory, backend, share_bytes, weight, reason, files in zip(
            self._directories, self._backends, shares, weighed.values, weighed.reasons, found, strict=True
        ):
            choice = self.choices[directory.path]
            self.choices[directory.path] = dataclasses.replace(choice, reasons=(*choice.reasons, reason))
            file = await backend.open_file(directory.path / files.active, create=files.active_bytes is None)
            size_bytes = max(share_bytes, files.active_bytes or 0)
            self._volumes.append(Volume(backend, file, ExtentAllocator(size_bytes), weight))
            for name, num_bytes in files.retired.items():
                file = await backend.open_file(directory.path / name)
                self._retired.append(Volume(backend, file, ExtentAllocator(num_bytes), weight))
        await gather_all(
            volume.backend.preallocate(volume.file, volume.allocator.size_bytes)
            for volume in self._volumes
            if volume.allocator.size_bytes
        )

    async def close(self) -> None:
        """Close the backends and remove the directories; nothing may be in flight.

        Raises:
            StorageError: a file or directory could not be closed or removed.
        """
        try:
            await gather_all(backend.aclose() for backend in self._backends)
        finally:
            removal = contextlib.ExitStack()
            for directory in self._directories:
                removal.callback(directory.close)
            await call_in_thread(removal.close)

    @property
    def weights(self) -> tuple[float, ...]:
        """The relative speed of each directory; the fastest has 1."""
        return tuple(volume.weight for volume in self._volumes)

    @property
    def path(self) -> Path:
        """The first file, for errors that concern no other."""
        return self._volumes[0].file.path

    def of_file(self, name: str) -> Volume:
        """The volume whose file has this name."""
        return next(volume for volume in (*self._volumes, *self._retired) if volume.file.path.name == name)

    def is_written(self, volume: Volume) -> bool:
        """Whether shards may be placed in it."""
        return volume in self._volumes

    async def retire(self, volume: Volume) -> None:
        """Place nothing in a file any more, but in a new one of the same size; what is free in it is given back.

        Raises:
            DiskFullError: there is no room for the new one; the old one stays as it was.
            StorageError: the system reported an error.
        """
        holes = [(hole.offset, hole.offset + hole.num_bytes) for hole in volume.allocator.holes]
        size_bytes, path = volume.allocator.size_bytes, volume.file.path
        await call_in_thread(lambda: punch(path, holes))
        file = await volume.backend.open_file(path.with_name(new_file_name()), create=True)
        try:
            await volume.backend.preallocate(file, size_bytes)
        except BaseException:
            await file.aclose()
            await call_in_thread(file.path.unlink)
            await volume.backend.preallocate(volume.file, size_bytes)
            raise
        new = dataclasses.replace(volume, file=file, allocator=ExtentAllocator(size_bytes))
        self._volumes[self._volumes.index(volume)] = new
        self._retired.append(volume)

    async def drop_empty(self) -> None:
        """Be done with retired files in which nothing is left.

        Raises:
            StorageError: the system reported an error.
        """
        for volume in [volume for volume in self._retired if not volume.allocator.used_bytes]:
            self._retired.remove(volume)
            await volume.file.aclose()
            with typed_errors(volume.file.path):
                await call_in_thread(volume.file.path.unlink)

    def place(self, num_bytes: int) -> dict[Volume, list[Extent]]:
        """Take room for a shard: as suits the directories' speed, and what does not fit there wherever room is.

        Args:
            num_bytes: a multiple of ``DIRECT_ALIGNMENT``, at most as many as are free in all files together.
        """
        used_bytes = [volume.allocator.used_bytes for volume in self._volumes]
        sizes = dict(zip(self._volumes, cut(num_bytes, self.weights, used_bytes), strict=True))
        for volume, size in sizes.items():
            sizes[volume] = min(size, volume.allocator.free_bytes)
        rest = num_bytes - sum(sizes.values())
        for volume in sorted(self._volumes, key=lambda volume: volume.load):
            more = min(rest, volume.allocator.free_bytes - sizes[volume])
            sizes[volume] += more
            rest -= more
        assert not rest, "the files together are at least as large as the capacity"
        return {volume: volume.allocator.allocate(size) for volume, size in sizes.items() if size}

    async def sync(self) -> None:
        """Make every write that has ended durable.

        Raises:
            StorageError: the system reported an error.
        """
        await gather_all(volume.backend.fsync(volume.file) for volume in self._volumes)

    def statistics(self) -> IOStatistics:
        """What all backends have moved since they were opened, probes included; safe from any thread."""
        total = IOStatistics()
        for part in (backend.statistics() for backend in self._backends):
            for field in dataclasses.fields(IOStatistics):
                if field.name != "extra":
                    setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))
            for name, value in part.extra.items():
                total.extra[name] = total.extra.get(name, 0.0) + value
        return total

    def _survey(self, found: Sequence[_Files]) -> tuple[dict[int, int], list[int]]:
        """What each file system has for us, by its number, and the number of each directory's."""
        devices = [directory.device for directory in self._directories]
        free_bytes = {
            device: directory.free_bytes() for device, directory in zip(devices, self._directories, strict=True)
        }
        for device, files in zip(devices, found, strict=True):
            free_bytes[device] += files.active_bytes or 0  # ours already
        return free_bytes, devices

    def _refuse(
        self, capacity_bytes: int, short_bytes: int, free_bytes: Mapping[int, int], devices: Sequence[int]
    ) -> NoReturn:
        """Show what all together must hold and what their file systems have free."""
        found = []
        for device, free in free_bytes.items():
            on_it = [
                each.path.parent for each, other in zip(self._directories, devices, strict=True) if other == device
            ]
            found.append(f"in {' and '.join(map(str, on_it))} {_show(free)} are free")
        raise DiskFullError(
            f"the NVMe tier needs {_show(capacity_bytes)}, and {_show(MARGIN_BYTES)} to spare on each file system; "
            f"{', '.join(found)}: short by {_show(short_bytes)}. Free space there, or give directories on other disks",
            path=self._directories[0].path,
            errno=errno.ENOSPC,
        )


def _show(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.3f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"
