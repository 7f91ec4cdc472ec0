"""The figures that a step and a tier report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class UnitStats:
    """What one unit cost in one step, or in several added up.

    Attributes:
        forward_seconds: time that the training thread ran its forward, waits left out; with recomputation also the time
            that backward ran it again.
        backward_seconds: the same for its backward.
        optimizer_seconds: time that the optimizer's thread stepped its parameters.
        stalls: seconds that the training thread waited for it, by cause; see ``StepStats.stalls``.
        moved_bytes: bytes moved, by route (``nvme_read``, ``nvme_write``, …) and kind of shard (``param``, …).
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    stalls: dict[str, float] = field(default_factory=dict)
    moved_bytes: dict[str, dict[str, int]] = field(default_factory=dict)

    def __add__(self, other: UnitStats) -> UnitStats:
        """Both together."""
        moved = {route: dict(kinds) for route, kinds in self.moved_bytes.items()}
        for route, kinds in other.moved_bytes.items():
            moved[route] = _sum(moved.get(route, {}), kinds)
        return UnitStats(
            self.forward_seconds + other.forward_seconds,
            self.backward_seconds + other.backward_seconds,
            self.optimizer_seconds + other.optimizer_seconds,
            _sum(self.stalls, other.stalls),
            moved,
        )


@dataclass(frozen=True, slots=True)
class RouteStats:
    """What one route between two tiers moved in one step.

    Attributes:
        moved_bytes: bytes of the transfers that ended in the step.
        busy_seconds: time of the step in which at least one transfer was moving; waiting in line is not moving.
        gb_s: 1e9 bytes per busy second; 0 where nothing moved.
        best_gb_s: the most that the run has seen up to here, over windows of at least 64 MiB and their busy seconds. A
            lower bound of the route's bandwidth; 0 before the first window.
    """

    moved_bytes: int
    busy_seconds: float
    gb_s: float
    best_gb_s: float


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """What NVMe can move, in 1e9 bytes per second, as measured elsewhere; ``None`` for what was not.

    Attributes:
        read: reading alone.
        write: writing alone.
        both: both directions together while reading and writing at once.
    """

    read: float | None = None
    write: float | None = None
    both: float | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """One training step, from the end of the step before to the end of this one.

    A step ends when ``step()`` returns. The optimizer's arithmetic and the write-back may go on beyond that, under the
    next forward: whatever runs is counted in the step in whose time it runs, so the tail of step n is in the figures
    of step n + 1. Bytes count in the step in which their transfer ends.

    Attributes:
        step: number of the step, from 1.
        seconds: wall time.
        stall_seconds: time that the training thread waited for shards in forward and backward.
        optimizer_seconds: time that it waited for the optimizer step.
        nvme_read_bytes: bytes read from NVMe.
        nvme_written_bytes: bytes written to NVMe.
        num_gathers: how many times a unit was gathered.
        num_stalls: how many of these gathers the training thread had to wait for.
        compute_seconds: time in which forward, backward or the optimizer computed; where two did at once, once.
        stalls: seconds that the training thread waited, by cause: ``read`` for the disk, ``room`` for memory,
            ``optimizer`` for the optimizer's step of what is needed, ``commit`` for a commit to be durable before state
            changes. Only causes that there were.
        overlap_share: the part of NVMe's busy time in which something computed, 0 to 1; 1 where NVMe was idle.
        roofline_seconds: the least that the step could have taken: the longest of ``compute_seconds``, what was read,
            what was written, and both together, each over its bandwidth. Bandwidths are those the meter was given, else
            the best that the run has seen, which are lower bounds: the true roofline may be lower. Nor does it see that
            things which share the cores slow each other down; ``bench/roofline.py`` compares with compute alone.
        achieved: ``roofline_seconds / seconds``, at most 1.
        routes: by name: ``nvme_read``, ``nvme_write``, and ``host_to_device``, ``device_to_host`` where there are such
            copies.
        units: by name of the unit, in the order of their first appearance.
        num_dropped_spans: what was too much to be recorded; where it is not 0, the figures from ``compute_seconds`` on
            are too low.
        commit_seconds: time of the step in which a commit was under way, beside training.
        commit_bytes: what commits that ended in it had to write: shards that were newer in memory, and their tensors.
    """

    step: int
    seconds: float
    stall_seconds: float
    optimizer_seconds: float
    nvme_read_bytes: int
    nvme_written_bytes: int
    num_gathers: int
    num_stalls: int
    compute_seconds: float = 0.0
    stalls: dict[str, float] = field(default_factory=dict)
    overlap_share: float = 1.0
    roofline_seconds: float = 0.0
    achieved: float = 0.0
    routes: dict[str, RouteStats] = field(default_factory=dict)
    units: dict[str, UnitStats] = field(default_factory=dict)
    num_dropped_spans: int = 0
    commit_seconds: float = 0.0
    commit_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What one tier holds.

    Attributes:
        used_bytes: leased or allocated now.
        peak_bytes: the most that ever was.
        budget_bytes: the bound; for NVMe the bytes the model's state can take at most.
    """

    used_bytes: int
    peak_bytes: int
    budget_bytes: int


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in [*one, *(key for key in other if key not in one)]}
