"""``Values``: weights, gradients and optimizer states that are away, read and changed one at a time, between steps.

What is changed is what is stepped: a weight at full precision, of which the parameter that computes becomes the
rounding. ``gathered`` goes the other way: parameters hold real values in the dtype that computes for a while, and where
an element was changed, the weight becomes that value; elsewhere it keeps all its bits.

A change goes the way of an optimizer step: the part's weights are pinned, read, changed and written run by run, and the
unit's gathered copy is dropped. So it needs no more host memory than a step.

Belongs to the training thread. Everything waits for the step that is under way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity.engine.formats import Compute, FormatOf, OpenWeights, Run
from infinity.engine.gradients import GradientSink
from infinity.engine.states import StateFormatOf
from infinity.engine.substep import PartState
from infinity.engine.unit import Part, Slot, Unit, state_kind
from infinity.engine.weights import PartShelf, WeightReader
from infinity.errors import EngineStateError, ModelError
from infinity.store.device import DeviceTier
from infinity.store.loop import LoopThread
from infinity.store.store import TieredStore

_OWNER = "values"

Change = Callable[[torch.Tensor], None]
"""Changes one weight in place: the slot's shape, the dtype that is stepped."""


class WeightWriter:
    """Changes weights of parts, wherever they are.

    Args:
        loop: the loop thread.
        store: the shards.
        device: told which gathered units have become stale.
        units: all units.
        format_of: how the weights of each part are stored.
        compute: runs arithmetic off the loop.
        fail: told what a change has failed with half-way, when the state is whole no more.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        device: DeviceTier,
        units: Sequence[Unit],
        *,
        format_of: FormatOf,
        compute: Compute,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._loop = loop
        self._store = store
        self._fail = fail
        self._device = device
        self._units = units
        self._format_of = format_of
        self._compute = compute

    def change(self, part: Part, changes: Mapping[int, Change]) -> None:
        """Change weights of a part, by slot.

        Raises:
            StorageError: a shard could not be read or written.
        """
        self._loop.run(self._change(part, changes))
        self._units[part.unit].version += 1

    async def _change(self, part: Part, changes: Mapping[int, Change]) -> None:
        weights = self._format_of(part).open(self._store, part, _OWNER)
        pinned = changed = False
        try:
            await weights.pin()
            pinned = True
            runs = iter(weights.runs)
            while (misfit := await self._compute(lambda: _change_runs(part, weights, runs, changes))) is not None:
                await weights.widen(self._compute)
                await self._compute(functools.partial(weights.write, *misfit))
            changed = True
        except BaseException as error:
            if pinned:
                self._fail(error)
            raise
        finally:
            await weights.release(changed=changed)
            await self._device.invalidate(part.unit)  # last: the unit may have been gathered ahead meanwhile


def _change_runs(
    part: Part, weights: OpenWeights, runs: Iterator[Run], changes: Mapping[int, Change]
) -> tuple[Run, torch.Tensor] | None:
    """Change run after run; one whose weights do not fit as they are stored is returned."""
    for run in runs:
        flat = weights.read(run)
        for position in run.positions:
            if position in changes:
                changes[position](run.view(part.slots[position], flat))
        if not weights.write(run, flat):
            return run, flat
    return None


class Gathered:
    """The parameters that hold their values just now, for users to read and change."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def check(self) -> None:
        """Refuse what needs parameters to be away.

        Raises:
            EngineStateError: some are gathered.
        """
        if self.names:
            raise EngineStateError(
                f"inside engine.gathered(), where parameter {min(self.names)} holds its value: forward, backward, step "
                "and other reads come after the with-block"
            )


