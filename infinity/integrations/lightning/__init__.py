"""Lightning: ``InfinityStrategy``, with which its ``Trainer`` trains under the engine; also by the name ``"infinity"``.

from infinity.integrations.lightning import InfinityStrategy
trainer = lightning.Trainer(strategy=InfinityStrategy({"hbm": "8GiB", "ram": "32GiB", "nvme": "/mnt/nvme0"}))

Who imports ``pytorch_lightning``, whose classes are others, takes it from ``infinity.integrations.pytorch_lightning``.
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
            need("lightning", extra="lightning", instead="pytorch_lightning")
            value = importlib.import_module("infinity.integrations.lightning.binding").bind("lightning.pytorch")
        else:
            value = importlib.import_module("infinity.integrations.lightning.exporting").export_checkpoint
        globals()[name] = value
        return value
