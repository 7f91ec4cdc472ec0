"""DeepSpeed's learning-rate schedules, by the formulas of its documentation, as schedulers of PyTorch.

They are numbered as DeepSpeed's are: the first optimizer step runs with what the constructor sets (iteration -1), the
second with iteration 0, and so on; so ``WarmupLR`` begins with two steps at its least rate. States are theirs:
``{"last_batch_iteration": ...}``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

_T = TypeVar("_T")
Rates = float | Sequence[float]
"""One for all groups, or one for each."""


class Schedule(LRScheduler):
    """Sets the learning rate of each group as a function of the iteration."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        if last_batch_iteration >= 0:  # PyTorch's own convention of going on
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_epoch=last_batch_iteration if last_batch_iteration >= 0 else -1)

    @property
    def last_batch_iteration(self) -> int:
        """The number of the latest iteration; -1 before the first."""
        return self.last_epoch - 1

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rate of each group at ``last_batch_iteration``."""
        return list(self.rates(self.last_batch_iteration))

    @abstractmethod
    def rates(self, iteration: int) -> list[float]:
        """The rate of each group at an iteration."""

    def step(self, iteration: int | None = None) -> None:
        """Go to the next iteration, or to a given one."""
        if iteration is not None:
            self.last_epoch = iteration
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """What DeepSpeed's has."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where another was. Rates follow at the next step: the optimizer's state has those of now."""
        self.last_epoch = state_dict["last_batch_iteration"] + 1
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def _each(optimizer: torch.optim.Optimizer, name: str, given: _T | Sequence[_T]) -> list[_T]:
    num_groups = len(optimizer.param_groups)
    if not isinstance(given, (list, tuple)):
        return [given] * num_groups  # type: ignore[list-item]
    if len(given) != num_groups:
        raise ValueError(f"{name}: expected one for each of {num_groups} groups, got {len(given)}")
    return list(given)


def _positive(name: str, given: float) -> float:
    if given <= 0:
        raise ValueError(f"{name}: expected more than 0, got {given}")
    return given


def _warmed_up(iteration: int, num_steps: int, kind: str) -> float:
    """How far warm-up has come, 0 to 1."""
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type: expected 'log' or 'linear', got {kind!r}")
    if iteration >= num_steps:
        return 1.0
    return math.log(iteration + 1) / math.log(num_steps) if kind == "log" else iteration / num_steps


class WarmupLR(Schedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps``, then constant."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        largest = [group["lr"] for group in optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
        self.least = _each(optimizer, "warmup_min_lr", warmup_min_lr)
        self.largest = _each(optimizer, "warmup_max_lr", largest)
        self.num_steps = max(2, int(_positive("warmup_num_steps", warmup_num_steps)))
        self.warmup_type = warmup_type
        _warmed_up(0, self.num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def factor(self, iteration: int) -> float:
        """Where between the least and the largest rate."""
        return _warmed_up(iteration, self.num_steps, self.warmup_type)

    def rates(self, iteration: int) -> list[float]:
        """See ``Schedule``."""
        if iteration < 0:
            return list(self.least)
        factor = self.factor(iteration)
        return [least + (largest - least) * factor for least, largest in zip(self.least, self.largest, strict=True)]


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, and then linearly to the least rate at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def factor(self, iteration: int) -> float:
        """See ``WarmupLR``."""
        if iteration < self.num_steps:
            return super().factor(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1.0, self.total_num_steps - self.num_steps))


class WarmupCosineLR(Schedule):
    """Ratios of each group's own rate: from ``warmup_min_ratio`` to 1, then along a cosine to ``cos_min_ratio``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.least_ratio = warmup_min_ratio
        self.last_ratio = cos_min_ratio
        self.num_steps = max(2, int(_positive("warmup_num_steps", warmup_num_steps)))
        self.warmup_type = warmup_type
        _warmed_up(0, self.num_steps, warmup_type)
        self.own = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def ratio(self, iteration: int) -> float:
        """What the groups' own rates are multiplied by."""
        if iteration < 0:
            return 0.0
        if iteration < self.num_steps:
            return self.least_ratio + _warmed_up(iteration, self.num_steps, self.warmup_type) * (1.0 - self.least_ratio)
        progress = min(1.0, (iteration - self.num_steps + 1) / max(1, self.total_num_steps - self.num_steps))
        return max(0.0, self.last_ratio + (1.0 - self.last_ratio) * (1 + math.cos(math.pi * progress)) / 2)

    def rates(self, iteration: int) -> list[float]:
        """See ``Schedule``."""
        ratio = self.ratio(iteration)
        return [own * ratio for own in self.own]


