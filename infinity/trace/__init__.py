"""What happened and how long it took: spans of work, figures of steps and tiers, traces for people to look at."""

from infinity.trace.meter import StepMeter
from infinity.trace.perfetto import write_trace
from infinity.trace.spans import (
    COMMIT,
    COPY,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    OPTIMIZER,
    READ,
    STALL,
    TRAINING,
    WRITE,
    Recorder,
    ShardSpans,
    Span,
    StepTrace,
    TransferObserver,
)
from infinity.trace.stats import Bandwidths, RouteStats, StepStats, TierUsage, UnitStats

__all__ = [
    "COMMIT",
    "COPY",
    "DEVICE_TO_HOST",
    "HOST_TO_DEVICE",
    "OPTIMIZER",
    "READ",
    "STALL",
    "TRAINING",
    "WRITE",
    "Bandwidths",
    "Recorder",
    "RouteStats",
    "ShardSpans",
    "Span",
    "StepMeter",
    "StepStats",
    "StepTrace",
    "TierUsage",
    "TransferObserver",
    "UnitStats",
    "write_trace",
]
