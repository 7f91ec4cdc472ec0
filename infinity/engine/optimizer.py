"""``OffloadedOptimizer``: any ``torch.optim`` optimizer, sub-group by sub-group, wherever its state lives.

A step walks the parts that have gradients. For each, its shards are pinned in host memory (the scheduler has already
begun to read the next ones), and a *shadow* of the user's optimizer (``shadow.py``) steps parameters that are views of
the shards. Then the shards are released dirty and written back while the next sub-group computes.

State tensors of the parameter's shape become shards; everything else (step counters, factored moments) stays in memory
as the optimizer made it.

Arithmetic runs on one worker thread; the loop only moves bytes.
"""

from __future__ import annotations

import asyncio
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.engine.prefetch import OPTIMIZER, PrefetchScheduler
from infinity.engine.shadow import HOOKS, PATCHED, Shadow, is_shard
from infinity.engine.unit import GRAD, MASTER, PARAM, Part, Unit, state_kind
from infinity.errors import ModelError
from infinity.io.memory import HEAP
from infinity.io.tasks import gather_all
from infinity.store.device import DeviceTier
from infinity.store.order import Use
from infinity.store.store import TieredStore

Gradients = dict[int, tuple[str, frozenset[int]]]


@dataclass(slots=True)
class PartState:
    """What the optimizer knows of one part.

    Attributes:
        shards: for each state that is a shard, its dtype and the slots that have it.
        small: for each slot, the states that stay in memory.
    """

    shards: dict[str, tuple[torch.dtype, set[int]]] = field(default_factory=dict)
    small: dict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))


