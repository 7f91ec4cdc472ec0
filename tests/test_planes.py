"""Two planes of 16 bits give every fp32 value back, to the bit, and the first is what rounding gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planes import NUM_BLOCKS, check_blocks

from infinity.engine import planes
from infinity.engine.planes import ELEMENTS_PER_EXCEPTION, NO_EXCEPTIONS, Exceptions, Residuals

HIGH_HALVES = [
    0x0000, 0x0001, 0x0002, 0x007E, 0x007F,  # zero and denormals, up to the largest
    0x0080, 0x0081,  # the smallest normal numbers
    0x3F7F, 0x3F80, 0x3F81,  # around one
    0x7F7E, 0x7F7F,  # the largest finite ones, half of which round to infinity
    0x7F80,  # infinity, and NaNs with the smallest payloads
    0x7F81, 0x7FBF, 0x7FC0, 0x7FC1, 0x7FFE, 0x7FFF,  # NaNs, signalling and quiet
]  # fmt: skip
NUM_PATTERNS = 1 << 32


class Split:
    """Values and what became of them."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.params = torch.full(values.shape, torch.nan, dtype=torch.bfloat16)
        self.residuals = torch.full(values.shape, 77, dtype=torch.int16)
        self.exceptions = planes.split(values, self.params, self.residuals)

    def check(self) -> None:
        assert_same_bits(self.params, self.values.to(torch.bfloat16))
        out = torch.full_like(self.values, 77.0)
        planes.join(self.params, self.residuals, self.exceptions, out)
        assert_same_bits(out, self.values)
        uppers = torch.full(self.values.shape, 77, dtype=torch.int16)
        params, residuals = torch.empty_like(self.params), torch.empty_like(self.residuals)
        planes.split_exactly(self.values, params, residuals, uppers)
        assert_same_bits(params, self.params)
        planes.join_exactly(uppers, residuals, out.fill_(77.0))
        assert_same_bits(out, self.values)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    integer = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    assert got.dtype == expected.dtype
    assert torch.equal(got.view(integer), expected.view(integer))


def patterns(start: int, stop: int) -> torch.Tensor:
    """fp32 values with the bit patterns from ``start`` to ``stop``."""
    return torch.from_numpy(np.arange(start, stop, dtype=np.int64).astype(np.uint32).view(np.float32))


def hopeless(values: torch.Tensor) -> torch.Tensor:
    """What no pair of planes can give back, found by arithmetic of its own: ties that go down, and NaN."""
    bits = values.view(torch.int32)
    return values.isnan() | ((bits & 0xFFFF == 0x8000) & (bits >> 16 & 1 == 0))


def test_all_low_halves_of_all_kinds_of_values() -> None:
    for high in HIGH_HALVES:
        for sign in (0, 0x8000):
            split = Split(patterns((high | sign) << 16, ((high | sign) + 1) << 16))
            split.check()
            exceptions = set(split.exceptions.indices.tolist())
            allowed = set(torch.nonzero(hopeless(split.values)).reshape(-1).tolist())
            assert exceptions <= allowed, hex(high | sign)
            ties = {0x8000} if 0x8000 in allowed and not split.values[0x8000].isnan() else set()
            assert ties <= exceptions


@pytest.mark.slow
@pytest.mark.parametrize("sign", [0, 1])
def test_an_eighth_of_every_pattern_there_is(sign: int) -> None:
    """Four blocks of each exponent; ``bench/planes.py`` goes through all."""
    num_ties, num_nans = (0x7F80 // 2), (1 << 23) - 1
    assert check_blocks(sign, range(sign, NUM_BLOCKS, 8)) <= num_ties + num_nans


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_values_in_any_number(data: st.DataObject) -> None:
    chunk = planes._CHUNK
    size = data.draw(st.sampled_from([0, 1, 7, 4096, chunk - 1, chunk, chunk + 1, 2 * chunk + 5]))
    seed = data.draw(st.integers(0, 1 << 30))
    bits = np.random.default_rng(seed).integers(0, NUM_PATTERNS, size, dtype=np.uint64).astype(np.uint32)
    if data.draw(st.booleans()):
        bits &= np.uint32(0xFFFF8000)  # ties everywhere
    chosen = data.draw(st.lists(st.tuples(st.integers(0, max(size - 1, 0)), st.integers(0, NUM_PATTERNS - 1))))
    for index, pattern in chosen if size else []:
        bits[index] = pattern
    Split(torch.from_numpy(bits.view(np.float32))).check()


def test_values_of_training_have_hardly_any_exceptions() -> None:
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    assert Split(values).exceptions.indices.size < 40


def test_exceptions_of_pieces_are_those_of_the_whole() -> None:
    values = torch.randn(1000).half().float()
    whole = Split(values).exceptions
    assert whole.indices.size > 20
    places = [(0, 0), (0, 1), (1, 400), (400, 1000)]
    pieces = [(start, Split(values[start:stop].clone()).exceptions) for start, stop in places]
    joined = planes.joined(pieces)
    assert np.array_equal(joined.indices, whole.indices)
    assert np.array_equal(joined.bits, whole.bits)
    for (start, stop), (_, piece) in zip(places, pieces, strict=True):
        within = whole.within(start, stop)
        assert np.array_equal(within.indices, piece.indices)
        assert np.array_equal(within.bits, piece.bits)


@pytest.mark.parametrize("num_elements", [4096, 8192, 1 << 20, 7 << 20])
def test_the_table_of_exceptions(num_elements: int) -> None:
    num_bytes = Residuals.num_bytes(num_elements)
    assert num_bytes % 4096 == 0
    assert num_bytes <= 2 * num_elements + max(0.05 * num_elements, 4096)
    shard = torch.zeros(num_bytes, dtype=torch.uint8)
    residuals = Residuals(shard, num_elements)
    assert residuals.plane.shape == (num_elements,)
    assert residuals.capacity >= num_elements / ELEMENTS_PER_EXCEPTION
    assert residuals.exceptions.indices.size == 0
    residuals.plane.fill_(-1)
    indices = np.arange(residuals.capacity, dtype=np.int64) * 3
    full = Exceptions(indices, (indices - 7).astype(np.int32))
    residuals.exceptions = full
    again = Residuals(shard.clone(), num_elements)
    assert np.array_equal(again.exceptions.indices, full.indices)
    assert np.array_equal(again.exceptions.bits, full.bits)
    assert bool((again.plane == -1).all())
    residuals.exceptions = NO_EXCEPTIONS
    assert residuals.exceptions.indices.size == 0
    assert again.exceptions.indices.size == residuals.capacity, "what it gives are copies"


def test_a_large_part_takes_twelve_bytes_for_each_parameter() -> None:
    """The parameter, its residual and two fp32 states: what a step writes."""
    num_elements = 1 << 20
    written = 2 * num_elements + Residuals.num_bytes(num_elements) + 8 * num_elements
    assert written <= 12.02 * num_elements
