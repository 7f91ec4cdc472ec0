"""BufferPool: a hard budget, exact sizes, reuse, poison, and events that travel with their blocks."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinity.io.memory import HUGE_PAGE_BYTES, PAGE_BYTES, allocate
from infinity.store.pool import BufferPool, Lease, lease_bytes
from infinity.trace import TierUsage

PAGE = PAGE_BYTES


class FakeEvent:
    """Counts how often the host waited for it."""

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


class Mapper:
    """Allocates, and remembers how much it was asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.fails = False

    def __call__(self, num_bytes: int) -> torch.Tensor:
        if self.fails:
            raise MemoryError("the system has no more")
        self.sizes.append(num_bytes)
        return allocate(num_bytes, populate=False)


def make_pool(num_pages: int, *, poison: bool = False) -> tuple[BufferPool, Mapper]:
    mapper = Mapper()
    return BufferPool("test", num_pages * PAGE, mapper, poison=poison), mapper


def lease(pool: BufferPool, num_pages: int) -> Lease:
    taken = pool.acquire_nowait(num_pages * PAGE)
    assert taken is not None
    return taken


def test_a_lease_takes_whole_pages_and_shows_the_bytes_that_were_asked_for() -> None:
    pool, mapper = make_pool(8)
    small = pool.acquire_nowait(1)
    exact = pool.acquire_nowait(2 * PAGE)
    above = pool.acquire_nowait(2 * PAGE + 1)
    assert small is not None
    assert exact is not None
    assert above is not None
    assert [len(each.tensor) for each in (small, exact, above)] == [1, 2 * PAGE, 2 * PAGE + 1]
    assert [each.num_bytes for each in (small, exact, above)] == [1, 2 * PAGE, 2 * PAGE + 1]
    assert [each.size_bytes for each in (small, exact, above)] == [PAGE, 2 * PAGE, 3 * PAGE]
    assert [lease_bytes(each.num_bytes) for each in (small, exact, above)] == mapper.sizes
    assert all(each.tensor.data_ptr() % PAGE == 0 for each in (small, exact, above))
    assert pool.free_bytes == 2 * PAGE


def test_nothing_is_given_beyond_the_budget() -> None:
    pool, mapper = make_pool(4)
    assert pool.acquire_nowait(4 * PAGE + 1) is None
    held = lease(pool, 3)
    assert pool.acquire_nowait(PAGE + 1) is None
    assert mapper.sizes == [3 * PAGE]
    held.release()
    assert lease(pool, 4).size_bytes == 4 * PAGE


def test_free_blocks_count_against_the_budget() -> None:
    pool, _ = make_pool(6)
    held, cached = lease(pool, 2), lease(pool, 3)
    cached.release()
    lease(pool, 2)
    statistics = pool.statistics()
    assert (statistics.leased_bytes, statistics.cached_bytes) == (4 * PAGE, 0)
    assert statistics.peak_bytes == 5 * PAGE
    held.release()


def test_a_failed_mapping_leaves_the_pool_as_it_was() -> None:
    pool, mapper = make_pool(4)
    mapper.fails = True
    with pytest.raises(MemoryError, match="no more"):
        pool.acquire_nowait(PAGE)
    statistics = pool.statistics()
    assert (statistics.leased_bytes, statistics.num_leases, statistics.num_maps) == (0, 0, 0)
    mapper.fails = False
    assert lease(pool, 4).size_bytes == 4 * PAGE


def test_memory_of_the_same_size_is_used_again() -> None:
    pool, mapper = make_pool(4)
    first = lease(pool, 2)
    address = first.tensor.data_ptr()
    first.release()
    again = pool.acquire_nowait(2 * PAGE - 100)
    assert again is not None
    assert again.tensor.data_ptr() == address
    assert len(again.tensor) == 2 * PAGE - 100
    assert mapper.sizes == [2 * PAGE]


def test_the_size_used_least_recently_is_unmapped_first() -> None:
    pool, mapper = make_pool(6)
    first, second, third = lease(pool, 1), lease(pool, 2), lease(pool, 1)
    first.release()
    third.release()
    second.release()
    lease(pool, 1).release()  # of the sizes, 1 is now the one used last
    assert pool.statistics().cached_bytes == 4 * PAGE
    lease(pool, 4)  # needs two pages of the cache
    lease(pool, 1)
    lease(pool, 1)
    assert mapper.sizes == [PAGE, 2 * PAGE, PAGE, 4 * PAGE]


