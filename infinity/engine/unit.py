"""Units, parts and slots: how a model's parameters become shards.

A *unit* is gathered and released whole. It is cut into *parts*: runs of whole parameters of one dtype that the
optimizer steps together (its sub-groups), so that the state of a part fits in host memory. A part's shards, one per
kind of state, all share one layout in elements: each parameter starts at a multiple of ``SLOT_ALIGNMENT`` elements, so
it is at least 128-byte aligned in every dtype and kernels run as on their own allocations, and each part ends at a
multiple of ``PART_ALIGNMENT`` elements, so that shards and their places in the gathered unit are whole pages.

Nothing is written onto a parameter but ``.data``: a view into the gathered buffer while gathered, and while released a
tensor of the true shape that reads as NaN and takes no memory; and ``.grad``, see ``gradients.py``.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.engine.standin import StandIn
from infinity.store.shard import ShardKey

SLOT_ALIGNMENT = 128
PART_ALIGNMENT = 4096

PARAM = "param"
MASTER = "master"
RESIDUAL = "residual"
UPPER = "upper"
SCRATCH = "scratch"
GRAD = "grad"
GRAD_SUM = "grad_sum"
OWN_GRAD = "own_grad"
OWN_GRAD_SUM = "own_grad_sum"
GATHERED = "gathered"
ACTIVATION = "activation"
SAVED = "saved"


def state_kind(name: str) -> str:
    """The kind of shard that holds one of the optimizer's states."""
    return f"state.{name}"


def saved_kind(kind: str) -> str:
    """The kind of shard that holds what one of another kind was."""
    return f"{SAVED}.{kind}"


class UnitState(enum.Enum):
    """Whether a unit's parameters are views of gathered memory."""

    RELEASED = "released"
    GATHERED = "gathered"


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter's place in its part.

    Attributes:
        name: the parameter's qualified name.
        param: the user's own parameter.
        offset: where it starts, in elements of the part.
        stand_in: what it holds while its value is away; ``None`` before the first time.
    """

    name: str
    param: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    stand_in: StandIn | None = field(default=None, repr=False)

    @property
    def is_away(self) -> bool:
        """Whether the parameter holds nothing but its placeholder."""
        return self.stand_in is not None and self.num_elements > 0 and self.stand_in.is_in(self.param)

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def original(self) -> Slot:
        """The slot of the whole parameter."""
        return self

    @property
    def is_left_out(self) -> bool:
        """Whether all of its elements are other ranks'."""
        return False

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter in a shard of its part: ``flat`` has the part's length, in any dtype."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """What this slot holds of a value of its parameter (the parameter's shape, any dtype): the slot's shape."""
        return value

    def cut(self, start: int, stop: int) -> Slot:
        """What of it lies between two elements of its part, in a shard that begins at the first."""
        end = self.offset + self.num_elements
        first, last = min(max(start, self.offset), end), min(max(stop, self.offset), end)
        place = min(max(self.offset, start), stop) - start
        return CutSlot(
            self.name, self.param, torch.Size([last - first]), (1,), place, whole=self, skipped=first - self.offset
        )


@dataclass(slots=True, eq=False)
class CutSlot(Slot):
    """A rank's piece of one parameter: consecutive elements as they lie in memory, perhaps none; one dimension.

    Attributes:
        whole: all of it.
        skipped: how many of its elements come before.
    """

    whole: Slot = field(kw_only=True, repr=False)
    skipped: int = field(kw_only=True)

    @property
    def original(self) -> Slot:
        """See ``Slot``."""
        return self.whole

    @property
    def is_left_out(self) -> bool:
        """Whether all of its elements are other ranks'."""
        return self.num_elements == 0 and self.whole.num_elements > 0

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """See ``Slot``: a view of the value where it lies in memory as the parameter does, else of a copy."""
        whole = self.whole
        if value.stride() != whole.stride:
            value = torch.empty_strided(whole.shape, whole.stride, dtype=value.dtype, device=value.device).copy_(value)
        return value.as_strided(self.shape, (1,), value.storage_offset() + self.skipped)


