"""DeepSpeed's interface to infinity: ``import infinity.integrations.deepspeed as deepspeed`` in a DeepSpeed script.

Nothing of DeepSpeed is needed. ``docs/deepspeed.md`` says what is the same and what is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinity.integrations.deepspeed import checkpointing, comm, moe, ops, pipe, runtime, utils, zero
from infinity.integrations.deepspeed.accelerator import get_accelerator
from infinity.integrations.deepspeed.comm import init_distributed
from infinity.integrations.deepspeed.data import DeepSpeedDataLoader, RepeatingLoader
from infinity.integrations.deepspeed.engine import DeepSpeedEngine
from infinity.integrations.deepspeed.initialize import add_config_arguments, initialize
from infinity.integrations.deepspeed.log import log_dist, logger
from infinity.integrations.deepspeed.optimizer import DeepSpeedOptimizer
from infinity.integrations.deepspeed.unsupported import NAMES, refuse_name

__all__ = [
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "RepeatingLoader",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "moe",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
]

if not TYPE_CHECKING:  # to a type checker, a module with this has every name, misspelt ones too

    def __getattr__(name: str) -> None:
        refuse_name("deepspeed", name, __all__, NAMES.get(name))
