"""``BenchSettings``: what the benchmark is told."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from infinity.config import BackendName
from infinity.console.output import STANDARD_OUTPUT, flag_error
from infinity.errors import ConfigError
from infinity.fields import Paths
from infinity.io.backend import DIRECT_ALIGNMENT

_MIB = 1 << 20
_MAX_DEPTH = 64
MAX_IN_FLIGHT_BYTES = 64 * _MIB
"""What an I/O backend keeps in flight at most, whatever it is asked for."""

_BYTE_SIZE = TypeAdapter(ByteSize)


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One way to cut the traffic.

    Attributes:
        block_bytes: size of one system call.
        depth: how many of them per directory are in flight.
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
    if point.block_bytes < DIRECT_ALIGNMENT or point.block_bytes % DIRECT_ALIGNMENT:
        raise ValueError(f"expected a size from 4KiB on that is a multiple of {DIRECT_ALIGNMENT} bytes")
    if not 1 <= point.depth <= _MAX_DEPTH:
        raise ValueError(f"expected from 1 to {_MAX_DEPTH} in flight")
    if point.round_bytes > MAX_IN_FLIGHT_BYTES:
        raise ValueError("expected at most 64MiB in flight, size times number: an I/O backend has no more there")
    return point


def _parse_share(value: object) -> float:
    words = str(value).strip()
    try:
        share = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError("expected a part from 0 to below 1, such as 0.1 or 10%")
    return share


class BenchSettings(BaseModel):
    """What to measure, where, and for how long. Fields are set by their alias, the flag's name.

    Raises:
        ConfigError: a value cannot be used, or two contradict; the message names the flags, what was expected and what
            came.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    nvme: Paths = ()
    """Directories to measure in: all at once, and each alone where there are several. One whose parent exists is
    created, and removed at the end."""

    size: Annotated[ByteSize, Field(ge=1)] | None = None
    """Bytes that are written and read, over all directories; also the most that one pass moves each way. None: at most
    1GiB, or 256MiB with --quick; less where disk, memory or time is short."""

    time_budget_seconds: Annotated[float, Field(gt=0)] | None = Field(default=None, alias="time")
    """About the most seconds to take, from the start of the program; slow disks take more, since each pass is at least
    one round of requests, and --fio takes as long again."""

    max_repeats: Annotated[int, Field(ge=1)] | None = Field(default=None, alias="repeats")
    """How often to measure each route in each of the best settings; fewer when the time is up."""

    quick: bool = False
    """A sixth of the time: fewer settings and repeats, less data."""

    points: tuple[Annotated[Point, BeforeValidator(_parse_point)], ...] = ()
    """Sizes of a system call, each with how many of them per directory are in flight, such as 4MiBx8,32MiBx2. None: a
    sweep finds the best."""

    device: str = "auto"
    """The device tier: cpu (a part of host memory), cuda, cuda:1 and so on. auto: the current accelerator, else cpu."""

    io_backend: BackendName = "auto"
    """How files are read and written. auto: in every way that works in all the directories, to find the best."""

    json_file: Path | None = Field(default=None, alias="json")
    """Write the figures here as one JSON document; - is standard output."""

    plot_file: Path | None = Field(default=None, alias="plot")
    """Draw the figures into this PNG: size of a call against queue depth, and the ladder of the tiers."""

    config_file: Path | None = Field(default=None, alias="config")
    """Write the recommended settings here, as JSON that infinity.initialize and infinity train --config take."""

    baseline_file: Path | None = Field(default=None, alias="baseline")
    """Compare with the figures in this file, an earlier --json; a regression ends the command with exit code 3."""

    tolerance: Annotated[float, BeforeValidator(_parse_share)] = 0.1
    """By how much a figure may be below that of --baseline, as a part of it: 0.1 or 10%."""

    fio: bool = False
    """Measure with fio as well, in turn with infinity, in the settings found best. Needs fio."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise flag_error(error) from None
        if not self.nvme:
            raise ConfigError("--nvme: expected a directory to measure in, got none; for example --nvme /tmp/infinity")
        if "tolerance" in self.model_fields_set and self.baseline_file is None:
            raise ConfigError("--tolerance: expected with --baseline FILE, the figures to compare with; give both")
        if len(set(self.points)) < len(self.points):
            raise ConfigError("--points: expected different ones, one is there twice")
        self._check_files()

    def _check_files(self) -> None:
        """Each output has a file of its own, and the baseline is not overwritten by anything but new figures."""
        outputs = {"--json": self.json_file, "--plot": self.plot_file, "--config": self.config_file}
        for flag, path in outputs.items():
            if path == STANDARD_OUTPUT and flag != "--json":
                raise ConfigError(f"{flag}: expected a file, got -; only --json writes to standard output")
        others = {**outputs, "--baseline": self.baseline_file}
        if self.json_file == self.baseline_file:
            del others["--baseline"]  # figures take the place of those that they were compared with
        real = {flag: os.path.realpath(path) for flag, path in others.items() if path is not None}
        for name, count in Counter(real.values()).items():
            if count > 1 and name != os.devnull:
                flags = " and ".join(flag for flag, same in real.items() if same == name)
                raise ConfigError(f"{flags}: expected different files, got {name} for each")

    @property
    def backends(self) -> tuple[BackendName, ...]:
        """The I/O backends to try, the engine's favourite first."""
        names: tuple[BackendName, ...] = get_args(BackendName)
        return tuple(name for name in names if name != "auto") if self.io_backend == "auto" else (self.io_backend,)

    @property
    def largest_auto_bytes(self) -> int:
        """The most that ``size`` is when it is not given."""
        return (256 if self.quick else 1024) * _MIB

    @property
    def budget_seconds(self) -> float:
        """``--time``, or its default."""
        return self.time_budget_seconds or (10.0 if self.quick else 60.0)

    @property
    def num_repeats(self) -> int:
        """``--repeats``, or its default."""
        return self.max_repeats or (3 if self.quick else 5)
