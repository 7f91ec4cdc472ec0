"""Norms over ranks: exact sums, the same bits for every number of ranks, and one answer on all of them."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import math
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from infinity.engine import clipping
from infinity.engine.clipping import Clipper
from infinity.engine.norms import Check
from infinity.engine.ranks.exact_sum import BLOCK, ExactSum, block_sums
from infinity.engine.ranks.norms import RankNorms
from infinity.engine.scaling import LossScaling, NoScaling, Scaling
from infinity.engine.unit import GRAD, Part, PartGradients, Slot
from infinity.errors import EngineStateError, NonFiniteError
from parity import same_bits

INF = math.inf
POWERS = [2.0, 1.0, 0.5, 3.0, 2.5, -1.0, -0.7]
ORDERS = [*POWERS, 0.0, INF, -INF]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
SHAPES = [(1,), (0,), (127,), (3, 129), (70, 64), (4096,), (5, 3, 700), (2, 12000)]


def random(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** float(torch.randint(-6, 4, (), generator=generator))
    values: torch.Tensor = (torch.randn(*shape, generator=generator, dtype=torch.float32) * scale).to(dtype)
    return values


class Together:
    """Ranks in threads, that tell each other facts as JSON."""

    def __init__(self, num_ranks: int) -> None:
        self._facts: list[str] = [""] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=30)
        self.num_exchanges = [0] * num_ranks

    def exchange_of(self, rank: int) -> Callable[[Any], list[Any]]:
        def exchange(fact: Any) -> list[Any]:
            self.num_exchanges[rank] += 1
            self._facts[rank] = json.dumps(fact, allow_nan=False)
            self._barrier.wait()
            facts = list(self._facts)
            self._barrier.wait()
            return [json.loads(each) for each in facts]

        return exchange

    def run(self, do: Callable[[int], Any]) -> list[Any]:
        def run(rank: int) -> Any:
            try:
                return do(rank)
            except BaseException:
                self._barrier.abort()  # nobody waits for who has failed
                raise

        with concurrent.futures.ThreadPoolExecutor(len(self._facts)) as threads:
            return list(threads.map(run, range(len(self._facts))))


def make_parts(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], num_slices: int) -> list[Part]:
    """A part for each dtype, in which all parameters of that dtype are, each with its dimensions reversed in memory."""
    parts: list[Part] = []
    for dtype in dict.fromkeys(dtypes):
        slots = []
        for number, (shape, other) in enumerate(zip(shapes, dtypes, strict=True)):
            if other == dtype:
                value = torch.empty(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape))))
                slots.append(Slot(f"p{number}", nn.Parameter(value), value.shape, value.stride(), 0))
        part = Part(len(parts), 0, len(parts), dtype, dtype, dtype, dtype, True, slots)
        part.lay_out(num_slices)
        parts.append(part)
    return parts


def gradients_of(parts: Sequence[Part]) -> dict[tuple[int, int], torch.Tensor]:
    """The same for the same parameters, however they are cut."""
    return {
        (part.index, i): random(slot.shape, part.dtype, 10 * i + part.index)
        for part in parts
        for i, slot in enumerate(part.slots)
    }


def norms_of(
    parts: Sequence[Part], rank: int, num_ranks: int, norm_type: float | None, exchange: Any, scaling: Scaling
) -> RankNorms:
    return RankNorms(
        norm_type,
        num_backwards=1,
        scaling=scaling,
        slices=[part.cut(rank, num_ranks) for part in parts],
        exchange=exchange,
    )


def total_of(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    num_ranks: int,
    norm_type: float,
    *,
    num_slices: int,
    partitioned: bool,
    change: Callable[[dict[tuple[int, int], torch.Tensor]], None] = lambda gradients: None,
) -> list[torch.Tensor]:
    parts = make_parts(shapes, dtypes, num_slices)
    gradients = gradients_of(parts)
    change(gradients)
    ranks = Together(num_ranks)

    def run(rank: int) -> torch.Tensor:
        norms = norms_of(parts, rank, num_ranks, norm_type, ranks.exchange_of(rank), NoScaling())
        stored = [part.cut(rank, num_ranks) for part in parts] if partitioned else parts
        for (index, i), gradient in gradients.items():
            piece = stored[index].slots[i].take(gradient)
            norms.take(stored[index], i, piece, [torch.tensor(0.5)])
        taken = [norms.get(stored[index], i) for index, i in gradients]
        return norms.total([each for each in taken if each is not None], [stored[i].step_dtype for i, _ in gradients])

    return ranks.run(run)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from(ORDERS),
    st.booleans(),
)
def test_the_norm_does_not_depend_on_ranks_or_stages(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], num_ranks: int, norm_type: float, partitioned: bool
) -> None:
    shapes, dtypes = [shape for shape, _ in kinds], [dtype for _, dtype in kinds]
    options: dict[str, Any] = {"num_slices": num_ranks}
    (alone,) = total_of(shapes, dtypes, 1, norm_type, num_slices=1, partitioned=True)
    together = total_of(shapes, dtypes, num_ranks, norm_type, partitioned=partitioned, **options)
    assert alone.shape == ()
    assert alone.dtype == (torch.float64 if torch.float64 in dtypes else torch.float32)
    assert all(same_bits(each, alone) for each in together)


@pytest.mark.parametrize("norm_type", ORDERS)
def test_it_is_pytorchs_but_for_rounding(norm_type: float) -> None:
    shapes = [shape for shape in SHAPES if math.prod(shape)]

    def some_zero(gradients: dict[tuple[int, int], torch.Tensor]) -> None:
        gradients[0, 1].zero_()

    change = some_zero if norm_type >= 0 else lambda gradients: None
    parts = make_parts(shapes, [torch.float32] * len(shapes), 1)
    gradients = gradients_of(parts)
    change(gradients)
    expected = torch.nn.utils.get_total_norm([0.5 * each.double() for each in gradients.values()], norm_type).float()
    for total in total_of(
        shapes, [torch.float32] * len(shapes), 3, norm_type, num_slices=3, partitioned=True, change=change
    ):
        torch.testing.assert_close(total, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
def test_infinity_and_nan_are_seen_on_all_ranks(norm_type: float) -> None:
    def changed(value: float) -> Callable[[dict[tuple[int, int], torch.Tensor]], None]:
        def change(gradients: dict[tuple[int, int], torch.Tensor]) -> None:
            gradients[0, 0].view(-1)[-1] = INF
            gradients[0, 1].view(-1)[0] = value

        return change

    shapes, dtypes = [(9000,), (5000,)], [torch.float32] * 2
    options: dict[str, Any] = {"num_slices": 3, "partitioned": True}
    totals = total_of(shapes, dtypes, 3, norm_type, change=changed(1.0), **options)
    assert [float(total) for total in totals] == [INF] * 3
    totals = total_of(shapes, dtypes, 3, norm_type, change=changed(math.nan), **options)
    assert all(total.isnan() for total in totals)


@pytest.mark.parametrize("norm_type", ORDERS)
def test_without_gradients_the_norm_is_0(norm_type: float) -> None:
    ranks = Together(2)

    def run(rank: int) -> torch.Tensor:
        return norms_of([], rank, 2, norm_type, ranks.exchange_of(rank), NoScaling()).total([], [])

    assert all(same_bits(total, torch.tensor(0.0)) for total in ranks.run(run))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 60 * BLOCK), st.integers(0, 3 * BLOCK), st.sampled_from(POWERS), st.sampled_from(DTYPES),
    st.integers(1, 5), st.data(),
)  # fmt: skip
def test_a_blocks_sum_follows_from_its_elements_alone(
    count: int, first: int, power: float, dtype: torch.dtype, num_threads: int, data: st.DataObject
) -> None:
    """Not from how many blocks are summed at once, nor from threads, nor from where in memory they lie."""
    values = random((count,), dtype, count)
    whole = block_sums(values, first, power)
    before = torch.get_num_threads()
    cuts = sorted(data.draw(st.lists(st.integers(1, 64), max_size=5)))
    edges = [0, *(edge for edge in (BLOCK * cut - first % BLOCK for cut in cuts) if 0 < edge < count), count]
    torch.set_num_threads(num_threads)
    try:
        pieces = [
            block_sums(torch.cat([values[:1], values[a:b]])[1:], first + a, power) for a, b in itertools.pairwise(edges)
        ]
    finally:
        torch.set_num_threads(before)
    assert same_bits(torch.cat(pieces), whole)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30000), st.integers(0, 4095), st.sampled_from(DTYPES), st.integers(0, 1000))
def test_squares_are_summed_with_hardly_a_rounding(count: int, first: int, dtype: torch.dtype, seed: int) -> None:
    values = random((count,), dtype, seed)
    if dtype.is_complex:
        exact = sum((Fraction(v.real) ** 2 + Fraction(v.imag) ** 2 for v in values.tolist()), Fraction())
    else:
        exact = sum((Fraction(value) ** 2 for value in values.tolist()), Fraction())
    total = Fraction(ExactSum.of(block_sums(values, first, 2.0)).units, 1 << 1074)
    assert abs(total - exact) <= exact * Fraction(1e-15)


NUMBERS = st.floats(min_value=0) | st.just(math.nan)


@given(st.lists(NUMBERS, max_size=40), st.integers(0, 40))
def test_exact_sums_are_exact_in_any_order_and_through_json(numbers: list[float], cut: int) -> None:
    def of(some: list[float]) -> ExactSum:
        return ExactSum.of(torch.tensor(some, dtype=torch.float64))

    total = of(numbers)
    finite = [number for number in numbers if math.isfinite(number)]
    assert Fraction(total.units, 1 << 1074) == sum(map(Fraction, finite), Fraction())
    assert (total.num_infinite, total.num_nan) == (numbers.count(INF), sum(map(math.isnan, numbers)))
    assert of(numbers[cut:]) + of(numbers[:cut]) == total
    assert ExactSum.from_document(json.loads(json.dumps(total.document()))) == total
    if finite == numbers:
        try:
            assert total.value == math.fsum(numbers)
        except OverflowError:
            assert total.value == INF
    else:
        assert total.value == INF or (total.num_nan and math.isnan(total.value))


class Waiting:
    """What ``Clipper`` needs of a sink: gradients that wait, and what they are scaled by."""

    def __init__(self, gradients: list[PartGradients]) -> None:
        self._gradients = gradients
        self.scaled: dict[tuple[int, int], float] = {}

    def waiting(self) -> list[PartGradients]:
        return self._gradients

    def undo(self) -> None:
        pass

    def scale(self, part: Part, position: int, scale: torch.Tensor) -> None:
        self.scaled[part.index, position] = float(scale)


class Shelf:
    """A part's shard, as ``PartShelf`` shows it; the store is a mapping."""

    def __init__(self, loop: Any, store: dict[int, torch.Tensor], part: Part) -> None:
        self._shard = store[part.index]

    def look(self, kind: str, take: Callable[[torch.Tensor], Any]) -> Any:
        return take(self._shard)


