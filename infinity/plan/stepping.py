"""One sub-group's step in virtual time: the shards of ``engine/substep.py``, fetched and released in the same order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infinity.engine.budget import Plan
from infinity.engine.stream import Job
from infinity.engine.substep import OPTIMIZER
from infinity.engine.unit import PARAM, RESIDUAL, SCRATCH, Part, PartGradients, state_kind
from infinity.plan.phantom import PhantomStore
from infinity.store.shard import ShardKey


class PhantomStepper:
    """Steps sub-groups of which only the sizes exist.

    Args:
        plan: the engine's.
        store: the shards, and the processor that takes the time.

    Attributes:
        busy_seconds: of the processor so far.
    """

    def __init__(self, plan: Plan, store: PhantomStore) -> None:
        self._plan = plan
        self._store = store
        self._states: set[ShardKey] = set()
        self.busy_seconds = 0.0

    async def step(self, gradients: PartGradients, pinned: Callable[[], None]) -> None:
        """One sub-group, as ``SubGroupStepper.step`` does it."""
        part, store, plan = gradients.part, self._store, self._plan
        sizes = plan.format_of(part).shards(part)
        in_planes = RESIDUAL in sizes
        scratch = {SCRATCH: plan.format_of(part).in_step(part)[SCRATCH]} if in_planes else {}
        states = plan.state_format_of(part, part.step_dtype)
        names = [part.key(state_kind(name)) for name in part.state_names]
        known = [key for key in names if key in self._states]
        if states.scratch_bytes:
            scratch |= {f"{SCRATCH}.{key.kind}": states.scratch_bytes for key in known}
        read = [RESIDUAL, PARAM] if in_planes else list(plan.format_of(part).read_by_step(part))
        others = [kind for kind in sizes if kind not in read]

        async def pin_weights() -> None:
            if SCRATCH in scratch:
                await store.put(_scratch(SCRATCH), scratch[SCRATCH], owner=OPTIMIZER)
            if in_planes:
                await asyncio.gather(*(self._fetch(part.key(kind)) for kind in read))
                return
            await self._fetch(part.key(read[0]))
            for kind in others:
                await store.put(part.key(kind), sizes[kind], owner=OPTIMIZER)

        await asyncio.gather(
            pin_weights(),
            *(
                store.put(_scratch(kind), num_bytes, owner=OPTIMIZER)
                for kind, num_bytes in scratch.items()
                if kind != SCRATCH
            ),
            *(self._fetch(key) for key in [gradients.key, *known]),
        )
        pinned()
        await self._arithmetic(part, in_planes=in_planes)
        for key in names:
            if key not in self._states:
                await store.put(key, states.num_bytes(part), owner=OPTIMIZER)
                self._states.add(key)
        for kind, num_bytes in scratch.items():
            store.release(_scratch(kind), owner=OPTIMIZER)
            store.prepare(_scratch(kind), num_bytes)
        store.release(gradients.key, owner=OPTIMIZER)
        for key in [*names, *(part.key(kind) for kind in sizes)]:
            store.release(key, owner=OPTIMIZER, dirty=True)
        await store.delete(gradients.key)

    async def _fetch(self, key: ShardKey) -> None:
        await self._store.fetch(key, owner=OPTIMIZER, update=True)

    async def _arithmetic(self, part: Part, *, in_planes: bool) -> None:
        hardware, machine = self._store.hardware, self._store.hardware.machine
        state_bytes = self._plan.part_state_bytes(part)
        seconds = machine.part_seconds + state_bytes / (machine.planes if in_planes else machine.optimizer)
        self.busy_seconds += seconds
        await hardware.processor.work(seconds)


def _scratch(kind: str) -> ShardKey:
    return ShardKey(0, 0, kind)


@dataclass(frozen=True, slots=True)
class PhantomStep(Job):
    """One sub-group to step.

    Attributes:
        phantom: steps it.
    """

    phantom: PhantomStepper

    async def run(self, stepper: Any, pinned: Callable[[], None]) -> None:
        """See ``PhantomStepper.step``."""
        await self.phantom.step(self.gradients, pinned)