class SubGroupStepper:
    """Streams sub-groups through host memory and steps them. Coroutines belong to the loop thread.

    Args:
        store: the shards.
        device: told which gathered units have become stale.
        scheduler: told of each sub-group, and reads ahead.
        units: all units.
        parts: all parts.
        optimizer: the user's optimizer.
        has_master: whether master weights are stepped beside the parameters.
        worker: where the arithmetic runs; the caller's to shut down.
    """

    def __init__(
        self,
        store: TieredStore,
        device: DeviceTier,
        scheduler: PrefetchScheduler,
        units: Sequence[Unit],
        parts: Sequence[Part],
        optimizer: torch.optim.Optimizer,
        *,
        has_master: bool,
        worker: ThreadPoolExecutor,
    ) -> None:
        self._store = store
        self._device = device
        self._scheduler = scheduler
        self._units = units
        self._parts = parts
        self._optimizer = optimizer
        self._shadow = Shadow(optimizer)
        self._has_master = has_master
        self._states: dict[int, PartState] = defaultdict(PartState)
        self._worker = worker

    @property
    def weights_kind(self) -> str:
        """The kind of shard that is stepped."""
        return MASTER if self._has_master else PARAM

    def state_of(self, part: Part) -> PartState:
        """The optimizer's state of a part."""
        return self._states[part.index]

    def adopt(self, states: dict[int, PartState]) -> None:
        """Take over state that the optimizer had before, by part."""
        self._states.update(states)

    def check_groups(self) -> None:
        """Refuse parameter groups with parameters that the optimizer did not have at start.

        Raises:
            ModelError: it says which group.
        """
        self._group_of()

    async def step(self, gradients: Gradients) -> None:
        """Step every part that has gradients, and delete the gradients.

        Raises:
            ModelError: the optimizer cannot be stepped sub-group by sub-group.
            StorageError: a shard could not be read or written.
        """
        group_of = self._group_of()
        await self._scheduler.begin_step()
        complete = False
        try:
            for index in sorted(gradients):
                part, (kind, present) = self._parts[index], gradients[index]
                await self._step_part(part, kind, present, group_of)
            if not gradients:
                await self._compute(lambda: self._shadow.step([]))
            self._shadow.end_step()
            for unit in {self._parts[index].unit for index in gradients}:
                self._units[unit].version += 1
            complete = True
        finally:
            self._scheduler.end_step(complete=complete)

    def _group_of(self) -> dict[nn.Parameter, int]:
        known = {slot.param for part in self._parts if part.stepped for slot in part.slots}
        group_of: dict[nn.Parameter, int] = {}
        for index, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                if param not in known:
                    raise ModelError(
                        f"optimizer group {index} holds a parameter of shape {tuple(param.shape)} that it did not hold "
                        "at infinity.initialize(); add every parameter group before initialize(), frozen ones too"
                    )
                group_of[param] = index
        return group_of

    async def _step_part(
        self, part: Part, kind: str, present: frozenset[int], group_of: dict[nn.Parameter, int]
    ) -> None:
        state = self._states[part.index]
        kinds = [self.weights_kind, kind, *(state_kind(name) for name in state.shards)]
        flats: dict[str, torch.Tensor] = {}
        try:
            await gather_all(self._pin(part, each, flats) for each in kinds)
            if self._has_master:
                lease = await self._store.put(part.key(PARAM), part.param_bytes, owner=OPTIMIZER)
                flats[PARAM] = lease.tensor
            self._scheduler.touch(Use.STEP, part.index)  # reads ahead, into what room is left, while this one computes
            await self._device.invalidate(part.unit)
            positions = [i for i in sorted(present) if part.slots[i].param in group_of]
            groups = [group_of[part.slots[i].param] for i in positions]
            fresh = await self._compute(lambda: self._arithmetic(part, kind, flats, positions, groups))
            for name, values in fresh.items():
                await self._add_shard(part, name, values, flats)
                HEAP.use(sum(value.nbytes for value in values.values()))
            fresh.clear()
            await self._compute(HEAP.make_room)
        finally:
            for each in flats:
                self._store.release(part.key(each), owner=OPTIMIZER, dirty=each != kind)
        await self._store.delete(part.key(kind))

    async def _pin(self, part: Part, kind: str, flats: dict[str, torch.Tensor]) -> None:
        flats[kind] = (await self._store.fetch(part.key(kind), owner=OPTIMIZER, update=True)).tensor

    async def _compute(self, arithmetic: Callable[[], Any]) -> Any:
        job = asyncio.get_running_loop().run_in_executor(self._worker, arithmetic)
        await asyncio.wait([job])
        return job.result()

    async def _add_shard(
        self, part: Part, name: str, values: dict[int, torch.Tensor], flats: dict[str, torch.Tensor]
    ) -> None:
        dtype = next(iter(values.values())).dtype
        key = part.key(state_kind(name))
        flats[state_kind(name)] = (await self._store.put(key, part.num_bytes(dtype), owner=OPTIMIZER)).tensor
        flat = flats[state_kind(name)].view(dtype)

        def copy() -> None:
            for position, value in values.items():
                part.slots[position].view(flat).copy_(value)

        await self._compute(copy)
        self._states[part.index].shards[name] = (dtype, set(values))

    def _arithmetic(
        self, part: Part, kind: str, flats: dict[str, torch.Tensor], positions: list[int], groups: list[int]
    ) -> dict[str, dict[int, torch.Tensor]]:
        """Step the slots at ``positions`` (worker thread). Returns states that have no shard yet, by name and slot."""
        weights = flats[self.weights_kind].view(part.step_dtype)
        gradients = flats[kind].view(part.compute_dtype if kind == GRAD else part.step_dtype)
        members = []
        for position, group in zip(positions, groups, strict=True):
            slot = part.slots[position]
            param = nn.Parameter(slot.view(weights), requires_grad=slot.param.requires_grad)
            vars(param).update(vars(slot.param))
            param.grad = slot.view(gradients).to(part.step_dtype)
            members.append((group, param, self._live_state(part, position, flats)))
        after = self._shadow.step(members)
        fresh: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        for position, (_, param, before) in zip(positions, members, strict=True):
            self._keep_state(part, position, before, after[param], flats, fresh)
        if self._has_master:
            params = flats[PARAM].view(part.compute_dtype)
            for slot in part.slots:
                slot.view(params).copy_(slot.view(weights))
        return dict(fresh)

    def _live_state(self, part: Part, position: int, flats: dict[str, torch.Tensor]) -> dict[str, Any]:
        state, slot = self._states[part.index], part.slots[position]
        live = {
            name: slot.view(flats[state_kind(name)].view(dtype))
            for name, (dtype, slots) in state.shards.items()
            if position in slots
        }
        return {**state.small.get(position, {}), **live}

    def _keep_state(
        self,
        part: Part,
        position: int,
        before: dict[str, Any],
        after: dict[str, Any],
        flats: dict[str, torch.Tensor],
        fresh: dict[str, dict[int, torch.Tensor]],
    ) -> None:
        """Put each state into its shard, or set it aside for a new one; what has no place in either stays in memory."""
        state, slot = self._states[part.index], part.slots[position]
        small = state.small[position] = {}
        for _, slots in state.shards.values():
            slots.discard(position)
        for name, value in after.items():
            known = state.shards.get(name)
            dtype = known[0] if known else next((each.dtype for each in fresh.get(name, {}).values()), None)
            if not is_shard(value, slot) or dtype not in (None, value.dtype):
                small[name] = _detached(value, flats)
            elif known is None:
                fresh[name][position] = value
            else:
                if value is not before.get(name):
                    slot.view(flats[state_kind(name)].view(value.dtype)).copy_(value)
                known[1].add(position)


