"""Draw the pictures of docs/concepts.md: what is cut into what and lies where; what stays and what is read.

    python bench/concept_pictures.py docs/pictures

Needs matplotlib (`pip install 'infinity[plot]'`). What stays is decided by the engine's own ``Residency``, which gets a
model of five units; nothing is measured.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.io.backend import Priority
from infinity.io.memory import PAGE_BYTES, allocate
from infinity.store.pool import BufferPool, Lease
from infinity.store.residency import Residency

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 130
INK, FAINT, PAPER, EMPTY = "#1f2430", "#6b7280", "#ffffff", "#f3f4f6"
DEVICE, HOST, NVME = "#2a9d8f", "#e9a23b", "#6d7fc4"
FORWARD, BACKWARD, READ = "#2a9d8f", "#1b6b61", "#4a90c9"

NUM_UNITS, NUM_FITTING = 5, 3
_ORDER = (*range(NUM_UNITS), *reversed(range(NUM_UNITS)))
_NUM_TURNS = 20
"""Of the event loop, in which a transfer that takes no time ends."""


def main(directory: Path) -> None:
    """Write both pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in (("tiers", draw_tiers()), ("order", draw_order())):
        figure.savefig(directory / f"{name}.png", dpi=DOTS_PER_INCH, facecolor=PAPER, metadata={"Software": ""})


@dataclass(frozen=True)
class Moment:
    """While one unit computes.

    Attributes:
        computing: which.
        read: what is read meanwhile.
        staying: what else is in memory.
    """

    computing: int
    read: frozenset[int]
    staying: frozenset[int]


async def follow(order: Sequence[int], num_fitting: int) -> list[Moment]:
    """What an engine that looks one unit ahead does in the third of three equal steps."""
    now, begun = 0, set[int]()

    def distance(unit: int) -> float:
        return next(ahead for ahead in range(len(order) + 1) if order[(now + ahead) % len(order)] == unit)

    async def fill(unit: int, lease: Lease, priority: Priority) -> None:
        begun.add(unit)

    pool = BufferPool("units", num_fitting * PAGE_BYTES, lambda size: allocate(size, populate=False))
    residency: Residency[int] = Residency(pool, distance=distance, fill=fill)
    moments = []
    try:
        for _ in range(3 * len(order)):
            unit = order[now % len(order)]
            await residency.fetch(unit, PAGE_BYTES, owner="training")
            begun.clear()
            now += 1
            residency.prefetch(order[now % len(order)], PAGE_BYTES)
            for _ in range(_NUM_TURNS):
                await asyncio.sleep(0)
            here = {each for each in set(order) if each in residency}
            moments.append(Moment(unit, frozenset(begun), frozenset(here - begun - {unit})))
            residency.release(unit, owner="training")
    finally:
        await residency.close()
        pool.close()
    return moments[-len(order) :]


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure whose axes are in inches, with nothing drawn."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def _box(
    axes: Axes,
    place: tuple[float, float, float, float],
    colour: str,
    text: str = "",
    *,
    ink: str = "white",
    size: float = 9,
    alpha: float = 1.0,
) -> None:
    """A box at (x, y, width, height), with words in its middle."""
    from matplotlib.patches import FancyBboxPatch

    x, y, width, height = place
    style = "round,pad=0,rounding_size=0.05"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor="none", alpha=alpha)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, size=size)


def _say(axes: Axes, x: float, y: float, text: str, size: float = 9, colour: str = INK, **style: Any) -> None:
    axes.text(x, y, text, size=size, color=colour, va="center", **style)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = FAINT) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.4})


_UNITS = ("embedding", "block 0", "block 1", "block 2", "…", "block N", "head")
_SHARDS = (
    ("param", 2, "what computes, bf16"),
    ("master", 4, "what is stepped, fp32"),
    ("state.exp_avg", 4, "of AdamW"),
    ("state.exp_avg_sq", 4, "of AdamW"),
    ("grad", 2, "from backward to its step"),
)
_TIERS = (
    ("device", "hbm", DEVICE, 2, "the units that compute now, and the next few"),
    ("host", "ram", HOST, 6, "shards needed soon, or changed and not yet written"),
    ("nvme", "the disk", NVME, 16, "what fits nowhere else"),
)


