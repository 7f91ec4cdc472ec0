"""fp32 numbers in fewer bytes, for optimizer states: close to them, and not the same.

``Rounded``: the nearest bf16; 8 bits of precision at every magnitude.

``Blockwise``: one byte each, relative to the largest magnitude of its block of 256, which is kept in fp32. The 256
codes are finest near the largest and reach down by seven powers of ten, each with half as many codes as the one above,
so that a block may hold numbers of very different magnitude, as second moments do (dynamic codes in blocks: Dettmers et
al., 8-bit Optimizers via Block-wise Quantization, 2021, arXiv:2110.02861). Where no number is negative the codes have
no sign, and are twice as fine; and then nothing but zero becomes zero, down to 1e-40 of the largest: optimizers divide
by roots of such numbers. A number is given the code nearest to it, found by its leading 19 bits in a table, so up to
one part in 1024 beside the middle between two codes the other one may be taken. Blocks with NaN or infinity come back
with NaN.

Why not torchao's: what it offers publicly are optimizers of its own, whose states are tensor subclasses, where here any
optimizer of the user's is stepped; and the functions inside look for the nearest code in eight passes over 64-bit
integers, which is meant to be compiled.

Arithmetic runs in pieces that stay in a core's cache and on one thread, as in ``planes.py``.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

BLOCK_ELEMENTS = 256

_CHUNK = 1 << 15
_NUM_POWERS = 7
_DROPPED_BITS = 13


class Codec(ABC):
    """A code for fp32 numbers.

    Attributes:
        code_bytes: what one number takes.
    """

    code_bytes: int

    def num_scales(self, num_elements: int) -> int:
        """How many fp32 numbers are kept beside the codes of so many consecutive ones."""
        return 0

    @abstractmethod
    def encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the codes of ``values``.

        Args:
            values: fp32, contiguous, shape ``(n,)``.
            codes: ``uint8``, contiguous, shape ``(n * code_bytes,)``.
            scales: fp32, shape ``(num_scales(n),)``.
        """

    @abstractmethod
    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write to ``out`` (fp32, contiguous, shape ``(n,)``) what was encoded."""


class Rounded(Codec):
    """bf16."""

    code_bytes = 2

    def encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See ``Codec``."""
        codes.view(torch.bfloat16).copy_(values)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Codec``."""
        out.copy_(codes.view(torch.bfloat16))


class Blockwise(Codec):
    """One byte, and a scale for each block. The scale of a block without negative numbers is kept negated."""

    code_bytes = 1

    def num_scales(self, num_elements: int) -> int:
        """See ``Codec``."""
        return -(-num_elements // BLOCK_ELEMENTS)

    def encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See ``Codec``."""
        for places, blocks in _pieces(values.numel()):
            value = values[places].view(blocks.stop - blocks.start, -1)
            scale = torch.amax(value.abs(), dim=1)
            signed = not float(value.min()) >= 0
            scaled = value / torch.where(scale == 0, 1.0, scale).unsqueeze(1)
            leading = scaled.view(torch.int32).numpy().view(np.uint32).reshape(-1) >> _DROPPED_BITS
            np.take(_nearest(signed), leading, out=codes[places].numpy(), mode="clip")
            scales[blocks] = scale if signed else -scale

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Codec``."""
        for places, blocks in _pieces(out.numel()):
            value, scale = out[places].view(blocks.stop - blocks.start, -1), scales[blocks]
            signed = not bool(torch.signbit(scale[0]))
            np.take(_numbers(signed), codes[places].numpy(), out=out[places].numpy(), mode="clip")
            value.mul_(scale.abs().unsqueeze(1))


def _pieces(num_elements: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of elements and of their blocks: whole blocks of which several fit the cache, and at last what is left."""
    whole = num_elements // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    for start in range(0, whole, _CHUNK):
        stop = min(start + _CHUNK, whole)
        yield slice(start, stop), slice(start // BLOCK_ELEMENTS, stop // BLOCK_ELEMENTS)
    if whole < num_elements:
        block = whole // BLOCK_ELEMENTS
        yield slice(whole, num_elements), slice(block, block + 1)


@functools.cache
def _numbers(signed: bool) -> npt.NDArray[np.float32]:
    """The number that each code stands for, relative to the scale; ascending, shape ``(256,)``."""
    magnitudes = [0.0, 1.0]
    for power in range(_NUM_POWERS):
        ends = np.linspace(0.1, 1.0, (1 if signed else 2) * 2**power + 1)
        magnitudes.extend((ends[:-1] + ends[1:]) / 2 * 10.0 ** (power - _NUM_POWERS + 1))
    numbers = [*magnitudes, *(-each for each in magnitudes[2:])] if signed else magnitudes
    return np.sort(np.array(numbers, np.float32))


@functools.cache
def _nearest(signed: bool) -> npt.NDArray[np.uint8]:
    """The code nearest to each pattern of leading bits of a number between -1 and 1; of NaN, that of 1."""
    numbers = _numbers(signed).astype(np.float64)
    leading = np.arange(1 << 32 - _DROPPED_BITS, dtype=np.uint32)
    bits = leading << _DROPPED_BITS | 1 << _DROPPED_BITS - 1
    with np.errstate(invalid="ignore"):  # some are signalling NaNs
        middles = bits.view(np.float32).astype(np.float64)
    middles = np.clip(np.nan_to_num(middles, nan=1.0), -1.0, 1.0)
    codes = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, middles)
    if not signed:
        codes = np.maximum(codes, 1)
        codes[[0, codes.size // 2]] = 0  # zero of either sign, and what is nearly that
    return codes.astype(np.uint8)
