"""``infinity.plan(...)`` and ``infinity plan`` alike: settings become a plan."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from torch import nn

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.plan.estimate import make_plan
from infinity.plan.result import Plan
from infinity.plan.settings import PlanSettings
from infinity.plan.sources import source_of
from infinity.plan.speeds import machine_of, with_optimizer

_FLAGS = {field.alias or name: name for name, field in PlanSettings.model_fields.items()}
_COMMAND_ONLY = {"plot", "json"}


def plan_of(
    model_or_config: nn.Module | str | os.PathLike[str] | None,
    config: Config | dict[str, Any] | str | os.PathLike[str] | None,
    settings: dict[str, Any],
) -> Plan:
    """See ``infinity.plan``."""
    known = [*(name for name in _FLAGS if name not in _COMMAND_ONLY), *Config.model_fields]
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise ConfigError(f"plan: no setting is called {name!r}; {hint}")
    chosen = PlanSettings(**{name: value for name, value in settings.items() if name in _FLAGS})
    fields = {name: value for name, value in settings.items() if name in Config.model_fields}
    return plan_with(model_or_config, Config(**{**_fields_of(config), **fields}), chosen)


def plan_with(
    model_or_config: nn.Module | str | os.PathLike[str] | None, config: Config, settings: PlanSettings
) -> Plan:
    """Plan as told; what the machine does not tell of its processor is measured here."""
    if config.accumulation_steps is None:  # as infinity train does
        config = config.model_copy(update={"accumulation_steps": settings.num_micro_batches})
    machine = machine_of(settings)
    source = source_of(model_or_config, settings)
    if settings.bench_file is None and settings.optimizer_speed is None:
        machine = with_optimizer(machine, settings.optimizer)
    return make_plan(source, config, settings, machine)


def _fields_of(config: Config | dict[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """What was set of a configuration."""
    if config is None:
        return {}
    if isinstance(config, dict):
        return dict(config)
    if isinstance(config, (str, os.PathLike)):
        config = Config.from_json(Path(config))
    if not isinstance(config, Config):
        raise ConfigError(f"config: expected a Config, a dictionary or a path, got {type(config).__name__}")
    return {name: getattr(config, name) for name in config.model_fields_set}