def _detached(value: Any, flats: dict[str, torch.Tensor]) -> Any:
    """A state that stays in memory: a copy if it lies in a shard, whose memory will be another's."""
    if isinstance(value, torch.Tensor):
        address = value.untyped_storage().data_ptr()
        if any(address == flat.untyped_storage().data_ptr() for flat in flats.values()):
            return value.clone()
    return value


class OffloadedOptimizer(torch.optim.Optimizer):
    """What ``engine.optimizer`` is: the user's optimizer with its state in the tiers.

    It shares the user's ``param_groups``, so learning-rate schedulers on either work. The user's own object steps
    through this one too, until ``release_user``. ``step`` consumes the gradients; ``zero_grad`` discards them.

    Args:
        user: the user's optimizer.
        step: steps what has gradients.
        discard: forgets the gradients.
        read_state: a copy of the state of one parameter.
    """

    def __init__(
        self,
        user: torch.optim.Optimizer,
        step: Callable[[], None],
        discard: Callable[[], None],
        read_state: Callable[[nn.Parameter], dict[str, Any]],
    ) -> None:
        self._user = user
        self._run_step = step
        self._run_discard = discard
        self._read_state = read_state
        super().__init__([dict(group) for group in user.param_groups], dict(user.defaults))
        self.param_groups = user.param_groups
        for name in HOOKS:
            setattr(self, name, getattr(user, name))
        self._complete = True
        self._replaced = {name: vars(user)[name] for name in PATCHED if name in vars(user)}
        offloaded = self

        def user_step(optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> None:
            offloaded.step(closure)

        user_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler may have wrapped the old one
        user.step = types.MethodType(user_step, user)  # type: ignore[method-assign]
        for name in PATCHED[1:]:
            setattr(user, name, getattr(self, name))

    def release_user(self) -> None:
        """Give the user's optimizer its own methods back."""
        for name in PATCHED:
            vars(self._user).pop(name, None)
        vars(self._user).update(self._replaced)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient, then forget the gradients.

        Raises:
            ModelError: a closure was given: it would evaluate the model several times per step.
            StorageError: a shard could not be read or written.
        """
        if closure is not None:
            raise ModelError(
                "optimizer.step(closure) is not supported: call loss.backward() before step(), without a closure"
            )
        self._user._opt_called = True  # type: ignore[attr-defined]  # what LR schedulers look for
        self._run_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that have not been stepped.

        Raises:
            ModelError: ``set_to_none`` is false: gradients that are away cannot be zeros, which the next step would
                step with momentum and weight decay.
        """
        if not set_to_none:
            raise ModelError(
                "optimizer.zero_grad(set_to_none=False) is not supported: gradients are discarded, not kept as zeros; "
                "call zero_grad()"
            )
        self._run_discard()
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state as from the user's own optimizer, read from the tiers: it holds everything, on the CPU.

        Raises:
            StorageError: a shard could not be read.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        states = {param: state for param in params if (state := self._read_state(param))}
        try:
            self.state.update(states)
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: the state lives in the tiers.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "optimizer.load_state_dict() under the engine: load the state into your optimizer before "
            "infinity.initialize(), which takes it over"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once made: parameters are laid out at start.

        Raises:
            ModelError: always.
        """
        if not hasattr(self, "_complete"):
            super().add_param_group(param_group)
            return
        raise ModelError(
            "optimizer.add_param_group() under the engine: add every parameter group before infinity.initialize(); "
            "parameters that are frozen at first may be in one"
        )
