"""``Simulated``: what a step in virtual time comes to, and ``Mark``, the counts at the end of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Simulated:
    """One step, once training repeats itself.

    Attributes:
        seconds: how long it takes.
        read_bytes: from NVMe.
        written_bytes: to NVMe.
        to_device: bytes from host memory to an accelerator.
        from_device: and back.
        stall_seconds: for which training waits, by cause: ``"disk"``, ``"optimizer"``.
        processor_seconds: for which the processor works.
        disk_seconds: for which the disk moves something.
        optimizer_seconds: of the processor, for the optimizer's arithmetic.
        device_peak_bytes: the most that device memory holds.
        host_peak_bytes: the most that host memory holds.
        traffic: bytes read and written by kind of shard.
        places: where shards are when the last step ends, in bytes by tier and kind of shard.
    """

    seconds: float
    read_bytes: int
    written_bytes: int
    to_device: int
    from_device: int
    stall_seconds: Mapping[str, float]
    processor_seconds: float
    disk_seconds: float
    optimizer_seconds: float
    device_peak_bytes: int
    host_peak_bytes: int
    traffic: Mapping[str, tuple[int, int]]
    places: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Mark:
    """All that has been counted until a step ended.

    Attributes:
        totals: the fields of ``Simulated`` that add up, by name.
        stall_seconds: as there.
        traffic: as there.
        places: as there.
    """

    totals: Mapping[str, float]
    stall_seconds: Mapping[str, float]
    traffic: Mapping[str, tuple[int, int]]
    places: Mapping[str, Mapping[str, int]]


def mean_step(first: Mark, last: Mark, num_steps: int, *, device_peak_bytes: int, host_peak_bytes: int) -> Simulated:
    """The mean of the steps between two marks.

    Args:
        first: before the first of them.
        last: after the last.
        num_steps: how many there are.
        device_peak_bytes: of the device tier.
        host_peak_bytes: of the host tier.
    """

    def mean(name: str) -> float:
        return (last.totals[name] - first.totals[name]) / num_steps

    def traffic_of(kind: str) -> tuple[int, int]:
        (read, written), (read_before, written_before) = last.traffic[kind], first.traffic.get(kind, (0, 0))
        return round((read - read_before) / num_steps), round((written - written_before) / num_steps)

    return Simulated(
        seconds=mean("seconds"),
        read_bytes=round(mean("read_bytes")),
        written_bytes=round(mean("written_bytes")),
        to_device=round(mean("to_device")),
        from_device=round(mean("from_device")),
        stall_seconds={
            cause: (seconds - first.stall_seconds[cause]) / num_steps for cause, seconds in last.stall_seconds.items()
        },
        processor_seconds=mean("processor_seconds"),
        disk_seconds=mean("disk_seconds"),
        optimizer_seconds=mean("optimizer_seconds"),
        device_peak_bytes=device_peak_bytes,
        host_peak_bytes=host_peak_bytes,
        traffic={kind: traffic_of(kind) for kind in last.traffic},
        places=last.places,
    )
