"""Residency: who must leave, what is written and when, and what can never fit."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_residency import Below, assert_all_given_back, make_pool, spin, stamp, version_of, world
from infinity.errors import BudgetError, StorageError
from infinity.io.backend import Priority
from infinity.io.memory import PAGE_BYTES
from infinity.store.order import Access, AccessOrder, Use
from infinity.store.pool import BufferPool
from infinity.store.residency import Residency, State

PAGE = PAGE_BYTES


# Who leaves


@given(
    st.permutations(range(8)), st.lists(st.booleans(), min_size=8, max_size=8), st.sets(st.integers(0, 7), max_size=7)
)
@settings(max_examples=60, deadline=None)
def test_the_one_needed_last_leaves(order: list[int], dirty: list[bool], pinned: set[int]) -> None:
    async def scenario() -> None:
        keys = "abcdefgh"
        async with world(8, keys + "x", automatic=True) as w:
            w.distances.update(zip(keys, map(float, order), strict=True))
            for key, changed in zip(keys, dirty, strict=True):
                await w.keep(key, dirty=changed)
            held = {keys[index] for index in pinned}
            for key in held:
                await w.hold(key)
            await w.hold("x")
            (left,) = set(keys) - set(w.resident())
            assert left not in held
            assert left == max(set(keys) - held, key=w.distances.__getitem__)
            assert (("spill", left) in w.below.log) == dirty[keys.index(left)]

    asyncio.run(scenario())


async def test_a_large_need_takes_the_room_of_several() -> None:
    async with world(6, automatic=True) as w:
        await w.keep("abcdef")
        await w.hold("h", num_pages=3)
        assert w.resident() == "abch"
        assert w.residency.statistics.num_evictions == 3


async def test_keys_without_a_known_use_leave_first() -> None:
    async with world(3, automatic=True) as w:
        await w.keep("abc")
        w.distances["b"] = math.inf
        await w.hold("d")
        assert w.resident() == "acd"


async def test_what_cannot_be_spilled_stays() -> None:
    below, pool = Below("abc", automatic=True), make_pool(2)
    residency: Residency[str] = Residency(pool, distance=lambda key: 0.0, fill=below.fill)
    await residency.reserve("a", PAGE, owner="me")
    residency.release("a", owner="me", dirty=True)
    await residency.fetch("b", PAGE, owner="me")
    residency.release("b", owner="me")
    await residency.fetch("c", PAGE, owner="me")
    assert ("a" in residency, "b" in residency) == (True, False)
    with pytest.raises(BudgetError, match=rf"a \({PAGE} bytes\).*raise it to at least {3 * PAGE} bytes"):
        await residency.fetch("b", PAGE, owner="me")
    await residency.flush()
    assert residency.state_of("a") is State.DIRTY
    await residency.close()
    assert_all_given_back(pool)


async def test_an_accelerators_event_goes_with_the_memory() -> None:
    class Event:
        def synchronize(self) -> None: ...

    event = Event()
    async with world(1) as w:
        await w.hold("a")
        w.residency.release("a", owner="me", after=event)
        task = w.fetch("b")
        await spin()
        w.below.only("fill", "b").succeed()
        assert (await task).after is None, "poisoning has waited for it"
    pool = BufferPool("test", PAGE, make_pool(1)._allocate)
    below = Below("ab", automatic=True)
    residency: Residency[str] = Residency(pool, distance=lambda key: 0.0, fill=below.fill)
    await residency.fetch("a", PAGE, owner="me")
    residency.release("a", owner="me", after=event)
    assert (await residency.fetch("b", PAGE, owner="me")).after is event
    await residency.close()


async def test_the_cost_of_choosing_does_not_grow_with_the_number_of_residents() -> None:
    """Two thousand residents; each access measures few distances, where looking at all would measure them all."""
    num_keys, num_measured = 2_500, 0
    order = AccessOrder(lambda access: [str(access.where)])
    order.adopt(Access(Use.STEP, where) for where in range(num_keys))

    def distance(key: str) -> float:
        nonlocal num_measured
        num_measured += 1
        return order.distance(key)

    async def move(*_: object) -> None:
        pass

    memory = torch.empty(PAGE, dtype=torch.uint8)
    residency: Residency[str] = Residency(
        BufferPool("test", 2_000 * PAGE, lambda size: memory),
        distance=distance,
        fill=move,
        spill=move,
        headroom_bytes=lambda: 8 * PAGE,
    )
    for cycle in range(2):
        for where in range(num_keys):
            order.access(Access(Use.STEP, where))
            await residency.fetch(str(where), PAGE, owner="me")
            residency.release(str(where), owner="me", dirty=cycle == 0)
            residency.prefetch(str((where + 1) % num_keys), PAGE)
    assert residency.statistics.num_evictions > 500
    assert residency.statistics.num_write_backs > 500
    assert num_measured < 2 * num_keys * 20
    await residency.close()


# Prefetching


async def test_a_prefetch_takes_free_room_and_is_a_hit() -> None:
    async with world(2) as w:
        assert w.residency.prefetch("a", PAGE)
        assert w.residency.prefetch("a", PAGE)
        await spin()
        assert w.below.only("fill", "a").priority is Priority.PREFETCH
        w.below.only("fill", "a").succeed()
        await w.residency.settle()
        await w.hold("a")
        assert w.residency.statistics.num_hits == 1


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_prefetch_evicts_only_what_is_clean_and_needed_later(data: st.DataObject) -> None:
    async def scenario() -> None:
        keys = "abcdefgh"
        async with world(8, keys + "x", automatic=True) as w:
            for key in keys:
                await w.keep(key, dirty=data.draw(st.booleans()))
            for key in data.draw(st.sets(st.sampled_from(keys), max_size=4)):
                await w.hold(key)
            w.distances.update(
                {key: float(data.draw(st.integers(0, 5), label=f"distance of {key}")) for key in keys + "x"}
            )
            num_bytes = data.draw(st.integers(1, 9 * PAGE), label="num_bytes")
            candidates = {
                key
                for key in keys
                if w.residency.state_of(key) is State.CLEAN
                and w.distances[key] > w.distances["x"]
                and not w.residency._residents[key].held
            }
            num_pages = -(-num_bytes // PAGE)
            came = w.residency.prefetch("x", num_bytes)
            assert came == (num_pages <= len(candidates))
            left = set(keys) - set(w.resident())
            assert left <= candidates
            assert len(left) == (num_pages if came else 0)
            if left and candidates - left:
                assert min(map(w.distances.__getitem__, left)) >= max(map(w.distances.__getitem__, candidates - left))
            await w.residency.settle()
            assert not any(action == "spill" for action, _ in w.below.log)

    asyncio.run(scenario())


async def test_while_a_demand_waits_for_room_no_prefetch_takes_any() -> None:
    async with world(4) as w:
        await w.hold("g", num_pages=2, owner="other")
        demand = w.fetch("h", num_pages=3)
        await spin()
        assert not w.residency.prefetch("a", PAGE)
        w.residency.release("g", owner="other")
        assert not w.residency.prefetch("a", PAGE)
        await spin()
        w.below.only("fill", "h").succeed()
        await demand
        assert w.residency.prefetch("a", PAGE)
        await spin()
        w.below.only("fill", "a").succeed()


async def test_a_prefetch_for_which_the_system_has_no_memory_is_no_error() -> None:
    def no_memory(num_bytes: int) -> Any:
        raise MemoryError("the system has no more")

    below = Below("a", automatic=True)
    residency: Residency[str] = Residency(
        BufferPool("test", PAGE, no_memory), distance=lambda key: 0.0, fill=below.fill
    )
    assert not residency.prefetch("a", PAGE)
    with pytest.raises(MemoryError, match="no more"):
        await residency.fetch("a", PAGE, owner="me")
    await residency.close()


# Writing


async def test_nothing_is_written_while_everything_fits() -> None:
    async with world(8) as w:
        for _ in range(3):
            await w.keep("abcdefgh", dirty=True)
        await spin()
        assert {action for action, _ in w.below.log} == {"fill"}


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_writing_ahead_keeps_headroom_and_no_more(data: st.DataObject) -> None:
    async def scenario() -> None:
        keys = "abcdefgh"
        async with world(8, keys, headroom_pages=data.draw(st.integers(0, 8), label="headroom")) as w:
            w.distances.update({key: float(data.draw(st.integers(0, 5), label=key)) for key in keys})
            headroom = w.residency._headroom_bytes() // PAGE
            for key in keys:
                await w.hold(key, update=True)
            for key in data.draw(st.permutations(keys)):
                written = w.writing()
                w.residency.release(key, owner="me", dirty=data.draw(st.booleans(), label=f"{key} is dirty"))
                await spin()
                states = {each: w.residency.state_of(each) for each in keys}
                idle = [each for each in keys if not w.residency._residents[each].pins]
                ready = sum(states[each] is State.WRITING or states[each] is State.CLEAN for each in idle)
                dirty = [each for each in idle if states[each] is State.DIRTY]
                assert ready >= headroom or not dirty
                started = set(w.writing()) - set(written)
                assert not started or ready <= headroom, "one fewer would not have done"
                for each in started:
                    assert w.distances[each] >= max((w.distances[other] for other in dirty), default=0)

    asyncio.run(scenario())


async def test_a_demand_waits_for_the_write_that_makes_its_room() -> None:
    async with world(1) as w:
        await w.hold("a", update=True)
        w.residency.release("a", owner="me", dirty=True)
        task = w.fetch("b")
        await spin()
        w.below.only("spill", "a").succeed()
        await spin()
        w.below.only("fill", "b").succeed()
        await task
        assert w.residency.statistics.num_write_backs == 1


async def test_a_failed_write_keeps_the_bytes_and_fails_the_demand_that_needs_the_room() -> None:
    async with world(1) as w:
        lease = await w.residency.reserve("a", PAGE, owner="me")
        stamp(lease.tensor, 5)
        w.residency.release("a", owner="me", dirty=True)
        task = w.fetch("b")
        await spin()
        error = w.below.only("spill", "a").fail()
        with pytest.raises(StorageError) as caught:
            await task
        assert caught.value is error
        assert w.residency.state_of("a") is State.DIRTY
        assert version_of((await w.residency.fetch("a", PAGE, owner="me")).tensor) == 5
        w.residency.release("a", owner="me")
        again = w.fetch("b")
        await spin()
        w.below.only("spill", "a").succeed()
        await spin()
        w.below.only("fill", "b").succeed()
        await again
        assert w.below.stored["a"] == 5


async def test_after_a_failed_write_nothing_is_written_ahead_until_one_succeeds() -> None:
    async with world(3, headroom_pages=1) as w:
        for key in "abc":
            await w.hold(key, update=True)
        w.residency.release("a", owner="me", dirty=True)
        await spin()
        w.below.only("spill", "a").fail()
        await spin()
        w.residency.release("b", owner="me", dirty=True)
        await spin()
        assert w.writing() == ""
        flushing = w.start(w.residency.flush())
        await spin()
        for transfer in w.below.in_flight.copy():
            transfer.succeed()
        await flushing
        assert (w.below.stored["a"], w.residency.state_of("b")) == (1, State.CLEAN)
        await w.hold("a", update=True)
        await w.hold("b", update=True)
        w.residency.release("b", owner="me", dirty=True)
        await spin()
        assert w.writing() == "b"
        w.below.only("spill", "b").succeed()
        await spin()


async def test_a_flush_writes_what_is_dirty_and_raises_the_first_failure() -> None:
    async with world(4) as w:
        await w.keep("abc", dirty=True)
        await w.keep("d")
        flushing = w.start(w.residency.flush())
        await spin()
        assert w.writing() == "abc"
        error = w.below.only("spill", "b").fail()
        await spin()
        assert not flushing.done(), "the others are still under way"
        w.below.only("spill", "a").succeed()
        w.below.only("spill", "c").succeed()
        with pytest.raises(StorageError) as caught:
            await flushing
        assert caught.value is error
        assert [w.residency.state_of(key) for key in "abcd"] == [State.CLEAN, State.DIRTY, State.CLEAN, State.CLEAN]
        again = w.start(w.residency.flush())
        await spin()
        w.below.only("spill", "b").succeed()
        await again
        await w.residency.flush()


async def test_a_flush_joins_writes_that_have_begun_and_a_cancelled_one_leaves_them() -> None:
    async with world(2, headroom_pages=2) as w:
        await w.keep("a", dirty=True)
        await w.keep("b", dirty=True)
        first = w.start(w.residency.flush())
        await spin()
        first.cancel()
        await spin()
        second = w.start(w.residency.flush())
        await spin()
        assert w.below.log.count(("spill", "a")) == 1
        for transfer in w.below.in_flight.copy():
            transfer.succeed()
        await second
        assert [w.residency.state_of(key) for key in "ab"] == [State.CLEAN, State.CLEAN]


async def test_quiesce_waits_for_both_directions_and_leaves_errors_to_others() -> None:
    async with world(3) as w:
        await w.keep("a", dirty=True)
        flushing = w.start(w.residency.flush())
        w.residency.prefetch("b", PAGE)
        await spin()
        waiting = [w.start(w.residency.quiesce()), w.start(w.residency.settle())]
        w.below.only("fill", "b").fail()
        await spin()
        assert [task.done() for task in waiting] == [False, True]
        w.below.only("spill", "a").fail()
        await waiting[0]
        with pytest.raises(StorageError):
            await flushing


# Budgets


async def test_what_is_larger_than_the_budget_is_refused_at_once_and_evicts_nobody() -> None:
    async with world(3, automatic=True) as w:
        await w.keep("ab", dirty=True)
        with pytest.raises(BudgetError, match=rf"test budget of {3 * PAGE} bytes.*h needs {4 * PAGE} bytes"):
            await w.residency.fetch("h", 4 * PAGE, owner="me")
        with pytest.raises(BudgetError, match="h needs"):
            await w.residency.reserve("h", 4 * PAGE, owner="me")
        assert w.resident() == "ab"


async def test_a_demand_that_can_never_be_met_is_refused_with_the_arithmetic() -> None:
    async with world(4, automatic=True) as w:
        await w.hold("a", num_pages=2)
        await w.hold("b")
        await w.keep("c", dirty=True)
        with pytest.raises(BudgetError) as caught:
            await w.residency.fetch("d", 2 * PAGE, owner="me")
        assert f"a ({2 * PAGE} bytes), b ({PAGE} bytes)" in str(caught.value)
        assert f"at least {5 * PAGE} bytes" in str(caught.value)
        assert "c" not in w.residency, "it made room first"


async def test_a_demand_waits_while_another_owner_may_release() -> None:
    async with world(1, automatic=True) as w:
        await w.hold("a", owner="other")
        task = w.fetch("b")
        await spin()
        assert not task.done()
        w.residency.release("a", owner="other")
        await task


async def test_owners_that_wait_for_each_other_are_not_left_hanging() -> None:
    async with world(2, automatic=True) as w:
        await w.hold("a", owner="x")
        await w.hold("b", owner="y")
        first = w.fetch("c", owner="x")
        await spin()
        assert not first.done()
        with pytest.raises(BudgetError, match="d needs"):
            await w.residency.fetch("d", PAGE, owner="y")
        w.residency.release("b", owner="y")
        await first


async def test_owners_that_wait_are_not_refused_while_one_of_them_can_go_on() -> None:
    async with world(4, automatic=True) as w:
        await w.hold("a", owner="x")
        await w.hold("b", owner="y")
        await w.hold("c", num_pages=2, owner="z")
        large = w.fetch("d", num_pages=3, owner="x")
        await spin()
        small = w.fetch("e", num_pages=2, owner="y")
        await spin()
        w.residency.release("c", owner="z")
        await small
        assert not large.done()
        w.residency.release_all(owner="y")
        await large


async def test_when_the_one_that_could_go_on_is_cancelled_the_other_is_refused() -> None:
    async with world(3, automatic=True) as w:
        await w.hold("a", owner="x")
        await w.hold("b", num_pages=2, owner="z")
        large = w.fetch("c", num_pages=3, owner="x")
        small = w.fetch("d", num_pages=2, owner="y")
        await spin()
        assert (large.done(), small.done()) == (False, False)
        w.residency.release("b", owner="z")
        small.cancel()  # too late to be served, too early to be gone when the other looks
        with pytest.raises(BudgetError):
            await large
        assert small.cancelled()
