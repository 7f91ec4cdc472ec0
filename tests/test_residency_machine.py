"""Residency under random calls, transfers that end well or not, and cancellation at any await, against a model of it.

Three owners, each one thread of control, fetch, reserve and release; prefetches, discards and flushes come in between;
the test decides when each transfer ends, and how, and how far the loop runs between two events. Every version of a
key's bytes carries its number, so that any byte that is lost, stale or written too early shows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fakes_residency import Below, make_pool, spin, stamp, version_of
from infinity.errors import BudgetError, StorageError
from infinity.io.memory import PAGE_BYTES
from infinity.store.residency import Residency, State

KEYS = "abcdef"
PAGES = dict(zip(KEYS, (1, 1, 2, 2, 3, 1), strict=True))
SIZES = {key: pages * PAGE_BYTES - (64 if key in "bd" else 0) for key, pages in PAGES.items()}
OWNERS = ["x", "y", "z"]
LAST_VERSION = 120


@dataclass
class Pending:
    """A call under way."""

    what: str
    key: str
    task: asyncio.Task[Any]


class ResidencyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.below = Below(KEYS)
        self.truth: dict[str, int | None] = dict.fromkeys(KEYS, 1)  # None: void, until released dirty
        self.below.expected = self.truth
        self.distances = {key: float(index) for index, key in enumerate(KEYS)}
        self.readers: dict[str, Counter[str]] = {owner: Counter() for owner in OWNERS}
        self.writers: dict[str, str] = {}  # key: owner
        self.calls: dict[str, Pending] = {}  # by owner, and "discard" and "flush"
        self.injected: list[BaseException] = []
        self.version = 1

    @initialize(num_pages=st.integers(3, 10))
    def open(self, num_pages: int) -> None:
        self.pool = make_pool(num_pages)
        self.residency: Residency[str] = Residency(
            self.pool,
            distance=self.distances.__getitem__,
            fill=self.below.fill,
            spill=self.below.spill,
            room=self.room,
        )

    def room(self) -> None:
        """A look-ahead, as often as it is told to look."""
        for key in KEYS:
            if self.may_read(key):
                self.residency.prefetch(key, SIZES[key], displace=self.distances[key] < 3)

    # What a caller may do

    def held(self, key: str) -> bool:
        return key in self.writers or any(counts[key] for counts in self.readers.values())

    def prepared(self, key: str) -> bool:
        """Whether it has memory and no bytes."""
        resident = self.residency._residents.get(key)
        return resident is not None and resident.void and not resident.held

    def asked(self, key: str, *whats: str) -> bool:
        return any(call.key == key and (not whats or call.what in whats) for call in self.calls.values())

    def may_read(self, key: str) -> bool:
        return key not in self.writers and not self.asked(key, "update", "reserve", "discard")

    def may_change(self, key: str) -> bool:
        return not self.held(key) and not self.asked(key) and "flush" not in self.calls

    def pins(self, owner: str) -> list[str]:
        return [*self.readers[owner].elements(), *(key for key, writer in self.writers.items() if writer == owner)]

    # Events

    def start(self, name: str, what: str, key: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.calls[name] = Pending(what, key, self.loop.create_task(coroutine))

    @precondition(lambda self: len(self.calls.keys() & set(OWNERS)) < len(OWNERS))
    @rule(data=st.data(), key=st.sampled_from(KEYS), what=st.sampled_from(["fetch", "fetch", "update", "reserve"]))
    def call(self, data: st.DataObject, key: str, what: str) -> None:
        owner = data.draw(st.sampled_from([owner for owner in OWNERS if owner not in self.calls]), label="owner")
        if what == "fetch" and self.may_read(key):
            self.start(owner, what, key, self.residency.fetch(key, SIZES[key], owner=owner))
        elif what == "update" and self.may_change(key):
            self.start(owner, what, key, self.residency.fetch(key, SIZES[key], owner=owner, update=True))
        elif what == "reserve" and self.may_change(key):
            self.start(owner, what, key, self.residency.reserve(key, SIZES[key], owner=owner))

    @precondition(lambda self: any(self.pins(owner) for owner in OWNERS if owner not in self.calls))
    @rule(data=st.data(), dirty=st.booleans())
    def release(self, data: st.DataObject, dirty: bool) -> None:
        free = [owner for owner in OWNERS if owner not in self.calls and self.pins(owner)]
        owner = data.draw(st.sampled_from(free), label="owner")
        key = data.draw(st.sampled_from(sorted(set(self.pins(owner)))), label="key")
        self.inside(lambda: self.release_now(owner, key, dirty))

    def release_now(self, owner: str, key: str, dirty: bool) -> None:
        changes = self.writers.get(key) == owner and dirty and self.version < LAST_VERSION
        if self.writers.get(key) == owner:
            del self.writers[key]
            if changes:
                self.version += 1
                stamp(self.residency._residents[key].lease.tensor, self.version)
                self.truth[key] = self.version
            else:
                self.give_up(key)
        else:
            self.readers[owner][key] -= 1
        self.residency.release(key, owner=owner, dirty=changes)

    def give_up(self, key: str) -> None:
        """A writer has not written: after a reservation, the tier below has the only value."""
        if self.truth[key] is None:
            self.truth[key] = self.below.stored[key]

    @rule(data=st.data())
    def release_all(self, data: st.DataObject) -> None:
        free = [owner for owner in OWNERS if owner not in self.calls]
        if not free:
            return
        owner = data.draw(st.sampled_from(free))
        self.inside(lambda: self.release_all_now(owner))

    def release_all_now(self, owner: str) -> None:
        for key in self.pins(owner):
            if self.writers.pop(key, None):
                self.give_up(key)
        self.readers[owner].clear()
        self.residency.release_all(owner=owner)

    @rule(key=st.sampled_from(KEYS), how=st.sampled_from(["fetch", "displace nobody", "prepare"]))
    def prefetch(self, key: str, how: str) -> None:
        if not (self.may_change(key) if how == "prepare" else self.may_read(key)):
            return

        def prefetch() -> None:
            before = {each: self.residency.state_of(each) for each in KEYS}
            prepared = self.prepared(key)
            if how == "prepare":
                came = self.residency.prepare(key, SIZES[key])
            else:
                came = self.residency.prefetch(key, SIZES[key], displace=how == "fetch")
                if prepared and not came:
                    before[key] = None  # its memory was given up
            assert came == (key in self.residency)
            left = [each for each in KEYS if before[each] is not None and each not in self.residency]
            assert came or not left
            for each in left:
                assert before[each] is State.CLEAN
                assert not self.held(each)
                assert self.distances[each] > self.distances[key]
                assert how != "displace nobody"

        self.inside(prefetch)

    @precondition(lambda self: "discard" not in self.calls)
    @rule(key=st.sampled_from(KEYS))
    def discard(self, key: str) -> None:
        if self.may_change(key):
            self.start("discard", "discard", key, self.residency.discard(key))

    @precondition(lambda self: "flush" not in self.calls and not self.writers)
    @rule()
    def flush(self) -> None:
        if not any(call.what in ("update", "reserve", "discard") for call in self.calls.values()):
            self.start("flush", "flush", "", self.residency.flush())

    @rule(distances=st.permutations(range(len(KEYS))))
    def change_order(self, distances: list[int]) -> None:
        self.distances.update(zip(KEYS, map(float, distances), strict=True))

    @precondition(lambda self: self.below.in_flight)
    @rule(data=st.data(), well=st.sampled_from([True, True, True, False]))
    def end_transfer(self, data: st.DataObject, well: bool) -> None:
        under_way = [each for each in self.below.in_flight if not each.end.done()]
        if not under_way:
            return
        transfer = data.draw(st.sampled_from(under_way))
        if well:
            transfer.succeed()
        else:
            self.injected.append(transfer.fail())

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.calls)), label="call")
        self.calls[name].task.cancel()
        self.run(data.draw(st.integers(1, 4), label="turns"))

    @rule(num_turns=st.integers(1, 4))
    def tick(self, num_turns: int) -> None:
        self.run(num_turns)

    @rule()
    def settle(self) -> None:
        """When the loop has nothing left to do, whoever waits does so for a transfer, or for someone who may act."""
        self.run(60)
        if not self.below.in_flight and self.calls:
            assert any(self.pins(owner) for owner in OWNERS if owner not in self.calls), "they would wait for ever"

    # What comes of it

    def run(self, num_turns: int) -> None:
        waiting = set(self.calls)
        for _ in range(num_turns):
            self.loop.run_until_complete(asyncio.sleep(0))
            self.collect(waiting)

    def inside(self, call: Callable[[], None]) -> None:
        """Make a synchronous call from the loop."""
        waiting = set(self.calls)

        async def turn() -> None:
            self.collect(waiting)
            call()

        self.loop.run_until_complete(turn())
        self.collect(waiting)

    def collect(self, waiting: set[str]) -> None:
        for name in [name for name, call in self.calls.items() if call.task.done()]:
            self.ended(name, self.calls.pop(name), waiting)

    def ended(self, name: str, call: Pending, waiting: set[str]) -> None:
        if call.task.cancelled():
            return
        error = call.task.exception()
        if isinstance(error, BudgetError):
            pinned = sum(PAGES[key] for key in {key for owner in OWNERS for key in self.pins(owner)})
            assert (pinned + PAGES[call.key]) * PAGE_BYTES > self.pool.budget_bytes
            assert all(owner in waiting for owner in OWNERS if self.pins(owner) and owner != name)
            assert call.key not in self.residency
        elif error is not None:
            assert isinstance(error, StorageError), repr(error)
            assert error in self.injected
        elif call.what == "discard":
            self.truth[call.key] = self.below.stored[call.key]
        elif call.what == "flush":
            assert self.below.stored == self.truth
        else:
            lease = call.task.result()
            assert lease is self.residency._residents[call.key].lease
            assert len(lease.tensor) == SIZES[call.key]
            if call.what == "fetch":
                self.readers[name][call.key] += 1
            else:
                self.writers[call.key] = name
            if call.what == "reserve":
                self.truth[call.key] = None
                lease.tensor.fill_(0xEE)

    @invariant()
    def budget_is_kept(self) -> None:
        statistics = self.pool.statistics()
        assert statistics.leased_bytes + statistics.cached_bytes <= statistics.budget_bytes
        resident = sum(PAGES[key] for key in KEYS if key in self.residency)
        assert statistics.leased_bytes == resident * PAGE_BYTES

    @invariant()
    def who_is_pinned_stays_and_keeps_the_last_version(self) -> None:
        for key in KEYS:
            if self.held(key):
                assert self.residency.state_of(key) in (State.CLEAN, State.DIRTY, State.WRITING)
                if self.truth[key] is not None:
                    assert version_of(self.residency._residents[key].lease.tensor) == self.truth[key]

    @invariant()
    def nothing_is_lost(self) -> None:
        """What is not resident is below; what is resident and idle is what was last released."""
        for key in KEYS:
            state = self.residency.state_of(key)
            if self.asked(key, "discard") or self.truth[key] is None:
                continue
            if state in (None, State.FILLING) or self.prepared(key):
                assert self.below.stored[key] == self.truth[key]
            else:
                assert version_of(self.residency._residents[key].lease.tensor) == self.truth[key]
                if state is State.CLEAN and not self.held(key):
                    assert self.below.stored[key] == self.truth[key]

    @invariant()
    def the_tier_below_saw_no_fault(self) -> None:
        assert self.below.faults == []

    def teardown(self) -> None:
        if not hasattr(self, "residency"):
            self.loop.close()
            return
        closing = self.loop.create_task(self.residency.close())
        self.finish(lambda: closing.done())
        for call in self.calls.values():
            self.finish(call.task.done)
            if not call.task.cancelled():
                call.task.exception()
        closing.result()
        statistics = self.pool.statistics()
        assert (statistics.leased_bytes, statistics.num_leases) == (0, 0)
        assert not asyncio.all_tasks(self.loop)
        assert self.below.faults == []
        self.loop.close()

    def finish(self, done: Callable[[], bool]) -> None:
        for _ in range(100):
            if done():
                return
            for transfer in self.below.in_flight:
                if not transfer.end.done():
                    transfer.succeed()
            self.loop.run_until_complete(spin(3))
        raise AssertionError("it never ended")


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
