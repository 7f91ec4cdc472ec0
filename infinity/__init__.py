"""infinity: train PyTorch models larger than accelerator memory, and larger than RAM."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Looked up when they are first asked for: torch takes seconds to import, which --help and Ctrl-C need not wait for.
if TYPE_CHECKING:
    from infinity.config import Config
    from infinity.engine.deferred import deferred_init
    from infinity.engine.engine import Engine
    from infinity.engine.initialize import initialize
    from infinity.engine.persistence.durability import CommitInfo
    from infinity.engine.persistence.importing import open_weights
    from infinity.engine.persistence.joined import open_checkpoint
    from infinity.engine.persistence.stored_state import StoredState
    from infinity.engine.persistence.tensor_reading import deferred_weights
    from infinity.engine.replay import ReplayedLoader
    from infinity.errors import (
        BudgetError,
        ConfigError,
        DirectoryError,
        DirectoryInUseError,
        DiskFullError,
        EngineStateError,
        InfinityError,
        ManifestError,
        MicroBatchError,
        MismatchError,
        ModelError,
        NoCommitError,
        NonFiniteError,
        NonFiniteWarning,
        RankFailedError,
        RanksApartError,
        RanksError,
        ShortTransferError,
        StorageError,
        UncertainCommitError,
    )
    from infinity.nn.embedding import TiledEmbedding
    from infinity.nn.linear import TiledLinear
    from infinity.nn.loss import tiled_cross_entropy
    from infinity.nn.replace import tile_large_layers
    from infinity.trace.stats import RouteStats, StepStats, TierUsage, UnitStats

__all__ = [
    "BudgetError",
    "CommitInfo",
    "Config",
    "ConfigError",
    "DirectoryError",
    "DirectoryInUseError",
    "DiskFullError",
    "Engine",
    "EngineStateError",
    "InfinityError",
    "ManifestError",
    "MicroBatchError",
    "MismatchError",
    "ModelError",
    "NoCommitError",
    "NonFiniteError",
    "NonFiniteWarning",
    "RankFailedError",
    "RanksApartError",
    "RanksError",
    "ReplayedLoader",
    "RouteStats",
    "ShortTransferError",
    "StepStats",
    "StorageError",
    "StoredState",
    "TierUsage",
    "TiledEmbedding",
    "TiledLinear",
    "UncertainCommitError",
    "UnitStats",
    "deferred_init",
    "deferred_weights",
    "initialize",
    "open_checkpoint",
    "open_weights",
    "tile_large_layers",
    "tiled_cross_entropy",
]

__version__ = "0.1.0"

_HOMES = {
    "BudgetError": "infinity.errors",
    "CommitInfo": "infinity.engine.persistence.durability",
    "Config": "infinity.config",
    "ConfigError": "infinity.errors",
    "DirectoryError": "infinity.errors",
    "DirectoryInUseError": "infinity.errors",
    "DiskFullError": "infinity.errors",
    "Engine": "infinity.engine.engine",
    "EngineStateError": "infinity.errors",
    "InfinityError": "infinity.errors",
    "ManifestError": "infinity.errors",
    "MicroBatchError": "infinity.errors",
    "MismatchError": "infinity.errors",
    "ModelError": "infinity.errors",
    "NoCommitError": "infinity.errors",
    "NonFiniteError": "infinity.errors",
    "NonFiniteWarning": "infinity.errors",
    "RankFailedError": "infinity.errors",
    "RanksApartError": "infinity.errors",
    "RanksError": "infinity.errors",
    "ReplayedLoader": "infinity.engine.replay",
    "RouteStats": "infinity.trace.stats",
    "ShortTransferError": "infinity.errors",
    "StepStats": "infinity.trace.stats",
    "StorageError": "infinity.errors",
    "StoredState": "infinity.engine.persistence.stored_state",
    "TierUsage": "infinity.trace.stats",
    "TiledEmbedding": "infinity.nn.embedding",
    "TiledLinear": "infinity.nn.linear",
    "UncertainCommitError": "infinity.errors",
    "UnitStats": "infinity.trace.stats",
    "deferred_init": "infinity.engine.deferred",
    "deferred_weights": "infinity.engine.persistence.tensor_reading",
    "initialize": "infinity.engine.initialize",
    "open_checkpoint": "infinity.engine.persistence.joined",
    "open_weights": "infinity.engine.persistence.importing",
    "tile_large_layers": "infinity.nn.replace",
    "tiled_cross_entropy": "infinity.nn.loss",
}


if not TYPE_CHECKING:  # to a type checker, a module with this has every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name == "plan":  # a package that can be called; importing it sets the name
            return importlib.import_module("infinity.plan")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "plan"})
