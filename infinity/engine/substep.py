"""``SubGroupStepper``: one sub-group of any ``torch.optim`` optimizer, stepped wherever its state lives.

A part's shards are pinned in host memory, and a *shadow* of the user's optimizer (``shadow.py``) steps parameters that
are views of the weights (``formats.py``), one run of them after the other. Then the shards are released dirty.

State tensors of the parameter's shape become shards (``states.py``); everything else (step counters, factored moments)
stays in memory as the optimizer made it.

Arithmetic runs where a worker says (``worker.py``); the loop only moves bytes.
"""

from __future__ import annotations

import copy
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.engine.formats import FormatOf, OpenWeights, Run, Scratch
from infinity.engine.shadow import Shadow, is_shard
from infinity.engine.states import StateFormatOf, exact_states, scratch_kind
from infinity.engine.unit import Part, PartGradients, Slot, state_kind
from infinity.io.memory import HEAP
from infinity.io.tasks import call_in_executor, gather_all
from infinity.store.store import TieredStore

OPTIMIZER = "optimizer"
"""The owner that pins what is stepped."""


@dataclass(slots=True)
class PartState:
    """What the optimizer knows of one part.

    Attributes:
        shards: for each state that is a shard, its dtype and the slots that have it.
        small: for each slot, the states that stay in memory.
    """

    shards: dict[str, tuple[torch.dtype, set[int]]] = field(default_factory=dict)
    small: dict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))

    def copy(self) -> PartState:
        """One that a step which leaves small states as they are does not change."""
        shards = {name: (dtype, set(slots)) for name, (dtype, slots) in self.shards.items()}
        return PartState(shards, defaultdict(dict, self.small))


