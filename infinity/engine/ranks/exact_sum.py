"""Sums of powers of gradients that do not depend on how ranks share them: rounded within a block, exact beyond.

Floating-point sums depend on their order, and with slices the order would depend on the number of ranks. So a part is
cut into blocks of 4096 elements, counted from its start: slices begin where blocks do (``PART_ALIGNMENT``), and no
block is ever shared. Within a block, powers are summed in fp64: a number with a few roundings that follows from the
block's elements alone. Blocks are then added exactly, as integers, which may be done in any order.

That a block's number follows from its elements alone rests on this: a product, a square root and a sum of two fp64
numbers are rounded in one way only (IEEE 754), on every device. Rows are summed by PyTorch on the CPU, where threads
share rows but never split one that is shorter than 32768; on accelerators, where the order depends on the number of
rows, by halves. Other powers than 1 and 2 come on the CPU from a vector library or, at the end of a thread's share,
from another one: so few elements at a time that one thread has them all, and whole vectors.

Rejected: Kahan's sums and double-double (more exact, and still dependent on order); all in integers (a pass of twenty
operations on each element instead of each block); norms of blocks (``vector_norm``: no faster, and rounded once more).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from infinity.engine.unit import PART_ALIGNMENT

BLOCK = PART_ALIGNMENT

_BLOCKS_PER_THREAD = 32
"""So many blocks in fp64, 1 MiB, stay in a core's cache."""

_BLOCKS_PER_POWER = 4
_UNIT_EXPONENT = 1074
_SPECIAL = 0x7FF
_HALF_BITS = 26
_MOST_AT_ONCE = 1 << 26
"""So many halves of significands are added exactly in fp64."""


def block_sums(values: torch.Tensor, first: int, norm_type: float) -> torch.Tensor:
    """Of each block, the sum of ``abs(value) ** norm_type``, as far as the block's elements are among ``values``.

    Args:
        values: shape ``(n,)``, of any floating-point or complex dtype, on any device: consecutive elements of a part.
        first: how many elements of the part, or of a slice of it, come before.
        norm_type: the power: finite, not 0.

    Returns:
        fp64, on the device of ``values``, shape ``(number of blocks,)``; empty without values.
    """
    assert values.ndim == 1
    count, lead = values.numel(), first % BLOCK
    num_blocks = -(-(lead + count) // BLOCK) if count else 0
    sums = torch.empty(num_blocks, dtype=torch.float64, device=values.device)
    at_once = min(num_blocks, _BLOCKS_PER_THREAD * (torch.get_num_threads() if values.device.type == "cpu" else 64))
    buffer = torch.empty(at_once * BLOCK, dtype=torch.float64, device=values.device)
    nothing = 0.0 if norm_type > 0 else math.inf  # to this power: 0
    for start in range(0, num_blocks, max(at_once, 1)):
        stop = min(start + at_once, num_blocks)
        powers = buffer[: (stop - start) * BLOCK]
        begin, end = start * BLOCK - lead, min(stop * BLOCK - lead, count)
        before = max(-begin, 0)
        powers[:before] = nothing
        powers[before : end - begin].copy_(_real(values[begin + before : end]))
        powers[end - begin :] = nothing
        _raise(powers, norm_type)
        _sum_rows(powers.view(-1, BLOCK), sums[start:stop])
    return sums


def _real(values: torch.Tensor) -> torch.Tensor:
    """Real numbers of the same magnitudes."""
    if not values.is_complex():
        return values
    real, imaginary = torch.view_as_real(values).double().unbind(-1)
    return (real * real + imaginary * imaginary).sqrt()


def _raise(values: torch.Tensor, power: float) -> None:
    """Raise magnitudes to a power, in place."""
    if power == 2:
        values.mul_(values)
        return
    values.abs_()
    if power != 1:
        at_once = _BLOCKS_PER_POWER * BLOCK if values.device.type == "cpu" else values.numel()
        for few in values.split(at_once):
            few.pow_(power)


def _sum_rows(rows: torch.Tensor, sums: torch.Tensor) -> None:
    """Sum each row into ``sums``; rows are used up."""
    if rows.device.type == "cpu":
        torch.sum(rows, dim=1, out=sums)
        return
    width = rows.shape[1]
    while width > 1:
        width //= 2
        rows[:, :width] += rows[:, width : 2 * width]
    sums.copy_(rows[:, 0])


@dataclass(frozen=True, slots=True)
class ExactSum:
    """A sum of fp64 numbers from 0 on, with all its bits.

    Attributes:
        units: the sum of the finite ones, in units of 2**-1074: of the smallest number that there is.
        num_infinite: how many were infinite.
        num_nan: how many were NaN.
    """

    units: int = 0
    num_infinite: int = 0
    num_nan: int = 0

    @classmethod
    def of(cls, numbers: torch.Tensor) -> ExactSum:
        """The sum of fp64 numbers from 0 on, of any shape, on any device."""
        bits = numbers.detach().reshape(-1).cpu().numpy().view(np.int64)
        exponents, fractions = (bits >> 52) & _SPECIAL, bits & ((1 << 52) - 1)
        is_special = exponents == _SPECIAL
        num_special, num_nan = int(is_special.sum()), int((is_special & (fractions != 0)).sum())
        if num_special:
            exponents, fractions = exponents[~is_special], fractions[~is_special]
        significands = fractions | ((exponents > 0).astype(np.int64) << 52)
        halves = (significands & ((1 << _HALF_BITS) - 1), significands >> _HALF_BITS)
        units = 0
        for start in range(0, len(exponents), _MOST_AT_ONCE):
            some = slice(start, start + _MOST_AT_ONCE)
            for number, half in enumerate(halves):
                totals = np.bincount(exponents[some], weights=half[some])
                for exponent in np.flatnonzero(totals).tolist():
                    units += int(totals[exponent]) << (max(exponent - 1, 0) + number * _HALF_BITS)
        return cls(units, num_special - num_nan, num_nan)

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.units + other.units, self.num_infinite + other.num_infinite, self.num_nan + other.num_nan)

    @property
    def value(self) -> float:
        """The sum, rounded once."""
        if self.num_nan:
            return math.nan
        if self.num_infinite:
            return math.inf
        try:
            return self.units / (1 << _UNIT_EXPONENT)
        except OverflowError:
            return math.inf

    def root(self, norm_type: float) -> torch.Tensor:
        """The norm of which this is the sum of powers: fp64, no dimensions, on the CPU."""
        return torch.tensor(self.value, dtype=torch.float64).pow(1 / norm_type)

    def document(self) -> dict[str, Any]:
        """All of it, such that JSON can hold it."""
        return {"units": f"{self.units:x}", "infinite": self.num_infinite, "nan": self.num_nan}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ExactSum:
        """What ``document`` has made."""
        return cls(int(document["units"], 16), document["infinite"], document["nan"])
