"""``InfinityStrategy`` for who imports ``pytorch_lightning``: see ``infinity.integrations.lightning``.

from infinity.integrations.pytorch_lightning import InfinityStrategy
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from infinity.integrations.missing import need

if TYPE_CHECKING:
    from infinity.integrations.lightning.exporting import export_checkpoint
    from infinity.integrations.lightning.strategy import EngineStrategy as InfinityStrategy

__all__ = ["InfinityStrategy", "export_checkpoint"]

if not TYPE_CHECKING:  # to a type checker, a module with this has every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "InfinityStrategy":
            need("pytorch_lightning", extra="lightning", instead="lightning")
            value = importlib.import_module("infinity.integrations.lightning.binding").bind("pytorch_lightning")
        else:
            value = importlib.import_module("infinity.integrations.lightning.exporting").export_checkpoint
        globals()[name] = value
        return value
