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
    order.adopt(Access(Use.GATHER, where) for where in range(num_keys))

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
    )
    for cycle in range(2):
        for where in range(num_keys):
            order.access(Access(Use.GATHER, where))
            await residency.fetch(str(where), PAGE, owner="me")
            residency.release(str(where), owner="me", dirty=cycle == 0)
            if not residency.prefetch(str((where + 1) % num_keys), PAGE):
                await residency.quiesce()
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
def test_a_prefetch_takes_the_place_of_those_needed_last_and_later_than_itself(data: st.DataObject) -> None:
    """At once if they are clean; if some are dirty, once these are written; never otherwise."""

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
            num_pages = data.draw(st.integers(1, 9), label="num_pages")
            later = [
                key for key in keys if w.distances[key] > w.distances["x"] and not w.residency._residents[key].held
            ]
            later.sort(key=lambda key: (w.distances[key], w.residency.state_of(key) is State.CLEAN), reverse=True)
            victims, dirty = later[:num_pages], {key for key in keys if w.residency.state_of(key) is State.DIRTY}
            fits, clean = len(victims) == num_pages, not dirty & set(victims)
            assert not w.residency.prefetch("x", num_pages * PAGE, displace=False)
            assert w.residency.prefetch("x", num_pages * PAGE) == (fits and clean)
            await w.residency.quiesce()
            written = {key for action, key in w.below.log if action == "spill"}
            assert written == (dirty & set(victims) if fits else set())
            if not clean:
                assert w.resident() == keys
                assert w.residency.prefetch("x", num_pages * PAGE) == fits
                await w.residency.quiesce()
            left = set(keys) - set(w.resident())
            assert sorted(map(w.distances.__getitem__, left)) == sorted(
                w.distances[key] for key in (victims if fits else [])
            )

    asyncio.run(scenario())


async def test_who_was_written_to_leave_goes_first_though_others_are_needed_later_by_now() -> None:
    """Else each try would find somebody new to write, and what was written would stay."""
    async with world(3, "abcx") as w:
        await w.keep("abc", dirty=True)
        w.distances["x"] = -1.0
        assert not w.residency.prefetch("x", PAGE)
        await spin()
        assert w.writing() == "c"
        assert w.below.only("spill", "c").priority is Priority.PREFETCH
        w.distances["a"] = 9.0
        assert not w.residency.prefetch("x", PAGE)
        w.below.only("spill", "c").succeed()
        await spin()
        assert w.residency.prefetch("x", PAGE)
        await spin()
        assert w.resident() == "abx"
        assert [key for action, key in w.below.log if action == "spill"] == ["c"]


async def test_who_was_written_to_leave_and_is_used_again_stays_like_any_other() -> None:
    async with world(3, "abcx") as w:
        await w.keep("abc", dirty=True)
        w.distances["x"] = -1.0
        assert not w.residency.prefetch("x", PAGE)
        await spin()
        w.below.only("spill", "c").succeed()
        await spin()
        await w.keep("c")
        w.distances["a"] = 9.0
        assert not w.residency.prefetch("x", PAGE)
        await spin()
        assert w.writing() == "a"


async def test_prepared_memory_is_there_for_the_reservation_and_leaves_like_any_other() -> None:
    async with world(2) as w:
        await w.keep("gh", dirty=True)
        assert not w.residency.prepare("a", PAGE)
        await spin()
        w.below.only("spill", "h").succeed()
        await spin()
        assert w.residency.prepare("a", PAGE)
        assert w.residency.prepare("a", PAGE)
        assert w.resident() == "ag"
        stamp((await w.residency.reserve("a", PAGE, owner="me")).tensor, 5)
        w.residency.release("a", owner="me", dirty=True)
        assert w.residency.state_of("a") is State.DIRTY
        await w.residency.discard("a")
        assert w.residency.prepare("b", PAGE)
        w.distances["b"] = 99.0
        await w.hold("c")
        assert "b" not in w.residency, "nothing was lost"


async def test_prepared_memory_does_not_pass_for_bytes() -> None:
    async with world(2, automatic=True) as w:
        for key in "ab":
            assert w.residency.prepare(key, PAGE)
        assert version_of((await w.residency.fetch("a", PAGE, owner="me")).tensor) == 1
        assert w.residency.prefetch("b", PAGE)
        await w.residency.settle()
        assert version_of((await w.residency.fetch("b", PAGE, owner="me")).tensor) == 1
        assert w.below.log == [("fill", "a"), ("fill", "b")]


# Being told of room


async def test_a_listener_is_told_of_room_once_per_turn_and_not_from_within() -> None:
    async with world(3) as w:
        for key in "abc":
            await w.hold(key, update=True)
        await spin()
        told = w.num_told
        for key in "abc":
            w.residency.release(key, owner="me", dirty=True)
        assert w.num_told == told
        await spin()
        assert w.num_told == told + 1
        w.distances["x"] = -1.0
        assert not w.residency.prefetch("x", 2 * PAGE)
        await spin()
        assert w.num_told == told + 1, "a prefetch tells nobody"
        for key in "bc":
            w.below.only("spill", key).succeed()
            await spin()
        assert w.num_told == told + 3
        await w.residency.discard("a")
        await spin()
        assert w.num_told == told + 4


