"""What the store moves: the name of a shard, and the ranges of a file that its bytes take."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from infinity.errors import BudgetError
from infinity.io.backend import DIRECT_ALIGNMENT


class ShardKey(NamedTuple):
    """This rank's slice of one kind of state of one unit.

    Attributes:
        unit: index of the unit in the model.
        part: index of the piece of the unit that is stepped at a time, 0 where there is only one; of an activation, its
            number.
        kind: which kind of state the bytes are: ``param``, ``master``, ``grad``, ``grad_sum``, ``activation`` or
            ``state.`` and the optimizer's name for it (``state.exp_avg``). The engine's business (``engine/unit.py``);
            here a name.
    """

    unit: int
    part: int
    kind: str

    def __str__(self) -> str:
        return f"unit {self.unit} part {self.part} {self.kind}"


class Extent(NamedTuple):
    """A contiguous range of a file, in bytes; both are multiples of ``DIRECT_ALIGNMENT``."""

    offset: int
    num_bytes: int


class ExtentAllocator:
    """Which ranges of a file of fixed size are free: a sorted list of holes, no two of them adjacent.

    Args:
        size_bytes: size of the file; a multiple of ``DIRECT_ALIGNMENT``.
    """

    def __init__(self, size_bytes: int) -> None:
        assert size_bytes >= 0
        assert size_bytes % DIRECT_ALIGNMENT == 0
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        self._holes = [Extent(0, size_bytes)] if size_bytes else []

    @property
    def used_bytes(self) -> int:
        """Bytes allocated now."""
        return self.size_bytes - self.free_bytes

    @property
    def holes(self) -> tuple[Extent, ...]:
        """The free ranges, by offset."""
        return tuple(self._holes)

    def allocate(self, num_bytes: int) -> list[Extent]:
        """Take ``num_bytes``: the start of the first hole that is large enough, else all of the largest holes.

        Raises:
            BudgetError: fewer bytes are free; nothing is taken.
        """
        assert num_bytes > 0
        assert num_bytes % DIRECT_ALIGNMENT == 0
        if num_bytes > self.free_bytes:
            raise BudgetError(
                f"an extent of {num_bytes} bytes does not fit: {self.free_bytes} of {self.size_bytes} bytes are free"
            )
        first_fit = next((hole for hole in self._holes if hole.num_bytes >= num_bytes), None)
        if first_fit is not None:
            return [self._take(first_fit, num_bytes)]
        extents = []
        for hole in sorted(self._holes, key=lambda hole: -hole.num_bytes):
            extents.append(self._take(hole, min(num_bytes, hole.num_bytes)))
            num_bytes -= extents[-1].num_bytes
            if not num_bytes:
                break
        return extents

    def reserve(self, extent: Extent) -> None:
        """Take this very range.

        Raises:
            BudgetError: it is not free; nothing is taken.
        """
        at = bisect.bisect_right(self._holes, (extent.offset, self.size_bytes)) - 1
        hole = self._holes[at] if at >= 0 else Extent(0, 0)
        end, hole_end = extent.offset + extent.num_bytes, hole.offset + hole.num_bytes
        if end > hole_end:
            raise BudgetError(f"the extent of {extent.num_bytes} bytes at {extent.offset} is not free")
        parts = [Extent(hole.offset, extent.offset - hole.offset), Extent(end, hole_end - end)]
        self._holes[at : at + 1] = [part for part in parts if part.num_bytes]
        self.free_bytes -= extent.num_bytes

    def _take(self, hole: Extent, num_bytes: int) -> Extent:
        at = bisect.bisect_left(self._holes, hole)
        rest = Extent(hole.offset + num_bytes, hole.num_bytes - num_bytes)
        self._holes[at : at + 1] = [rest] if rest.num_bytes else []
        self.free_bytes -= num_bytes
        return Extent(hole.offset, num_bytes)

    def free(self, extent: Extent) -> None:
        """Give back what ``allocate`` returned; adjacent holes become one."""
        offset, end = extent.offset, extent.offset + extent.num_bytes
        at = bisect.bisect_left(self._holes, extent)
        first, last = at, at
        if at > 0:
            before = self._holes[at - 1]
            assert before.offset + before.num_bytes <= offset, "freed twice"
            if before.offset + before.num_bytes == offset:
                offset, first = before.offset, at - 1
        if at < len(self._holes):
            after = self._holes[at]
            assert end <= after.offset, "freed twice"
            if end == after.offset:
                end, last = after.offset + after.num_bytes, at + 1
        self._holes[first:last] = [Extent(offset, end - offset)]
        self.free_bytes += extent.num_bytes
