"""Hypothesis runs the same examples every time, so that a red run is red for its reader; INFINITY_FUZZ=1 explores."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("explore" if os.environ.get("INFINITY_FUZZ") == "1" else "same")