def draw_tiers() -> Figure:
    """A model, its units, the shards of one, and the three tiers they live in."""
    figure, axes = _canvas(11, 4.5)
    for x, title in ((0.3, "a model, in units"), (3.1, "its shards, for each parameter"), (6.6, "three tiers")):
        _say(axes, x, 4.2, title, 11, weight="bold")
    for row, unit in enumerate(_UNITS):
        shown = unit == "block 1"
        place = (0.3, 3.45 - row * 0.52, 1.7, 0.42)
        _box(axes, place, DEVICE if shown else "#e5e7eb", unit, ink="white" if shown else INK)
    _arrow(axes, (2.08, 2.62), (3.02, 2.62))
    for row, (kind, num_bytes, what) in enumerate(_SHARDS):
        y = 3.47 - row * 0.72
        _box(axes, (3.1, y, 0.5 * num_bytes, 0.4), HOST, f"{num_bytes} bytes", size=8, ink=INK)
        _say(axes, 3.1, y - 0.13, f"{kind}: {what}", 8, FAINT)
    _arrow(axes, (5.4, 2.25), (6.45, 2.25))
    for row, (tier, budget, colour, num_pieces, what) in enumerate(_TIERS):
        y = 2.85 - row * 1.3
        _box(axes, (6.6, y, 4.1, 1.0), colour, alpha=0.16)
        _say(axes, 6.75, y + 0.8, tier, 10, weight="bold")
        _say(axes, 10.55, y + 0.8, f"budget: {budget}", 8.5, FAINT, ha="right")
        for piece in range(num_pieces):
            _box(axes, (6.75 + piece * 0.24, y + 0.32, 0.19, 0.3), colour)
        _say(axes, 6.75, y + 0.15, what, 8, FAINT)
        if row:
            _arrow(axes, (8.5, y + 1.02), (8.5, y + 1.28))
        if tier == "nvme":
            _arrow(axes, (8.8, y + 1.28), (8.8, y + 1.02))
    return figure


def draw_order() -> Figure:
    """One step of a model of which only a part fits: what computes, what stays, what is read."""
    moments = asyncio.run(follow(_ORDER, NUM_FITTING))
    figure, axes = _canvas(11, 3.7)
    title = f"One step of a model of {NUM_UNITS} units, of which {NUM_FITTING} fit in memory"
    _say(axes, 0.3, 3.4, title, 11, weight="bold")
    left, width, height = 1.2, 0.95, 0.4
    for unit in range(NUM_UNITS):
        _say(axes, left - 0.15, 2.6 - unit * 0.47 + height / 2, f"unit {unit}", 9, ha="right")
    for now, moment in enumerate(moments):
        for unit in range(NUM_UNITS):
            place = (left + now * width, 2.6 - unit * 0.47, width - 0.06, height)
            if unit == moment.computing:
                forward = now < NUM_UNITS
                _box(axes, place, FORWARD if forward else BACKWARD, "forward" if forward else "backward", size=8)
            elif unit in moment.read:
                _box(axes, place, READ, "is read", size=8)
            elif unit in moment.staying:
                _box(axes, place, HOST, "stays", size=8, alpha=0.5, ink=INK)
            else:
                _box(axes, place, EMPTY)
    _arrow(axes, (left, 0.55), (left + len(moments) * width, 0.55))
    num_reads = sum(len(moment.read) for moment in moments)
    words = f"{num_reads} reads for {len(moments)} uses. Each read is under the unit before its own."
    _say(axes, left, 0.28, words, 9)
    _say(axes, left + len(moments) * width, 0.28, "time", 8.5, FAINT, ha="right")
    return figure


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python bench/concept_pictures.py DIRECTORY")
    main(Path(sys.argv[1]))
