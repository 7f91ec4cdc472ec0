"""What differs between a model on one rank and one on several: one contract, ``Job``, with an object for each.

An engine is built the same way in both; where several ranks need something else in the place of a part, the job makes
that part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch

from infinity.config import Config
from infinity.engine.budget import Plan
from infinity.engine.gradients import GradientSink
from infinity.engine.norms import GradientNorms, Norms
from infinity.engine.persistence import agreement
from infinity.engine.persistence.agreement import Ranks
from infinity.engine.prefetch import Orders, PrefetchScheduler
from infinity.engine.ranks.lane import CLOSED
from infinity.engine.slicing import ALONE, Slicing
from infinity.engine.stream import StepStream
from infinity.engine.weights import WeightReader
from infinity.rank_paths import nvme_for_rank
from infinity.store.device import DeviceTier
from infinity.store.loop import LoopThread
from infinity.store.store import TieredStore

Invalidate = Callable[[int], Awaitable[None]]


class Job(ABC):
    """Makes those parts of an engine that depend on how many ranks there are.

    Attributes:
        config: the user's, with this rank's own directories.
        device: this rank's.
        slicing: what of the state this rank has.
        why_closed: what other ranks are told that still count on this one.
        ranks: agrees with the others on durable states.
    """

    config: Config
    device: torch.device
    slicing: Slicing
    why_closed: str = CLOSED
    ranks: Ranks

    @abstractmethod
    def check_plan(self, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what these ranks cannot train together.

        Raises:
            ConfigError: the optimizer cannot step slices.
            ModelError: ranks have different models.
        """

    @abstractmethod
    def share(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A value of rank 0's, given each rank's own; by name."""

    @abstractmethod
    def common(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """What all ranks take where each gives a value that should be the same: rank 0's; nothing is changed."""

    @abstractmethod
    def build_scheduler(self, *arguments: Any, **others: Any) -> PrefetchScheduler:
        """As ``PrefetchScheduler``."""

    @abstractmethod
    def build_gathers(
        self,
        scheduler: PrefetchScheduler,
        plan: Plan,
        device: DeviceTier,
        store: TieredStore,
        orders: Orders,
        stream: StepStream,
    ) -> None:
        """Say how the scheduler's units come."""

    @abstractmethod
    async def before_step(self, device: DeviceTier, unit: int) -> None:
        """Have nothing gathered of a unit of which a step begins."""

    @abstractmethod
    async def after_change(self, device: DeviceTier, unit: int) -> None:
        """Have nothing gathered of a unit that was changed between steps."""

    @abstractmethod
    def build_gradients(
        self, loop: LoopThread, store: TieredStore, scheduler: PrefetchScheduler, *, plan: Plan, **others: Any
    ) -> GradientSink:
        """As ``GradientSink``, without its parts."""

    @abstractmethod
    def build_norms(self, norm_type: float | None, *, plan: Plan, **others: Any) -> Norms[Any]:
        """As ``Norms``."""

    @abstractmethod
    def build_reader(self, loop: LoopThread, store: TieredStore, *, plan: Plan, **others: Any) -> WeightReader:
        """As ``WeightReader``."""

    @abstractmethod
    def begin_step(self, num_steps: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """See to it that all ranks are about to take the same step.

        Args:
            num_steps: how many were taken.
            groups: of the optimizer, with its hyper-parameters.

        Raises:
            RanksError: they are not.
        """

    @abstractmethod
    def all_have(self, has: bool) -> bool:
        """Whether all ranks have something, given whether this one has; called at the same point on all."""

    @property
    @abstractmethod
    def collective_bytes(self) -> dict[str, int]:
        """What this rank has sent, by kind of collective."""

    @abstractmethod
    def stop(self) -> None:
        """No more collectives."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the groups. Calling twice is harmless."""


class OneRank(Job):
    """A model on one rank."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.device = device
        self.config = nvme_for_rank(config, 0, 1, 0, "localhost")
        self.slicing = ALONE
        self.ranks = agreement.OneRank()

    def check_plan(self, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        """Nothing can be wrong."""

    def share(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Its own."""
        return value

    def common(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Its own."""
        return value

    def build_scheduler(self, *arguments: Any, **others: Any) -> PrefetchScheduler:
        """The plain one."""
        return PrefetchScheduler(*arguments, **others)

    def build_gathers(self, *arguments: Any) -> None:
        """The device tier's own."""

    async def before_step(self, device: DeviceTier, unit: int) -> None:
        """Drop it."""
        await device.invalidate(unit)

    async def after_change(self, device: DeviceTier, unit: int) -> None:
        """Drop it."""
        await device.invalidate(unit)

    def build_gradients(
        self, loop: LoopThread, store: TieredStore, scheduler: PrefetchScheduler, *, plan: Plan, **others: Any
    ) -> GradientSink:
        """The plain one."""
        return GradientSink(loop, store, scheduler, plan.parts, **others)

    def build_norms(self, norm_type: float | None, *, plan: Plan, **others: Any) -> Norms[Any]:
        """Those of PyTorch."""
        return GradientNorms(norm_type, **others)

    def build_reader(self, loop: LoopThread, store: TieredStore, *, plan: Plan, **others: Any) -> WeightReader:
        """The plain one."""
        return WeightReader(loop, store, plan.parts, **others)

    def begin_step(self, num_steps: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """It is the same."""

    def all_have(self, has: bool) -> bool:
        """Its own answer."""
        return has

    @property
    def collective_bytes(self) -> dict[str, int]:
        """None."""
        return {}

    def stop(self) -> None:
        """There are none."""

    def leave(self) -> None:
        """There are none."""
