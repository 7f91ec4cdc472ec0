"""Residency: bringing bytes in and letting them go, under faults and cancellation."""

from __future__ import annotations

import asyncio

import pytest

from fakes_residency import assert_all_given_back, spin, stamp, until, version_of, world
from infinity.errors import EngineStateError, StorageError
from infinity.io.backend import Priority
from infinity.io.memory import PAGE_BYTES
from infinity.store.residency import State

PAGE = PAGE_BYTES


# Fetching


async def test_a_fetch_pins_the_bytes_and_the_next_finds_them() -> None:
    async with world(2) as w:
        task = w.fetch("a")
        await spin()
        assert w.residency.state_of("a") is State.FILLING
        assert w.below.only("fill", "a").priority is Priority.DEMAND
        w.below.only("fill", "a").succeed()
        lease = await task
        assert version_of(lease.tensor) == 1
        assert w.residency.state_of("a") is State.CLEAN
        again = await w.residency.fetch("a", PAGE, owner="other")
        assert again is lease
        assert w.below.log == [("fill", "a")]
        statistics = w.residency.statistics
        assert (statistics.num_hits, statistics.num_misses) == (1, 1)


async def test_the_priority_of_a_fetch_is_that_of_its_transfer() -> None:
    async with world(2) as w:
        w.start(w.residency.fetch("a", PAGE, owner="me", priority=Priority.PREFETCH))
        assert w.residency.prefetch("b", PAGE, priority=Priority.DEMAND)
        await spin()
        assert w.below.only("fill", "a").priority is Priority.PREFETCH
        assert w.below.only("fill", "b").priority is Priority.DEMAND
        for transfer in w.below.in_flight.copy():
            transfer.succeed()
        await spin()


async def test_concurrent_fetches_of_one_key_fill_once() -> None:
    async with world(2) as w:
        tasks = [w.fetch("a", owner=owner) for owner in ("x", "y", "z")]
        await spin()
        w.below.only("fill", "a").succeed()
        leases = await asyncio.gather(*tasks)
        assert leases[0] is leases[1] is leases[2]
        assert w.below.log == [("fill", "a")]


async def test_concurrent_fetches_of_one_key_are_content_with_room_for_one() -> None:
    """The second finds no room for another copy, and must not say so: it needs none."""
    async with world(2) as w:
        await w.hold("h", num_pages=2, owner="other")
        tasks = [w.fetch("a", num_pages=2, owner="me") for _ in range(2)]
        await spin()
        w.residency.release("h", owner="other")
        await spin()
        w.below.only("fill", "a").succeed()
        first, second = await asyncio.gather(*tasks)
        assert first is second
        assert w.residency.statistics.num_evictions == 1


async def test_a_failed_fill_reaches_everyone_who_waits_and_leaves_nothing() -> None:
    async with world(2) as w:
        tasks = [w.fetch("a", owner=owner) for owner in ("x", "y")]
        await spin()
        error = w.below.only("fill", "a").fail()
        assert await asyncio.gather(*tasks, return_exceptions=True) == [error, error]
        assert "a" not in w.residency
        assert w.pool.statistics().leased_bytes == 0
        await w.hold("a")
        assert version_of((await w.residency.fetch("a", PAGE, owner="x")).tensor) == 1


async def test_a_failed_prefetch_reaches_the_demand_that_joined_it() -> None:
    async with world(2) as w:
        assert w.residency.prefetch("a", PAGE)
        await spin()
        task = w.fetch("a")
        await spin()
        error = w.below.only("fill", "a").fail()
        with pytest.raises(StorageError) as caught:
            await task
        assert caught.value is error


async def test_a_prefetch_that_failed_unseen_is_tried_again_by_the_demand() -> None:
    async with world(2) as w:
        assert w.residency.prefetch("a", PAGE)
        await spin()
        w.below.only("fill", "a").fail()
        await spin()
        assert "a" not in w.residency
        await w.hold("a")
        assert w.below.log == [("fill", "a"), ("fill", "a")]


async def test_a_cancelled_fetch_leaves_the_fill_to_others() -> None:
    async with world(2) as w:
        first, second = w.fetch("a", owner="x"), w.fetch("a", owner="y")
        await spin()
        first.cancel()
        await spin()
        w.below.only("fill", "a").succeed()
        await second
        assert first.cancelled()
        w.residency.release("a", owner="y")
        await w.residency.discard("a")  # nobody else holds it


async def test_a_cancelled_wait_for_a_movement_lets_go_of_the_resident() -> None:
    """Who waits for room must hear of it: the movement has ended before, and nothing else will happen."""
    async with world(1) as w:
        joined = w.fetch("a", owner="x")
        await spin()
        waiting = w.fetch("b", owner="y")
        await spin()
        w.below.only("fill", "a").succeed()
        await until(lambda: w.residency.state_of("a") is State.CLEAN)  # and the fetch is yet to wake up
        joined.cancel()
        await spin()
        assert joined.cancelled()
        w.below.only("fill", "b").succeed()
        await waiting


async def test_an_update_waits_for_the_write_in_flight_and_reading_does_not() -> None:
    async with world(2) as w:
        await w.keep("a", dirty=True)
        flushing = w.start(w.residency.flush())
        await spin()
        assert w.residency.state_of("a") is State.WRITING
        lease = await w.residency.fetch("a", PAGE, owner="reader")
        update = w.fetch("a", owner="writer", update=True)
        await spin()
        assert not update.done()
        w.below.only("spill", "a").succeed()
        assert await update is lease
        await flushing
        assert w.residency.state_of("a") is State.CLEAN


# Reserving and discarding


