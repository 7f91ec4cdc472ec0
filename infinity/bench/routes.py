"""The routes between tiers, and what one request does on each."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.bench.passes import Lane
from infinity.bench.settings import Point
from infinity.bench.sizing import plan_flight
from infinity.bench.tiers import Ring, Tiers
from infinity.bench.volumes import Channel, Volume
from infinity.io.completion import call_in_thread
from infinity.io.memory import PAGE_BYTES

_COPY_BYTES = 32 << 20

Check = Callable[[torch.Tensor, str], Awaitable[None]]
"""Compares bytes with what belongs there; also told where they came from, in words."""


class Direction(str, enum.Enum):
    """From one tier to another; the value is its name in the figures."""

    READ = "read"
    WRITE = "write"
    UPLOAD = "upload"
    DOWNLOAD = "download"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Route:
    """What is measured as one figure.

    Attributes:
        name: as people write it.
        directions: which traffic runs side by side.
        reads: whether files are read.
        writes: whether files are written.
    """

    name: str
    directions: tuple[Direction, ...]
    reads: bool = False
    writes: bool = False


READ = Route("nvme->host", (Direction.READ,), reads=True)
WRITE = Route("host->nvme", (Direction.WRITE,), writes=True)
BOTH = Route("nvme<->host", (Direction.READ, Direction.WRITE), reads=True, writes=True)
UPLOAD = Route("host->device", (Direction.UPLOAD,))
DOWNLOAD = Route("device->host", (Direction.DOWNLOAD,))
EXCHANGE = Route("device<->host", (Direction.UPLOAD, Direction.DOWNLOAD))
LOAD = Route("nvme->device", (Direction.LOAD,), reads=True)

FILE_ROUTES = (READ, WRITE, BOTH, LOAD)
DEVICE_ROUTES = (UPLOAD, DOWNLOAD, EXCHANGE)
ROUTE_NAMES = tuple(route.name for route in (READ, WRITE, BOTH, *DEVICE_ROUTES, LOAD))


@dataclass(frozen=True, slots=True)
class Request:
    """A piece of a file, and of the memory it is written from.

    Attributes:
        volume: whose file.
        offset: byte offset in the file.
        source: ``uint8``, shape ``(n,)``: what belongs there.
    """

    volume: Volume
    offset: int
    source: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Size of the piece."""
        return self.source.numel()


Move = Callable[[Request], Awaitable[None]]


