"""Hugging Face Transformers: ``InfinityTrainer``, a ``transformers.Trainer`` that trains with the engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from infinity.integrations.missing import need

if TYPE_CHECKING:
    from infinity.integrations.transformers.trainer import InfinityTrainer

__all__ = ["InfinityTrainer"]

_HOMES = {"InfinityTrainer": "infinity.integrations.transformers.trainer"}

if not TYPE_CHECKING:  # to a type checker, a module with this has every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        need("transformers", "accelerate", extra="transformers")
        globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
        return value
