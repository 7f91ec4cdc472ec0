"""``PlannedScheduler``: a scheduler whose units come as all ranks plan it."""

from __future__ import annotations

import torch

from infinity.engine.prefetch import PrefetchScheduler
from infinity.engine.ranks.gathers import PlannedGathers
from infinity.engine.unit import Part
from infinity.store.pool import StreamEvent


class PlannedScheduler(PrefetchScheduler):
    """A scheduler whose units come as they are planned.

    Attributes:
        gathers: plans them; set before anything is gathered.
    """

    gathers: PlannedGathers

    def _plan(self, unit: int) -> None:
        self.gathers.demand(unit)

    async def _demand(self, unit: int) -> torch.Tensor:
        await self.gathers.arrived(unit)
        return await super()._demand(unit)

    async def _invalidate_all(self) -> None:
        await self.gathers.invalidate_all()

    def _prefetch_unit(self, unit: int, beyond_step: bool) -> bool:
        return True  # planned at the demand before

    def _prefetch_gradients(self, part: Part) -> bool:
        return True  # a gradient passes through memory for the whole part first

    def _release(self, unit: int, after: StreamEvent | None) -> None:
        super()._release(unit, after)
        self.gathers.release(unit)

    def _release_all(self, after: StreamEvent | None) -> None:
        super()._release_all(after)
        self.gathers.release_all()