class Traffic:
    """Requests between files and memory at one point; each direction goes on where its last pass stopped.

    Every file has lanes of its own, so that each goes at its own pace, as the engine's stripes allow it to.

    Args:
        tiers: the tiers.
        point: block size and depth.
        largest_request_bytes: less where the files are slow, so that a round of requests stays short.
    """

    def __init__(self, tiers: Tiers, point: Point, largest_request_bytes: int) -> None:
        self.point = point
        self._tiers = tiers
        self._flight = plan_flight(point, tiers.share_bytes, largest_request_bytes)
        size = self._flight.request_bytes
        self._landing = Ring(tiers.landing, size)
        self._arena = Ring(tiers.device.memory, size)
        self._requests = {volume: list(self._cut(volume, 0, tiers.share_bytes)) for volume in tiers.volumes}
        self._cursors = {
            (direction, volume): itertools.cycle(self._turned(direction, requests))
            for direction in (Direction.READ, Direction.WRITE, Direction.LOAD)
            for volume, requests in self._requests.items()
        }

    @property
    def request_bytes(self) -> int:
        """Size of a request."""
        return self._flight.request_bytes

    def lanes(self, channel: Channel, route: Route, volumes: Sequence[Volume] | None = None) -> list[Lane]:
        """The traffic of a route.

        Args:
            channel: where it goes through.
            route: one of ``FILE_ROUTES``.
            volumes: whose files; ``None``: of all.
        """
        moves = {Direction.READ: self._read, Direction.WRITE: self._write, Direction.LOAD: self._load}
        return [
            self._lane(direction, self._cursors[direction, volume], len(self._requests[volume]), move)
            for direction in route.directions
            for move in [moves[direction](channel)]
            for volume in volumes or self._tiers.volumes
        ]

    def write_window(self, channel: Channel, start: int, stop: int) -> list[Lane]:
        """Write these bytes of each file once."""
        return self._once(Direction.WRITE, self._write(channel), start, stop)

    def check_window(self, channel: Channel, start: int, stop: int, check: Callable[[Request], Check]) -> list[Lane]:
        """Read these bytes of each file once, and have them checked."""

        async def read(request: Request) -> None:
            with self._landing.place(request.num_bytes) as place:
                await channel.read_into(request.volume, request.offset, place)
                await check(request)(place, "the file")

        return self._once(Direction.READ, read, start, stop)

    def check_device(self, channel: Channel, check: Callable[[Request], Check]) -> list[Lane]:
        """Bring a round of bytes to the device, from host memory and from the files; what comes back is checked."""
        load = self._load_into

        async def there_and_back(request: Request) -> None:
            with self._arena.place(request.num_bytes) as arena:
                await self._tiers.device.upload(request.source, arena)
                await self._check_back(arena, check(request), "device memory, copied there from host memory")
                await load(channel, request, arena)
                await self._check_back(arena, check(request), "device memory, read there from the file")

        stop = min(self._flight.num_bytes, self._tiers.share_bytes)
        return self._once(Direction.LOAD, there_and_back, 0, stop)

    def _cut(self, volume: Volume, start: int, stop: int) -> Iterator[Request]:
        source = self._tiers.source_of(volume)
        for offset in range(start, stop, self._flight.request_bytes):
            yield Request(volume, offset, source[offset : min(offset + self._flight.request_bytes, stop)])

    @staticmethod
    def _turned(direction: Direction, requests: list[Request]) -> list[Request]:
        """So that reads and writes side by side are in different places."""
        half = len(requests) // 2 if direction is Direction.READ else 0
        return requests[half:] + requests[:half]

    def _once(self, direction: Direction, move: Move, start: int, stop: int) -> list[Lane]:
        cuts = [list(self._cut(volume, start, stop)) for volume in self._tiers.volumes]
        return [self._lane(direction, iter(requests), len(requests), move) for requests in cuts]

    def _lane(self, direction: Direction, cursor: Iterator[Request], most: int, move: Move) -> Lane:
        return make_lane(direction, self._flight.num_requests, most, cursor, move)

    def _read(self, channel: Channel) -> Move:
        async def read(request: Request) -> None:
            with self._landing.place(request.num_bytes) as place:
                await channel.read_into(request.volume, request.offset, place)

        return read

    def _write(self, channel: Channel) -> Move:
        return lambda request: channel.write_from(request.volume, request.offset, request.source)

    def _load(self, channel: Channel) -> Move:
        async def load(request: Request) -> None:
            with self._arena.place(request.num_bytes) as arena:
                await self._load_into(channel, request, arena)

        return load

    async def _load_into(self, channel: Channel, request: Request, arena: torch.Tensor) -> None:
        device = self._tiers.device
        if device.in_host_memory:
            await channel.read_into(request.volume, request.offset, arena)
            return
        with self._landing.place(request.num_bytes) as place:
            await channel.read_into(request.volume, request.offset, place)
            await device.upload(place, arena)

    async def _check_back(self, arena: torch.Tensor, check: Check, source: str) -> None:
        with self._landing.place(arena.numel()) as place:
            await call_in_thread(place.zero_)  # what an earlier request left might be right
            await self._tiers.device.download(arena, place)
            await check(place, source)


class DeviceTraffic:
    """Copies between host memory and device memory.

    Attributes:
        copy_bytes: size of one copy.
        depth: how many of each direction are in flight.
    """

    def __init__(self, tiers: Tiers) -> None:
        memory_bytes = tiers.landing.numel()
        self.copy_bytes = max(PAGE_BYTES, min(_COPY_BYTES, memory_bytes // 8) // PAGE_BYTES * PAGE_BYTES)
        self.depth = 1 if tiers.device.in_host_memory else 2
        self._device = tiers.device
        self._landing = Ring(tiers.landing, self.copy_bytes)
        self._arena = Ring(tiers.device.memory, self.copy_bytes)
        self._num_copies = memory_bytes // self.copy_bytes
        pieces = tiers.source[: tiers.source.numel() // self.copy_bytes * self.copy_bytes].split(self.copy_bytes)
        self._sources = itertools.cycle(pieces or (tiers.source,))

    def lanes(self, route: Route) -> list[Lane]:
        """The traffic of a route, one of ``DEVICE_ROUTES``."""
        moves = {Direction.UPLOAD: self._upload, Direction.DOWNLOAD: self._download}
        return [
            make_lane(direction, self.depth, 4 * self._num_copies, self._sources, moves[direction])
            for direction in route.directions
        ]

    async def _upload(self, source: torch.Tensor) -> None:
        with self._arena.place(source.numel()) as place:
            await self._device.upload(source, place)

    async def _download(self, source: torch.Tensor) -> None:
        with self._arena.place(source.numel()) as arena, self._landing.place(source.numel()) as place:
            await self._device.download(arena, place)


def make_lane(
    direction: Direction,
    depth: int,
    max_requests: int,
    cursor: Iterator[Any],
    move: Callable[[Any], Awaitable[None]],
) -> Lane:
    """A lane that moves what the cursor brings, requests or pieces of memory."""

    async def move_next() -> int:
        item = next(cursor)
        await move(item)
        return int(item.num_bytes if isinstance(item, Request) else item.numel())

    return Lane(direction.value, depth, max_requests, move_next)
