"""A plan as one picture: what each tier holds, what a step moves, and what it takes.

Made as the picture of ``infinity bench`` is, without ``pyplot``; a bar's text says its figure.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from infinity.console.formats import format_bytes
from infinity.errors import storage_error
from infinity.plan.result import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (10.0, 7.2)
_DOTS_PER_INCH = 110
_COLOURS = ("#0072b2", "#b04a00", "#009e73", "#cc79a7", "#6a6a6a")
_FONT = "DejaVu Sans"  # comes with matplotlib


def write_plot(plan: Plan, path: Path) -> None:
    """Draw a plan to a PNG file.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    figure.text(0.03, 0.955, f"infinity plan: {plan.name}", family=_FONT, fontsize=13, parse_math=False)
    words = f"{plan.seconds:.3g} s per step, {plan.tokens_per_second:,.0f} tokens/s; bottleneck: {plan.bottleneck}"
    figure.text(0.03, 0.915, words, family=_FONT, fontsize=9, color="#5a5a5a", parse_math=False)
    kept = dict(plan.summary.kept)
    moved = {route: size for route, size in plan.moved.items() if size}
    busy = {name: seconds for name, seconds in plan.busy.items() if seconds} | {"step": plan.seconds}
    _bars(figure.add_axes((0.22, 0.64, 0.7, 0.23)), "kept", {k: (v, format_bytes(v)) for k, v in kept.items()})
    _bars(
        figure.add_axes((0.22, 0.35, 0.7, 0.2)),
        "moved per step",
        {k: (v, format_bytes(v)) for k, v in moved.items()} or {"nothing": (0, "0 B")},
    )
    _bars(figure.add_axes((0.22, 0.05, 0.7, 0.2)), "seconds", {k: (v, f"{v:.3g} s") for k, v in busy.items()})
    try:
        canvas.print_png(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise storage_error("writing the picture for --plot", error, path=path) from error


def _bars(axes: Axes, title: str, bars: dict[str, tuple[float, str]]) -> None:
    largest = max((value for value, _ in bars.values()), default=0) or 1.0
    for place, (value, text) in enumerate(bars.values()):
        axes.barh(-place, value / largest, height=0.7, color=_COLOURS[place % len(_COLOURS)])
        axes.text(value / largest + 0.01, -place, text, family=_FONT, fontsize=8, va="center", parse_math=False)
    axes.set_xlim(0, 1.15)
    axes.set_xticks([])
    axes.set_yticks([-place for place in range(len(bars))], list(bars), family=_FONT, fontsize=8, parse_math=False)
    axes.set_title(title, family=_FONT, fontsize=9, loc="left", parse_math=False)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
