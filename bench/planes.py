"""Every fp32 value there is, as two planes of 16 bits and back: 4,294,967,296 bit patterns, two minutes on two cores.

The tests go through an eighth of them, spread over all exponents, and through all that are special.

    python bench/planes.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

import torch

from infinity.engine import planes

BLOCK = 1 << 18
NUM_BLOCKS = (1 << 31) // BLOCK
"""For each sign."""


def check_blocks(sign: int, blocks: Iterable[int]) -> int:
    """Split and join blocks of consecutive bit patterns; how many there were that two planes do not hold.

    In memory that is used again and again, which is what takes the time.

    Raises:
        AssertionError: a value does not come back, or is not rounded as PyTorch rounds it.
    """
    params, rounded = torch.empty(BLOCK, dtype=torch.bfloat16), torch.empty(BLOCK, dtype=torch.bfloat16)
    residuals, uppers = torch.empty(BLOCK, dtype=torch.int16), torch.empty(BLOCK, dtype=torch.int16)
    within, bits, out = (
        torch.arange(BLOCK, dtype=torch.int32),
        torch.empty(BLOCK, dtype=torch.int32),
        torch.empty(BLOCK),
    )
    num_exceptions = 0
    for block in blocks:
        torch.add(within, block * BLOCK - (sign << 31), out=bits)
        values = bits.view(torch.float32)
        exceptions = planes.split(values, params, residuals)
        assert torch.equal(params.view(torch.int16), rounded.copy_(values).view(torch.int16))
        planes.join(params, residuals, exceptions, out)
        assert torch.equal(out.view(torch.int32), bits)
        planes.copy_uppers(values, uppers)
        planes.join_exactly(uppers, residuals, out.zero_())
        assert torch.equal(out.view(torch.int32), bits)
        num_exceptions += exceptions.indices.size
    return num_exceptions


def main() -> int:
    begun = time.perf_counter()
    num_ties, num_nans = (0x7F80 // 2), (1 << 23) - 1
    for sign in (0, 1):
        num_exceptions = check_blocks(sign, range(NUM_BLOCKS))
        if not num_ties <= num_exceptions <= num_ties + num_nans:
            print(f"sign {sign}: {num_exceptions} exceptions, expected {num_ties} to {num_ties + num_nans}")
            return 1
        print(f"sign {sign}: {NUM_BLOCKS * BLOCK:,} values came back to the bit; {num_exceptions:,} by the table")
    print(f"{time.perf_counter() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
