"""``JoiningReader``: whole values of parameters of which each rank has a piece. All ranks read the same in order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from infinity.engine.collectives import Collectives
from infinity.engine.persistence.documents import Reader, Writer
from infinity.engine.ranks.lane import Lane
from infinity.engine.substep import PartState
from infinity.engine.unit import CutSlot, Part, Slot
from infinity.engine.weights import WeightReader


class JoiningReader(WeightReader):
    """A reader whose every call is one of all ranks, which get the same.

    Args:
        whole: all parts, whole.
        lane: runs the collectives.
        collectives: the lane's.
        arguments: as for ``WeightReader``.
    """

    def __init__(
        self, *arguments: Any, whole: Sequence[Part], lane: Lane, collectives: Collectives, **others: Any
    ) -> None:
        super().__init__(*arguments, **others)
        self._lane = lane
        self._collectives = collectives
        self._sizes = {}
        for part in whole:
            cuts = [part.cut(rank, collectives.num_ranks) for rank in range(collectives.num_ranks)]
            for position, slot in enumerate(part.slots):
                self._sizes[slot.param] = [cut.slots[position].num_elements for cut in cuts]

    def join(self, slot: Slot, piece: torch.Tensor) -> torch.Tensor:
        """See ``WeightReader``."""
        if not isinstance(slot, CutSlot):
            return piece
        what = f"reading {slot.name}"
        joined = self._lane.submit(what, functools.partial(self._join, slot, piece, what))
        with self._lane.awaited():
            return self._loop.wait(joined)

    def _join(self, slot: Slot, piece: torch.Tensor, what: str) -> torch.Tensor:
        """On the lane."""
        flat, end, sizes = piece.new_empty(slot.original.num_elements), 0, self._sizes[slot.param]
        for rank, size in enumerate(sizes):
            there = flat[end : end + size]
            if rank == self._collectives.rank:
                there.copy_(piece)
            self._collectives.broadcast(there, source=rank, phase=what)
            end += size
        return flat.as_strided(slot.original.shape, slot.original.stride)

    def _read_state(self, part: Part, slot: Slot, state: PartState) -> dict[str, Any]:
        if not isinstance(slot, CutSlot):
            return super()._read_state(part, slot, state)
        own = super()._read_state(part, slot, state)
        pieces = {
            name: own.pop(name)
            for name, (_, positions) in state.shards.items()
            if part.slots.index(slot) in positions and name in own
        }
        owner = next((rank for rank, size in enumerate(self._sizes[slot.param]) if size), 0)
        writer = Writer()
        told = [
            {name: str(piece.dtype).removeprefix("torch.") for name, piece in pieces.items()},
            writer.write(own, f"the optimizer's state of {slot.name}"),
            {name: _told(tensor) for name, tensor in writer.tensors.items()},
        ]
        what = f"reading the optimizer's state of {slot.name}"
        is_owner = owner == self._collectives.rank
        exchanged = self._lane.submit(what, lambda: self._collectives.exchange(told if is_owner else None, what))
        with self._lane.awaited():
            said: list[Any] = self._loop.wait(exchanged)
        dtypes, document, tensors = self._collectives.sharing(said)[owner]
        reader = Reader({name: _heard(*tensor) for name, tensor in tensors.items()})
        small: dict[str, Any] = reader.read(document, f"the optimizer's state of {slot.name}")
        empty = {name: torch.empty(0, dtype=getattr(torch, dtype)) for name, dtype in dtypes.items()}
        return {**small, **{name: self.join(slot, pieces.get(name, empty[name])) for name in dtypes}}


def _told(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().contiguous().view(-1)
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), flat.view(torch.uint8).tolist()]


def _heard(dtype: str, shape: Sequence[int], content: Sequence[int]) -> torch.Tensor:
    return torch.tensor(content, dtype=torch.uint8).view(getattr(torch, dtype)).view(torch.Size(shape))