async def test_reserved_memory_is_filled_by_the_caller() -> None:
    async with world(1) as w:
        stamp((await w.residency.reserve("a", PAGE, owner="me")).tensor, 7)
        w.residency.release("a", owner="me", dirty=True)
        assert w.residency.state_of("a") is State.DIRTY
        flushing = w.start(w.residency.flush())
        await spin()
        w.below.only("spill", "a").succeed()
        await flushing
        assert w.below.stored["a"] == 7
        assert w.below.log == [("spill", "a")]


@pytest.mark.parametrize("before", ["absent", "clean", "dirty"])
async def test_a_reservation_that_is_given_up_leaves_nothing_resident(before: str) -> None:
    """Neither half-written bytes nor those from before may pass for the key's value."""
    async with world(2) as w:
        if before != "absent":
            await w.keep("a", dirty=before == "dirty")
        (await w.residency.reserve("a", PAGE, owner="me")).tensor.fill_(99)
        await w.residency.flush()
        w.residency.release("a", owner="me")
        assert "a" not in w.residency
        assert w.pool.statistics().leased_bytes == 0
        assert ("spill", "a") not in w.below.log


async def test_a_reservation_waits_for_what_moves() -> None:
    async with world(2) as w:
        w.residency.prefetch("a", PAGE)
        await spin()
        reserving = w.start(w.residency.reserve("a", PAGE, owner="me"))
        await spin()
        assert not reserving.done()
        w.below.only("fill", "a").fail()
        stamp((await reserving).tensor, 2)
        w.residency.release("a", owner="me", dirty=True)
        flushing = w.start(w.residency.flush())
        await spin()
        again = w.start(w.residency.reserve("a", PAGE, owner="me"))
        await spin()
        assert not again.done()
        w.below.only("spill", "a").succeed()
        await flushing
        stamp((await again).tensor, 3)
        w.residency.release("a", owner="me", dirty=True)
        assert w.residency.state_of("a") is State.DIRTY


async def test_a_discarded_key_is_not_written() -> None:
    async with world(2) as w:
        await w.keep("ab", dirty=True)
        await w.residency.discard("a")
        await w.residency.discard("never seen")
        assert w.resident() == "b"
        assert w.below.log == [("fill", "a"), ("fill", "b")]
        assert w.residency.statistics.num_evictions == 0


async def test_discarding_waits_for_what_moves() -> None:
    async with world(2) as w:
        w.residency.prefetch("a", PAGE)
        await spin()
        discarding = w.start(w.residency.discard("a"))
        await spin()
        assert not discarding.done()
        w.below.only("fill", "a").succeed()
        await discarding
        assert "a" not in w.residency


async def test_misuse_is_caught() -> None:
    async with world(2) as w:
        await w.hold("a")
        with pytest.raises(AssertionError, match="discarded while in use"):
            await w.residency.discard("a")
        with pytest.raises(AssertionError, match="released more often"):
            w.residency.release("a", owner="other")
        w.residency.release("a", owner="me")
        with pytest.raises(AssertionError, match="released more often"):
            w.residency.release("a", owner="me")


async def test_release_all_ends_every_pin_of_one_owner() -> None:
    async with world(4) as w:
        await w.hold("a")
        await w.hold("a")
        await w.hold("b")
        await w.hold("a", owner="other")
        await w.residency.reserve("c", PAGE, owner="me")
        w.residency.release_all(owner="me")
        assert w.resident() == "ab"
        await w.residency.discard("b")
        with pytest.raises(AssertionError, match="in use"):
            await w.residency.discard("a")
        w.residency.release("a", owner="other")


async def test_release_all_does_not_touch_a_fetch_under_way() -> None:
    async with world(1) as w:
        task = w.fetch("a")
        await spin()
        w.residency.release_all(owner="me")
        w.below.only("fill", "a").succeed()
        await task
        w.residency.release("a", owner="me")


# Closing


async def test_closing_ends_everyone_who_waits() -> None:
    async with world(2) as w:
        await w.hold("a", owner="other")
        filling = w.fetch("b", owner="x")
        await spin()
        waiting = w.fetch("c", owner="y")
        await spin()
        closing = w.start(w.residency.close())
        await spin()
        assert not closing.done(), "a transfer in flight still uses its lease"
        assert w.pool.statistics().num_leases == 2
        w.below.only("fill", "b").succeed()
        await closing
        for task in (filling, waiting):
            with pytest.raises(EngineStateError):
                await task
        assert_all_given_back(w.pool)
        w.residency.release("a", owner="other")
        assert not w.residency.prefetch("a", PAGE)
        for call in (w.residency.fetch("a", PAGE, owner="x"), w.residency.reserve("a", PAGE, owner="x")):
            with pytest.raises(EngineStateError, match="test tier is closed"):
                await call
        await w.residency.close()


async def test_closing_before_a_movement_has_begun() -> None:
    """A task that is cancelled before its first step never runs."""
    async with world(2) as w:
        await w.keep("a", dirty=True)
        task = w.fetch("b")
        flushing = w.start(w.residency.flush())
        await asyncio.sleep(0)
        await w.residency.close()
        for each in (task, flushing):
            with pytest.raises(EngineStateError):
                await each
        assert w.below.log == [("fill", "a")]
        assert_all_given_back(w.pool)


async def test_a_cancelled_close_still_gives_everything_back() -> None:
    async with world(2) as w:
        w.residency.prefetch("a", PAGE)
        await spin()
        closing = w.start(w.residency.close())
        await spin()
        closing.cancel()
        await spin()
        assert not closing.done()
        w.below.only("fill", "a").succeed()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert_all_given_back(w.pool)
