"""``Snapshot``: what a commit keeps beside the bytes of shards, and the layout that tells how to read these.

It is the ``engine`` part of a manifest (``store/manifest.py``). Everything in it that is not a plain number or name is
a document of ``documents.py``, whose tensors are in the commit's ``.safetensors`` file. Read without trust: what does
not have these types is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from torch import nn

from infinity.engine.formats import FormatOf, Master, Whole
from infinity.engine.states import StateFormatOf
from infinity.engine.substep import PartState
from infinity.engine.unit import PART_ALIGNMENT, CutSlot, Part, Slot, Unit
from infinity.errors import ManifestError
from infinity.store.manifest import Manifest

_MAX_ELEMENTS = 1 << 62
_MAX_WHOLE_ELEMENTS = 1 << 56
"""Of a parameter of which a rank has a piece: as many fit into an address space, in any dtype."""

_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
WeightsAs = Literal["whole", "master", "planes"]
StatesAs = Literal["full", "bf16", "int8"]
Stage = Literal[0, 1, 2, 3]


class _Record(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True)


class SlotLayout(_Record):
    """One parameter's place in the shards of its part (``unit.Slot``): all of it, or one rank's piece of it."""

    name: str
    shape: list[_Count]
    """The parameter's own, as ``stride``."""

    stride: list[_Count]
    offset: _Count
    start: _Count = 0
    """How many of the parameter's elements, as they lie in memory, come before those that are here."""

    count: _Count | None = None
    """How many of them are here; ``None``, and not written: all."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = write(self)
        if self.count is None:
            del document["start"], document["count"]
        return document


def _span(slot: SlotLayout) -> int:
    """How many elements it takes; each of them is one of the parameter's."""
    whole = _num_elements(slot)
    if whole > _MAX_WHOLE_ELEMENTS:
        raise ValueError(f"parameter {slot.name} has a shape that no tensor has")
    if slot.start + (slot.count or 0) > whole or (slot.count is None and slot.start):
        raise ValueError(
            f"parameter {slot.name}: elements {slot.start} to {slot.start + (slot.count or 0)} of {whole} there are not"
        )
    return whole if slot.count is None else slot.count


def _num_elements(slot: SlotLayout) -> int:
    """How many elements the parameter has; they lie without gaps."""
    if len(slot.shape) != len(slot.stride):
        raise ValueError(f"parameter {slot.name}: shape and stride differ in length")
    count, end = math.prod(slot.shape), 1
    if not count:
        if math.prod(max(size, 1) for size in slot.shape) >= _MAX_ELEMENTS:
            raise ValueError(f"parameter {slot.name} has a shape that no tensor has")
        return 0
    for stride, size in sorted(zip(slot.stride, slot.shape, strict=True)):
        if size > 1 and stride != end:
            raise ValueError(
                f"parameter {slot.name}: elements of shape {slot.shape} and stride {slot.stride} have gaps"
            )
        end *= size
    return count


class StateLayout(_Record):
    """One optimizer state of a part that is a shard, of kind ``state.<name>``."""

    dtype: str
    stored: StatesAs
    """How (``states.py``): ``full`` is exact."""

    slots: list[_Count]
    """Positions of the parameters that have it."""


class PartLayout(_Record):
    """A run of parameters whose shards have one layout (``unit.Part``)."""

    unit: _Count
    position: _Count
    dtype: str
    compute_dtype: str
    step_dtype: str
    stepped: bool
    weights: WeightsAs
    """How (``formats.py``): ``whole``: shard ``param`` in the compute dtype; ``master``: shard ``master`` in the step
    dtype, and ``param``; ``planes``: ``param`` and ``residual``, at times ``upper``."""

    num_elements: _Count
    slots: list[SlotLayout]
    states: dict[str, StateLayout]

    @model_validator(mode="after")
    def _check(self) -> PartLayout:
        for name in (self.dtype, self.compute_dtype, self.step_dtype, *(each.dtype for each in self.states.values())):
            torch_dtype(name)
        if not self.num_elements or self.num_elements % PART_ALIGNMENT:
            raise ValueError(f"expected elements of a multiple of {PART_ALIGNMENT}, got {self.num_elements}")
        if self.weights == "planes" and (self.compute_dtype, self.step_dtype) != ("bfloat16", "float32"):
            raise ValueError(f"planes are of float32 and bfloat16, not of {self.step_dtype} and {self.compute_dtype}")
        end = 0
        for slot in self.slots:
            if slot.offset < end:
                raise ValueError(f"parameter {slot.name} begins before the one before it ends")
            end = slot.offset + _span(slot)
        if end > self.num_elements:
            raise ValueError(f"parameter {self.slots[-1].name} ends behind the end of its part")
        for name, state in self.states.items():
            if any(position >= len(self.slots) for position in state.slots):
                raise ValueError(f"state {name} is that of a parameter that its part does not have")
        return self


class OptimizerState(_Record):
    """What the optimizer keeps beside shards."""

    class_name: str
    groups: list[dict[str, Any]]
    """Documents of its parameter groups, in which ``params`` are names."""

    small: dict[str, Any]
    """Documents of the states that are no shards (step counters, factored moments), by parameter."""