def test_taking_a_block_counts_as_use_of_its_size() -> None:
    pool, mapper = make_pool(6)
    first, second, third = lease(pool, 1), lease(pool, 1), lease(pool, 2)
    for each in (first, second, third):
        each.release()
    lease(pool, 1)  # one of two: the other is now younger than the block of two pages
    lease(pool, 3)
    lease(pool, 1)
    assert mapper.sizes == [PAGE, PAGE, 2 * PAGE, 3 * PAGE]


def test_releasing_twice_is_harmless() -> None:
    pool, _ = make_pool(4)
    first, second = lease(pool, 2), lease(pool, 2)
    first.release()
    first.release(FakeEvent())
    statistics = pool.statistics()
    assert (statistics.leased_bytes, statistics.cached_bytes, statistics.num_leases) == (2 * PAGE, 2 * PAGE, 1)
    again = lease(pool, 2)
    assert again.tensor.data_ptr() != second.tensor.data_ptr()
    assert again.after is None


def test_a_lease_is_not_usable_after_release() -> None:
    pool, _ = make_pool(1)
    held = lease(pool, 1)
    held.release()
    with pytest.raises(AssertionError, match="after release"):
        _ = held.tensor
    with pytest.raises(AssertionError, match="after release"):
        _ = held.after


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.complex64,
        torch.complex128,
    ],
)
def test_poison_is_nan_in_every_format(dtype: torch.dtype) -> None:
    pool, _ = make_pool(1, poison=True)
    held = lease(pool, 1)
    view = held.tensor.view(dtype)
    held.tensor.zero_()
    held.release()
    assert view.to(torch.complex128 if dtype.is_complex else torch.float64).isnan().all()


def test_without_debug_released_memory_is_left_alone() -> None:
    pool, _ = make_pool(1)
    held = lease(pool, 1)
    view = held.tensor.fill_(7)
    held.release()
    assert view.eq(7).all()


def test_poison_waits_for_the_work_that_still_reads_the_memory() -> None:
    pool, _ = make_pool(1, poison=True)
    event = FakeEvent()
    lease(pool, 1).release(event)
    assert event.num_waits == 1
    assert lease(pool, 1).after is None


def test_an_event_travels_with_its_block_and_no_host_thread_waits() -> None:
    pool, _ = make_pool(4)
    event, other = FakeEvent(), FakeEvent()
    first, second = lease(pool, 1), lease(pool, 2)
    first.release(event)
    second.release(other)
    assert lease(pool, 1).after is event
    assert lease(pool, 2).after is other
    assert (event.num_waits, other.num_waits) == (0, 0)


def test_an_event_is_not_lost_when_its_next_lease_ends_without_one() -> None:
    """A fill that failed or was cancelled may never have waited for it."""
    pool, _ = make_pool(1)
    event, later = FakeEvent(), FakeEvent()
    lease(pool, 1).release(event)
    lease(pool, 1).release()
    third = lease(pool, 1)
    assert third.after is event
    third.release(later)
    assert lease(pool, 1).after is later


def test_unmapping_waits_for_the_work_that_still_reads_the_memory() -> None:
    pool, _ = make_pool(2)
    event, other = FakeEvent(), FakeEvent()
    lease(pool, 1).release(event)
    lease(pool, 2).release(other)
    assert event.num_waits == 1  # two pages had no room beside the cached one
    pool.close()
    assert other.num_waits == 1
    assert pool.statistics().cached_bytes == 0


def test_usage_is_what_every_tier_reports() -> None:
    pool, _ = make_pool(8)
    first, second = lease(pool, 3), lease(pool, 2)
    first.release()
    assert pool.usage() == TierUsage(2 * PAGE, 5 * PAGE, 8 * PAGE)
    second.release()
    lease(pool, 4)
    assert pool.usage() == TierUsage(4 * PAGE, 6 * PAGE, 8 * PAGE)  # three pages had to go


HUGE = HUGE_PAGE_BYTES


def huge_lease(pool: BufferPool, num_bytes: int, stamp: int) -> Lease:
    taken = pool.acquire_nowait(num_bytes)
    assert taken is not None
    taken.tensor.fill_(stamp)
    return taken