@dataclass(slots=True, eq=False)
class Part:
    """A run of parameters of one dtype that is stepped together.

    Attributes:
        index: number among all parts: the sub-group's number.
        unit: number of its unit.
        position: number within its unit.
        dtype: what the model gave its parameters.
        compute_dtype: what forward and backward use.
        step_dtype: what the optimizer steps.
        sum_dtype: what gradients of several backwards are summed in: one of these two.
        stepped: whether the optimizer holds its parameters.
        slots: its parameters, in order.
        state_names: the states of its parameters' shapes that the optimizer is expected to have, in order.
        num_elements: length of each of its shards, padding included.
        start: where its parameters begin in the gathered unit, in bytes.
    """

    index: int
    unit: int
    position: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    step_dtype: torch.dtype
    sum_dtype: torch.dtype
    stepped: bool
    slots: list[Slot]
    state_names: dict[str, None] = field(default_factory=dict)
    num_elements: int = 0
    start: int = 0

    def key(self, kind: str) -> ShardKey:
        """The shard of one kind of state."""
        return ShardKey(self.unit, self.position, kind)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """The size of a shard of this part in ``dtype``."""
        return self.num_elements * dtype.itemsize

    @property
    def param_bytes(self) -> int:
        """The size of its gathered parameters."""
        return self.num_bytes(self.compute_dtype)

    @property
    def stop(self) -> int:
        """Where its parameters end in the gathered unit, in bytes."""
        return self.start + self.param_bytes

    def lay_out(self, num_slices: int = 1) -> None:
        """Give each slot its offset and the part its length, which can be cut into so many slices of whole pages."""
        end = 0
        for slot in self.slots:
            slot.offset = -(-end // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
            end = slot.offset + slot.num_elements
        aligned = PART_ALIGNMENT * num_slices
        self.num_elements = max(-(-end // aligned), 1) * aligned

    def cut(self, index: int, num_slices: int) -> Part:
        """One of equal slices, as a part of its own: the same slots in the same order, each with what it has there."""
        num_elements = self.num_elements // num_slices
        first = index * num_elements
        return dataclasses.replace(
            self,
            slots=[slot.cut(first, first + num_elements) for slot in self.slots],
            state_names=dict(self.state_names),
            num_elements=num_elements,
            start=self.start + first * self.compute_dtype.itemsize,
        )


@dataclass(frozen=True, slots=True)
class PartGradients:
    """The gradients of a part that wait for its step.

    Attributes:
        part: which.
        kind: the kind of shard that holds them.
        present: the slots that have one.
        scales: for a slot, what its gradient is multiplied by before it is stepped: tensors of no dimensions, one
            after the other.
        whole: of what the shard has the gradients, if that is more than this rank steps.
    """

    part: Part
    kind: str
    present: frozenset[int]
    scales: Mapping[int, Sequence[torch.Tensor]] = field(default_factory=dict)
    whole: Part | None = None

    def flat(self, shard: torch.Tensor) -> torch.Tensor:
        """The part's gradients in their shard: its length, in ``dtype``."""
        flat = shard.view(self.dtype)
        if self.whole is None:
            return flat
        first = (self.part.start - self.whole.start) // self.part.compute_dtype.itemsize
        return flat[first : first + self.part.num_elements]

    @property
    def dtype(self) -> torch.dtype:
        """What they are stored in."""
        return self.part.compute_dtype if self.kind == GRAD else self.part.sum_dtype

    @property
    def key(self) -> ShardKey:
        """Their shard."""
        return self.part.key(self.kind)

    @property
    def num_bytes(self) -> int:
        """The size of their shard."""
        return (self.whole or self.part).num_bytes(self.dtype)


@dataclass(slots=True, eq=False)
class Unit:
    """What is gathered together.

    Attributes:
        index: number among all units, in the order of the model's parameters.
        name: what users know it by.
        triggers: modules whose forward needs it, with their names.
        parts: its parts, in order.
        version: how many optimizer steps have changed it.
        forward_depth: how many forwards of the passage that runs use it: its triggers' and those that it is lent to.
        num_waiting: how many forwards of passages that wait for their turn do.
        num_readers: how many nodes of the graph are reading it.
        held_by: the holds of the backwards that would rather keep it gathered.
        buffer: the gathered parameters, ``None`` while released.
        versions: the parameters' version counters when it was last gathered, or else at start.
        handles: what stands for its memory in tensors that autograd has saved (``saved.py``) and has not let go.
    """

    index: int
    name: str
    triggers: list[tuple[str, nn.Module]]
    parts: list[Part]
    device: torch.device
    state: UnitState = UnitState.RELEASED
    version: int = 0
    forward_depth: int = 0
    num_waiting: int = 0
    num_readers: int = 0
    held_by: set[Any] = field(default_factory=set, repr=False)
    buffer: torch.Tensor | None = field(default=None, repr=False)
    versions: list[int] = field(default_factory=list, repr=False)
    handles: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet, repr=False)

    @property
    def slots(self) -> Iterator[Slot]:
        """All its parameters' slots, in order."""
        return (slot for part in self.parts for slot in part.slots)

    @property
    def is_in_use(self) -> bool:
        """Whether a forward or a node of the graph needs its memory now."""
        return self.forward_depth > 0 or self.num_waiting > 0 or self.num_readers > 0

    @property
    def is_idle(self) -> bool:
        """Whether it is gathered, and no forward and no backward would keep it."""
        return self.state is UnitState.GATHERED and not (self.forward_depth or self.num_waiting or self.held_by)

    def forget_users(self) -> None:
        """Nobody uses or holds it any more, whatever was interrupted."""
        self.forward_depth = self.num_waiting = self.num_readers = 0
        self.held_by.clear()

    @property
    def num_bytes(self) -> int:
        """Size of the gathered unit."""
        return self.parts[-1].stop if self.parts else 0

    def bind(self, buffer: torch.Tensor) -> None:
        """Make every parameter a view of ``buffer``: ``uint8``, shape ``(num_bytes,)``, on the device."""
        for part in self.parts:
            flat = buffer[part.start : part.stop].view(part.compute_dtype)
            for slot in part.slots:
                slot.param.data = slot.view(flat)
        self.note_versions()
        self.buffer = buffer
        self.state = UnitState.GATHERED

    def unbind(self) -> None:
        """Make every parameter a placeholder of its true shape."""
        self.buffer = None
        self.state = UnitState.RELEASED
        for part in self.parts:
            for slot in part.slots:
                self.leave(part, slot)

    def leave(self, part: Part, slot: Slot) -> None:
        """Put the placeholder into one parameter, which stays the object that the user and the optimizer hold."""
        if slot.stand_in is None:
            slot.stand_in = StandIn(slot.shape, part.compute_dtype, self.device)
        slot.param.data = slot.stand_in.tensor

    def restore(self) -> None:
        """Put new placeholders in the place of those that were written or replaced."""
        for slot in self.slots:
            slot.stand_in = None
        self.unbind()

    def written_parameter(self) -> str | None:
        """The name of a parameter that was written, converted or replaced through ``.data`` while it was away."""
        for part in self.parts:
            for slot in part.slots:
                if slot.stand_in is not None and not slot.stand_in.is_in(slot.param):
                    return slot.name
        return None

    def note_versions(self, only: Slot | None = None) -> None:
        """Changes in place are counted from now on: of all parameters, or of one."""
        if only is None:
            self.versions = [slot.param._version for slot in self.slots]
        else:
            self.versions[list(self.slots).index(only)] = only.param._version

    def changed_parameter(self) -> str | None:
        """The name of a parameter that was changed in place since the unit was last gathered."""
        for slot, version in zip(self.slots, self.versions, strict=True):
            if slot.param._version != version:
                return slot.name
        return None
