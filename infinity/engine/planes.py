"""Two planes of 16 bits in place of a bf16 parameter and its fp32 master: the same values in two thirds of the bytes.

The first plane is the bf16 value with which forward computes, exactly what ``values.to(torch.bfloat16)`` gives. The
second, the *residual*, is the low half of the fp32 value's 32 bits, read as a signed number. Together they give the
value back to the bit: rounding to the nearest moves it by at most half of 2**16 steps, so that, as integers,

    value = (bf16 << 16) + residual

Two kinds of values have no such pair. A value half-way between two bf16 values, of which ties-to-even takes the one
nearer to zero, is 2**15 steps above it and shares its pair with the value 2**15 steps below. And rounding keeps nothing
of a NaN but that it is one. These *exceptions* are found by comparing, not by trusting the rounding, and are kept
beside the planes as they are, in a table of one place for every 1024 elements. Of values that training has made, one in
131072 is a tie of this kind. Where the table does not suffice (weights that come from fp16 are such ties by the dozen,
diverged ones are NaN) a third plane with the exact upper halves takes its place (``formats.py``). So nothing is ever
lost, which the tests show for each of the 2**32 patterns.

Rejected: the upper halves and the low ones, cut rather than rounded (forward would need a third plane or other numbers
than plain PyTorch); a bit per element for the ties (0.125 bytes per parameter and step, always, for one in 131072).

Arithmetic runs in pieces, since each thread needs memory of its own for one (5 MiB). They are large: beside training
what costs is not the arithmetic but each call, after which the thread waits for its turn. (Two cores, both directions
for 116M parameters on a thread beside training: 1.08 s in pieces of 2**18, 0.81 of 2**20, 0.61 of 2**22 elements.) In
pieces of 2**15, which PyTorch does not divide among threads, it took twice as long as in 2**18 even alone.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from infinity.io.memory import PAGE_BYTES, round_up

ELEMENTS_PER_EXCEPTION = 1024

_CHUNK = 1 << 20
"""How many elements at a time."""

_HEADER_BYTES = 8
_ENTRY_BYTES = 12
_TIE = -(1 << 15)


class Exceptions(NamedTuple):
    """Elements whose planes are another value's.

    Attributes:
        indices: which, ascending; ``int64``, shape ``(n,)``.
        bits: their fp32 values, as ``int32``, shape ``(n,)``.
    """

    indices: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int32]

    def within(self, start: int, stop: int) -> Exceptions:
        """Those of the elements from ``start`` to ``stop``, counted from ``start``."""
        first, last = np.searchsorted(self.indices, (start, stop))
        return Exceptions(self.indices[first:last] - start, self.bits[first:last])


NO_EXCEPTIONS = Exceptions(np.empty(0, np.int64), np.empty(0, np.int32))


def joined(pieces: Sequence[tuple[int, Exceptions]]) -> Exceptions:
    """The exceptions of consecutive pieces, each with the element at which it starts."""
    found = [(start, piece) for start, piece in pieces if piece.indices.size]
    if not found:
        return NO_EXCEPTIONS
    indices = np.concatenate([piece.indices + start for start, piece in found])
    return Exceptions(indices, np.concatenate([piece.bits for _, piece in found]))


class _Scratch(threading.local):
    """What one thread computes in."""

    def __init__(self) -> None:
        self.wide = torch.empty(_CHUNK, dtype=torch.int32)
        self.mask = np.empty(_CHUNK, np.bool_)


_SCRATCH = _Scratch()


def split(values: torch.Tensor, params: torch.Tensor, residuals: torch.Tensor) -> Exceptions:
    """Write both planes of ``values``.

    Args:
        values: fp32, contiguous, shape ``(n,)``.
        params: bf16, contiguous, shape ``(n,)``; becomes ``values.to(torch.bfloat16)``.
        residuals: ``int16``, contiguous, shape ``(n,)``.

    Returns:
        The elements that the planes do not give back.
    """
    wide, low, mask = values.view(torch.int32), residuals.numpy(), _SCRATCH.mask
    real, bits = values.numpy(), wide.numpy()
    pieces: list[tuple[int, Exceptions]] = []
    chunks = zip(_chunks(values), _chunks(wide), _chunks(params), _chunks(residuals), strict=True)
    for start, (value, integer, param, residual) in zip(range(0, max(values.numel(), 1), _CHUNK), chunks, strict=True):
        place = slice(start, start + _CHUNK)
        param.copy_(value)
        residual.copy_(integer)  # keeps the low half
        candidates = np.equal(low[place], _TIE, out=mask[: value.numel()])
        if math.isnan(value.sum()):  # the sum of what has a NaN is one; that of infinities may be
            candidates |= np.isnan(real[place])
        if np.count_nonzero(candidates):
            found = _exceptions(np.flatnonzero(candidates), bits[place], param, low[place])
            pieces.append((start, found))
    return joined(pieces)


def _exceptions(
    candidates: npt.NDArray[np.int64],
    bits: npt.NDArray[np.int32],
    param: torch.Tensor,
    low: npt.NDArray[np.int16],
) -> Exceptions:
    """Which of the candidates their planes do not give back."""
    upper = param.view(torch.int16).numpy()[candidates].astype(np.int32) << 16
    true = bits[candidates]
    wrong = upper + low[candidates] != true
    return Exceptions(candidates[wrong], true[wrong])


def join(params: torch.Tensor, residuals: torch.Tensor, exceptions: Exceptions, out: torch.Tensor) -> None:
    """Write to ``out`` the values whose planes these are.

    Args:
        params: bf16, contiguous, shape ``(n,)``.
        residuals: ``int16``, contiguous, shape ``(n,)``.
        exceptions: what ``split`` returned.
        out: fp32, contiguous, shape ``(n,)``.
    """
    bits = out.view(torch.int32)
    upper = params.view(torch.int16)
    for wide, param, residual in zip(_chunks(bits), _chunks(upper), _chunks(residuals), strict=True):
        low = _SCRATCH.wide[: wide.numel()]
        low.copy_(residual)
        wide.copy_(param)
        torch.add(low, wide, alpha=1 << 16, out=wide)
    bits.numpy()[exceptions.indices] = exceptions.bits


def split_exactly(values: torch.Tensor, params: torch.Tensor, residuals: torch.Tensor, uppers: torch.Tensor) -> None:
    """Write three planes, which give back every value: ``uppers`` (``int16``) holds the upper halves, unrounded."""
    params.copy_(values)
    residuals.copy_(values.view(torch.int32))
    copy_uppers(values, uppers)


def copy_uppers(values: torch.Tensor, uppers: torch.Tensor) -> None:
    """Write to ``uppers`` (``int16``) the upper halves of ``values`` (fp32), unrounded; both contiguous."""
    for wide, upper in zip(_chunks(values.view(torch.int32)), _chunks(uppers), strict=True):
        upper.copy_(torch.bitwise_right_shift(wide, 16, out=_SCRATCH.wide[: wide.numel()]))


def join_exactly(uppers: torch.Tensor, residuals: torch.Tensor, out: torch.Tensor) -> None:
    """Write to ``out`` (fp32) the values whose upper and low halves these are."""
    for wide, upper, residual in zip(_chunks(out.view(torch.int32)), _chunks(uppers), _chunks(residuals), strict=True):
        low = _SCRATCH.wide[: wide.numel()]
        low.copy_(residual).bitwise_and_(0xFFFF)
        wide.copy_(upper).bitwise_left_shift_(16).bitwise_or_(low)


def _chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(flat.split(_CHUNK))


class ExceptionTable:
    """Exceptions as they lie behind a plane of residuals: how many, their indices, their values.

    Args:
        memory: ``uint8``, shape ``(ExceptionTable.num_bytes(num_elements),)``.

    Attributes:
        capacity: how many exceptions the table holds.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        table = memory.numpy()
        self.capacity = (table.nbytes - _HEADER_BYTES) // _ENTRY_BYTES
        self._count = table[:_HEADER_BYTES].view(np.int64)
        bits_start = _HEADER_BYTES + 8 * self.capacity
        self._indices = table[_HEADER_BYTES:bits_start].view(np.int64)
        self._bits = table[bits_start : bits_start + 4 * self.capacity].view(np.int32)

    @staticmethod
    def num_bytes(num_elements: int) -> int:
        """The size of the table for so many elements, of which there are whole pages."""
        return round_up(_HEADER_BYTES + _ENTRY_BYTES * -(-num_elements // ELEMENTS_PER_EXCEPTION), PAGE_BYTES)

    def is_sound(self, num_elements: int) -> bool:
        """Whether it can be that of so many elements: bytes from a disk may be any."""
        count = int(self._count[0])
        if not 0 <= count <= self.capacity:
            return False
        indices = self._indices[:count]
        return not count or bool(indices[0] >= 0 and indices[-1] < num_elements and np.all(indices[1:] > indices[:-1]))

    def read(self) -> Exceptions:
        """A copy of what is in it."""
        count = int(self._count[0])
        assert 0 <= count <= self.capacity
        return Exceptions(self._indices[:count].copy(), self._bits[:count].copy())

    def write(self, exceptions: Exceptions) -> None:
        """Replace what is in it; at most ``capacity`` of them."""
        count = exceptions.indices.size
        assert count <= self.capacity
        self._count[0] = count
        self._indices[:count] = exceptions.indices
        self._bits[:count] = exceptions.bits


class Residuals:
    """The shard of a part's residuals: the plane, and behind it the table of exceptions.

    Args:
        shard: ``uint8``, shape ``(Residuals.num_bytes(num_elements),)``.
        num_elements: the part's.

    Attributes:
        plane: ``int16``, shape ``(num_elements,)``.
        table: what it holds of exceptions.
    """

    def __init__(self, shard: torch.Tensor, num_elements: int) -> None:
        self.plane = shard[: 2 * num_elements].view(torch.int16)
        self.table = ExceptionTable(shard[2 * num_elements :])

    @staticmethod
    def num_bytes(num_elements: int) -> int:
        """The size of the shard for so many elements, of which there are whole pages: a multiple of ``PAGE_BYTES``."""
        return 2 * num_elements + ExceptionTable.num_bytes(num_elements)

    @property
    def capacity(self) -> int:
        """How many exceptions the table holds."""
        return self.table.capacity

    @property
    def exceptions(self) -> Exceptions:
        """A copy of the table."""
        return self.table.read()

    @exceptions.setter
    def exceptions(self, exceptions: Exceptions) -> None:
        self.table.write(exceptions)
