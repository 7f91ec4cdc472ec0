"""Checkpoints of several ranks made by hand, of any number and stage, and the values that a reader must find there."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import nn

from infinity.engine.formats import Master, WeightFormat, Whole
from infinity.engine.persistence.documents import Writer
from infinity.engine.persistence.snapshot import (
    OptimizerState,
    PartLayout,
    Snapshot,
    Stage,
    StatesAs,
    WeightsAs,
    dtype_name,
    layout_of,
)
from infinity.engine.planar import with_planes
from infinity.engine.planes import Residuals, split
from infinity.engine.shadow import is_shard
from infinity.engine.states import states_as
from infinity.engine.substep import PartState
from infinity.engine.unit import MASTER, PARAM, RESIDUAL, CutSlot, Part, Slot, state_kind
from infinity.store.manifest import (
    Manifest,
    StoredExtent,
    StoredFile,
    StoredShard,
    StoredTensors,
    checksum,
    encode,
    long_checksum,
    manifest_name,
    tensors_name,
)
from infinity.store.owner import OWNER
from infinity.store.partial import part_name

_KEY = ("unit", "part", "kind")
STATE = "fedcba9876543210" * 2
Tensors = dict[str, torch.Tensor]


@dataclass
class Group:
    """Parameters that are stored alike, as one part.

    Attributes:
        weights: how they are stored.
        states: how the optimizer's states are; ``None``: it does not hold them.
        params: their values at full precision, by name.
    """

    weights: WeightsAs
    states: StatesAs | None
    params: Tensors

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of what computes, and of what is stepped."""
        return (torch.float32 if self.weights == "whole" else torch.bfloat16), torch.float32


@dataclass
class Model:
    """What is stored.

    Attributes:
        groups: its parts.
        states: of the optimizer, by parameter: whole values, and small ones.
        buffers: by name.
        step: how many steps it has taken.
    """

    groups: list[Group]
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    step: int = 7

    @property
    def params(self) -> Tensors:
        """All, by name."""
        return {name: value for group in self.groups for name, value in group.params.items()}


SHAPES: list[tuple[int, ...]] = [
    *((), (0, 3), (1,), (2,), (127,), (4097,), (8193,), (12289,)),
    *((64, 64), (129, 33), (90, 130), (3, 5, 7, 9)),
]
"""Hard to divide."""


def model_of(seed: int, states: StatesAs | None = None) -> Model:
    """Parameters of sizes that are hard to divide, with values at random."""
    draw, values = random.Random(seed), torch.Generator().manual_seed(seed)
    model, number = Model([]), 0
    for index in range(draw.randrange(1, 4)):
        as_: WeightsAs = draw.choice(["whole", "master", "planes"])
        some: list[StatesAs | None] = ["full", "int8", "bf16"]
        stored = draw.choice([*some, None] if as_ == "whole" else some)
        group = Group(as_, states or stored, {})
        for _ in range(draw.randrange(1, 7)):
            shape = draw.choice(SHAPES)
            value = torch.randn(shape, generator=values)
            if len(shape) == 4 and draw.random() < 0.7:
                value = value.to(memory_format=torch.channels_last)
            group.params[f"part{index}.{number}"] = value
            number += 1
        model.groups.append(group)
        for name, value in group.params.items() if group.states else ():
            exp_avg = torch.empty_like(value).copy_(torch.randn(value.shape, generator=values))
            exp_avg_sq = torch.empty_like(value).copy_(torch.rand(value.shape, generator=values))
            model.states[name] = {"step": torch.tensor(float(number)), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    model.buffers = {"count": torch.tensor(seed), "mean": torch.randn(3, generator=values)}
    return model


def write_ranks(
    root: Path, model: Model, num_ranks: int, stage: Stage, *, number: int = 3, num_slices: int | None = None
) -> list[Path]:
    """Write what ``save_checkpoint`` writes; returns the directories of the ranks, which repeat so many slices."""
    directories = [root] if num_ranks == 1 else [root / part_name(rank, num_ranks) for rank in range(num_ranks)]
    for rank, directory in enumerate(directories):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / OWNER).touch()
        _write(directory, model, rank, num_ranks, stage, number, num_slices or num_ranks)
    return directories


def stored_parts(model: Model, rank: int, num_ranks: int, stage: int) -> list[Part]:
    """The parts of one rank."""
    parts = []
    for index, group in enumerate(model.groups):
        compute, step = group.dtypes
        slots = [
            Slot(name, nn.Parameter(value, requires_grad=False), value.shape, value.stride(), 0)
            for name, value in group.params.items()
        ]
        part = Part(index, 0, index, step, compute, step, compute, group.states is not None, slots)
        part.lay_out(num_ranks)
        parts.append(part.cut(rank, num_ranks) if stage and num_ranks > 1 else part)
    return parts