class Values:
    """What users read and change between steps; ``engine.values``.

    Args:
        loop: the loop thread.
        store: the shards.
        units: all units.
        parts: all parts.
        reader: reads weights and states.
        writer: changes weights.
        gradients: those that wait for a step.
        gathered: told what holds its value.
        state_of: what the optimizer knows of a part.
        state_format_of: how its states are stored.
        compute: runs arithmetic off the loop.
        settle: called before anything, with the name of what is to be done; raises where it cannot be done now.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        units: Sequence[Unit],
        parts: Sequence[Part],
        reader: WeightReader,
        writer: WeightWriter,
        gradients: GradientSink,
        gathered: Gathered,
        *,
        state_of: Callable[[Part], PartState],
        state_format_of: StateFormatOf,
        compute: Compute,
        settle: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._store = store
        self._units = units
        self._reader = reader
        self._writer = writer
        self._gradients = gradients
        self._state_of = state_of
        self._state_format_of = state_format_of
        self._compute = compute
        self._settle = settle
        self._places = {slot.param: (part, i) for part in parts for i, slot in enumerate(part.slots)}
        self._gathered = gathered

    def weight(self, param: nn.Parameter) -> torch.Tensor:
        """A copy at full precision (the fp32 master weight where there is one), on the CPU.

        Raises:
            EngineStateError: it is no time to read, as inside a forward.
            ModelError: the parameter is not the model's.
            StorageError: its shard could not be read.
        """
        self._begin(param, "weight")
        return self._reader.read(param, full=True)

    def set_weight(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Change a weight at full precision.

        Args:
            param: a parameter of the model.
            value: of its shape, any dtype and device.

        Raises:
            EngineStateError: it is no time to write.
            ModelError: the parameter is not the model's, or the value has another shape.
            StorageError: a shard could not be read or written.
        """
        part, position = self._begin(param, "set_weight")
        _check_shape(part.slots[position], value)
        self._writer.change(part, {position: functools.partial(_copy, value)})

    def load(self, values: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Change many weights at full precision, part by part. All shapes are checked first.

        Raises:
            EngineStateError: it is no time to write.
            ModelError: a parameter is not the model's, or a value has another shape.
            StorageError: a shard could not be read or written.
        """
        self._settle("load_state_dict")
        changes: list[tuple[Part, int, Change]] = []
        for param, value in values.items():
            part, position = self._place(param)
            _check_shape(part.slots[position], value)
            changes.append((part, position, functools.partial(_copy, value)))
        self._change(changes)

    def grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """A copy of the gradient as the step would take it, on the CPU; ``None`` if there is none.

        It is in the dtype that is stepped, summed over backwards, without the loss scale, clipped if it was. To set
        one, assign to ``param.grad``.

        Raises:
            EngineStateError: it is no time to read.
            ModelError: the parameter is not the model's, or a gradient was changed in place while it was away.
            StorageError: its shard could not be read.
        """
        part, position = self._begin(param, "grad")
        slot = part.slots[position]
        for waiting in self._gradients.waiting():
            if waiting.part is part and position in waiting.present:
                take = functools.partial(_clone, slot, waiting.dtype)
                gradient = PartShelf(self._loop, self._store, part).look(waiting.kind, take).to(part.step_dtype)
                for scale in waiting.scales.get(position, ()):
                    gradient.mul_(scale)
                return gradient
        return None if param.grad is None else param.grad.detach().cpu().clone()

    def state(self, param: nn.Parameter, name: str) -> Any:
        """A copy of one of the optimizer's states of a parameter, such as ``exp_avg``, on the CPU.

        Raises:
            EngineStateError: it is no time to read.
            ModelError: the parameter is not the model's, or has no such state (before its first step it has none).
            StorageError: its shard could not be read.
        """
        part, position = self._begin(param, "state")
        states = self._reader.read_state(param, self._state_of)
        if name not in states:
            raise _unknown_state(part.slots[position], name, states)
        return states[name]

    def set_state(self, param: nn.Parameter, name: str, value: Any) -> None:
        """Change one of the optimizer's states of a parameter; it must have it already.

        Args:
            param: a parameter of the model.
            name: which state.
            value: a tensor of its shape, or what the optimizer keeps there.

        Raises:
            EngineStateError: it is no time to write.
            ModelError: the parameter is not the model's, has no such state, or one of another shape.
            StorageError: its shard could not be read or written.
        """
        part, position = self._begin(param, "set_state")
        slot, state = part.slots[position], self._state_of(part)
        small, (dtype, positions) = state.small[position], state.shards.get(name, (None, set()))
        if position not in positions:
            if name not in small:
                names = [*small, *(each for each, (_, those) in state.shards.items() if position in those)]
                raise _unknown_state(slot, name, names)
            known = small[name]
            if isinstance(known, torch.Tensor):
                _check_shape(slot, value, known.shape)
                value = value.to(known, copy=True)
            small[name] = value
            return
        assert dtype is not None
        _check_shape(slot, value)
        states = self._state_format_of(part, dtype)
        value = value.to("cpu", dtype)

        async def write() -> None:
            key = part.key(state_kind(name))
            lease = await self._store.fetch(key, owner=_OWNER, update=True)
            try:
                await self._compute(functools.partial(states.write, part, position, lease.tensor, value))
            finally:
                self._store.release(key, owner=_OWNER, dirty=True)

        self._loop.run(write())

    @contextlib.contextmanager
    def gathered(self, params: Iterable[nn.Parameter] | nn.Parameter, *, modify: bool = False) -> Iterator[None]:
        """Have parameters hold their values, as copies on the device in the dtype that computes; see ``Engine``."""
        chosen = list(dict.fromkeys([params] if isinstance(params, nn.Parameter) else params))
        self._settle("gathered")
        places = {param: self._places[param] for param in chosen if param in self._places}
        try:
            for param, (part, position) in places.items():
                slot = part.slots[position]
                self._gathered.names.add(slot.name)
                param.data = self._reader.read(param, full=False).to(self._units[part.unit].device)
                assert param.stride() == slot.stride
            before = {param: (param._version, param.data_ptr()) for param in places}
            yield
            found = {param: param.data for param in places}
            after = {param: (param._version, param.data_ptr()) for param in places}
        finally:
            self._gathered.names.clear()
            for part, position in places.values():
                self._units[part.unit].leave(part, part.slots[position])
                self._units[part.unit].note_versions(part.slots[position])
        if modify:
            self._keep(places, found)
        elif before != after:
            name = next(self._slot(param).name for param in places if before[param] != after[param])
            raise ModelError(
                f"parameter {name} was changed inside engine.gathered() and the change is dropped; to keep changes, "
                "call gathered(params, modify=True)"
            )

    def _keep(
        self, places: Mapping[nn.Parameter, tuple[Part, int]], found: Mapping[nn.Parameter, torch.Tensor]
    ) -> None:
        """Take over what parameters were changed to while they were gathered."""
        changes: list[tuple[Part, int, Change]] = []
        for param, (part, position) in places.items():
            value = found[param]
            _check_shape(part.slots[position], value)
            value = value.to("cpu", part.compute_dtype)
            changes.append((part, position, functools.partial(_copy_changed, value)))
        self._change(changes)

    def _change(self, changes: Iterable[tuple[Part, int, Change]]) -> None:
        """Change weights, those of a part together."""
        by_part: dict[int, tuple[Part, dict[int, Change]]] = {}
        for part, position, change in changes:
            by_part.setdefault(part.index, (part, {}))[1][position] = change
        for part, of_part in by_part.values():
            self._writer.change(part, of_part)

    def _begin(self, param: nn.Parameter, what: str) -> tuple[Part, int]:
        place = self._place(param)
        self._settle(what)
        return place

    def _place(self, param: nn.Parameter) -> tuple[Part, int]:
        place = self._places.get(param)
        if place is None:
            raise ModelError(
                f"expected a parameter of the engine's model, got a {type(param).__name__} that is none of them; "
                "take it from engine.module"
            )
        return place

    def _slot(self, param: nn.Parameter) -> Slot:
        part, position = self._places[param]
        return part.slots[position]


def _clone(slot: Slot, dtype: torch.dtype, shard: torch.Tensor) -> torch.Tensor:
    return slot.view(shard.view(dtype)).clone()


def _copy(value: torch.Tensor, weight: torch.Tensor) -> None:
    weight.copy_(value.detach())


def _copy_changed(value: torch.Tensor, weight: torch.Tensor) -> None:
    """Where ``value`` differs in any bit from what ``weight`` rounds to, it is the new weight."""
    if value.dtype == weight.dtype:
        weight.copy_(value)
        return
    differs = value.view(torch.int16) != weight.to(value.dtype).view(torch.int16)
    weight.copy_(torch.where(differs, value.to(weight.dtype), weight))


def _check_shape(slot: Slot, value: object, shape: torch.Size | None = None) -> None:
    expected = slot.shape if shape is None else shape
    if not isinstance(value, torch.Tensor) or value.shape != expected:
        got = f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ModelError(f"parameter {slot.name}: expected a tensor of shape {tuple(expected)}, got {got}")


def _unknown_state(slot: Slot, name: str, names: Iterable[str]) -> ModelError:
    known = ", ".join(map(str, names)) or "none before its first step"
    return ModelError(f"parameter {slot.name} has no optimizer state {name!r}; it has: {known}")
