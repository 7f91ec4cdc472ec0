"""The search for the best cell, on made-up disks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.bench.settings import MAX_IN_FLIGHT_BYTES, Point
from infinity.bench.sweep import BLOCKS, DEPTHS, DIRECTIONS, Cell, Figure, Sweep, SweepDirection, grid
from infinity.config import BackendName

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

Disk = Callable[[Cell, SweepDirection], Figure]


class SimulatedDisk:
    """A device with a latency for each call, a bandwidth, and a processor that pays for each call.

    Reading wants many bytes in flight, writing few large calls.
    """

    def __init__(self, noise: float = 0.0, seed: int = 0, seconds_per_call: dict[str, float] | None = None) -> None:
        self._noise = noise
        self._random = random.Random(seed)
        self._seconds_per_call = seconds_per_call or {}

    def truth(self, cell: Cell, direction: SweepDirection) -> float:
        """GB/s without noise: what is in flight over the latency, up to the bandwidth of the device."""
        point = cell.point
        latency = 1e-3 + self._seconds_per_call.get(cell.backend, 0.0)
        limit = 3.0 if direction == "read" else 5.0 * point.block_bytes / (point.block_bytes + MIB)
        flowing = point.round_bytes / 1e9 / latency
        return limit * flowing / (limit + flowing)

    def __call__(self, cell: Cell, direction: SweepDirection) -> Figure:
        factor = 1 + self._random.uniform(-self._noise, self._noise)
        cpu = 0.005 + 2e-5 * 1e9 / cell.point.block_bytes
        return Figure(self.truth(cell, direction) * factor, cpu * (1 + self._random.uniform(-0.1, 0.1) * self._noise))


def visit(sweep: Sweep, disk: Disk, cells: Iterable[Cell]) -> None:
    for cell in cells:
        for direction in DIRECTIONS:
            sweep.add(cell, direction, disk(cell, direction))


def search(
    disk: Disk, backends: tuple[BackendName, ...] = ("threads",), *, num_rounds: int = 6, share_bytes: int = GIB
) -> Sweep:
    sweep = Sweep(backends, grid(share_bytes))
    visit(sweep, disk, sweep.anchors())
    visit(sweep, disk, sweep.coarse())
    for _ in range(num_rounds):
        visit(sweep, disk, sweep.refine())
    return sweep


def test_the_grid_has_every_point_that_fits() -> None:
    points = grid(GIB)
    assert points == sorted(set(points))
    assert {point.block_bytes for point in points} == set(BLOCKS) == {256 * KIB << power for power in range(8)}
    assert {point.depth for point in points} == set(DEPTHS) == {1, 2, 4, 8, 16}
    assert max(point.round_bytes for point in points) == MAX_IN_FLIGHT_BYTES
    assert Point(32 * MIB, 2) in points
    assert Point(32 * MIB, 4) not in points
    small = {256: (1, 2, 4), 512: (1, 2), 1024: (1,)}
    assert grid(MIB) == [Point(block * KIB, depth) for block, depths in small.items() for depth in depths]
    assert grid(4096) == [Point(256 * KIB, 1)]


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_best_is_found_without_measuring_everything(noise: float) -> None:
    disk = SimulatedDisk(noise)
    sweep = search(disk)
    for direction in DIRECTIONS:
        best_there_is = max(disk.truth(Cell("threads", point), direction) for point in grid(GIB))
        assert disk.truth(sweep.best(direction), direction) >= 0.9 * best_there_is
    assert len(sweep.cells) < len(grid(GIB))
    assert len(set(sweep.cells)) == len(sweep.cells)


def test_every_beginning_of_the_coarse_round_spans_the_grid() -> None:
    sweep = Sweep(["threads"], grid(GIB))
    visit(sweep, SimulatedDisk(), sweep.anchors())
    cells = [*sweep.anchors(), *sweep.coarse()]
    assert len(set(cells)) == len(cells) == 13
    first = [cell.point for cell in cells[:5]]
    assert {point.block_bytes for point in first} >= {256 * KIB, MIB, 32 * MIB}
    assert {point.depth for point in first} >= {2, 8, 16}


def test_a_backend_far_behind_is_left_alone() -> None:
    disk = SimulatedDisk(seconds_per_call={"aiofiles": 0.1})
    sweep = search(disk, ("threads", "aiofiles"))
    assert [cell for cell in sweep.cells if cell.backend == "aiofiles"] == [Cell("aiofiles", Point(4 * MIB, 8))]


def test_another_backend_is_tried_where_the_first_is_best_and_wins_if_it_is_better() -> None:
    sweep = search(SimulatedDisk(), ("threads", "aiofiles"))
    others = [cell for cell in sweep.cells if cell.backend == "aiofiles"]
    assert 1 < len(others) < len(sweep.cells) / 2
    assert {sweep.best(direction).backend for direction in DIRECTIONS} == {"threads"}  # equals: the favourite
    slow = SimulatedDisk(seconds_per_call={"threads": 0.004})
    better = search(slow, ("threads", "aiofiles"))
    assert {better.best(direction).backend for direction in DIRECTIONS} == {"aiofiles"}


def test_when_nothing_is_left_to_try_the_leaders_are_measured_again() -> None:
    disk = SimulatedDisk(0.03)
    sweep = search(disk, num_rounds=12)
    num_cells = len(sweep.cells)
    again = sweep.refine()
    assert set(again) <= set(sweep.cells)
    assert set(again) <= {cell for direction in DIRECTIONS for cell in sweep.leaders(direction)}
    visit(sweep, disk, again)
    assert len(sweep.cells) == num_cells


def test_among_equals_the_cheap_and_then_the_small_is_best() -> None:
    fast, cheap, small = (Cell("threads", Point(block * MIB, depth)) for block, depth in ((16, 4), (4, 8), (4, 4)))
    slow = Cell("threads", Point(MIB, 1))
    sweep = Sweep(["threads"], grid(GIB))
    figures = {
        fast: Figure(3.0, 0.05),
        cheap: Figure(2.95, 0.0200),
        small: Figure(2.9, 0.0208),  # within noise of the cheapest, and less in flight
        slow: Figure(2.0, 0.001),
    }
    for cell, figure in figures.items():
        for direction in DIRECTIONS:
            sweep.add(cell, direction, figure)
    assert sweep.leaders("read") == [small, cheap, fast]
    assert sweep.balanced() == small
    assert sweep.finalists(2) == [small, fast]


def test_the_balanced_cell_is_good_in_both_directions() -> None:
    reader, writer, both = (Cell("threads", Point(4 * MIB, depth)) for depth in (1, 2, 4))
    sweep = Sweep(["threads"], grid(GIB))
    for cell, read, write in ((reader, 3.0, 1.0), (writer, 1.0, 3.0), (both, 2.6, 2.6)):
        sweep.add(cell, "read", Figure(read, 0.01))
        sweep.add(cell, "write", Figure(write, 0.01))
    assert sweep.balanced() == both
    assert sweep.finalists(4) == [both, reader, writer]


@given(st.integers(0, 1000), st.sampled_from([MIB, 3 * MIB, 17 * MIB, GIB]), st.integers(1, 3))
def test_proposals_are_on_the_grid_and_never_empty(seed: int, share_bytes: int, num_backends: int) -> None:
    backends: tuple[BackendName, ...] = ("threads", "uring", "aiofiles")
    sweep = Sweep(backends[:num_backends], grid(share_bytes))
    disk = SimulatedDisk(0.5, seed)
    points = set(grid(share_bytes))
    anchors = sweep.anchors()
    assert [cell.backend for cell in anchors] == list(backends[:num_backends])
    visit(sweep, disk, anchors)
    coarse = sweep.coarse()
    assert {cell.point for cell in (*anchors, *coarse)} <= points
    visit(sweep, disk, coarse)
    for _ in range(8):
        proposal = sweep.refine()
        assert proposal
        assert len(set(proposal)) == len(proposal)
        assert {cell.point for cell in proposal} <= points
        visit(sweep, disk, proposal)
    finalists = sweep.finalists(4)
    assert finalists[0] == sweep.balanced()
    assert 1 <= len(finalists) <= 4
    assert len(set(finalists)) == len(finalists)