class World:
    """Ranks with a clipper each; those in ``idle`` have no gradients that wait."""

    def __init__(
        self, num_ranks: int, *, fp16: bool = False, norm_type: float | None = None, idle: Sequence[int] = (),
        bad: Sequence[tuple[int, int, float]] = (),
    ) -> None:  # fmt: skip
        dtype = torch.float16 if fp16 else torch.float32
        self.ranks = Together(num_ranks)
        self.parts = make_parts([(100, 90), (0,), (9000,), (7,)], [dtype] * 4, num_ranks)
        for part in self.parts:
            part.step_dtype = torch.float32
        self.model = nn.Module()
        for part in self.parts:
            for slot in part.slots:
                self.model.register_parameter(slot.name, slot.param)
        self.gradients = gradients_of(self.parts)
        for position, element, value in bad:
            self.gradients[0, position].view(-1)[element] = value
        self.scalings: list[Scaling] = [
            LossScaling(4.0, window=10, hysteresis=1, minimum=1.0) if fp16 else NoScaling() for _ in range(num_ranks)
        ]
        self.sinks, self.clippers = [], []
        for rank in range(num_ranks):
            scaling = self.scalings[rank]
            norms = norms_of(self.parts, rank, num_ranks, norm_type, self.ranks.exchange_of(rank), scaling)
            stored = [part.cut(rank, num_ranks) for part in self.parts]
            store = {part.index: torch.zeros(part.num_bytes(dtype), dtype=torch.uint8) for part in stored}
            for (index, i), gradient in self.gradients.items():
                slot = stored[index].slots[i]
                slot.view(store[index].view(dtype)).copy_(slot.take(gradient))
            scales = {i: tuple(scaling.inverses) for i in range(4)}
            waiting = [PartGradients(part, GRAD, frozenset(range(4)), scales) for part in stored]
            sink = Waiting([] if rank in idle else waiting)
            self.sinks.append(sink)
            self.clippers.append(
                Clipper(self.model, cast(Any, None), cast(Any, store), cast(Any, sink), norms, scaling)
            )

    def run(self, do: Callable[[Clipper[Any]], Any]) -> list[Any]:
        results = self.ranks.run(lambda rank: do(self.clippers[rank]))
        assert len(set(self.ranks.num_exchanges)) == 1, "all ranks ask equally often"
        return results


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> type[World]:
    monkeypatch.setattr(clipping, "PartShelf", Shelf)
    return World


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_all_ranks_clip_by_the_same_factor(num_ranks: int, world: type[World]) -> None:
    ranks = world(num_ranks)
    totals = ranks.run(lambda clipper: clipper.clip(1.0))
    holders = [nn.Parameter(torch.zeros_like(gradient)) for gradient in ranks.gradients.values()]
    for holder, gradient in zip(holders, ranks.gradients.values(), strict=True):
        holder.grad = gradient
    torch.testing.assert_close(totals[0], torch.nn.utils.clip_grad_norm_(holders, 1.0), rtol=3e-7, atol=0)
    assert all(same_bits(total, totals[0]) for total in totals)
    assert all(sink.scaled == ranks.sinks[0].scaled and len(sink.scaled) == 4 for sink in ranks.sinks)


