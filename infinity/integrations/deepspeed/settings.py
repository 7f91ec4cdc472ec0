"""``Settings``: what DeepSpeed's engine is asked of its configuration, and of the optimizer's groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infinity.deepspeed_json import DeepSpeedConfig
from infinity.engine.engine import Engine
from infinity.engine.meeting import place
from infinity.errors import EngineStateError
from infinity.integrations.deepspeed.optimizer import DeepSpeedOptimizer

_STEPS_BY_MOMENTUM = ("SGD", "RMSprop")


class Settings(nn.Module):
    """The part of ``DeepSpeedEngine`` that answers.

    Attributes:
        infinity: the engine.
        optimizer: steps like the user's own; ``None`` without one.
    """

    infinity: Engine
    optimizer: DeepSpeedOptimizer | None
    _settings: DeepSpeedConfig
    _accumulation_steps: int
    _micro_batch_size: int | None

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients before they were clipped, of the latest step; ``None`` before the first."""
        return None if self.infinity.grad_norm is None else float(self.infinity.grad_norm)

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return self._of_groups("lr")

    def set_lr(self, lr: float) -> None:
        """Give all groups a learning rate; a scheduler sets it anew at its next step."""
        for group in self._require_optimizer("set_lr").param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def get_type(self) -> list[Any]:
        """What groups have as ``type``; 0.0 where they have none."""
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of each group."""
        by_momentum = self.optimizer_name() in _STEPS_BY_MOMENTUM
        return self._of_groups("momentum" if by_momentum else "betas")

    def train_batch_size(self) -> int | None:
        """Samples of a step, of all ranks; ``None`` where the configuration does not say."""
        size = self._micro_batch_size
        return None if size is None else size * self._accumulation_steps * place().num_ranks

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples of a micro-batch on each rank; ``None`` where the configuration does not say."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._accumulation_steps

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """All three."""
        return self.train_batch_size(), self._micro_batch_size, self._accumulation_steps

    def gradient_clipping(self) -> float:
        """The largest norm of gradients; 0 for no clipping."""
        return self._settings.config.max_grad_norm or 0.0

    def zero_optimization_stage(self) -> int:
        """What ranks divide among them, 0 to 3."""
        return self.infinity.config.stage

    def zero_optimization(self) -> bool:
        """Whether they divide anything."""
        return self.infinity.config.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether they divide gradients."""
        return self.infinity.config.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether they divide parameters."""
        return self.infinity.config.stage >= 3

    def fp16_enabled(self) -> bool:
        """Whether it computes in fp16."""
        return self.infinity.config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether it computes in bf16."""
        return self.infinity.config.precision == "bf16"

    def optimizer_name(self) -> str:
        """The optimizer's, as the configuration or its class has it; empty without one."""
        if self._settings.optimizer is not None:
            return self._settings.optimizer.type
        return "" if self.optimizer is None else type(self.optimizer._user).__name__

    def scheduler_name(self) -> str | None:
        """The scheduler's, as the configuration has it."""
        return None if self._settings.scheduler is None else self._settings.scheduler.type

    def steps_per_print(self) -> int:
        """After so many steps one is reported."""
        return self._settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether that says where the time went."""
        return self._settings.wall_clock_breakdown

    def _of_groups(self, name: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get(name, 0.0) for group in groups]

    def _require_optimizer(self, what: str) -> DeepSpeedOptimizer:
        if self.optimizer is None:
            raise EngineStateError(
                f"engine.{what}(): the engine was made without an optimizer, to compute only; give initialize() one, "
                "or an 'optimizer' in the DeepSpeed configuration"
            )
        return self.optimizer
