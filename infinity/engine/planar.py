"""Planes: bf16 parameters and residuals (``planes.py``) in place of bf16 parameters and fp32 master weights.

It keeps the contract's promise, the same weights to the bit, also where two planes do not do. If there are more
exceptions than the table behind the residuals holds, the part's new version is *wide*: a third shard has the exact
upper halves of the weights, which with the low ones are all of their bits, and the parameters are only their rounding.
The third shard goes at the first step whose result fits the table. Whether it exists is the only record of that.

Assumed: nobody reads a part's planes between the ``pin`` and the ``release`` of whoever changes them. And bytes between
two parameters are zero in each plane, from the first values on, so that they are never exceptions.

Rejected: a fp32 shard instead of the third plane (its key would replace the residuals', and NVMe would need room for
both: the extents of a deleted shard stay); exceptions in memory of their own (outside the budget).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from infinity.engine.formats import (
    Compute,
    FormatOf,
    NewWeights,
    OpenWeights,
    Pins,
    Run,
    Scratch,
    Shelf,
    WeightFormat,
    flat_of,
    runs_of,
    scratch_bytes,
    with_masters,
)
from infinity.engine.planes import (
    NO_EXCEPTIONS,
    Exceptions,
    Residuals,
    copy_uppers,
    join,
    join_exactly,
    joined,
    split,
    split_exactly,
)
from infinity.engine.unit import PARAM, RESIDUAL, SCRATCH, UPPER, Part, Slot
from infinity.io.tasks import gather_all
from infinity.store.store import TieredStore

_PIECE = 1 << 20


class _Planes(WeightFormat):
    """Two planes of 16 bits, and at times a third.

    Args:
        scratch_bytes: the memory in which a step makes the weights of a run.
    """

    def __init__(self, scratch_bytes: int) -> None:
        self._scratch_bytes = scratch_bytes

    def shards(self, part: Part) -> dict[str, int]:
        return {PARAM: part.param_bytes, RESIDUAL: Residuals.num_bytes(part.num_elements)}

    def at_most(self, part: Part) -> dict[str, int]:
        return {**self.shards(part), UPPER: part.param_bytes}

    def in_step(self, part: Part) -> dict[str, int]:
        return {**self.at_most(part), SCRATCH: self._scratch_bytes}

    def read_by_step(self, part: Part) -> Sequence[str]:
        return [PARAM, RESIDUAL, UPPER]

    def open(self, store: TieredStore, part: Part, owner: str) -> OpenWeights:
        return _OpenPlanes(Pins(store, part, owner), Scratch(store, SCRATCH, self._scratch_bytes, owner))

    def create(self, store: TieredStore, part: Part, owner: str) -> NewWeights:
        return _NewPlanes(Pins(store, part, owner), self.shards(part))

    def read(self, part: Part, slot: Slot, shelf: Shelf) -> torch.Tensor:
        # One shard after the other: a reader that waits holds nothing.
        place = slice(slot.offset, slot.offset + slot.num_elements)

        def low_halves(shard: torch.Tensor) -> tuple[torch.Tensor, Exceptions]:
            residuals = Residuals(shard, part.num_elements)
            return residuals.plane[place].clone(), residuals.exceptions.within(place.start, place.stop)

        weights = torch.empty(slot.num_elements, dtype=torch.float32)
        residual, exceptions = shelf.look(RESIDUAL, low_halves)
        if UPPER in shelf:
            upper = shelf.look(UPPER, lambda shard: shard.view(torch.int16)[place].clone())
            join_exactly(upper, residual, weights)
        else:
            param = shelf.look(PARAM, lambda shard: shard.view(torch.bfloat16)[place].clone())
            join(param, residual, exceptions, weights)
        return weights.as_strided(slot.shape, slot.stride)


class _Writer:
    """Writes a part's planes piece by piece, in order; ``PARAM`` and ``RESIDUAL`` are pinned, ``UPPER`` may be.

    ``write`` and ``fill`` compute.

    Attributes:
        wide: whether it writes the third plane too.
    """

    def __init__(self, pins: Pins) -> None:
        self.wide = False
        self._pins = pins
        self._found: list[tuple[int, Exceptions]] = []
        self._num_found = 0
        self._stop = 0

    def write(self, start: int, weights: torch.Tensor) -> bool:
        """Write fp32 weights, shape ``(n,)``, from an element on; false where there are too many exceptions."""
        place = slice(start, start + weights.numel())
        param, residual = params_of(self._pins)[place], residuals_of(self._pins).plane[place]
        if self.wide:
            split_exactly(weights, param, residual, uppers_of(self._pins)[place])
            return True
        found = split(weights, param, residual)
        if self._num_found + found.indices.size > residuals_of(self._pins).capacity:
            return False
        self._found.append((start, found))
        self._num_found += found.indices.size
        self._stop = place.stop
        return True

    async def widen(self, compute: Compute) -> None:
        """Go on with three planes; the third gets what has been written already."""
        assert not self.wide
        is_new = UPPER not in self._pins.shards
        if is_new:
            await self._pins.put(UPPER, self._pins.part.param_bytes)
        await compute(lambda: self._fill(is_new=is_new))
        self.wide = True

    def _fill(self, *, is_new: bool) -> None:
        uppers, exceptions = uppers_of(self._pins), joined(self._found)
        if is_new:
            uppers.zero_()
        weights = torch.empty(min(self._stop, _PIECE), dtype=torch.float32)
        for start in range(0, self._stop, _PIECE):
            stop = min(start + _PIECE, self._stop)
            piece, place = weights[: stop - start], slice(start, stop)
            within = exceptions.within(start, stop)
            join(params_of(self._pins)[place], residuals_of(self._pins).plane[place], within, piece)
            copy_uppers(piece, uppers[place])
        self._found.clear()

    def end(self) -> None:
        """All is written: the table too."""
        residuals_of(self._pins).exceptions = joined(self._found)


class _OpenPlanes(OpenWeights):
    def __init__(self, pins: Pins, scratch: Scratch) -> None:
        self.runs = runs_of(pins.part)
        self._pins = pins
        self._scratch = scratch
        self._writer = _Writer(pins)
        self._was_wide = UPPER in pins
        self._exceptions = NO_EXCEPTIONS

    @property
    def memory(self) -> Iterable[torch.Tensor]:
        return [self._scratch.memory, *self._pins.shards.values()]

    async def pin(self) -> None:
        await self._scratch.take()
        await gather_all(self._pins.fetch(kind) for kind in (RESIDUAL, UPPER if self._was_wide else PARAM))
        if self._was_wide:
            await self._pins.put(PARAM, self._pins.part.param_bytes)
        self._exceptions = residuals_of(self._pins).exceptions

    def read(self, run: Run) -> torch.Tensor:
        place = slice(run.start, run.stop)
        weights = self._scratch.memory.view(torch.float32)[: run.stop - run.start]
        residual = residuals_of(self._pins).plane[place]
        if self._was_wide:
            join_exactly(uppers_of(self._pins)[place], residual, weights)
        else:
            join(params_of(self._pins)[place], residual, self._exceptions.within(run.start, run.stop), weights)
        return weights

    def write(self, run: Run, weights: torch.Tensor) -> bool:
        return self._writer.write(run.start, weights)

    async def widen(self, compute: Compute) -> None:
        await self._writer.widen(compute)

    async def release(self, *, changed: bool) -> None:
        if changed:
            self._writer.end()
        self._scratch.give_back()
        if changed and UPPER in self._pins.shards and not self._writer.wide:
            await self._pins.discard(UPPER)
        self._pins.release_all(dirty=changed)


class _NewPlanes(NewWeights):
    def __init__(self, pins: Pins, sizes: Mapping[str, int]) -> None:
        self._pins = pins
        self._sizes = sizes
        self._writer = _Writer(pins)

    async def pin(self) -> None:
        for kind, num_bytes in self._sizes.items():
            await self._pins.put(kind, num_bytes)

    def write(self, position: int, value: torch.Tensor) -> bool:
        slot = self._pins.part.slots[position]
        if position == 0:
            for shard in self._pins.shards.values():
                shard.zero_()
        return self._writer.write(slot.offset, flat_of(slot, value))

    async def widen(self, compute: Compute) -> None:
        await self._writer.widen(compute)

    async def release(self, *, changed: bool) -> None:
        if changed:
            self._writer.end()
        self._pins.release_all(dirty=changed)


def params_of(pins: Pins) -> torch.Tensor:
    """The pinned parameters, as ``bf16``."""
    return pins.shards[PARAM].view(torch.bfloat16)


def uppers_of(pins: Pins) -> torch.Tensor:
    """The pinned upper halves, as ``int16``."""
    return pins.shards[UPPER].view(torch.int16)


def residuals_of(pins: Pins) -> Residuals:
    """The pinned residuals."""
    return Residuals(pins.shards[RESIDUAL], pins.part.num_elements)


def with_planes(parts: Sequence[Part]) -> FormatOf:
    """Planes for what is stepped in fp32 and computes in bf16."""
    planes = _Planes(scratch_bytes(parts))

    def of(part: Part) -> WeightFormat:
        is_pair = (part.compute_dtype, part.step_dtype) == (torch.bfloat16, torch.float32)
        return planes if part.stepped and is_pair else with_masters(part)

    return of
