"""``Machine``: how fast a machine moves bytes and computes, as far as a plan needs to know."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds, in bytes (or operations) per second, and what small things cost.

    Attributes:
        read: from NVMe, reads alone.
        write: to NVMe, writes alone.
        mixed: both directions together, while both go on.
        to_device: from host memory to an accelerator.
        from_device: and back.
        network: what one rank sends to others.
        flops: operations per second of forward and backward.
        copy: from host memory to host memory.
        optimizer: bytes of state per second that a step of the optimizer goes through: weights, gradients and states.
        planes: the same where weights are in planes.
        transfer: CPU seconds for each byte that moves between NVMe and host memory.
        request_seconds: CPU seconds for each shard that moves there.
        latency_seconds: until who waits for a shard knows that it has moved; others move meanwhile.
        part_seconds: for each sub-group that is stepped, beside its bytes.
        gather_seconds: for each unit that is gathered.
        step_seconds: for each step.
        source: where the figures come from, in words.
    """

    read: float = 3 * GB
    write: float = 2 * GB
    mixed: float = 3 * GB
    to_device: float = 12 * GB
    from_device: float = 12 * GB
    network: float = 10 * GB
    flops: float = 1e14
    copy: float = 8 * GB
    optimizer: float = 8 * GB
    planes: float = 4 * GB
    transfer: float = 0.02 / GB
    request_seconds: float = 1e-4
    latency_seconds: float = 1e-3
    part_seconds: float = 4e-4
    gather_seconds: float = 3e-4
    step_seconds: float = 2e-3
    source: str = ""

    def transfer_seconds(self, num_bytes: int) -> float:
        """Of the processor, for one shard that moves between NVMe and host memory."""
        return self.request_seconds + num_bytes * self.transfer
