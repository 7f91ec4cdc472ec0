"""``Sweep``: which cells (I/O backend x block size x queue depth) to look at next, and which are best.

Pure: it proposes, is told figures, and proposes again; it knows neither files nor clocks.

1. *Anchors*: one good cell of each backend. Those far behind the best are not looked at any further.
2. *Coarse*: a few block sizes and depths that span the grid, with one backend: the first of those that do not differ
   much. Every beginning of their order spans the grid too, so that it may be cut short when the time is up.
3. *Refine*, again and again: what is around the best reading and the best writing cells (neighbours on the full grid,
   and the same point with another backend), then what is around those that have now shown to be best. Where nothing is
   left, the leaders are measured once more, those with the fewest figures first.

A proposal is a round, to be measured in order; every other round runs backwards, so that a disk whose pace drifts does
not favour a corner of the grid.

What is best: on one device many cells reach the same bandwidth, and the largest of noisy figures is luck. So all within
``NEAR`` of the largest median count as equal; of these the cheapest in CPU time wins, and among equally cheap ones the
one with the fewest bytes in flight, which lets an urgent read wait least.

Rejected: the full grid (34 cells for each backend, most of them hopeless, leave no time to repeat the good ones); a
fitted model of the device (caches, stripes and schedulers make surfaces that none fits).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from infinity.bench.settings import MAX_IN_FLIGHT_BYTES, Point
from infinity.config import BackendName

KIB, MIB = 1 << 10, 1 << 20
BLOCKS = tuple(256 * KIB << power for power in range(8))
DEPTHS = (1, 2, 4, 8, 16)
NEAR = 0.05
"""Relative bandwidth: closer figures count as equal."""

_CHEAP = 0.1
"""Relative CPU time: closer figures count as equal."""

_FAR_BEHIND = 0.7
"""A backend whose anchor is below this part of the best one in both directions is not looked at any further."""

_MUCH_WORSE = 0.85
"""The coarse part takes the first backend of which both directions are above this part of the best."""

_COARSE = (
    Point(4 * MIB, 8),
    Point(32 * MIB, 2),
    Point(1 * MIB, 16),
    Point(4 * MIB, 2),
    Point(256 * KIB, 16),
    Point(16 * MIB, 4),
    Point(1 * MIB, 4),
    Point(32 * MIB, 1),
    Point(4 * MIB, 16),
    Point(256 * KIB, 4),
    Point(8 * MIB, 1),
    Point(1 * MIB, 1),
    Point(256 * KIB, 1),
)

SweepDirection = Literal["read", "write"]
DIRECTIONS: tuple[SweepDirection, ...] = ("read", "write")


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One way to move bytes.

    Attributes:
        backend: the I/O backend.
        point: block size and queue depth.
    """

    backend: BackendName
    point: Point

    def __str__(self) -> str:
        return f"{self.backend} {self.point}"


@dataclass(frozen=True, slots=True)
class Figure:
    """What one pass in a cell showed."""

    gb_s: float
    cpu_s_per_gb: float


def grid(share_bytes: int) -> list[Point]:
    """All points that fit into files of so many bytes; the smallest one always does.

    Args:
        share_bytes: size of a directory's file.
    """
    most = min(MAX_IN_FLIGHT_BYTES, share_bytes)
    points = [Point(block, depth) for block in BLOCKS for depth in DEPTHS if block * depth <= most]
    return points or [Point(BLOCKS[0], DEPTHS[0])]


