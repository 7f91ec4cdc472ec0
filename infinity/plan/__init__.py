"""Tell whether a model fits, how fast it will train and what wears, before anything is made.

The package can be called: ``infinity.plan(model, hbm="2GiB", ram="8GiB", nvme="/mnt/nvme0", batch=8, seq=512)``.
"""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from infinity.config import Config
    from infinity.plan.result import Plan


def plan(
    model_or_config: nn.Module | str | os.PathLike[str] | None = None,
    config: Config | dict[str, Any] | str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Plan:
    """Plan the training of a model. Nothing is trained, and no memory is taken for its state.

    Args:
        model_or_config: a model, real or made under ``infinity.deferred_init()``, which stays as it is; or the path of
            a Hugging Face ``config.json``; ``None``: what ``settings`` name, as ``parameters=7e9, layers=32,
            hidden=4096`` do.
        config: budgets and everything else, as ``infinity.initialize`` takes them.
        **settings: the flags of ``infinity plan``, by their names with ``_`` for ``-``: what is planned (``batch``,
            ``seq``, ``accumulate``, ``optimizer``, ``ranks``), the machine (``bench``, or ``read``, ``write``,
            ``mixed``, ``pcie``, ``network``, and ``flops`` or ``compute_seconds``), ``endurance``; and fields of
            ``infinity.Config``, which go before ``config``.

    Raises:
        BudgetError: the budgets cannot train the model; ``error.smallest`` and ``error.short`` say what would do.
        ConfigError: a setting is unknown or cannot be used.
        ModelError: the model cannot be planned.
    """
    from infinity.plan.call import plan_of

    return plan_of(model_or_config, config, settings)


class _CallablePackage(types.ModuleType):
    def __call__(
        self,
        model_or_config: nn.Module | str | os.PathLike[str] | None = None,
        config: Config | dict[str, Any] | str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> Plan:
        return plan(model_or_config, config, **settings)


_CallablePackage.__call__.__doc__ = plan.__doc__
sys.modules[__name__].__class__ = _CallablePackage