class LRRangeTest(Schedule):
    """Rates that grow for ever, to find the largest that trains (https://arxiv.org/abs/1803.09820)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.least = _each(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.by_stairs = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """See ``Schedule``."""
        intervals = (iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(intervals) if self.by_stairs else intervals)
        return [least * increase for least in self.least]


class OneCycle(Schedule):
    """One cycle from the least rate to the largest and back, then a decay (https://arxiv.org/abs/1803.09820).

    Momentum, the first of ``betas``, goes the other way; before the first step it is the least, as in DeepSpeed. Of an
    optimizer without ``betas`` it stays.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.first = float(_positive("cycle_first_step_size", cycle_first_step_size))
        self.second = self.first if cycle_second_step_size is None else float(cycle_second_step_size)
        if self.second < 0:
            raise ValueError(f"cycle_second_step_size: expected 0 or more, got {cycle_second_step_size}")
        self.stairs = (
            cycle_first_stair_count,
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
        )
        self.decay_step_size = decay_step_size
        self.least = _each(optimizer, "cycle_min_lr", cycle_min_lr)
        self.largest = _each(optimizer, "cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.has_momentum = cycle_momentum and "betas" in optimizer.defaults
        self.least_momentum = _each(optimizer, "cycle_min_mom", cycle_min_mom)
        self.largest_momentum = _each(optimizer, "cycle_max_mom", cycle_max_mom)
        super().__init__(optimizer, last_batch_iteration)

    def height(self, iteration: int) -> float:
        """Where in the cycle: 0 at its ends, 1 at its top."""
        total = self.first + self.second
        position = (iteration + 1) % total
        is_first = position <= self.first
        reached = position / self.first if is_first else (total - position) / self.second
        stairs = self.stairs[0 if is_first else 1]
        return math.floor(reached * stairs) / stairs if stairs > 0 else reached

    def rates(self, iteration: int) -> list[float]:
        """See ``Schedule``."""
        if iteration < self.first + self.second:
            height = self.height(iteration)
            return [least + (most - least) * height for least, most in zip(self.least, self.largest, strict=True)]
        decay = 1 + self.decay_lr_rate * self._decayed(iteration)
        return [least / decay for least in self.least]

    def momenta(self, iteration: int) -> list[float]:
        """The momentum of each group at an iteration."""
        if iteration < 0:
            return list(self.least_momentum)
        if iteration < self.first + self.second:
            height = self.height(iteration)
            pairs = zip(self.least_momentum, self.largest_momentum, strict=True)
            return [most - (most - least) * height for least, most in pairs]
        return [most * (1 + self.decay_mom_rate * self._decayed(iteration)) for most in self.largest_momentum]

    def _decayed(self, iteration: int) -> float:
        """How many steps of decay have passed since the cycle."""
        return (iteration - self.first - self.second + 1) / self.decay_step_size if self.decay_step_size else 0.0

    def step(self, iteration: int | None = None) -> None:
        """See ``Schedule``."""
        super().step(iteration)
        if self.has_momentum:
            momenta = self.momenta(self.last_batch_iteration)
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, 0.99)


ALL: tuple[type[Schedule], ...] = (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
