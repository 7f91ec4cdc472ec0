"""PEFT: adapters of a model under the engine, saved and loaded as PEFT has them, and merged into the base's weights.

from infinity.integrations.peft import export_merged, load_adapters, save_adapters
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from infinity.integrations.missing import need

if TYPE_CHECKING:
    from infinity.integrations.peft.adapters import load_adapters, save_adapters
    from infinity.integrations.peft.merged import export_merged

__all__ = ["export_merged", "load_adapters", "save_adapters"]

_HOMES = {
    "export_merged": "infinity.integrations.peft.merged",
    "load_adapters": "infinity.integrations.peft.adapters",
    "save_adapters": "infinity.integrations.peft.adapters",
}

if not TYPE_CHECKING:  # to a type checker, a module with this has every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        need("peft", "transformers", extra="peft")
        globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
        return value
