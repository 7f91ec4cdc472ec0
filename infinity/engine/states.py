"""How the optimizer's states are stored, as one contract with an object for each way.

``Exact``: as the optimizer made them, and stepped where they lie.
``Packed``: fp32 states in fewer bytes (``codecs.py``), made into fp32 for a step, one run of parameters at a time, in
    scratch memory that is leased like a shard. Not the same numbers: ``Config.optimizer_states`` says so.

A packed shard has the codes of all elements, then the scales of each parameter's blocks, then, as they are, the states
of parameters of fewer than ``PACKED_ELEMENTS``: biases and norms, which take little room and matter much.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from infinity.engine.codecs import Blockwise, Codec, Rounded
from infinity.engine.formats import Run, flat_of, scratch_bytes
from infinity.engine.unit import SCRATCH, Part, Slot
from infinity.io.memory import PAGE_BYTES, round_up

PACKED_ELEMENTS = 4096
"""The smallest parameter whose states are packed."""


def scratch_kind(name: str) -> str:
    """The kind of memory in which one of the optimizer's states is made."""
    return f"{SCRATCH}.{name}"


class StateFormat(ABC):
    """One way to store a state of a part's parameters. Its methods compute."""

    @abstractmethod
    def num_bytes(self, part: Part) -> int:
        """The size of the shard."""

    @property
    def scratch_bytes(self) -> int:
        """The memory that a step needs beside the shard, the same for all parts."""
        return 0

    @property
    def is_exact(self) -> bool:
        """Whether its elements are those that the optimizer made."""
        return False

    @abstractmethod
    def read(
        self, part: Part, position: int, shard: torch.Tensor, run: Run, scratch: torch.Tensor | None
    ) -> torch.Tensor:
        """The state of a slot, to be changed in place and then written: the parameter's shape and stride.

        Args:
            part: whose.
            position: the slot.
            shard: ``uint8``, shape ``(num_bytes(part),)``.
            run: the run to which the slot belongs.
            scratch: ``uint8``, shape ``(scratch_bytes,)``; each slot of a run has its own place in it.
        """

    @abstractmethod
    def write(self, part: Part, position: int, shard: torch.Tensor, value: torch.Tensor) -> None:
        """Store the state of a slot: the parameter's shape; perhaps what ``read`` gave."""

    @abstractmethod
    def copy(self, part: Part, position: int, shard: torch.Tensor) -> torch.Tensor:
        """A copy of the state of a slot, of the parameter's shape and stride."""


StateFormatOf = Callable[[Part, torch.dtype], StateFormat]
"""The format of a part's states of a dtype."""