async def test_a_failed_prefetch_tells_nobody_of_its_room() -> None:
    """Whoever was told would try it again at once, and so on."""
    async with world(1) as w:
        assert w.residency.prefetch("a", PAGE)
        await spin()
        told = w.num_told
        w.below.only("fill", "a").fail()
        await spin()
        assert w.num_told == told


async def test_while_a_demand_waits_nobody_is_told_of_room_and_afterwards_they_are() -> None:
    async with world(2) as w:
        await w.hold("g", owner="other")
        await w.hold("h", owner="other")
        demand = w.fetch("a", num_pages=2)
        await spin()
        told = w.num_told
        w.residency.release("g", owner="other")
        await spin()
        assert w.num_told == told
        w.residency.release("h", owner="other")
        await spin()
        assert w.num_told > told
        w.below.only("fill", "a").succeed()
        await demand


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


async def test_what_is_dirty_is_written_only_when_somebody_sooner_wants_its_place() -> None:
    async with world(3, "abcx") as w:
        await w.keep("abc", dirty=True)
        w.distances["x"] = 9.0
        assert not w.residency.prefetch("x", PAGE)
        assert not w.residency.prefetch("x", PAGE, displace=False)
        assert not w.residency.prefetch("x", 4 * PAGE)
        await spin()
        assert w.writing() == ""


async def test_a_demand_has_all_that_it_needs_written_at_once_and_before_prefetches() -> None:
    async with world(4) as w:
        await w.keep("abcd", dirty=True)
        task = w.fetch("h", num_pages=3)
        await spin()
        assert w.writing() == "bcd"
        assert {transfer.priority for transfer in w.below.in_flight} == {Priority.DEMAND}
        for key in "bdc":
            w.below.only("spill", key).succeed()
            await spin()
        assert w.resident() == "ah"
        w.below.only("fill", "h").succeed()
        await task


async def test_a_demand_counts_on_what_is_being_written_to_leave() -> None:
    async with world(4, "abcdghx") as w:
        await w.keep("abcd", dirty=True)
        w.distances["x"] = -1.0
        assert not w.residency.prefetch("x", 2 * PAGE)
        await spin()
        first = w.fetch("h", num_pages=1)
        second = w.fetch("g", num_pages=2)
        await spin()
        assert w.writing() == "bcd", "one more for three pages"
        for transfer in w.below.in_flight.copy():
            transfer.succeed()
        await spin()
        for transfer in w.below.in_flight.copy():
            transfer.succeed()
        await asyncio.gather(first, second)
        assert w.resident() == "agh"


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
    async with world(2, "abx") as w:
        await w.keep("ab", dirty=True)
        w.distances["x"] = -1.0
        assert not w.residency.prefetch("x", PAGE)
        await spin()
        w.below.only("spill", "b").fail()
        await spin()
        assert not w.residency.prefetch("x", PAGE)
        await spin()
        assert w.writing() == ""
        flushing = w.start(w.residency.flush())
        await spin()
        for transfer in w.below.in_flight.copy():
            transfer.succeed()
        await flushing
        await w.keep("a", dirty=True)
        w.distances["a"] = 9.0
        assert not w.residency.prefetch("x", PAGE)
        await spin()
        assert w.writing() == "a"


async def test_one_of_several_writes_that_fails_fails_the_demand_and_the_others_go_on() -> None:
    async with world(2) as w:
        await w.keep("ab", dirty=True)
        task = w.fetch("h", num_pages=2)
        await spin()
        error = w.below.only("spill", "a").fail()
        with pytest.raises(StorageError) as caught:
            await task
        assert caught.value is error
        w.below.only("spill", "b").succeed()
        await spin()
        assert [w.residency.state_of(key) for key in "ab"] == [State.DIRTY, State.CLEAN]


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
    async with world(2) as w:
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


async def test_what_must_leave_soon_is_written_ahead_and_no_more_than_that() -> None:
    async with world(4) as w:
        await w.keep("defg", dirty=True)
        w.residency.write_ahead(2 * PAGE, beyond=w.distances["e"])
        await spin()
        assert w.writing() == "fg"
        w.residency.write_ahead(2 * PAGE, beyond=w.distances["e"])
        await spin()
        assert w.writing() == "fg", "these will do"
        for key in "fg":
            w.below.only("spill", key).succeed()
        await spin()
        w.residency.write_ahead(4 * PAGE, beyond=w.distances["e"])
        await spin()
        assert w.writing() == "", "the others are needed sooner"
        assert w.resident() == "defg"
        demand = w.fetch("a")
        await spin()
        w.below.only("fill", "a").succeed()
        await demand
        assert w.resident() == "adef", "its room was ready"


async def test_nothing_is_written_ahead_while_there_is_room_or_a_demand_waits() -> None:
    async with world(4) as w:
        await w.keep("gh", dirty=True)
        w.residency.write_ahead(2 * PAGE, beyond=0.0)
        await spin()
        assert w.writing() == ""
        demand = w.fetch("a", num_pages=3)
        await spin()
        assert w.writing() == "h"
        w.residency.write_ahead(4 * PAGE, beyond=0.0)
        await spin()
        assert w.writing() == "h"
        w.below.only("spill", "h").succeed()
        await spin()
        w.below.only("fill", "a").succeed()
        await demand
