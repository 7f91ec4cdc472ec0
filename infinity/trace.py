"""What happened and how long it took: the figures that a step and a tier report."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """One training step, from the end of the step before to the end of this one.

    Attributes:
        step: number of the step, from 1.
        seconds: wall time.
        stall_seconds: time that the training thread waited for shards in forward and backward.
        optimizer_seconds: time that it waited for the optimizer step.
        nvme_read_bytes: bytes read from NVMe.
        nvme_written_bytes: bytes written to NVMe.
        num_gathers: how many times a unit was gathered.
        num_stalls: how many of these gathers the training thread had to wait for.
    """

    step: int
    seconds: float
    stall_seconds: float
    optimizer_seconds: float
    nvme_read_bytes: int
    nvme_written_bytes: int
    num_gathers: int
    num_stalls: int

    def as_dict(self) -> dict[str, float]:
        """The same as a plain dictionary, for JSON."""
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
