"""How close the residency comes to the least that must be moved, and that this least is what it says."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_residency import Below, make_pool
from fakes_training import PAGE, Cycle, Model, Training, mean, run_virtually
from infinity.store.optimum import Touch, least_moved, least_read, least_written
from infinity.store.residency import Residency

KEYS = "abcdef"


# The least, by exhaustive search


def fewest(trace: Sequence[Touch], budget_bytes: int, *, read_cost: int, write_cost: int) -> int:
    """The least cost of any sequence of decisions, from an empty memory; what is needed no more costs nothing."""
    sizes = {touch.key: touch.num_bytes for touch in trace}

    @functools.cache
    def wanted(at: int, key: Hashable) -> bool:
        """Whether the bytes that a key has before touch ``at`` are read by it or a later one."""
        uses = (touch for touch in trace[at:] if touch.key == key)
        first = next(uses, None)
        return first is not None and first.reads

    @functools.cache
    def best(at: int, resident: frozenset[tuple[Hashable, bool]]) -> float:
        if at == len(trace):
            return 0
        touch = trace[at]
        held: dict[Hashable, bool] = dict(resident)
        others = [key for key in held if key != touch.key]
        least = math.inf
        if not (touch.reads or touch.writes):
            return best(at + 1, frozenset((key, held[key]) for key in others))
        for kept in subsets(others):
            if sum(sizes[key] for key in kept) + touch.num_bytes > budget_bytes:
                continue
            gone = [key for key in others if key not in kept]
            cost = sum(write_cost * sizes[key] for key in gone if held[key] and wanted(at, key))
            if touch.key not in held and touch.reads:
                cost += read_cost * touch.num_bytes
            dirty = touch.writes or held.get(touch.key, False)
            state = frozenset([*((key, held[key]) for key in kept), (touch.key, dirty)])
            least = min(least, cost + best(at + 1, state))
        return least

    return int(best(0, frozenset()))


def subsets(keys: Sequence[Hashable]) -> list[tuple[Hashable, ...]]:
    found: list[tuple[Hashable, ...]] = [()]
    for key in keys:
        found += [(*subset, key) for subset in found]
    return found


@st.composite
def traces(draw: st.DrawFn, *, mixed: bool = False, writing: bool = True) -> list[Touch]:
    """A cycle of a few uses; a key that is deleted in it is made anew."""
    sizes = {key: draw(st.integers(1, 3)) if mixed else 1 for key in KEYS[: draw(st.integers(2, 5))]}
    uses = draw(st.lists(st.sampled_from(sorted(sizes)), min_size=2, max_size=7))
    return [Touch(key, sizes[key], True, writing and draw(st.booleans())) for key in uses]


def ended(trace: list[Touch]) -> list[Touch]:
    """The same once, and nothing is needed afterwards."""
    sizes = {touch.key: touch.num_bytes for touch in trace}
    return [*trace, *(Touch(key, size, False, False) for key, size in sizes.items())]


@given(traces(), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_with_one_size_the_least_is_exact(trace: list[Touch], budget: int, num_times: int) -> None:
    line = ended(trace * num_times)
    num_keys = len({touch.key for touch in trace})
    assert sum(least_read(line, budget, 1)) == fewest(line, budget, read_cost=1, write_cost=0) - num_keys
    assert sum(least_written(line, budget, 1)) == fewest(line, budget, read_cost=0, write_cost=1)


@given(traces(), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_around_a_cycle_it_is_exact_but_for_the_end(trace: list[Touch], budget: int) -> None:
    """What is given up for the sake of the cycle after the last one, the search does not pay."""
    num_keys = len({touch.key for touch in trace})
    read = fewest(trace * 3, budget, read_cost=1, write_cost=0) - num_keys
    assert read <= sum(least_read(trace, budget, 3)) <= read + num_keys
    written = fewest(trace * 3, budget, read_cost=0, write_cost=1)
    assert written <= sum(least_written(trace, budget, 3)) <= written + num_keys


@given(traces(mixed=True), st.integers(3, 8))
@settings(max_examples=100, deadline=None)
def test_with_mixed_sizes_it_is_a_lower_bound(trace: list[Touch], budget: int) -> None:
    line = ended(trace * 2)
    cold_bytes = sum({touch.key: touch.num_bytes for touch in trace}.values())
    assert sum(least_read(line, budget, 1)) <= fewest(line, budget, read_cost=1, write_cost=0) - cold_bytes
    assert sum(least_written(line, budget, 1)) <= fewest(line, budget, read_cost=0, write_cost=1)
    assert least_moved(trace, cold_bytes) == (0, 0)


def test_the_least_of_a_scan_is_what_does_not_fit() -> None:
    """Ten shards in a circle and memory for six: of each cycle one place is taken by whoever is used now."""
    trace = [Touch(key, 1, True, True) for key in range(10)]
    moved = least_moved(trace, 6)
    assert moved.read_bytes == moved.written_bytes == pytest.approx(40 / 9, abs=0.5)
    assert least_moved(trace, 10) == (0, 0)


def test_bytes_that_nobody_reads_again_cost_nothing() -> None:
    gradient = [Touch("g", 4, False, True), Touch("g", 4, True, False), Touch("g", 4, False, False)]
    assert least_moved([*gradient, Touch("x", 4, True, False)], 4) == (4, 0)
    overwritten = [Touch("p", 4, False, True), Touch("x", 4, True, False)]
    assert least_moved(overwritten, 4) == (4, 0), "x alone"


def test_bytes_that_pass_memory_by_take_no_place_of_others() -> None:
    kept = Touch("k", 4, True, True)
    assert least_moved([kept, Touch("p", 4, True, False)], 4) == (8, 4)
    assert least_moved([kept, Touch("p", 4, True, False, passes=True)], 4) == (4, 0)


# The policy


async def follow(trace: Sequence[Touch], num_pages: int, num_cycles: int) -> tuple[int, int]:
    """Pages that the residency reads and writes when it follows a trace, after all keys were brought in once."""
    keys = {str(touch.key) for touch in trace}
    below, now = Below("".join(sorted(keys)), automatic=True), 0

    def distance(key: str) -> float:
        return next((d for d in range(len(trace)) if trace[(now + d) % len(trace)].key == key), math.inf)

    pool = make_pool(num_pages)
    residency: Residency[str] = Residency(pool, distance=distance, fill=below.fill, spill=below.spill)
    sizes = {str(touch.key): touch.num_bytes for touch in trace}
    try:
        for _ in range(num_cycles):
            for touch in trace:
                await residency.fetch(str(touch.key), touch.num_bytes * PAGE, owner="me", update=touch.writes)
                now += 1
                residency.release(str(touch.key), owner="me", dirty=touch.writes)
        return tuple(  # type: ignore[return-value]
            sum(sizes[key] for action, key in below.log if action == which) for which in ("fill", "spill")
        )
    finally:
        await residency.close()
        pool.close()


@given(traces(), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_it_reads_the_least_that_can_be_read(trace: list[Touch], num_pages: int) -> None:
    """Belady's rule is optimal for shards of one size, whether they are dirty or not."""
    read, _ = asyncio.run(follow(trace, num_pages, 3))
    assert read == fewest(trace * 3, num_pages, read_cost=1, write_cost=0)


