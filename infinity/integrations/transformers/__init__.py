"""Hugging Face Transformers: pretrained models in, training with ``InfinityTrainer``, and back out again."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from infinity.integrations.missing import need

if TYPE_CHECKING:
    from infinity.integrations.transformers.exporting import export_pretrained
    from infinity.integrations.transformers.loading import from_pretrained
    from infinity.integrations.transformers.trainer import InfinityTrainer

__all__ = ["InfinityTrainer", "export_pretrained", "from_pretrained"]

_HOMES = {
    "InfinityTrainer": "infinity.integrations.transformers.trainer",
    "export_pretrained": "infinity.integrations.transformers.exporting",
    "from_pretrained": "infinity.integrations.transformers.loading",
}

if not TYPE_CHECKING:  # to a type checker, a module with this has every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        need("transformers", "accelerate", extra="transformers")
        globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
        return value