def test_some_parameters_are_clipped_as_some(world: type[World]) -> None:
    ranks = world(3)
    params = [ranks.model.get_parameter(name) for name in ("p3", "p2")]
    totals = ranks.run(lambda clipper: clipper.clip(1.0, INF, parameters=params))
    expected = max(ranks.gradients[0, i].abs().max() for i in (2, 3))
    assert [float(total) for total in totals] == [float(expected)] * 3
    assert all(set(sink.scaled) <= {(0, 2), (0, 3)} for sink in ranks.sinks)


@pytest.mark.parametrize("norm_type", [None, 2.0, INF])
@pytest.mark.parametrize("value", [INF, math.nan])
def test_one_ranks_overflow_is_everybodys(value: float, norm_type: float | None, world: type[World]) -> None:
    """The element is one that only the last rank has; one rank has no gradients at all."""
    ranks = world(4, fp16=True, norm_type=norm_type, idle=[1], bad=[(3, 6, value)])
    ranks.run(lambda clipper: clipper.check_finite())
    assert [scaling.skips for scaling in ranks.scalings] == [True] * 4
    ranks.run(lambda clipper: clipper.check_finite())
    assert ranks.ranks.num_exchanges == [1] * 4, "all know already"


def test_finite_gradients_are_finite_on_all_ranks(world: type[World]) -> None:
    ranks = world(3, fp16=True, idle=[0, 2])
    ranks.run(lambda clipper: clipper.check_finite())
    assert [(scaling.skips, scaling.must_check()) for scaling in ranks.scalings] == [(False, False)] * 3


