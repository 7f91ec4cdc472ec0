"""infinity: train PyTorch models larger than accelerator memory, and larger than RAM."""

from infinity.config import Config
from infinity.engine.deferred import deferred_init
from infinity.engine.engine import Engine, initialize
from infinity.errors import (
    BudgetError,
    ConfigError,
    DirectoryError,
    DirectoryInUseError,
    DiskFullError,
    EngineStateError,
    InfinityError,
    ModelError,
    ShortTransferError,
    StorageError,
)
from infinity.trace import StepStats, TierUsage

__all__ = [
    "BudgetError",
    "Config",
    "ConfigError",
    "DirectoryError",
    "DirectoryInUseError",
    "DiskFullError",
    "Engine",
    "EngineStateError",
    "InfinityError",
    "ModelError",
    "ShortTransferError",
    "StepStats",
    "StorageError",
    "TierUsage",
    "deferred_init",
    "initialize",
]

__version__ = "0.1.0"