@given(traces(), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_it_moves_no_more_than_twice_the_least(trace: list[Touch], num_pages: int) -> None:
    """What is written is read again, but for the last cycle, and no policy reads less."""
    read, written = asyncio.run(follow(trace, num_pages, 3))
    num_keys = len({touch.key for touch in trace})
    assert written <= read + num_keys
    assert read + written <= 2 * fewest(trace * 3, num_pages, read_cost=1, write_cost=1) + num_keys


async def test_a_trace_on_which_a_clean_one_should_have_left_costs_one_more() -> None:
    """The bound is not idle: ``b`` is needed later than ``a``, but it is dirty and ``a`` is not."""
    trace = [Touch("b", 1, True, True), Touch("a", 1, True, False), Touch("c", 1, True, False)]
    trace += [Touch("a", 1, True, False), Touch("b", 1, True, False)]
    read, written = await follow(trace, 2, 1)
    assert (read, written) == (4, 1)
    assert fewest(trace, 2, read_cost=1, write_cost=1) == 4


# Training

PAGES = {"param": 2, "rest": 2, "exp_avg": 4, "exp_avg_sq": 4, "grad": 2}


@pytest.mark.parametrize(
    ("schedule", "share", "disk_share"),
    [
        *(("backward", share, disk_share) for share in (0.25, 0.5, 0.75) for disk_share in (0.5, 1.5)),
        *((schedule, share, 1.0) for schedule in ("tail", "serial") for share in (0.25, 0.6)),
    ],
)
def test_training_moves_what_it_must_with_two_sub_groups_less(schedule: str, share: float, disk_share: float) -> None:
    """Two take their place for the time they cost: the one that is stepped, and the one that is read or written."""
    model = Model(10, PAGES, schedule)
    num_pages = int(share * model.state_pages)
    cycles = run_virtually(train(model, num_pages, disk_share))[4:]
    read, written = (mean(each) for each in zip(*((c.read_pages, c.written_pages) for c in cycles), strict=True))
    least = least_moved(model.touches(), num_pages * PAGE)
    with_less = least_moved(model.touches(), (num_pages - 2 * sum(PAGES.values())) * PAGE)
    assert least.read_bytes / PAGE * 0.98 <= read <= with_less.read_bytes / PAGE + 2
    assert least.written_bytes / PAGE * 0.98 <= written <= with_less.written_bytes / PAGE + 2
    assert written <= read + 2, "what is written leaves"
    assert all(cycle.resident_pages > num_pages - max(PAGES.values()) for cycle in cycles), "no shard more fits"


async def train(model: Model, num_pages: int, disk_share: float) -> list[Cycle]:
    """Eight cycles; without any memory, the disk would be busy for that share of the time that arithmetic takes."""
    seconds = sum(model.seconds[:2])
    training = Training(model, num_pages, disk_speed=28 / seconds / disk_share, ahead_pages=sum(PAGES.values()))
    return await training.run(8)


@pytest.mark.parametrize("schedule", ["backward", "tail", "serial"])
def test_where_everything_fits_nothing_moves(schedule: str) -> None:
    model = Model(8, PAGES, schedule)
    cycles = run_virtually(train(model, model.state_pages, 1.0))
    assert all(cycle.written_pages == 0 for cycle in cycles)
    assert all(cycle.read_pages == 0 for cycle in cycles[1:])


def test_every_page_of_memory_saves_traffic() -> None:
    """Never more with more; and for a page more nearly two less, one read and one written."""
    model = Model(8, PAGES)
    moved = []
    for tenths in range(3, 10):
        cycles = run_virtually(train(model, model.state_pages * tenths // 10, 1.0))[4:]
        moved.append(mean(cycle.moved_pages for cycle in cycles))
    assert all(after <= before + 2 for before, after in itertools.pairwise(moved))
    assert moved[0] - moved[5] >= 1.5 * model.state_pages * 0.5