def test_where_no_rank_has_gradients_nothing_is_known(world: type[World]) -> None:
    ranks = world(3, fp16=True, idle=[0, 1, 2])
    ranks.run(lambda clipper: clipper.check_finite())
    assert all(scaling.must_check() for scaling in ranks.scalings)
    assert [float(total) for total in ranks.run(lambda clipper: clipper.clip(1.0))] == [0.0] * 3


def test_who_need_not_check_asks_nobody(world: type[World]) -> None:
    ranks = world(3)
    ranks.run(lambda clipper: clipper.check_finite())
    assert ranks.ranks.num_exchanges == [0, 0, 0]


@pytest.mark.parametrize("norm_type", [None, 2.0, 0.0, -1.0, 9.0])
def test_the_first_culprit_is_named_on_all_ranks(norm_type: float | None, world: type[World]) -> None:
    ranks = world(3, norm_type=norm_type, bad=[(3, 2, INF), (2, 8000, math.nan)])
    assert ranks.run(lambda clipper: clipper.find_nonfinite()) == ["p2"] * 3
    assert ranks.run(lambda clipper: clipper.find_nonfinite()) == ["p2"] * 3
    good = world(3, norm_type=norm_type, idle=[1])
    assert good.run(lambda clipper: clipper.find_nonfinite()) == [None] * 3


def test_a_sum_that_overflows_is_no_culprit(world: type[World]) -> None:
    ranks = world(2, norm_type=9.0, bad=[(2, 8000, 3e38)])
    assert ranks.run(lambda clipper: clipper.find_nonfinite()) == [None] * 2


def test_an_error_is_everybodys_and_names_the_first(world: type[World]) -> None:
    ranks = world(3, bad=[(3, 2, INF), (2, 8000, math.nan)])

    def clip(clipper: Clipper[Any]) -> str:
        with pytest.raises(NonFiniteError, match="is that of p2") as error:
            clipper.clip(1.0, error_if_nonfinite=True)
        return str(error.value)

    assert len(set(ranks.run(clip))) == 1
    assert all(not sink.scaled for sink in ranks.sinks)


def test_ranks_that_ask_for_different_things_are_told(world: type[World]) -> None:
    ranks = Together(2)

    def run(rank: int) -> None:
        norms = norms_of([], rank, 2, [2.0, 1.0][rank], ranks.exchange_of(rank), NoScaling())
        with pytest.raises(EngineStateError, match=r"rank \d asks for the norm of order .* where this one asks"):
            norms.total([], [])
        with pytest.raises(EngineStateError, match="whether gradients are finite"):
            norms.total([], []) if rank else norms.join(Check(any_came=False))

    ranks.run(run)


def test_gradients_that_nobody_steps_do_not_count(world: type[World]) -> None:
    ranks = world(2, idle=[0, 1])
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.full((3,), 5.0)
    assert [float(total) for total in ranks.run(lambda clipper: clipper.clip(1.0, parameters=param))] == [0.0] * 2
    assert param.grad.eq(5).all()
