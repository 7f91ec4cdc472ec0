"""What every tier can say of itself."""

from __future__ import annotations

from typing import Protocol

from infinity.trace import TierUsage


class Tier(Protocol):
    """A place where shards live: ``DeviceTier``, ``HostTier`` and ``NvmeTier``."""

    def usage(self) -> TierUsage:
        """Bytes used now, at most, and allowed; safe from any thread."""

    async def aclose(self) -> None:
        """Let what is in flight end, give back what the tier took, and leave nothing behind. Harmless when repeated."""