class Exact(StateFormat):
    """States as they are.

    Args:
        dtype: theirs.
    """

    is_exact = True

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def num_bytes(self, part: Part) -> int:
        """See ``StateFormat``."""
        return part.num_bytes(self._dtype)

    def read(
        self, part: Part, position: int, shard: torch.Tensor, run: Run, scratch: torch.Tensor | None
    ) -> torch.Tensor:
        """See ``StateFormat``: a view of the shard."""
        return part.slots[position].view(shard.view(self._dtype))

    def write(self, part: Part, position: int, shard: torch.Tensor, value: torch.Tensor) -> None:
        """See ``StateFormat``."""
        _put(value, part.slots[position].view(shard.view(self._dtype)))

    def copy(self, part: Part, position: int, shard: torch.Tensor) -> torch.Tensor:
        """See ``StateFormat``."""
        return part.slots[position].view(shard.view(self._dtype)).clone()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot's states are in a packed shard, in bytes.

    Attributes:
        codes: of a large parameter, the codes; of a small one, the states themselves.
        scales: what the codes are relative to.
        is_packed: whether the parameter is large.
    """

    codes: slice
    scales: slice
    is_packed: bool


class Packed(StateFormat):
    """fp32 states of large parameters as codes.

    Args:
        codec: what makes them.
        scratch_bytes: the memory in which a step makes the states of a run.

    Attributes:
        codec: what makes them.
    """

    def __init__(self, codec: Codec, scratch_bytes: int) -> None:
        self.codec = codec
        self._scratch_bytes = scratch_bytes
        self._places: dict[int, list[Place]] = {}  # by part

    def num_bytes(self, part: Part) -> int:
        """See ``StateFormat``."""
        ends = [end for place in self.places_of(part) for end in (place.codes.stop, place.scales.stop)]
        return round_up(max(part.num_elements * self.codec.code_bytes, *ends), PAGE_BYTES)

    @property
    def scratch_bytes(self) -> int:
        """See ``StateFormat``."""
        return self._scratch_bytes

    def read(
        self, part: Part, position: int, shard: torch.Tensor, run: Run, scratch: torch.Tensor | None
    ) -> torch.Tensor:
        """See ``StateFormat``."""
        slot, place = part.slots[position], self.places_of(part)[position]
        if not place.is_packed:
            return _shaped(slot, shard[place.codes].view(torch.float32))
        assert scratch is not None
        start = slot.offset - run.start
        out = scratch.view(torch.float32)[start : start + slot.num_elements]
        self.codec.decode(shard[place.codes], shard[place.scales].view(torch.float32), out)
        return _shaped(slot, out)

    def write(self, part: Part, position: int, shard: torch.Tensor, value: torch.Tensor) -> None:
        """See ``StateFormat``."""
        slot, place = part.slots[position], self.places_of(part)[position]
        if place.is_packed:
            scales = shard[place.scales].view(torch.float32)
            self.codec.encode(flat_of(slot, value), shard[place.codes], scales)
        else:
            _put(value, _shaped(slot, shard[place.codes].view(torch.float32)))

    def copy(self, part: Part, position: int, shard: torch.Tensor) -> torch.Tensor:
        """See ``StateFormat``."""
        slot, place = part.slots[position], self.places_of(part)[position]
        if not place.is_packed:
            return _shaped(slot, shard[place.codes].view(torch.float32)).clone()
        out = torch.empty(slot.num_elements, dtype=torch.float32)
        self.codec.decode(shard[place.codes], shard[place.scales].view(torch.float32), out)
        return _shaped(slot, out)

    def places_of(self, part: Part) -> list[Place]:
        """Where the states of each slot are."""
        if part.index not in self._places:
            self._places[part.index] = self._lay_out(part)
        return self._places[part.index]

    def _lay_out(self, part: Part) -> list[Place]:
        places, end, size = [], part.num_elements * self.codec.code_bytes, self.codec.code_bytes
        for slot in part.slots:
            is_packed = slot.num_elements >= PACKED_ELEMENTS
            if is_packed:
                codes = slice(slot.offset * size, (slot.offset + slot.num_elements) * size)
                beside = 4 * self.codec.num_scales(slot.num_elements)
            else:
                codes = slice(end, end + 4 * slot.num_elements)
                beside = 4 * slot.num_elements
            places.append(Place(codes, slice(end, end + beside), is_packed))
            end += beside
        return places


def _shaped(slot: Slot, flat: torch.Tensor) -> torch.Tensor:
    return flat.as_strided(slot.shape, slot.stride, flat.storage_offset())


def _put(value: torch.Tensor, target: torch.Tensor) -> None:
    if value.data_ptr() != target.data_ptr() or value.stride() != target.stride():
        target.copy_(value)


def exact_states(part: Part, dtype: torch.dtype) -> StateFormat:
    """All states as they are."""
    return Exact(dtype)


def states_as(name: Literal["full", "bf16", "int8"], parts: Sequence[Part]) -> StateFormatOf:
    """How the states of ``parts`` are stored under ``Config.optimizer_states``."""
    if name == "full":
        return exact_states
    packed = Packed({"bf16": Rounded, "int8": Blockwise}[name](), scratch_bytes(parts))

    def of(part: Part, dtype: torch.dtype) -> StateFormat:
        pays = dtype == torch.float32 and any(slot.num_elements >= PACKED_ELEMENTS for slot in part.slots)
        return packed if pays else Exact(dtype)

    return of
