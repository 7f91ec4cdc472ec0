"""``SchedulerSpec``: DeepSpeed's ``scheduler`` section, as one of its schedules or of ``torch.optim.lr_scheduler``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import lr_scheduler

from infinity.deepspeed_json import schedules
from infinity.deepspeed_json.document import wrong
from infinity.deepspeed_json.notes import closest
from infinity.deepspeed_json.optimizers import WRONG_ARGUMENTS, OptimizerSpec, numeric
from infinity.errors import ConfigError

_Kind = type[lr_scheduler.LRScheduler]

_OF_DEEPSPEED: Mapping[str, type[schedules.Schedule]] = {kind.__name__: kind for kind in schedules.ALL}


def _flat(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """Which schedule, and with what.

    Attributes:
        type: as the configuration has it.
        params: the arguments that it has there.
    """

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def make(self, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        """The schedule of an optimizer.

        Raises:
            ConfigError: an argument is not what it must be.
        """
        kind = self._kind()
        try:
            return kind(optimizer, **{name: numeric(value) for name, value in self.params.items()})
        except WRONG_ARGUMENTS as error:
            raise ConfigError(f"DeepSpeed configuration: scheduler.params of {self.type}: {error}") from error

    def check(self, optimizer: OptimizerSpec | None) -> None:
        """Refuse what cannot be made.

        Args:
            optimizer: of the same configuration; ``None`` where it has none.

        Raises:
            ConfigError: it names the type or the argument.
        """
        kind = self._kind()
        arguments = {name: each for name, each in inspect.signature(kind).parameters.items() if name != "optimizer"}
        for name in self.params:
            if name not in arguments:
                known = ", ".join(sorted(arguments))
                raise ConfigError(
                    f"DeepSpeed configuration: scheduler.params.{name}: {self.type} has no such argument"
                    f"{closest(name, arguments) or f'; it takes {known}'}"
                )
        missing = [
            name
            for name, each in arguments.items()
            if each.default is inspect.Parameter.empty and name not in self.params
        ]
        if missing:
            raise ConfigError(
                f"DeepSpeed configuration: scheduler.type = {self.type!r}: expected {', '.join(missing)} in "
                "scheduler.params"
            )
        for name, value in self.params.items():
            if any(isinstance(each, float) and not math.isfinite(each) for each in _flat(numeric(value))):
                raise wrong(f"scheduler.params.{name}", "finite numbers", value)
        num_groups = max([1, *(len(value) for value in self.params.values() if isinstance(value, list))])
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1, 1))]} for _ in range(num_groups)]
        spec = optimizer or OptimizerSpec("AdamW")
        try:
            made = spec.make(groups)
        except WRONG_ARGUMENTS as error:  # LBFGS has one group only
            expected = f"scheduler.params of {self.type} for {num_groups} groups of parameters"
            raise ConfigError(f"DeepSpeed configuration: {expected}: {spec.type}: {error}") from error
        self.make(made)

    def _kind(self) -> _Kind:
        kind: Any = _OF_DEEPSPEED.get(self.type) or getattr(lr_scheduler, self.type, None)
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler):
            return kind
        raise ConfigError(
            f"DeepSpeed configuration: scheduler.type = {self.type!r}: expected one of {', '.join(_OF_DEEPSPEED)}, or "
            f"a class of torch.optim.lr_scheduler{closest(self.type, [*_OF_DEEPSPEED, *dir(lr_scheduler)])}"
        )