class Sweep:
    """The search over one set of backends.

    Args:
        backends: those that work, the favourite first.
        points: the grid.
    """

    def __init__(self, backends: Sequence[BackendName], points: Sequence[Point]) -> None:
        self._backends = list(backends)
        self._points = frozenset(points)
        self._figures: dict[SweepDirection, dict[Cell, list[Figure]]] = {name: defaultdict(list) for name in DIRECTIONS}
        self._num_rounds = 0

    @property
    def cells(self) -> list[Cell]:
        """Those that have been measured, in order."""
        return list(self._figures["read"])

    def add(self, cell: Cell, direction: SweepDirection, figure: Figure) -> None:
        """Note what a pass showed; each cell is measured in both directions."""
        self._figures[direction][cell].append(figure)

    def anchors(self) -> list[Cell]:
        """The first round: one cell of each backend."""
        point = self._coarse()[0]
        return [Cell(backend, point) for backend in self._backends]

    def coarse(self) -> list[Cell]:
        """The second round: cells of one backend that span the grid."""
        good = [cell for cell in self.cells if self._share(cell) >= _MUCH_WORSE]
        backend = good[0].backend if good else max(self.cells, key=self._share).backend
        return [Cell(backend, point) for point in self._coarse()[1:]]

    def refine(self) -> list[Cell]:
        """A later round: what is around the best, or the best once more."""
        self._num_rounds += 1
        around = dict.fromkeys(
            near for direction in DIRECTIONS for cell in self.leaders(direction)[:2] for near in self._around(cell)
        )
        cells = [cell for cell in around if cell not in self._figures["read"]]
        if not cells:
            leaders = {cell for direction in DIRECTIONS for cell in self.leaders(direction)}
            fewest = min(len(self._figures["read"][cell]) for cell in leaders)
            cells = sorted(cell for cell in leaders if len(self._figures["read"][cell]) == fewest)
        return cells if self._num_rounds % 2 else cells[::-1]

    def gb_s(self, cell: Cell, direction: SweepDirection) -> float:
        """Median bandwidth of a measured cell."""
        return statistics.median(figure.gb_s for figure in self._figures[direction][cell])

    def leaders(self, direction: SweepDirection) -> list[Cell]:
        """The cells that count as equally fast, in the order of preference."""
        fastest = max(self.gb_s(cell, direction) for cell in self.cells)
        near = [cell for cell in self.cells if self.gb_s(cell, direction) >= fastest * (1 - NEAR)]
        cost = {
            cell: statistics.median(figure.cpu_s_per_gb for figure in self._figures[direction][cell]) for cell in near
        }
        cheapest = min(cost.values())

        def preference(cell: Cell) -> tuple[int, int, int, int]:
            ratio = cost[cell] / cheapest if cheapest > 0 else 1.0
            steps = math.floor(math.log(ratio) / math.log(1 + _CHEAP)) if ratio > 1 else 0
            return steps, cell.point.round_bytes, -cell.point.block_bytes, self._backends.index(cell.backend)

        return sorted(near, key=preference)

    def best(self, direction: SweepDirection) -> Cell:
        """The best cell of a direction."""
        return self.leaders(direction)[0]

    def balanced(self) -> Cell:
        """The best cell for both directions: a setting to train with."""
        shares = {cell: self._share(cell) for cell in self.cells}
        near = [cell for cell in self.cells if shares[cell] >= max(shares.values()) * (1 - NEAR)]
        order = [cell for direction in DIRECTIONS for cell in self.leaders(direction)]
        return min(near, key=lambda cell: (order.index(cell) if cell in order else len(order), -shares[cell]))

    def finalists(self, count: int) -> list[Cell]:
        """The cells to measure thoroughly: the balanced one, the best of each direction, the fastest, the next."""
        fastest = [max(self.cells, key=lambda cell: self.gb_s(cell, direction)) for direction in DIRECTIONS]
        wanted: list[Iterable[Cell]] = [[self.balanced()], map(self.best, DIRECTIONS), fastest]
        wanted += [self.leaders(direction)[1:2] for direction in DIRECTIONS]
        return list(dict.fromkeys(cell for cells in wanted for cell in cells))[:count]

    def _coarse(self) -> list[Point]:
        return [point for point in _COARSE if point in self._points] or [max(self._points)]

    def _share(self, cell: Cell) -> float:
        """The lesser of its parts of the fastest reading and the fastest writing."""
        return min(self._part(cell, direction, self.cells) for direction in DIRECTIONS)

    def _part(self, cell: Cell, direction: SweepDirection, of: Sequence[Cell]) -> float:
        return self.gb_s(cell, direction) / max(self.gb_s(other, direction) for other in of)

    def _is_far_behind(self, backend: BackendName) -> bool:
        anchors = [Cell(name, self._coarse()[0]) for name in self._backends]
        anchor = anchors[self._backends.index(backend)]
        return all(self._part(anchor, direction, anchors) < _FAR_BEHIND for direction in DIRECTIONS)

    def _around(self, cell: Cell) -> Iterator[Cell]:
        """One step in block size, in depth, or in both with the bytes in flight unchanged; the same with others."""
        for block, depth in ((2, 1), (0.5, 1), (1, 2), (1, 0.5), (2, 0.5), (0.5, 2)):
            point = Point(int(cell.point.block_bytes * block), int(cell.point.depth * depth))
            if point in self._points:
                yield Cell(cell.backend, point)
        for backend in self._backends:
            if not self._is_far_behind(backend):
                yield Cell(backend, cell.point)
