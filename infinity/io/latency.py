"""``LatencyHistogram``: how long blocks took, in constant memory and without keeping a figure for each.

Buckets grow geometrically, eight to an octave, so a percentile is right to about 5% over nine orders of magnitude. A
list of all latencies was rejected: a training run moves millions of blocks.
"""

from __future__ import annotations

import math
from collections import Counter

_BUCKETS_PER_OCTAVE = 8


class LatencyHistogram:
    """Counts of durations by size. Not locked: whoever adds holds a lock of their own."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._counts.total()

    def __eq__(self, other: object) -> bool:
        return self._counts == other._counts if isinstance(other, LatencyHistogram) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"<LatencyHistogram of {len(self)}, median {self.percentile(50):.3g} s>"

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[math.ceil(math.log2(max(seconds, 1e-9)) * _BUCKETS_PER_OCTAVE)] += 1

    def copy(self) -> LatencyHistogram:
        """A snapshot."""
        return self._with(Counter(self._counts))

    def __add__(self, other: LatencyHistogram) -> LatencyHistogram:
        """Both together."""
        return self._with(self._counts + other._counts)

    def since(self, earlier: LatencyHistogram) -> LatencyHistogram:
        """What was added after ``earlier``, a snapshot of this one."""
        return self._with(self._counts - earlier._counts)

    def percentile(self, percent: float) -> float:
        """The duration in seconds that so many percent did not exceed, to about 5%; NaN where nothing was counted.

        Args:
            percent: from 0 to 100.
        """
        wanted = max(1, math.ceil(percent / 100 * len(self)))
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                return float(2 ** ((bucket - 0.5) / _BUCKETS_PER_OCTAVE))
        return math.nan

    @staticmethod
    def _with(counts: Counter[int]) -> LatencyHistogram:
        histogram = LatencyHistogram()
        histogram._counts = counts
        return histogram
