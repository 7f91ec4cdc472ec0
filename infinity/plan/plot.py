"""A plan as one picture: what is kept and where, what a step moves, and what it takes.

Made as the picture of ``infinity bench`` is, without ``pyplot``; a bar's text says its figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from infinity.console.formats import format_bytes, format_figure
from infinity.errors import storage_error
from infinity.plan.result import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCHES = (10.0, 7.2)
_DOTS_PER_INCH = 110
_MEMORY, _DISK, _OTHER, _STEP = "#0072b2", "#b04a00", "#b8b8b8", "#404040"
_PLACES = {"host": (_MEMORY, "in host memory"), "nvme": (_DISK, "on NVMe alone")}
_FONT = "DejaVu Sans"  # comes with matplotlib


def write_plot(plan: Plan, path: Path) -> None:
    """Draw a plan to a PNG file.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    figure.text(0.03, 0.955, f"infinity plan: {plan.name}", family=_FONT, fontsize=13, parse_math=False)
    words = (
        f"{plan.summary.num_parameters:,} parameters; {format_figure(plan.seconds)} s per step, "
        f"{format_figure(plan.tokens_per_second)} tokens/s; bottleneck: {plan.bottleneck}"
    )
    figure.text(0.03, 0.915, words, family=_FONT, fontsize=9, color="#5a5a5a", parse_math=False)
    kept = _axes(figure, (0.64, 0.23), "state, and where it is when a step ends", _kept(plan))
    if plan.placed:
        patches = [Patch(color=colour, label=label) for colour, label in (*_PLACES.values(), (_OTHER, "not just now"))]
        kept.legend(
            handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False,
            prop={"family": _FONT, "size": 8},
        )  # fmt: skip
    moved = [
        _Bar(route, format_bytes(size), [(size, _route_colour(route))]) for route, size in plan.moved.items() if size
    ]
    _axes(figure, (0.35, 0.2), "moved by a step", moved or [_Bar("nothing", format_bytes(0), [])])
    busy = [
        _Bar(name, f"{format_figure(seconds)} s", [(seconds, _DISK if name == "disk" else _MEMORY)])
        for name, seconds in plan.busy.items()
        if seconds
    ]
    whole = _Bar("step", f"{format_figure(plan.seconds)} s", [(plan.seconds, _STEP)])
    _axes(figure, (0.05, 0.2), "busy in a step", [*busy, whole])
    try:
        canvas.print_png(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise storage_error("writing the picture for --plot", error, path=path) from error


class _Bar(NamedTuple):
    """One bar: its name, its text, and its parts with their colours."""

    name: str
    text: str
    parts: list[tuple[float, str]]


def _kept(plan: Plan) -> list[_Bar]:
    bars = []
    for kind, size in plan.summary.kept.items():
        parts = [(plan.placed[tier].get(kind, 0), colour) for tier, (colour, _) in _PLACES.items() if plan.placed]
        rest = max(size - sum(part for part, _ in parts), 0)
        bars.append(_Bar(kind, format_bytes(size), [*parts, (rest, _OTHER if plan.placed else _MEMORY)]))
    return bars


def _route_colour(route: str) -> str:
    return _DISK if route.startswith("nvme") else _MEMORY


def _axes(figure: Figure, place: tuple[float, float], title: str, bars: Sequence[_Bar]) -> Axes:
    """Bars one under the other, the longest over the whole width."""
    axes = figure.add_axes((0.19, place[0], 0.76, place[1]))
    largest = max(sum(size for size, _ in bar.parts) for bar in bars) or 1.0
    for place_of, bar in enumerate(bars):
        begin = 0.0
        for size, colour in bar.parts:
            axes.barh(-place_of, size / largest, left=begin, height=0.7, color=colour)
            begin += size / largest
        axes.text(begin + 0.01, -place_of, bar.text, family=_FONT, fontsize=8, va="center", parse_math=False)
    axes.set_xlim(0, 1.12)
    axes.set_ylim(-len(bars) + 0.5, 0.5)
    axes.set_xticks([])
    names = [bar.name.replace("nvme", "NVMe").replace("pcie", "PCIe") for bar in bars]
    axes.set_yticks([-each for each in range(len(bars))], names, family=_FONT, fontsize=8, parse_math=False)
    axes.set_title(title, family=_FONT, fontsize=9, loc="left", parse_math=False)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    return axes