class Snapshot(_Record):
    """What a commit keeps beside the bytes of shards."""

    step: _Count
    """How many optimizer steps were taken, skipped ones included."""

    stage: Stage | None = None
    """What was divided among ranks (``Config.stage``); ``None``, and not written: there was one rank."""

    units: list[str]
    parts: list[PartLayout]
    tied: dict[str, str]
    """Further names of parameters that have several, each with the name that is in ``parts``."""

    buffers: dict[str, Any]
    """Documents of the model's buffers by name; those that are not persistent or have no value too."""

    persistent_buffers: list[str]
    """Those of them that ``state_dict()`` has."""

    extra_states: dict[str, Any] = Field(default_factory=dict)
    """Documents of what modules' ``get_extra_state()`` returned, by the names in ``state_dict()``."""

    optimizer: OptimizerState
    random: dict[str, Any]
    """Documents of the states of random generators: ``python``, ``numpy``, ``torch``, and the device's."""

    scaling: dict[str, Any]
    """A document of the loss scaler's state; empty where there is none."""

    tracked: dict[str, Any]
    """Documents of the state dicts of what the user tracks: schedulers, loaders, anything."""

    config: dict[str, Any]
    versions: dict[str, str]

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = write(self)
        if self.stage is None:
            del document["stage"]
        return document

    @model_validator(mode="after")
    def _check(self) -> Snapshot:
        names = [slot.name for part in self.parts for slot in part.slots]
        if len(set(names)) != len(names):
            raise ValueError("a parameter is named twice")
        for alias, name in self.tied.items():
            if name not in names or alias in names:
                raise ValueError(f"{alias} cannot be a further name of {name}")
        if missing := set(self.persistent_buffers) - set(self.buffers):
            raise ValueError(f"there is no buffer {min(missing)}")
        if any(part.unit >= len(self.units) for part in self.parts):
            raise ValueError("a part names a unit that there is not")
        if len({(part.unit, part.position) for part in self.parts}) != len(self.parts):
            raise ValueError("a part is there twice")
        return self


def snapshot_of(manifest: Manifest, path: Any) -> Snapshot:
    """The engine's part of a manifest.

    Args:
        manifest: of a commit.
        path: its file, for errors.

    Raises:
        ManifestError: it is not what an engine writes.
    """
    try:
        return Snapshot.model_validate(manifest.engine)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (UnicodeEncodeError, RecursionError) as error:
        reason = str(error)
    raise ManifestError(f"commit cannot be used: engine.{reason}", path=path)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as ``bfloat16``.

    Raises:
        ValueError: there is none.
    """
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype of torch is named {name!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Its name, as ``torch_dtype`` takes it."""
    return str(dtype).removeprefix("torch.")


def layout_of(
    part: Part, state: PartState, format_of: FormatOf, state_format_of: StateFormatOf, states_as: StatesAs
) -> PartLayout:
    """What a part's shards look like now.

    Args:
        part: which.
        state: what the optimizer knows of it.
        format_of: how its weights are stored.
        state_format_of: how its optimizer states are.
        states_as: ``Config.optimizer_states``.
    """
    stored = format_of(part)
    weights: WeightsAs = "whole" if isinstance(stored, Whole) else "master" if isinstance(stored, Master) else "planes"
    return PartLayout(
        unit=part.unit,
        position=part.position,
        dtype=dtype_name(part.dtype),
        compute_dtype=dtype_name(part.compute_dtype),
        step_dtype=dtype_name(part.step_dtype),
        stepped=part.stepped,
        weights=weights,
        num_elements=part.num_elements,
        slots=[_slot_layout(slot) for slot in part.slots],
        states={
            name: StateLayout(
                dtype=dtype_name(dtype),
                stored="full" if state_format_of(part, dtype).is_exact else states_as,
                slots=sorted(positions),
            )
            for name, (dtype, positions) in sorted(state.shards.items())
        },
    )


def _slot_layout(slot: Slot) -> SlotLayout:
    whole = slot.original
    layout = SlotLayout(name=slot.name, shape=list(whole.shape), stride=list(whole.stride), offset=slot.offset)
    if not isinstance(slot, CutSlot):
        return layout
    count = slot.num_elements
    return layout.model_copy(update={"start": slot.skipped if count else 0, "count": count})


def parts_of(snapshot: Snapshot) -> list[Part]:
    """Parts with the layout of a snapshot, whose parameters are placeholders on the meta device.

    With them everything that reads shards (``formats.py``, ``states.py``) works without the model.
    """
    parts = []
    for index, each in enumerate(snapshot.parts):
        compute, step = torch_dtype(each.compute_dtype), torch_dtype(each.step_dtype)
        slots = [_slot_of(slot, compute) for slot in each.slots]
        part = Part(
            index, each.unit, each.position, torch_dtype(each.dtype), compute, step, compute, each.stepped, slots
        )
        part.state_names = dict.fromkeys(each.states)
        part.num_elements = each.num_elements
        parts.append(part)
    return parts


def _slot_of(layout: SlotLayout, dtype: torch.dtype) -> Slot:
    param = nn.Parameter(torch.empty(layout.shape, dtype=dtype, device="meta"), requires_grad=False)
    whole = Slot(layout.name, param, torch.Size(layout.shape), tuple(layout.stride), layout.offset)
    if layout.count is None:
        return whole
    size = torch.Size([layout.count])
    return CutSlot(layout.name, param, size, (1,), layout.offset, whole=whole, skipped=layout.start)


def same_layout(snapshot: Snapshot, units: Sequence[Unit], layouts: Mapping[int, PartLayout]) -> bool:
    """Whether shards of a commit can serve as they are: units and parts are cut alike and stored alike.

    Args:
        snapshot: of the commit.
        units: of the engine.
        layouts: of its parts by index, with no states.
    """
    ours = [layout.model_copy(update={"states": {}}) for layout in layouts.values()]
    theirs = [layout.model_copy(update={"states": {}}) for layout in snapshot.parts]
    return ours == theirs and [unit.name for unit in units] == snapshot.units
