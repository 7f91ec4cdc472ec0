"""The routes between tiers, and what one request does on each."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import torch

from infinity.bench.passes import Lane
from infinity.bench.settings import Point
from infinity.bench.tiers import Request, Ring, Tiers
from infinity.io.completion import call_in_thread


class Direction(enum.Enum):
    """From one tier to another."""

    READ = enum.auto()
    WRITE = enum.auto()
    UPLOAD = enum.auto()
    DOWNLOAD = enum.auto()
    LOAD = enum.auto()


@dataclass(frozen=True, slots=True)
class Route:
    """What is measured as one figure.

    Attributes:
        name: as people write it.
        directions: which traffic runs side by side.
        reads: whether files are read.
        writes: whether files are written.
        weight: its part of the time; memory shows its pace sooner than files.
    """

    name: str
    directions: tuple[Direction, ...]
    reads: bool = False
    writes: bool = False
    weight: float = 1.0

    @property
    def uses_files(self) -> bool:
        """Whether NVMe is one end of it."""
        return self.reads or self.writes


READ = Route("nvme->host", (Direction.READ,), reads=True)
WRITE = Route("host->nvme", (Direction.WRITE,), writes=True)
BOTH = Route("nvme<->host", (Direction.READ, Direction.WRITE), reads=True, writes=True)
UPLOAD = Route("host->device", (Direction.UPLOAD,), weight=0.25)
DOWNLOAD = Route("device->host", (Direction.DOWNLOAD,), weight=0.25)
LOAD = Route("nvme->device", (Direction.LOAD,), reads=True)
ROUTES = (READ, WRITE, BOTH, UPLOAD, DOWNLOAD, LOAD)


class Traffic:
    """Requests of one point, in any direction; each direction goes on where its last pass stopped.

    Attributes:
        point: size and number of requests.
        requests: all files, cut into pieces.
    """

    def __init__(self, tiers: Tiers, point: Point) -> None:
        self.point = point
        self.requests = tiers.requests(point.block_bytes)
        self._device = tiers.device
        self._num_volumes = len(tiers.volumes)
        self._landing = Ring(tiers.landing, point.block_bytes)
        self._arena = Ring(tiers.device.memory, point.block_bytes)
        half = len(self.requests) // 2
        self._cursors = {direction: itertools.cycle(self.requests) for direction in Direction}
        # So that reads and writes side by side are in different places.
        self._cursors[Direction.READ] = itertools.cycle(self.requests[half:] + self.requests[:half])

    def depth(self, route: Route) -> int:
        """Requests in flight per directory: with two directions, half of them each way."""
        return max(1, self.point.depth // len(route.directions)) * len(route.directions)

    def lanes(self, route: Route) -> list[Lane]:
        """The traffic of a route."""
        depth = self.depth(route) // len(route.directions) * self._num_volumes
        return [self._lane(self._cursors[direction], depth, self._move(direction)) for direction in route.directions]

    def once(self, move: Callable[[Request], Awaitable[None]]) -> Lane:
        """All requests in order; as many may be begun as there are."""
        return self._lane(iter(self.requests), self.point.depth * self._num_volumes, move)

    @staticmethod
    def _lane(cursor: Iterator[Request], depth: int, move: Callable[[Request], Awaitable[None]]) -> Lane:
        async def move_next() -> int:
            request = next(cursor)
            await move(request)
            return request.num_bytes

        return Lane(depth, move_next)

    def _move(self, direction: Direction) -> Callable[[Request], Awaitable[None]]:
        return {
            Direction.READ: self._read,
            Direction.WRITE: Request.write,
            Direction.UPLOAD: self._upload,
            Direction.DOWNLOAD: self._download,
            Direction.LOAD: self._load,
        }[direction]

    async def check_file(self, request: Request, check: Callable[[torch.Tensor, str], Awaitable[None]]) -> None:
        """Read from the file to host memory, and have it checked."""
        with self._landing.place(request.num_bytes) as place:
            await request.read_into(place)
            await check(place, "the file")

    async def check_device(self, request: Request, check: Callable[[torch.Tensor, str], Awaitable[None]]) -> None:
        """Bring the same bytes to the device from host memory and from the file, and have checked what comes back."""
        with self._arena.place(request.num_bytes) as arena:
            await self._device.upload(request.source, arena)
            await self._check_back(arena, check, "device memory, copied there from host memory")
            await self._load_into(request, arena)
            await self._check_back(arena, check, "device memory, read there from the file")

    async def _check_back(
        self, arena: torch.Tensor, check: Callable[[torch.Tensor, str], Awaitable[None]], source: str
    ) -> None:
        with self._landing.place(arena.numel()) as place:
            await call_in_thread(place.zero_)  # what an earlier request left might be right
            await self._device.download(arena, place)
            await check(place, source)

    async def _read(self, request: Request) -> None:
        with self._landing.place(request.num_bytes) as place:
            await request.read_into(place)

    async def _upload(self, request: Request) -> None:
        with self._arena.place(request.num_bytes) as place:
            await self._device.upload(request.source, place)

    async def _download(self, request: Request) -> None:
        with self._arena.place(request.num_bytes) as arena, self._landing.place(request.num_bytes) as place:
            await self._device.download(arena, place)

    async def _load(self, request: Request) -> None:
        with self._arena.place(request.num_bytes) as arena:
            await self._load_into(request, arena)

    async def _load_into(self, request: Request, arena: torch.Tensor) -> None:
        if self._device.in_host_memory:
            await request.read_into(arena)
            return
        with self._landing.place(request.num_bytes) as place:
            await request.read_into(place)
            await self._device.upload(place, arena)
