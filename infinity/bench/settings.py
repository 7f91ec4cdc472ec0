"""``BenchSettings``: what the benchmark is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from infinity.config import BackendName, Paths
from infinity.console.output import flag_error
from infinity.errors import ConfigError
from infinity.io.backend import DIRECT_ALIGNMENT

_MIB = 1 << 20
_MAX_BLOCK_BYTES = 1 << 30
_MAX_DEPTH = 64
_BYTE_SIZE = TypeAdapter(ByteSize)


@dataclass(frozen=True, slots=True)
class Point:
    """One way to cut the traffic.

    Attributes:
        block_bytes: size of a request.
        depth: how many requests per directory are in flight.
    """

    block_bytes: int
    depth: int

    @property
    def round_bytes(self) -> int:
        """Bytes in flight per directory."""
        return self.block_bytes * self.depth

    def __str__(self) -> str:
        return f"{ByteSize(self.block_bytes).human_readable().replace('.0', '')} x {self.depth}"


def _parse_point(value: object) -> object:
    if not isinstance(value, str):
        return value
    size, _, depth = value.rpartition("x")
    try:
        point = Point(_BYTE_SIZE.validate_python(size.strip()), int(depth))
    except ValueError:
        raise ValueError("expected a size and a number in flight, such as 4MiBx8") from None
    if not DIRECT_ALIGNMENT <= point.block_bytes <= _MAX_BLOCK_BYTES or point.block_bytes % DIRECT_ALIGNMENT:
        raise ValueError(f"expected a size from 4KiB to 1GiB that is a multiple of {DIRECT_ALIGNMENT} bytes")
    if not 1 <= point.depth <= _MAX_DEPTH:
        raise ValueError(f"expected from 1 to {_MAX_DEPTH} requests in flight")
    return point


class BenchSettings(BaseModel):
    """What to measure, where, and for how long. Fields are set by their alias, the flag's name.

    Raises:
        ConfigError: a value cannot be used; the message names the flag, what was expected and what came.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    nvme: Paths = ()
    """Directories to measure in, striped as the engine stripes them. One whose parent exists is created, and removed at
    the end."""

    size: Annotated[ByteSize, Field(ge=1)] | None = None
    """Bytes that are written and read, over all directories; also the most that one pass moves each
    way. None: at most 1GiB, or
    256MiB with --quick; less where disk, memory or time is short."""

    time_budget_seconds: Annotated[float, Field(gt=0)] | None = Field(default=None, alias="time")
    """About the most seconds to take; slow disks take more, since each pass is at least one round of requests."""

    max_repeats: Annotated[int, Field(ge=1)] | None = Field(default=None, alias="repeats")
    """How often to measure each route at each point; fewer when the time is up."""

    quick: bool = False
    """Half the time, fewer repeats, less data."""

    points: tuple[Annotated[Point, BeforeValidator(_parse_point)], ...] = (
        Point(4 * _MIB, 8),
        Point(8 * _MIB, 4),
        Point(32 * _MIB, 2),
    )
    """Sizes of a request, each with the number of requests in flight per directory."""

    device: str = "auto"
    """The device tier: cpu (a part of host memory), cuda, cuda:1, … auto: the current accelerator, else cpu."""

    io_backend: BackendName = "auto"
    """How files are read and written. auto: the best that a probe in the directory shows to work."""

    json_file: Path | None = Field(default=None, alias="json")
    """Write the figures here as one JSON document; - is standard output."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise flag_error(error) from None
        if not self.nvme:
            raise ConfigError("--nvme: expected a directory to measure in, got none; for example --nvme /tmp/infinity")
        if not self.points:
            raise ConfigError("--points: expected at least one, such as 4MiBx8")

    @property
    def largest_auto_bytes(self) -> int:
        """The most that ``size`` is when it is not given."""
        return (256 if self.quick else 1024) * _MIB

    @property
    def budget_seconds(self) -> float:
        """``--time``, or its default."""
        return self.time_budget_seconds or (10.0 if self.quick else 20.0)

    @property
    def num_repeats(self) -> int:
        """``--repeats``, or its default."""
        return self.max_repeats or (3 if self.quick else 5)
