"""``bind``: the strategy for one of the two packages that Lightning is: ``lightning.pytorch``, ``pytorch_lightning``.

Each has classes of its own, and takes only a strategy that is made of them. So ``EngineStrategy`` and
``EnginePrecision`` have none of either as base, and are put together here with those of one.
"""

from __future__ import annotations

import importlib
from typing import Any

from infinity.integrations.lightning.precision import EnginePrecision
from infinity.integrations.lightning.strategy import EngineStrategy

_BORROWED = (
    "setup_distributed",
    "set_world_ranks",
    "barrier",
    "broadcast",
    "reduce",
    "determine_ddp_device_ids",
    "_get_process_group_backend",
)
"""What Lightning's DDP strategy does between processes; to be a DDP strategy means a ``DistributedSampler`` always."""


def bind(package: str) -> type[Any]:
    """Make ``InfinityStrategy`` of a package's classes, and register it there as ``"infinity"``.

    Args:
        package: its name, as it is imported.
    """
    pytorch = importlib.import_module(package)
    plugins = importlib.import_module(f"{package}.plugins.precision")
    strategies = importlib.import_module(f"{package}.strategies")
    parallel = importlib.import_module(f"{package}.strategies.parallel").ParallelStrategy
    launchers = importlib.import_module(f"{package}.strategies.launchers.subprocess_script")
    home = "infinity.integrations." + package.removesuffix(".pytorch")
    precision = type(
        "EnginePrecision",
        (EnginePrecision, plugins.Precision),
        {"__module__": home, "plain_backward": staticmethod(pytorch.LightningModule.backward)},
    )
    strategy = type(
        "InfinityStrategy",
        (EngineStrategy, parallel),
        {name: vars(strategies.DDPStrategy)[name] for name in _BORROWED}
        | {
            "__module__": home,
            "__doc__": EngineStrategy.__doc__,
            "precision_type": precision,
            "plain_precisions": (plugins.Precision, plugins.HalfPrecision, plugins.MixedPrecision),
            "launcher_type": launchers._SubprocessScriptLauncher,
        },
    )
    strategies.StrategyRegistry.register(
        EngineStrategy.strategy_name,
        strategy,
        description="Training of models larger than memory: parameters, gradients and optimizer states on NVMe.",
        override=True,
    )
    return strategy
