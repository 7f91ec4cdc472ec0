"""State directories made by hand, with all that one can hold, and the values that a reader must find in them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors

from infinity.engine.persistence.documents import Writer
from infinity.engine.persistence.snapshot import (
    OptimizerState,
    PartLayout,
    SlotLayout,
    Snapshot,
    StateLayout,
    StatesAs,
    WeightsAs,
    dtype_name,
    parts_of,
    torch_dtype,
)
from infinity.engine.planes import NO_EXCEPTIONS, Residuals, join, split, split_exactly
from infinity.engine.states import states_as
from infinity.engine.unit import MASTER, PARAM, RESIDUAL, SLOT_ALIGNMENT, UPPER, Part, state_kind
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
from infinity.store.shard import ShardKey

PAGE = 4096
STATE = "0123456789abcdef" * 2

Shape = tuple[int, ...]

ODDITIES: dict[str, Any] = {
    "note": ("a", 1),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False, True]),
    "factor": torch.arange(4.0).bfloat16(),
    "best": np.float32(2.5),
}
"""What an optimizer may keep of a parameter beside tensors of its shape."""


@dataclass
class Sketch:
    """A part that is to be.

    Attributes:
        unit: number of its unit.
        position: number within it.
        compute: the dtype that computes.
        step: the dtype that is stepped.
        weights: how they are stored.
        states: how the optimizer's are; ``None``: there are none.
        shapes: of its parameters, by name.
        wide: whether planes have a third.
    """

    unit: int
    position: int
    compute: torch.dtype
    step: torch.dtype
    weights: WeightsAs
    states: StatesAs | None
    shapes: Mapping[str, Shape]
    wide: bool = False


UNITS = ["embedding", "blocks.0", "(rest)"]
SKETCHES = [
    Sketch(0, 0, torch.bfloat16, torch.float32, "planes", "full", {"embedding.weight": (37, 24)}),
    Sketch(
        1,
        0,
        torch.bfloat16,
        torch.float32,
        "planes",
        "int8",
        {"blocks.0.up.weight": (96, 70), "blocks.0.up.bias": (96,), "blocks.0.none": (0, 5), "blocks.0.one": ()},
        wide=True,
    ),
    Sketch(1, 1, torch.float16, torch.float32, "master", "bf16", {"blocks.0.conv.weight": (8, 6, 10, 12)}),
    Sketch(2, 0, torch.float32, torch.float32, "whole", "full", {"norm.weight": (5,), "norm.bias": (5,)}),
    Sketch(2, 1, torch.bfloat16, torch.bfloat16, "whole", None, {"frozen.weight": (11, 3)}),
]
CHANNELS_LAST = "blocks.0.conv.weight"
TIED = {"head.weight": "embedding.weight"}
GROUPS: list[dict[str, Any]] = [
    {"lr": 0.1, "betas": (0.9, 0.95), "params": ["embedding.weight", "blocks.0.up.weight", "blocks.0.conv.weight"]},
    {"lr": float("inf"), "betas": (0.9, 0.95), "params": ["blocks.0.up.bias", "norm.weight", "blocks.0.one"]},
]


@dataclass
class Expected:
    """What a reader must find.

    Attributes:
        weights: at full precision.
        computing: in the dtype that computes.
        states: the optimizer's, by parameter.
    """

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    computing: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)


def layout_of(sketch: Sketch, held: set[str]) -> PartLayout:
    slots, end = [], 0
    for name, shape in sketch.shapes.items():
        like = torch.empty(shape, device="meta")
        if name == CHANNELS_LAST:
            like = like.to(memory_format=torch.channels_last)
        offset = -(-end // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        slots.append(SlotLayout(name=name, shape=list(shape), stride=list(like.stride()), offset=offset))
        end = offset + like.numel()
    large = [i for i, slot in enumerate(slots) if torch.Size(slot.shape).numel() > 1 and slot.name in held]
    has_states = sketch.states is not None and bool(large)
    return PartLayout(
        unit=sketch.unit,
        position=sketch.position,
        dtype=dtype_name(sketch.step),
        compute_dtype=dtype_name(sketch.compute),
        step_dtype=dtype_name(sketch.step),
        stepped=sketch.states is not None,
        weights=sketch.weights,
        num_elements=max(-(-end // PAGE), 1) * PAGE,
        slots=slots,
        states={
            name: StateLayout(dtype="float32", stored=sketch.states or "full", slots=large)
            for name in (("exp_avg", "exp_avg_sq") if has_states else ())
        },
    )


class StateWriter:
    """A state directory that gets commits.

    Args:
        directories: where data files are; the first gets the commits.
        sketches: its parts.
        groups: parameter groups of the optimizer.
        seed: of all values.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        sketches: Sequence[Sketch] = SKETCHES,
        groups: Sequence[Mapping[str, Any]] = GROUPS,
        seed: int = 0,
    ) -> None:
        self.directories = list(directories)
        self.sketches = list(sketches)
        self.groups = list(groups)
        held = {str(name) for group in groups for name in group["params"]}
        self.layouts = [layout_of(sketch, held) for sketch in sketches]
        self.random = torch.Generator().manual_seed(seed)
        self.expected: dict[int, Expected] = {}
        self.stored: dict[ShardKey, StoredShard] = {}
        self.ends = [0] * len(self.directories)
        self.names = [f"shards-{index + 0xABC0:016x}.bin" for index in range(len(self.directories))]
        for directory, name in zip(self.directories, self.names, strict=True):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (directory / name).touch()

    def write(self, number: int, *, changed: Sequence[int] | None = None) -> Manifest:
        """Commit: new values in the parts ``changed`` (all of them where there is no commit yet)."""
        before = self.expected.get(max(self.expected, default=-1), Expected())
        expected = Expected(dict(before.weights), dict(before.computing), dict(before.states))
        writer = Writer()
        buffers = {"norm.count": torch.tensor(number), "norm.scratch": torch.arange(3.0) + number}
        snapshot = self._snapshot(number, writer, buffers)
        for part, layout, sketch in zip(parts_of(snapshot), self.layouts, self.sketches, strict=True):
            if changed is None or part.index in changed:
                for kind, (dtype, shard) in self._shards(part, layout, sketch, expected).items():
                    self._store(part.key(kind), dtype_name(dtype), shard, number)
        small: dict[str, dict[str, Any]] = {name: {"step": torch.tensor(float(number))} for name in expected.states}
        small["blocks.0.up.bias"] = {**small.get("blocks.0.up.bias", {}), **ODDITIES}
        small["blocks.0.one"] = {"step": torch.tensor(float(number)), "exp_avg": torch.tensor(0.25)}
        for name, state in small.items():
            if any(name in group["params"] for group in self.groups):
                expected.states[name] = {**expected.states.get(name, {}), **state}
        snapshot = snapshot.model_copy(
            update={
                "optimizer": snapshot.optimizer.model_copy(
                    update={"small": {name: writer.write(each, name) for name, each in small.items()}}
                ),
            }
        )
        expected.weights |= {name: expected.weights[of] for name, of in TIED.items() if of in expected.weights}
        expected.computing |= {name: expected.computing[of] for name, of in TIED.items() if of in expected.weights}
        expected.weights["norm.count"] = expected.computing["norm.count"] = buffers["norm.count"]
        self.expected[number] = expected
        tensors = save_tensors(writer.tensors)
        (self.directories[0] / tensors_name(number)).write_bytes(tensors)
        manifest = Manifest(
            state=STATE,
            number=number,
            rank=0,
            world_size=1,
            time="2026-01-02T03:04:05+00:00",
            files=[
                StoredFile(name=name, num_bytes=end, directory=str(directory))
                for name, end, directory in zip(self.names, self.ends, self.directories, strict=True)
            ],
            shards=list(self.stored.values()),
            tensors=StoredTensors(num_bytes=len(tensors), checksum=long_checksum(tensors)),
            engine=snapshot.model_dump(mode="json"),
        )
        (self.directories[0] / manifest_name(number)).write_bytes(encode(manifest))
        return manifest

    def _snapshot(self, step: int, writer: Writer, buffers: Mapping[str, torch.Tensor]) -> Snapshot:
        names = {name for sketch in self.sketches for name in sketch.shapes}
        return Snapshot(
            step=step,
            units=UNITS,
            parts=self.layouts,
            tied={alias: name for alias, name in TIED.items() if name in names},
            buffers={name: writer.write(each, name) for name, each in buffers.items()},
            persistent_buffers=["norm.count"],
            optimizer=OptimizerState(
                class_name="AdamW",
                groups=[{key: writer.write(each, key) for key, each in group.items()} for group in self.groups],
                small={},
            ),
            random={"torch": writer.write(torch.get_rng_state(), "random"), "python": writer.write((3, (1, 2)), "r")},
            scaling={},
            tracked={"scheduler": writer.write({"last_epoch": step, "rates": [0.1, float("nan")]}, "tracked")},
            config={"precision": "bf16"},
            versions={"infinity": "0.1.0"},
        )

    def _shards(
        self, part: Part, layout: PartLayout, sketch: Sketch, expected: Expected
    ) -> dict[str, tuple[torch.dtype, torch.Tensor]]:
        full = torch.zeros(part.num_elements, dtype=part.step_dtype)
        for slot in part.slots:
            value = torch.randn(slot.shape, generator=self.random).to(part.step_dtype)
            if value.numel() > 4 and sketch.weights == "planes":
                bits = value.view(-1).view(torch.int32)
                bits[1] = (bits[1] & ~0x1FFFF) | 0x8000  # a tie that rounds down, which two planes do not give back
                if sketch.wide:
                    value.view(-1)[2] = torch.nan
            slot.view(full).copy_(value)
            expected.weights[slot.name] = value
            expected.computing[slot.name] = value.to(part.compute_dtype)
        shards = self._weights(full, part, sketch)
        for name, state in layout.states.items():
            format_ = states_as(state.stored, [part])(part, torch_dtype(state.dtype))
            shard = torch.zeros(format_.num_bytes(part), dtype=torch.uint8)
            for position in state.slots:
                slot = part.slots[position]
                value = torch.randn(slot.shape, generator=self.random)
                format_.write(part, position, shard, value if name == "exp_avg" else value.square())
                copied = format_.copy(part, position, shard)
                expected.states[slot.name] = {**expected.states.get(slot.name, {}), name: copied}
            shards[state_kind(name)] = torch.float32, shard
        return shards

    def _weights(self, full: torch.Tensor, part: Part, sketch: Sketch) -> dict[str, tuple[torch.dtype, torch.Tensor]]:
        param = full.to(part.compute_dtype)
        shards = {PARAM: (part.compute_dtype, param.view(torch.uint8))}
        if sketch.weights == "master":
            shards[MASTER] = part.step_dtype, full.view(torch.uint8)
        if sketch.weights == "planes":
            shard = torch.zeros(Residuals.num_bytes(part.num_elements), dtype=torch.uint8)
            residuals = Residuals(shard, part.num_elements)
            if sketch.wide:
                upper = torch.zeros(part.num_elements, dtype=torch.int16)
                split_exactly(full, param, residuals.plane, upper)
                shards[UPPER] = torch.int16, upper.view(torch.uint8)
            else:
                residuals.exceptions = split(full, param, residuals.plane)
                assert residuals.exceptions.indices.size
                without = torch.empty_like(full)
                join(param, residuals.plane, NO_EXCEPTIONS, without)
                assert not torch.equal(without, full), "the table is for nothing"
            shards[RESIDUAL] = torch.uint8, shard
        return shards

    def _store(self, key: ShardKey, dtype: str, shard: torch.Tensor, number: int) -> None:
        """Write a shard where nothing is yet: cut in up to three, over all files."""
        content = shard.numpy().tobytes()
        num_pages = len(content) // PAGE
        assert num_pages * PAGE == len(content)
        pieces = min(num_pages, 1 + (len(self.stored) + number) % 3)
        cuts = [index * num_pages // pieces * PAGE for index in range(pieces + 1)]
        extents = []
        for index, (start, stop) in enumerate(itertools.pairwise(cuts)):
            file = (index + len(self.stored)) % len(self.directories)
            path, offset = self.directories[file] / self.names[file], self.ends[file] + PAGE * (index % 2)
            with path.open("r+b") as opened:
                os.pwrite(opened.fileno(), content[start:stop], offset)
            extents.append(
                StoredExtent(file=file, offset=offset, num_bytes=stop - start, checksum=checksum(content[start:stop]))
            )
            self.ends[file] = offset + stop - start
        self.stored[key] = StoredShard(
            unit=key.unit, part=key.part, kind=key.kind, dtype=dtype, generation=number, extents=extents
        )


def flat_bits(tensor: torch.Tensor) -> bytes:
    """A tensor's values as bytes, in the order of its indices."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