@dataclass(slots=True)
class _Step:
    """One step of one part.

    Attributes:
        gradients: what it is stepped with.
        positions: the slots that are stepped.
        shadow: steps them.
        weights: the part's.
        leaves: whether gradients and small states are left as they are.
        flats: the gradients and states that are pinned, by kind.
        scratch: memory to make states in, by their names.
        fresh: states that have no shard yet, by name and slot.
    """

    gradients: PartGradients
    positions: list[int]
    shadow: Shadow
    weights: OpenWeights
    leaves: bool = False
    flats: dict[str, torch.Tensor] = field(default_factory=dict)
    scratch: dict[str, Scratch] = field(default_factory=dict)
    fresh: dict[str, dict[int, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def part(self) -> Part:
        """Which."""
        return self.gradients.part

    @property
    def memory(self) -> list[torch.Tensor]:
        """All that is pinned."""
        scratch = [each.memory for each in self.scratch.values()]
        return [*self.flats.values(), *scratch, *self.weights.memory]


class SubGroupStepper:
    """Steps one sub-group at a time, in host memory. Coroutines belong to the loop thread.

    Args:
        store: the shards.
        format_of: how the weights of each part are stored.
        worker: where the arithmetic runs; the caller's to shut down.
        state_format_of: how its optimizer states are.

    Attributes:
        observe: told of a part when its arithmetic, or a piece of it, has run, and from when to when; by any thread.
    """

    def __init__(
        self,
        store: TieredStore,
        *,
        format_of: FormatOf,
        worker: Executor,
        state_format_of: StateFormatOf = exact_states,
    ) -> None:
        self._store = store
        self._format_of = format_of
        self._state_format_of = state_format_of
        self._states: dict[int, PartState] = defaultdict(PartState)
        self._worker = worker
        self._wide = torch.empty(0, dtype=torch.uint8)  # where gradients of a run are made in the dtype that is stepped
        self.observe: Callable[[Part, float, float], None] = lambda part, begun, ended: None

    def state_of(self, part: Part) -> PartState:
        """The optimizer's state of a part."""
        return self._states[part.index]

    def adopt(self, states: Mapping[int, PartState]) -> None:
        """Take over state that the optimizer had before, by part."""
        self._states.update(states)

    async def step(
        self, gradients: PartGradients, shadow: Shadow, pinned: Callable[[], None], *, tentative: bool = False
    ) -> None:
        """Step a part and delete its gradients.

        Args:
            gradients: the part's.
            shadow: steps the parameters, with the hyper-parameters of this step.
            pinned: called once all shards are in host memory, before anything changes.
            tentative: it may have to be stepped again: gradients stay, and no small state is changed in place.

        Raises:
            ModelError: the optimizer cannot be stepped sub-group by sub-group.
            StorageError: a shard could not be read or written.
        """
        part, kind = gradients.part, gradients.kind
        slots = part.slots
        positions = [
            i for i in sorted(gradients.present) if slots[i].param in shadow.group_of and not slots[i].is_left_out
        ]
        weights = self._format_of(part).open(self._store, part, OPTIMIZER)
        step = _Step(gradients, positions, shadow, weights, tentative)
        states = self._states[part.index].shards
        kinds = [kind, *(state_kind(name) for name in states)]
        for name, (dtype, _) in states.items():
            num_bytes = self._state_format_of(part, dtype).scratch_bytes
            if num_bytes:
                step.scratch[name] = Scratch(self._store, scratch_kind(name), num_bytes, OPTIMIZER)
        changed = False
        try:
            scratch = [each.take() for each in step.scratch.values()]
            await gather_all([step.weights.pin(), *scratch, *(self._pin(step, each) for each in kinds)])
            pinned()
            await self._step_runs(step)
            changed = True
            if step.fresh:
                await self._add_shards(step)
        finally:
            for name in step.scratch:
                step.scratch[name].give_back()
            for each in step.flats:
                self._store.release(part.key(each), owner=OPTIMIZER, dirty=each != kind)
            await step.weights.release(changed=changed)
        if not tentative:
            await self._store.delete(part.key(kind))

    async def _step_runs(self, step: _Step) -> None:
        runs = iter(step.weights.runs)
        while (misfit := await self.compute(lambda: self._arithmetic(step, runs))) is not None:
            await step.weights.widen(self.compute)
            await self.compute(functools.partial(step.weights.write, *misfit))

    async def compute(self, arithmetic: Callable[[], Any]) -> Any:
        """Run something on the optimizer's thread; it has ended when this ends, however that is."""
        return await call_in_executor(self._worker, arithmetic)

    async def _pin(self, step: _Step, kind: str) -> None:
        step.flats[kind] = (await self._store.fetch(step.part.key(kind), owner=OPTIMIZER, update=True)).tensor

    async def _add_shards(self, step: _Step) -> None:
        """Make shards of the states that have none yet."""
        for name, values in step.fresh.items():
            await self._add_shard(step, name, values)
            HEAP.use(sum(value.nbytes for value in values.values()))
        step.fresh.clear()
        await self.compute(HEAP.make_room)

    async def _add_shard(self, step: _Step, name: str, values: dict[int, torch.Tensor]) -> None:
        part, kind, dtype = step.part, state_kind(name), next(iter(values.values())).dtype
        states = self._state_format_of(part, dtype)
        shard = (await self._store.put(part.key(kind), states.num_bytes(part), owner=OPTIMIZER)).tensor
        step.flats[kind] = shard

        def copy() -> None:
            for position, value in values.items():
                states.write(part, position, shard, value)

        await self.compute(copy)
        self._states[part.index].shards[name] = (dtype, set(values))

    def _arithmetic(self, step: _Step, runs: Iterator[Run]) -> tuple[Run, torch.Tensor] | None:
        """Step run after run, where the worker computes; one whose weights do not fit as they are stored is returned.

        All in one call: beside training, each one waits for its turn.
        """
        begun = time.perf_counter()
        try:
            for run in runs:
                weights = step.weights.read(run)
                self._step_run(step, run, weights)
                if not step.weights.write(run, weights):
                    return run, weights
            HEAP.make_room()
            return None
        finally:
            self.observe(step.part, begun, time.perf_counter())

    def _step_run(self, step: _Step, run: Run, weights: torch.Tensor) -> None:
        """Step the slots of a run."""
        part = step.part
        positions = [position for position in step.positions if position in run.positions]
        members = []
        for position in positions:
            slot = part.slots[position]
            param = nn.Parameter(run.view(slot, weights), requires_grad=slot.param.requires_grad)
            vars(param).update(vars(slot.param))
            param.grad = self._gradient(step, run, slot)
            for scale in step.gradients.scales.get(position, ()):
                param.grad.mul_(scale)
            members.append((step.shadow.group_of[slot.param], param, self._live_state(step, run, position)))
        if members or not step.positions:
            after = step.shadow.step(members)
            for position, (_, param, _) in zip(positions, members, strict=True):
                self._keep_state(step, position, after[param])

    def _gradient(self, step: _Step, run: Run, slot: Slot) -> torch.Tensor:
        """A slot's gradient in the dtype that is stepped; a copy lies in memory that the next run uses again."""
        part, gradients = step.part, step.gradients
        shard = gradients.flat(step.flats[gradients.kind])
        if gradients.dtype == part.step_dtype and not step.leaves:
            return slot.view(shard)
        num_bytes = (run.stop - run.start) * part.step_dtype.itemsize
        if self._wide.nbytes < num_bytes:
            self._wide = torch.empty(num_bytes, dtype=torch.uint8)
        wide = run.view(slot, self._wide[:num_bytes].view(part.step_dtype))
        return wide.copy_(slot.view(shard))

    def _live_state(self, step: _Step, run: Run, position: int) -> dict[str, Any]:
        part, state = step.part, self._states[step.part.index]
        live = {}
        for name, (dtype, slots) in state.shards.items():
            if position in slots:
                scratch = step.scratch[name].memory if name in step.scratch else None
                states, shard = self._state_format_of(part, dtype), step.flats[state_kind(name)]
                live[name] = states.read(part, position, shard, run, scratch)
        small = state.small.get(position, {})
        return {**({name: _copy_of(value) for name, value in small.items()} if step.leaves else small), **live}

    def _keep_state(self, step: _Step, position: int, after: dict[str, Any]) -> None:
        """Put each state into its shard, or set it aside for a new one; what has no place in either stays in memory."""
        part, state, memory = step.part, self._states[step.part.index], [*step.memory, self._wide]
        small = state.small[position] = {}
        for _, slots in state.shards.values():
            slots.discard(position)
        for name, value in after.items():
            known = state.shards.get(name)
            dtype = known[0] if known else next((each.dtype for each in step.fresh.get(name, {}).values()), None)
            if not is_shard(value, part.slots[position]) or dtype not in (None, value.dtype):
                small[name] = _detached(value, memory)
            elif known is None:
                step.fresh[name][position] = _detached(value, memory)
            else:
                self._state_format_of(part, value.dtype).write(part, position, step.flats[state_kind(name)], value)
                known[1].add(position)


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _detached(value: Any, memory: Iterable[torch.Tensor]) -> Any:
    """A state that stays in memory: a copy if it lies in memory that will be another's."""
    if isinstance(value, torch.Tensor):
        address = value.untyped_storage().data_ptr()
        if any(address == flat.untyped_storage().data_ptr() for flat in memory):
            return value.clone()
    return value
