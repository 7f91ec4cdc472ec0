"""``infinity.initialize``: from what a user holds to an engine."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.collectives import DeviceMesh, ProcessGroup
from infinity.engine.engine import Engine


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Config | dict[str, Any] | str | os.PathLike[str] | None = None,
    *,
    process_group: ProcessGroup | DeviceMesh | None = None,
) -> Engine:
    """Put a model and its optimizer under the engine.

    The model's values, and any state the optimizer already has, move into the tiers. From then on parameters hold their
    values only while their unit computes; ``engine.state_dict()`` reads them at any time.

    Args:
        model: the model, real or made under ``infinity.deferred_init()``.
        optimizer: any ``torch.optim`` optimizer of the model's parameters.
        config: a ``Config``, its fields as a dictionary, or the path of a JSON file; ``None`` for the defaults.
        process_group: the ranks that train together; every one of them calls this. Of a mesh of two dimensions, ranks
            along the second share the state, and those along the first have copies of it (hybrid sharding). ``None``:
            all of the default group, or all that torchrun has started, or this process alone.

    Raises:
        ConfigError: the configuration cannot be used.
        ModelError: the model or the optimizer cannot be managed.
        BudgetError: the budgets are too small; the message names the smallest that would do.
        RanksError: not all ranks came.
        DirectoryError: an NVMe path is missing, unusable or in use by another job.
        DiskFullError: the NVMe paths have no room for the state.
    """
    return Engine(model, optimizer, Config.of(config), process_group)
