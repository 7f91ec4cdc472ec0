"""Hugging Face Accelerate: ``Accelerator``, with the loop that scripts have, and the engine in the place of DDP.

from infinity.integrations.accelerate import Accelerator
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from infinity.integrations.missing import need

if TYPE_CHECKING:
    from infinity.integrations.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]

_HOMES = {"Accelerator": "infinity.integrations.accelerate.accelerator"}

if not TYPE_CHECKING:  # to a type checker, a module with this has every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        need("accelerate", extra="accelerate")
        globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
        return value