def test_what_must_be_unmapped_gives_its_pages_to_what_is_mapped() -> None:
    pool = BufferPool("test", 8 * HUGE, lambda size: allocate(size, populate=False), recycles=True)
    kept = huge_lease(pool, 2 * HUGE, 1)
    huge_lease(pool, 5 * HUGE + PAGE, 2).release()
    new = pool.acquire_nowait(3 * HUGE)
    assert new is not None
    assert (new.tensor == 2).all()
    assert pool.statistics().cached_bytes == 2 * HUGE  # the rest; its last page has no use
    other = pool.acquire_nowait(4 * HUGE - PAGE)
    assert other is None
    other = pool.acquire_nowait(3 * HUGE - PAGE)  # some of its own too
    assert other is not None
    assert (other.tensor[: 2 * HUGE] == 2).all()
    assert pool.statistics().cached_bytes == 0
    other.tensor.fill_(3)
    assert (new.tensor == 2).all()
    assert (kept.tensor == 1).all()


@settings(max_examples=25, deadline=None)
@given(
    operations=st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, 2)), max_size=30),
    run_pages=st.sampled_from([1, 2]),
)
def test_pages_that_moved_are_nobody_elses(operations: list[tuple[bool, int, int]], run_pages: int) -> None:
    pool = BufferPool("test", 12 * HUGE, lambda size: allocate(size, populate=False), recycles=True)
    pool._run_bytes = run_pages * HUGE
    held: list[tuple[Lease, int]] = []
    for stamp, (takes, num_huge, num_small) in enumerate(operations, 1):
        if takes or not held:
            num_bytes = num_huge * HUGE + (num_small - 1) * PAGE
            if num_bytes <= pool.free_bytes:
                held.append((huge_lease(pool, num_bytes, stamp), stamp))
        else:
            held.pop(num_huge % len(held))[0].release()
        assert all((each.tensor.numpy() == stamp).all() for each, stamp in held)
        free = [block.tensor for blocks in pool._free.values() for block in blocks]
        cached_bytes = sum(tensor.numel() for tensor in free)
        assert pool.statistics().cached_bytes == cached_bytes
        assert cached_bytes <= pool.free_bytes
        assert all(tensor.data_ptr() % HUGE == 0 for tensor in free if tensor.numel() >= HUGE)


class PoolMachine(RuleBasedStateMachine):
    """Random leases against a plain account of them."""

    BUDGET = 16

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.mapper = make_pool(self.BUDGET)
        self.held: list[tuple[Lease, int]] = []
        self.ended: list[Lease] = []
        self.cached: OrderedDict[int, int] = OrderedDict()  # how many blocks by size, least recently used first
        self.maps: list[int] = []
        self.stamp = 0

    @property
    def held_pages(self) -> int:
        return sum(each.size_bytes for each, _ in self.held) // PAGE

    @property
    def cached_pages(self) -> int:
        return sum(size * number for size, number in self.cached.items())

    @rule(num_bytes=st.integers(0, (BUDGET + 2) * PAGE))
    def acquire(self, num_bytes: int) -> None:
        size = max(-(-num_bytes // PAGE), 1)
        fits = size <= self.BUDGET - self.held_pages
        taken = self.pool.acquire_nowait(num_bytes)
        assert (taken is not None) == fits
        if taken is None:
            return
        if size in self.cached:
            self.uncache(size)
        else:
            while self.cached_pages > self.BUDGET - self.held_pages - size:
                self.uncache(next(iter(self.cached)))
            self.maps.append(size * PAGE)
        if size in self.cached:
            self.cached.move_to_end(size)
        assert len(taken.tensor) == num_bytes
        assert taken.size_bytes == size * PAGE
        self.stamp = self.stamp % 250 + 1
        taken.tensor.fill_(self.stamp)
        self.held.append((taken, self.stamp))

    def uncache(self, size: int) -> None:
        self.cached[size] -= 1
        if not self.cached[size]:
            del self.cached[size]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        taken, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        size = taken.size_bytes // PAGE
        self.cached[size] = self.cached.get(size, 0) + 1
        self.cached.move_to_end(size)
        taken.release()
        self.ended.append(taken)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.ended)).release()

    @rule()
    def close(self) -> None:
        self.pool.close()
        self.cached.clear()

    @invariant()
    def accounts_agree(self) -> None:
        statistics = self.pool.statistics()
        assert statistics.leased_bytes == self.held_pages * PAGE
        assert statistics.num_leases == len(self.held)
        assert statistics.cached_bytes == self.cached_pages * PAGE
        assert statistics.leased_bytes + statistics.cached_bytes <= statistics.peak_bytes <= statistics.budget_bytes
        assert statistics.num_maps == len(self.mapper.sizes)
        assert self.mapper.sizes == self.maps
        assert self.pool.free_bytes == statistics.budget_bytes - statistics.leased_bytes

    @invariant()
    def no_lease_shares_memory(self) -> None:
        assert all((each.tensor.numpy() == stamp).all() for each, stamp in self.held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
