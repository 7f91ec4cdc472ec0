"""AccessOrder and Ranking: what comes next, how far away it is, and who is needed last."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from infinity.engine.prefetch import Orders
from infinity.store import order as module
from infinity.store.order import Access, AccessOrder, Recurrence, Use
from infinity.store.ranking import Ranking
from infinity.store.shard import ShardKey


def gather(where: int) -> Access:
    return Access(Use.GATHER, where)


def keys_of(access: Access) -> list[Hashable]:
    """Neighbours share a key, so that a key has several accesses and an access several keys."""
    return [access.where, f"pair {access.where // 2}"]


def order_of(*wheres: int) -> AccessOrder:
    order = AccessOrder(keys_of)
    order.adopt([gather(where) for where in wheres])
    return order


def brute_distance(accesses: list[Access], cursor: int, key: Hashable) -> float:
    """By definition: walk from the cursor, once around, to the first access that touches the key."""
    for steps, access in enumerate(accesses[cursor:] + accesses[:cursor]):
        if key == access or key in keys_of(access):
            return steps
    return math.inf


class OrderMachine(RuleBasedStateMachine):
    """Random accesses, expected or not, over random cycles, against the definition."""

    def __init__(self) -> None:
        super().__init__()
        self.order = AccessOrder(keys_of)
        self.known: list[Access] = []
        self.recorded: list[Access] = []
        self.cursor = 0
        self.num_surprises = 0

    @initialize(wheres=st.lists(st.integers(0, 5), max_size=12))
    def adopt(self, wheres: list[int]) -> None:
        self.known = [gather(where) for where in wheres]
        self.order.adopt(self.known)

    @rule(where=st.integers(0, 7))
    def access(self, where: int) -> None:
        access = gather(where)
        distance = brute_distance(self.known, self.cursor, access)
        self.num_surprises += distance != 0
        if math.isfinite(distance):
            self.cursor = (self.cursor + int(distance) + 1) % len(self.known)
        self.recorded.append(access)
        self.order.access(access)

    @rule()
    def access_as_expected(self) -> None:
        if self.known:
            self.access(self.known[self.cursor].where)

    @rule()
    def end_cycle(self) -> None:
        self.order.end_cycle()
        self.known = self.recorded or self.known
        self.recorded, self.cursor = [], 0

    @rule()
    def abandon_cycle(self) -> None:
        self.order.abandon_cycle()
        self.recorded, self.cursor = [], 0

    @invariant()
    def agrees_with_the_definition(self) -> None:
        keys: list[Hashable] = [*range(8), *(f"pair {pair}" for pair in range(4)), *map(gather, range(8))]
        assert [self.order.distance(key) for key in keys] == [
            brute_distance(self.known, self.cursor, key) for key in keys
        ]
        assert list(self.order.upcoming()) == self.known[self.cursor :] + self.known[: self.cursor]
        assert len(self.order) == len(self.known)
        assert self.order.num_surprises == self.num_surprises


TestOrderMachine = OrderMachine.TestCase
TestOrderMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_an_unexpected_access_moves_the_cursor_to_its_next_occurrence() -> None:
    order = order_of(0, 1, 2, 3, 2)
    order.access(gather(2))
    assert order.num_surprises == 1
    assert [access.where for access in order.upcoming()] == [3, 2, 0, 1, 2]
    order.access(gather(3))
    order.access(gather(2))
    assert order.num_surprises == 1, "it is in step again"


def test_an_unknown_access_leaves_the_cursor() -> None:
    order = order_of(0, 1, 2)
    order.access(gather(0))
    order.access(gather(9))
    assert order.num_surprises == 1
    assert order.distance(1) == 0
    assert order.distance(9) == math.inf


def test_before_anything_is_known_every_access_is_a_surprise_and_the_first_cycle_teaches() -> None:
    order = AccessOrder(keys_of)
    assert list(order.upcoming()) == []
    for where in (4, 2, 4):
        order.access(gather(where))
    assert order.num_surprises == 3
    order.end_cycle()
    for where in (4, 2, 4):
        order.access(gather(where))
    assert order.num_surprises == 3
    assert order.distance(2) == 1


def test_a_cycle_without_accesses_keeps_the_prediction() -> None:
    order = order_of(0, 1)
    order.end_cycle()
    assert [access.where for access in order.upcoming()] == [0, 1]


def test_an_abandoned_cycle_teaches_nothing() -> None:
    order = order_of(0, 1, 2)
    order.access(gather(0))
    order.access(gather(7))
    order.abandon_cycle()
    assert order.distance(0) == 0
    order.access(gather(0))
    order.access(gather(1))
    order.end_cycle()
    assert [access.where for access in order.upcoming()] == [0, 1], "what came before the break is forgotten"


def test_a_cycle_that_never_ends_is_recorded_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_RECORDED", 3)
    order = AccessOrder(keys_of)
    for where in range(8):
        order.access(gather(where))
    order.end_cycle()
    assert [access.where for access in order.upcoming()] == [0, 1, 2]


def make_orders() -> Orders:
    """Two units of one part each."""
    parts = [
        SimpleNamespace(index=i, unit=i, position=0, stepped=True, key=lambda kind, i=i: ShardKey(i, 0, kind))
        for i in range(2)
    ]
    units = [SimpleNamespace(index=i, parts=[part]) for i, part in enumerate(parts)]
    return Orders(cast(Any, units), cast(Any, parts), lambda part: [ShardKey(part.index, 0, "master")])


def test_evaluation_between_two_steps_teaches_training_nothing() -> None:
    orders = make_orders()
    training = list(orders.training.upcoming())
    expected = training.copy()
    for access in training[:3]:
        orders.training.access(access)
    orders.current = orders.evaluation
    for where in (1, 0, 1):
        orders.current.access(gather(where))
    orders.current = orders.training
    for access in training[3:]:
        orders.training.access(access)
    orders.training.end_cycle()
    assert list(orders.training.upcoming()) == expected
    assert orders.training.num_surprises == 0


def test_what_a_lap_leaves_out_is_not_expected_until_it_happens_again() -> None:
    order = order_of(*range(4))
    steps = Recurrence(order, [(0, 4), (1, 4)])

    def lap(*stepped: int) -> None:
        for where in range(4):
            order.access(gather(where))
        for what in stepped:
            steps.happened(what)
        order.end_cycle()
        steps.end_lap()

    lap(0, 1)
    assert list(steps.upcoming()) == [0, 1]
    lap(0)
    lap(0)
    assert list(steps.upcoming()) == [0]
    assert steps.distance(1) == math.inf
    lap(0, 1)
    assert list(steps.upcoming()) == [0, 1]
    assert 4 <= steps.distance(0) < steps.distance(1) < 5, "a lap away, in the same order"


def test_units_are_ranked_by_what_runs_now_and_shards_by_training() -> None:
    orders = make_orders()
    key = ShardKey(0, 0, "master")
    in_training, shard = orders.unit_distance(0), orders.shard_distance(key)
    orders.current = orders.evaluation
    orders.evaluation.access(Access(Use.FORWARD, 0))
    orders.evaluation.access(gather(0))
    assert orders.unit_distance(0) == 2, "unit 1, then the next forward"
    assert orders.unit_distance(0) != in_training
    assert orders.shard_distance(key) == shard


# Ranking


def latest_first(ranking: Ranking[int]) -> list[int]:
    return [member for _, member in ranking.latest_first()]


def test_a_ranking_is_a_set() -> None:
    ranking: Ranking[int] = Ranking(float)
    ranking.add(3)
    ranking.add(5)
    ranking.discard(4)
    assert (len(ranking), 3 in ranking, 4 in ranking) == (2, True, False)
    with pytest.raises(AssertionError):
        ranking.add(3)
    ranking.discard(3)
    assert list(ranking.latest_first()) == [(5.0, 5)]


@pytest.mark.parametrize("num_members", [5, 500])
def test_a_ranking_is_exact_while_an_order_repeats_itself(num_members: int) -> None:
    order = AccessOrder(lambda access: [access.where])
    order.adopt([gather(where) for where in range(num_members)])
    ranking: Ranking[int] = Ranking(order.distance)
    for member in range(0, num_members, 2):
        ranking.add(member)
    for where in itertools.chain(range(num_members), range(num_members // 3)):
        order.access(gather(where))
        if where in ranking:
            ranking.discard(where)
            ranking.add(where)
        expected = sorted(range(0, num_members, 2), key=order.distance, reverse=True)
        assert latest_first(ranking) == expected


def test_members_whose_use_went_by_without_them_take_their_new_place() -> None:
    order = AccessOrder(lambda access: [access.where])
    order.adopt([gather(where) for where in range(200)])
    ranking: Ranking[int] = Ranking(order.distance)
    for member in range(200):
        ranking.add(member)
    assert latest_first(ranking)[0] == 199
    order.access(gather(49))
    assert latest_first(ranking) == [*range(49, -1, -1), *range(199, 49, -1)]


def test_members_without_a_known_use_are_needed_last() -> None:
    order = order_of(*range(100))
    ranking: Ranking[int] = Ranking(order.distance)
    for member in range(98, 104):
        ranking.add(member)
    assert latest_first(ranking) == [100, 101, 102, 103, 99, 98]


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_a_ranking_never_loses_or_invents_a_member(data: st.DataObject) -> None:
    """Whatever the distances do: they are wishes, and may change without notice."""
    distances = [0.0] * 100
    ranking: Ranking[int] = Ranking(lambda member: distances[member])
    members: set[int] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        for member in data.draw(st.sets(st.integers(0, 99), max_size=50)):
            if member in members:
                ranking.discard(member)
                members.discard(member)
            else:
                ranking.add(member)
                members.add(member)
        if data.draw(st.booleans()):
            spread = data.draw(st.integers(1, 1000))
            distances[:] = [float(i * 7919 % spread) for i in range(100)]
        assert sorted(latest_first(ranking)) == sorted(members)
        assert len(ranking) == len(members)


class At:
    """A member whose hash is, as that of most objects, where it lies in memory."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __hash__(self) -> int:
        return self.address


def test_equals_are_ranked_by_what_came_before_and_not_by_where_they_are_in_memory() -> None:
    def ranked(step: int) -> list[int]:
        ranking: Ranking[At] = Ranking(lambda member: 1.0)
        members = [At(number * step % 211) for number in range(200)]
        for number, member in enumerate(members):
            ranking.add(member)
            if number % 3 == 0:
                list(ranking.latest_first())
        return [members.index(member) for _, member in ranking.latest_first()]

    assert sorted(ranked(1)) == list(range(200))
    assert ranked(1) == ranked(17) == ranked(97)