def _write(
    directory: Path, model: Model, rank: int, num_ranks: int, stage: Stage, number: int, num_slices: int
) -> None:
    parts, writer = stored_parts(model, rank % num_slices, num_slices, stage), Writer()
    layouts: list[PartLayout] = []
    shards: dict[Any, tuple[str, torch.Tensor]] = {}
    small: dict[str, Any] = {}
    planes = with_planes(parts)
    for part, group in zip(parts, model.groups, strict=True):
        format_: WeightFormat = {"whole": Whole(), "master": Master(), "planes": planes(part)}[group.weights]
        full = torch.zeros(part.num_elements, dtype=torch.float32)
        for slot in part.slots:
            slot.view(full).copy_(slot.take(group.params[slot.name]))
        for kind, (dtype, shard) in _weights(full, part, group).items():
            shards[part.key(kind)] = dtype_name(dtype), shard
        state, of = PartState(), states_as(group.states or "full", parts)
        for position, slot in enumerate(part.slots):
            if slot.is_left_out:
                continue
            for name, value in model.states.get(slot.name, {}).items():
                piece = value if name == "step" else slot.take(value)
                if is_shard(piece, slot):
                    state.shards.setdefault(name, (torch.float32, set()))[1].add(position)
                    shards.setdefault(
                        part.key(state_kind(name)),
                        ("float32", torch.zeros(of(part, torch.float32).num_bytes(part), dtype=torch.uint8)),
                    )
                    of(part, torch.float32).write(part, position, shards[part.key(state_kind(name))][1], piece)
                else:
                    state.small[position][name] = piece.clone()
            if state.small.get(position):
                small[slot.name] = writer.write(dict(state.small[position]), slot.name)
        layouts.append(layout_of(part, state, _always(format_), of, group.states or "full"))
    snapshot = Snapshot(
        step=model.step,
        stage=stage if num_ranks > 1 else None,
        units=["(rest)"],
        parts=layouts,
        tied={},
        buffers={name: writer.write(each, name) for name, each in model.buffers.items()},
        persistent_buffers=list(model.buffers),
        optimizer=OptimizerState(
            class_name="AdamW",
            groups=[{"lr": writer.write(0.1, "lr"), "params": [*model.states]}],
            small=small,
        ),
        random={"torch": writer.write(torch.full((3,), rank), "random")},
        scaling={},
        tracked={"loader": writer.write({"position": 100 + rank}, "tracked")},
        config={},
        versions={},
    )
    _commit(directory, snapshot, writer, shards, rank, num_ranks, number)


def _always(format_: WeightFormat) -> Callable[[Part], WeightFormat]:
    return lambda _: format_


def _commit(
    directory: Path,
    snapshot: Snapshot,
    writer: Writer,
    shards: Mapping[Any, tuple[str, torch.Tensor]],
    rank: int,
    num_ranks: int,
    number: int,
) -> None:
    name, end = f"shards-{rank * 1000 + number:016x}.bin", 0
    stored: list[StoredShard] = []
    with (directory / name).open("wb") as file:
        for key, (dtype, shard) in sorted(shards.items()):
            content = shard.numpy().tobytes()
            half = len(content) // 2 // 4096 * 4096
            extents = []
            for piece in filter(None, (content[:half], content[half:])):
                file.write(piece)
                extents.append(StoredExtent(file=0, offset=end, num_bytes=len(piece), checksum=checksum(piece)))
                end += len(piece)
            stored.append(
                StoredShard(dtype=dtype, generation=number, extents=extents, **dict(zip(_KEY, key, strict=True)))
            )
    tensors = save_tensors(writer.tensors)
    (directory / tensors_name(number)).write_bytes(tensors)
    manifest = Manifest(
        state=STATE,
        number=number,
        rank=rank,
        world_size=num_ranks,
        time="2026-01-02T03:04:05+00:00",
        files=[StoredFile(name=name, num_bytes=end, directory=str(directory))],
        shards=stored,
        tensors=StoredTensors(num_bytes=len(tensors), checksum=long_checksum(tensors)),
        engine=snapshot.model_dump(mode="json"),
    )
    (directory / manifest_name(number)).write_bytes(encode(manifest))


def _weights(full: torch.Tensor, part: Part, group: Group) -> dict[str, tuple[torch.dtype, torch.Tensor]]:
    if group.weights == "whole":
        return {PARAM: (torch.float32, full.view(torch.uint8))}
    param = full.to(torch.bfloat16)
    shards = {PARAM: (torch.bfloat16, param.view(torch.uint8))}
    if group.weights == "master":
        shards[MASTER] = torch.float32, full.view(torch.uint8)
    else:
        shard = torch.zeros(Residuals.num_bytes(part.num_elements), dtype=torch.uint8)
        residuals = Residuals(shard, part.num_elements)
        residuals.exceptions = split(full, param, residuals.plane)
        shards[RESIDUAL] = torch.uint8, shard
    return shards


def expected_states(model: Model, num_ranks: int, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """What a reader must find of the optimizer's states: as they are, or what each rank's packing gives back."""
    found = {name: {each: value.clone() for each, value in state.items()} for name, state in model.states.items()}
    for rank in range(num_ranks if stage else 1):
        parts = stored_parts(model, rank, num_ranks, stage)
        for part, group in zip(parts, model.groups, strict=True):
            format_ = states_as(group.states or "full", parts)(part, torch.float32)
            for position, slot in enumerate(part.slots):
                for name in ("exp_avg", "exp_avg_sq") if slot.name in model.states and not slot.is_left_out else ():
                    piece = slot.take(model.states[slot.name][name])
                    if not is_shard(piece, slot):
                        continue
                    shard = torch.zeros(format_.num_bytes(part), dtype=torch.uint8)
                    format_.write(part, position, shard, piece)
                    start = slot.skipped if isinstance(slot, CutSlot) else 0
                    target = found[slot.name][name].as_strided((slot.original.num_elements,), (1,))
                    copied = format_.copy(part, position, shard)
                    flat = copied.as_strided((slot.num_elements,), (1,))
                    target[start : start + slot.num_elements] = flat
    return found
