"""``Values``: weights, gradients and optimizer states that are away, read and changed one at a time, between steps.

What is changed is what is stepped: a weight at full precision, of which the parameter that computes becomes the
rounding. ``gathered`` goes the other way: parameters hold real values in the dtype that computes for a while, and where
an element was changed, the weight becomes that value; elsewhere it keeps all its bits.

Belongs to the training thread. Everything waits for the step that is under way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity.engine.formats import Compute
from infinity.engine.gradients import GradientSink
from infinity.engine.incoming import check_tensor
from infinity.engine.saved import SavedTensors
from infinity.engine.states import StateFormatOf
from infinity.engine.substep import PartState
from infinity.engine.unit import Part, PartGradients, Slot, Unit, state_kind
from infinity.engine.weights import PartShelf, WeightReader
from infinity.engine.writer import Change, WeightWriter, copy_of
from infinity.errors import EngineStateError, ModelError
from infinity.store.loop import LoopThread
from infinity.store.store import TieredStore

_OWNER = "values"


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
                f"inside engine.gathered(), where parameter {min(self.names)} holds its value: forward, step and "
                "other reads and changes through the engine come after the with-block"
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
        common: what counts of a value that is given, by name: with several ranks one's.
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
        common: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, value: value,
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
        self._common = common
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
        slot = part.slots[position]
        value = self._common(slot.name, check_tensor(f"parameter {slot.name}", value, slot.original.shape))
        self._writer.change([(part, position, copy_of(slot.take(value)))])

    def load(self, values: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Change many weights at full precision, part by part.

        Args:
            values: plain tensors of the right shapes.

        Raises:
            EngineStateError: it is no time to write.
            StorageError: a shard could not be read or written.
        """
        self._settle("load_state_dict")
        places = ((*self._place(param), value) for param, value in values.items())
        slots = ((part, i, part.slots[i], value) for part, i, value in places)
        self._writer.change((p, i, copy_of(slot.take(self._common(slot.name, value)))) for p, i, slot, value in slots)

    def empty(self, param: nn.Parameter) -> torch.Tensor:
        """Memory for a weight at full precision, on the CPU."""
        part, position = self._place(param)
        slot = part.slots[position].original
        return torch.empty_strided(slot.shape, slot.stride, dtype=part.step_dtype)

    def part_of(self, param: nn.Parameter) -> Part:
        """The part that holds a weight."""
        return self._place(param)[0]

    def name_of(self, param: nn.Parameter) -> str:
        """The parameter's name in the model."""
        part, position = self._place(param)
        return part.slots[position].name

    def grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """A copy of the gradient as the step would take it, on the CPU; ``None`` if there is none.

        It is in the dtype that is stepped, summed over backwards, without the loss scale, clipped if it was. That of a
        parameter which the optimizer does not hold is what stands on ``param.grad``, as backward left it.

        Raises:
            EngineStateError: it is no time to read.
            ModelError: the parameter is not the model's, or a gradient was changed in place while it was away.
            StorageError: its shard could not be read.
        """
        part, position = self._begin(param, "grad")
        slot = part.slots[position]
        for waiting in self._gradients.waiting():
            if waiting.part is part and position in waiting.present:
                take = functools.partial(_clone, slot, waiting)
                gradient = PartShelf(self._loop, self._store, part).look(waiting.kind, take).to(part.step_dtype)
                for scale in waiting.scales.get(position, ()):
                    gradient.mul_(scale)
                return self._reader.join(slot, gradient)
        return None if param.grad is None else param.grad.detach().cpu().clone()

    def set_grad(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Change the gradient that the step will take; what later backwards bring is added to it.

        Args:
            param: a parameter of the model.
            value: of its shape, any dtype and device, without the loss scale; it is not clipped any more.

        Raises:
            EngineStateError: it is no time to write, or the step has begun under backward.
            ModelError: the parameter is not the model's, or the value cannot be its gradient.
            StorageError: a shard could not be read or written.
        """
        part, position = self._begin(param, "set_grad")
        slot = part.slots[position]
        value = check_tensor(f"gradient of parameter {slot.name}", value, slot.original.shape).detach()
        value = self._common(slot.name, value) if part.stepped else value
        with torch.inference_mode(False):
            if part.stepped:
                self._gradients.replace(part, position, value.to("cpu", part.step_dtype))
            else:
                param.grad = value.to(param, copy=True)

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
        if isinstance(value, torch.Tensor):
            value = self._common(slot.name, value)
        if slot.is_left_out:
            return
        small, (dtype, positions) = state.small[position], state.shards.get(name, (None, set()))
        if position not in positions:
            if name not in small:
                names = [*small, *(each for each, (_, those) in state.shards.items() if position in those)]
                raise _unknown_state(slot, name, names)
            small[name] = _like(f"optimizer state {name!r} of parameter {slot.name}", small[name], value)
            return
        assert dtype is not None
        states = self._state_format_of(part, dtype)
        value = check_tensor(f"optimizer state {name!r} of parameter {slot.name}", value, slot.original.shape)
        value = slot.take(value).to("cpu", dtype)

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
        chosen = _parameters(params)
        self._settle("gathered")
        places = {param: self._places[param] for param in chosen if param in self._places}
        saved = SavedTensors(
            _hold_nothing
        )  # what is computed here may be differentiated when the values are away again
        try:
            for param, (part, position) in places.items():
                slot = part.slots[position]
                self._gathered.names.add(slot.name)
                param.data = self._reader.read(param, full=False).to(self._units[part.unit].device)
                assert param.stride() == slot.original.stride
            before = {param: (param._version, param.data_ptr()) for param in places}
            saved.push()
            try:
                yield
            finally:
                saved.pop()
            found = {param: param.data for param in places}
            after = {param: (param._version, param.data_ptr()) for param in places}
        finally:
            self._gathered.names.clear()
            for part, position in places.values():
                self._units[part.unit].leave(part, part.slots[position].original)
                self._units[part.unit].note_versions(part.slots[position].original)
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
            slot = part.slots[position]
            value = check_tensor(f"parameter {slot.name}", found[param], slot.original.shape)
            value = slot.take(self._common(slot.name, value)).to("cpu", part.compute_dtype)
            changes.append((part, position, functools.partial(_copy_changed, value)))
        self._writer.change(changes)

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


def _parameters(given: object) -> list[nn.Parameter]:
    if isinstance(given, nn.Module) or not isinstance(given, (nn.Parameter, Iterable)):
        raise ModelError(f"gathered(): expected parameters, got a {type(given).__name__}; give module.parameters()")
    params = [given] if isinstance(given, nn.Parameter) else list(dict.fromkeys(given))
    for each in params:
        if not isinstance(each, nn.Parameter):
            raise ModelError(f"gathered(): expected parameters, got a {type(each).__name__} among them")
    return params


def _hold_nothing(unit: Unit, reads: bool) -> None:
    raise AssertionError("no unit is gathered")


def _clone(slot: Slot, gradients: PartGradients, shard: torch.Tensor) -> torch.Tensor:
    return slot.view(gradients.flat(shard)).clone()


def _copy_changed(value: torch.Tensor, weight: torch.Tensor) -> None:
    """Where ``value`` differs in any bit from what ``weight`` rounds to, it is the new weight."""
    if value.dtype == weight.dtype:
        weight.copy_(value)
        return
    differs = value.view(torch.int16) != weight.to(value.dtype).view(torch.int16)
    weight.copy_(torch.where(differs, value.to(weight.dtype), weight))


def _like(what: str, known: Any, value: Any) -> Any:
    """A new value for a state that stays in memory."""
    if isinstance(known, torch.Tensor):
        with torch.inference_mode(False):
            return check_tensor(what, value, known.shape).detach().to(known, copy=True)
    if isinstance(value, torch.Tensor):
        raise ModelError(f"{what}: expected what the optimizer keeps there, a {type(known).__name__}, got a tensor")
    return value


def _unknown_state(slot: Slot, name: str, names: Iterable[str]) -> ModelError:
    known = ", ".join(map(str, names)) or "none before its first step"
    return ModelError(f"parameter {slot.name} has no optimizer state {name!r}; it has: {known}")
