"""Pipeline parallelism, refused by name."""

from __future__ import annotations

from typing import NoReturn

from infinity.integrations.deepspeed.unsupported import NAMES, refuse_name


def __getattr__(name: str) -> NoReturn:
    refuse_name("deepspeed.pipe", name, (), None if name.startswith("__") else NAMES["pipe"])
