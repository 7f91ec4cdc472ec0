"""infinity: train PyTorch models larger than accelerator memory, and larger than RAM."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Looked up when they are first asked for: torch takes seconds to import, which --help and Ctrl-C need not wait for.
if TYPE_CHECKING:
    from infinity.config import Config
    from infinity.engine.deferred import deferred_init
    from infinity.engine.engine import Engine
    from infinity.engine.importing import open_weights
    from infinity.engine.initialize import initialize
    from infinity.errors import (
        BudgetError,
        ConfigError,
        DirectoryError,
        DirectoryInUseError,
        DiskFullError,
        EngineStateError,
        InfinityError,
        MicroBatchError,
        ModelError,
        NonFiniteError,
        ShortTransferError,
        StorageError,
    )
    from infinity.nn.embedding import TiledEmbedding
    from infinity.nn.linear import TiledLinear
    from infinity.nn.loss import tiled_cross_entropy
    from infinity.nn.replace import tile_large_layers
    from infinity.trace.stats import RouteStats, StepStats, TierUsage, UnitStats

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
    "MicroBatchError",
    "ModelError",
    "NonFiniteError",
    "RouteStats",
    "ShortTransferError",
    "StepStats",
    "StorageError",
    "TierUsage",
    "TiledEmbedding",
    "TiledLinear",
    "UnitStats",
    "deferred_init",
    "initialize",
    "open_weights",
    "tile_large_layers",
    "tiled_cross_entropy",
]

__version__ = "0.1.0"

_HOMES = {
    "BudgetError": "infinity.errors",
    "Config": "infinity.config",
    "ConfigError": "infinity.errors",
    "DirectoryError": "infinity.errors",
    "DirectoryInUseError": "infinity.errors",
    "DiskFullError": "infinity.errors",
    "Engine": "infinity.engine.engine",
    "EngineStateError": "infinity.errors",
    "InfinityError": "infinity.errors",
    "MicroBatchError": "infinity.errors",
    "ModelError": "infinity.errors",
    "NonFiniteError": "infinity.errors",
    "RouteStats": "infinity.trace.stats",
    "ShortTransferError": "infinity.errors",
    "StepStats": "infinity.trace.stats",
    "StorageError": "infinity.errors",
    "TierUsage": "infinity.trace.stats",
    "TiledEmbedding": "infinity.nn.embedding",
    "TiledLinear": "infinity.nn.linear",
    "UnitStats": "infinity.trace.stats",
    "deferred_init": "infinity.engine.deferred",
    "initialize": "infinity.engine.initialize",
    "open_weights": "infinity.engine.importing",
    "tile_large_layers": "infinity.nn.replace",
    "tiled_cross_entropy": "infinity.nn.loss",
}


if not TYPE_CHECKING:  # to a type checker, a module with this has every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
