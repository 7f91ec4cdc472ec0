"""The figures as one picture: heat maps of block size x queue depth, and a ladder of the tiers.

Needs matplotlib, which only this asks for (``infinity[plot]``). The figure is made and written through objects of its
own, without ``pyplot``: no state of another user of matplotlib in the process is touched. What a user's settings could
change in it (colours, fonts, mathematical text) is said explicitly.

Readable in greyscale and with any colour vision: in ``cividis`` lighter is faster, the best is framed as well, and the
directions of arrows are their heads. Every text is measured and shortened to the room it has, whatever the figures and
names are; what the font has no glyph for is replaced.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.bench.results import Report, Result
from infinity.bench.table import fit, format_block, format_figure, is_recommended
from infinity.console.formats import format_bytes
from infinity.console.output import check_output
from infinity.errors import ConfigError, storage_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCHES = (13.0, 8.4)
_DOTS_PER_INCH = 110
_FONT = "DejaVu Sans"  # comes with matplotlib
_INK, _FAINT, _PAPER = "#1a1a1a", "#5a5a5a", "#ffffff"
_UP, _DOWN, _BOTH = "#0072b2", "#b04a00", "#404040"
_TITLES = {"nvme->host": "Reading: NVMe to host", "host->nvme": "Writing: host to NVMe"}
_BETWEEN_RANKS = ("all-gather", "reduce-scatter")
_LARGEST_FILLED_AXIS = 12
_SMALLEST_POINTS = 4.5
_WIDEST_PATH = 36
_THICKEST_FRAME = 2.4
_POINTS_PER_INCH = 72


def check_plot(path: Path) -> None:
    """Refuse, before any work is done, a picture that could not be drawn or written at the end.

    Raises:
        ConfigError: matplotlib is missing or does not load, the name does not end in ``.png``, or it cannot be written
            there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'infinity[plot]'")
    try:
        importlib.import_module("matplotlib.backends.backend_agg")
    except Exception as error:  # whatever a damaged or an ill-matched installation does
        repair = "install it anew: pip install --force-reinstall matplotlib"
        raise ConfigError(f"--plot needs matplotlib, which does not load here ({error}); {repair}") from error
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot: expected a file name that ends in .png, got {path}")
    check_output(path, "--plot", replaced=False)


def write_plot(report: Report, path: Path) -> None:
    """Draw the figures and write them to a file as PNG.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(draw(report))
    try:
        # And not savefig, which follows the user's settings.
        canvas.print_png(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise storage_error("writing the picture for --plot", error, path=path) from error


def draw(report: Report) -> Figure:
    """The picture, on a canvas of its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, facecolor=_PAPER)
    FigureCanvasAgg(figure)
    whole = _axes(figure, (0, 0, 1, 1))
    _write(whole, 0.03, 0.965, "infinity bench", 0.3, 15, bold=True)
    _write(whole, 0.03, 0.93, _machine_line(report.machine), 0.94, 9, color=_FAINT)
    for route, bottom in (("nvme->host", 0.535), ("host->nvme", 0.075)):
        _draw_heat_map(_axes(figure, (0.085, bottom, 0.38, 0.315)), report, route)
    _Ladder(_axes(figure, (0.52, 0.03, 0.455, 0.87)), report).draw()
    return figure


def _axes(figure: Figure, place: tuple[float, float, float, float]) -> Axes:
    axes = figure.add_axes(place, facecolor=_PAPER)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    return axes


def _machine_line(machine: Mapping[str, Any]) -> str:
    parts = [machine.get("cpu"), machine.get("kernel"), machine.get("torch") and f"torch {machine['torch']}"]
    return " · ".join(str(part) for part in parts if part)


def _write(
    axes: Axes,
    x: float,
    y: float,
    words: str,
    width: float,
    points: float,
    *,
    bold: bool = False,
    color: str = _INK,
    align: str = "left",
    rotation: float = 0.0,
) -> None:
    """Put one line of text into axes, shortened in its middle to ``width``, in the units of the axes."""
    words = _with_glyphs(words)
    text = axes.text(
        x,
        y,
        words,
        family=_FONT,
        fontsize=points,
        fontweight="bold" if bold else "normal",
        color=color,
        ha=align,
        va="center",
        rotation=rotation,
        rotation_mode="anchor",
        parse_math=False,
        usetex=False,
    )
    bounds, room = axes.bbox, axes.get_xlim() if rotation == 0 else axes.get_ylim()
    pixels = width / (room[1] - room[0]) * (bounds.width if rotation == 0 else bounds.height)
    keep = len(words)
    while keep > 1:
        extent = text.get_window_extent()
        taken = extent.width if rotation == 0 else extent.height
        if taken <= pixels:
            return
        keep = min(keep - 1, math.ceil(keep * pixels / taken))
        text.set_text(words[: keep - keep // 2] + "…" + words[len(words) - keep // 2 :])


def _with_glyphs(words: str) -> str:
    """The text with a question mark for each character that the font cannot draw."""
    from matplotlib.font_manager import findfont, get_font

    glyphs = get_font(findfont(_FONT)).get_charmap()
    return "".join(letter if ord(letter) in glyphs else "?" for letter in words.replace("\n", " "))


def _draw_heat_map(axes: Axes, report: Report, route: str) -> None:
    """The settings that were measured on a route, block size upwards and queue depth to the right.

    A cell has the figure of the backend that was fastest there: a sweep looks at most cells with one backend only.
    """
    best = report.best().get(route)
    if best is None:
        _write(axes, 0, 1.06, _TITLES[route], 1, 11, bold=True)
        _write(axes, 0.5, 0.5, "not measured", 1, 11, color=_FAINT, align="center")
        return
    cells = _cells(report, route, best)
    blocks, depths = (_steps({place[axis] for place in cells}) for axis in (0, 1))
    _write(axes, 0, 1.15, f"{_TITLES[route]}, GB/s", 1, 11, bold=True)
    setting = f"{format_block(best.block_bytes, ' ')} x {best.queue_depth}"
    backends = dict.fromkeys(result.backend for result in cells.values())
    legend = f"by {best.backend}; " if len(backends) == 1 else "by the fastest backend; "
    legend += f"framed: best, {setting}"
    legend += f" {best.backend}" if len(backends) > 1 else ""
    chosen = next((result for result in cells.values() if is_recommended(result, report.recommended)), best)
    legend += "; dashed: recommended" if chosen is not best else ""
    _write(axes, 0, 1.06, legend, 1, 8.5, color=_FAINT)
    slowest = min(min(result.median_gb_s for result in cells.values()), best.median_gb_s / 2)
    for result in sorted(cells.values(), key=lambda result: (result is best, result is chosen)):
        share = min(1.0, (result.median_gb_s - slowest) / (best.median_gb_s - slowest))
        box = (
            depths.index(result.queue_depth) / len(depths),
            blocks.index(result.block_bytes) / len(blocks),
            1 / len(depths),
            1 / len(blocks),
        )
        _draw_cell(axes, box, result, share, frame="-" if result is best else "--" if result is chosen else "")
    _draw_scales(axes, [format_block(block, " ") for block in blocks], [str(depth) for depth in depths])


def _cells(report: Report, route: str, best: Result) -> dict[tuple[int, int], Result]:
    """By block size and queue depth; neither references nor single directories."""
    cells = {(best.block_bytes, best.queue_depth): best}
    for result in report.results:
        if result.route == route and not result.reference and result.path is None:
            place = (result.block_bytes, result.queue_depth)
            held = cells.get(place)
            if held is None or (held is not best and held.median_gb_s < result.median_gb_s):
                cells[place] = result
    return cells


def _steps(sizes: set[int]) -> list[int]:
    """The sizes on an axis; where they are powers of two and near one another, with the powers between them."""
    if all(size > 0 and size & (size - 1) == 0 for size in sizes):
        low, high = min(sizes).bit_length(), max(sizes).bit_length()
        if high - low < _LARGEST_FILLED_AXIS:
            return [1 << bits for bits in range(low - 1, high)]
    return sorted(sizes)


def _size_points(axes: Axes) -> tuple[float, float]:
    box = axes.get_position()
    inches_across, inches_down = _SIZE_INCHES
    return box.width * inches_across * _POINTS_PER_INCH, box.height * inches_down * _POINTS_PER_INCH


def _draw_cell(axes: Axes, box: tuple[float, float, float, float], result: Result, share: float, frame: str) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    x, y, width, height = box
    fill = colormaps["cividis"](share)
    axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=_PAPER, linewidth=0.8))
    across, down = _size_points(axes)
    if frame:
        thickness = min(_THICKEST_FRAME, height * down / 9) * (1.0 if frame == "-" else 0.8)
        inset_x, inset_y = 0.8 * thickness / across, 0.8 * thickness / down
        axes.add_patch(
            Rectangle(
                (x + inset_x, y + inset_y),
                width - 2 * inset_x,
                height - 2 * inset_y,
                facecolor="none",
                edgecolor="#000000" if share > 0.5 else _PAPER,
                linewidth=thickness,
                linestyle=frame,
            )
        )
    words = format_figure(result.median_gb_s)
    points = min(10.0, 0.55 * height * down, 0.8 * width * across / (0.68 * len(words)))
    if points >= _SMALLEST_POINTS:
        color, bold = "#000000" if share > 0.5 else _PAPER, frame == "-"
        _write(axes, x + width / 2, y + height / 2, words, width, points, bold=bold, color=color, align="center")


def _draw_scales(axes: Axes, blocks: Sequence[str], depths: Sequence[str]) -> None:
    """Labels along both axes, as many as have room, and a frame around the cells."""
    from matplotlib.patches import Rectangle

    across, down = _size_points(axes)
    axes.add_patch(Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=_FAINT, linewidth=0.8, clip_on=False))
    every = math.ceil(len(blocks) * 12 / down)
    for index in range(0, len(blocks), every):
        y = (index + 0.5) / len(blocks)
        _write(axes, -0.012, y, blocks[index], 0.14, 8.5, align="right")
    every = math.ceil(len(depths) * 24 / across)
    for index in range(0, len(depths), every):
        x = (index + 0.5) / len(depths)
        _write(axes, x, -0.05, depths[index], 0.06, 8.5, align="center")
    _write(axes, 0.5, -0.135, "blocks in flight per directory", 1, 9, color=_FAINT, align="center")
    _write(axes, -0.165, 0.5, "block size", 1, 9, color=_FAINT, align="center", rotation=90)


class _Ladder:
    """The tiers, one above the other, with what moves between them; and what happens within each, inside its box.

    Args:
        axes: from 0 to 1 both ways.
        report: the figures.
    """

    _NVME, _HOST, _DEVICE = (0.0, 0.19), (0.405, 0.595), (0.81, 1.0)
    _COLUMNS = (0.035, 0.315, 0.595)
    _LABEL_WIDTH = 0.215
    _INNER = 0.84
    _THINNEST, _THICKEST = 2.0, 9.0

    def __init__(self, axes: Axes, report: Report) -> None:
        self._axes = axes
        self._write = functools.partial(_write, axes)
        self._report = report
        self._best = report.best()
        figures = [result.median_gb_s for result in self._best.values() if result.median_gb_s > 0]
        self._fastest, self._slowest = max(figures, default=1.0), min(figures, default=1.0)

    def draw(self) -> None:
        """All of it."""
        machine = self._report.machine
        self._draw_box(self._DEVICE, 1.0, "device", str(machine.get("device", "")))
        cores, ram = machine.get("cores"), machine.get("ram")
        sizes = [] if cores is None else [f"{cores} cores"]
        sizes += [] if ram is None else [format_bytes(ram)]
        self._draw_box(self._HOST, self._INNER, "host memory", " · ".join(sizes))
        self._draw_box(self._NVME, 1.0, "NVMe", "")
        if any(route in self._best for route in _BETWEEN_RANKS):
            self._list_inside(self._DEVICE, 1.0, _BETWEEN_RANKS)
        self._list_inside(self._HOST, self._INNER, ("memcpy", "optimizer", "checksum"))
        self._list_directories()
        for routes, low, high in (
            (("nvme->host", "host->nvme", "nvme<->host"), self._NVME[1], self._HOST[0]),
            (("host->device", "device->host", "device<->host"), self._HOST[1], self._DEVICE[0]),
        ):
            for x, route, color in zip(self._COLUMNS, routes, (_UP, _DOWN, _BOTH), strict=True):
                self._draw_arrow(x, low, high, route, color)
                self._label(x + 0.03, (low + high) / 2, route)
        self._draw_through()

    def _draw_box(self, rows: tuple[float, float], width: float, name: str, words: str) -> None:
        from matplotlib.patches import Rectangle

        low, high = rows
        box = Rectangle((0, low), width, high - low, facecolor="#eef1f4", edgecolor=_FAINT, linewidth=1, clip_on=False)
        self._axes.add_patch(box)
        self._write(0.025, high - 0.03, name, 0.24, 12, bold=True)
        self._write(width - 0.025, high - 0.03, words, width - 0.30, 8.5, color=_FAINT, align="right")

    def _list_inside(self, rows: tuple[float, float], width: float, routes: Sequence[str]) -> None:
        """What is done within a tier, side by side."""
        room = (width - 0.05) / len(routes)
        for index, route in enumerate(routes):
            x, y = 0.025 + index * room, rows[0] + 0.065
            self._label(x, y, route, room - 0.02, with_backend=routes is _BETWEEN_RANKS)

    def _list_directories(self) -> None:
        """What the NVMe tier is made of, and how fast each directory is alone."""
        facts = self._report.machine.get("paths")
        lines = []
        for index, path in enumerate(self._report.nvme):
            of_path = facts[index] if isinstance(facts, Sequence) and index < len(facts) else {}
            about = [of_path.get(name) for name in ("filesystem", "device", "model")]
            line = f"{fit(path, _WIDEST_PATH, keep_start=False)}: {' · '.join(str(fact) for fact in about if fact)}"
            alone = {
                word: max(each.median_gb_s for each in self._report.results if (each.route, each.path) == (route, path))
                for word, route in (("read", "nvme->host"), ("write", "host->nvme"))
                if any((each.route, each.path) == (route, path) for each in self._report.results)
            }
            speeds = ", ".join(f"{word} {format_figure(figure)}" for word, figure in alone.items())
            lines.append(line + (f" · alone: {speeds} GB/s" if speeds else ""))
        if len(lines) > 4:
            lines[3:] = [f"and {len(lines) - 3} more"]
        for index, line in enumerate(lines):
            self._write(0.025, self._NVME[1] - 0.072 - 0.031 * index, line, 0.95, 8.5)

    def _draw_arrow(self, x: float, low: float, high: float, route: str, color: str) -> None:
        """From tier to tier; the thicker the faster, by each doubling as much."""
        from matplotlib.patches import FancyArrowPatch

        result = self._best.get(route)
        first, _, last = route.partition("<->" if "<->" in route else "->")
        upwards = (first, last) in {("nvme", "host"), ("host", "device"), ("nvme", "device")}
        places = [(x, low), (x, high)] if upwards else [(x, high), (x, low)]
        thickness = self._THINNEST
        if result is not None and result.median_gb_s > 0 and self._fastest > self._slowest:
            share = math.log(result.median_gb_s / self._slowest) / math.log(self._fastest / self._slowest)
            thickness += share * (self._THICKEST - self._THINNEST)
        self._axes.add_patch(
            FancyArrowPatch(
                *places,
                arrowstyle=f"{'<|' if '<->' in route else ''}-|>,head_length=4,head_width=2.4",
                mutation_scale=1 + thickness / 4,
                linewidth=thickness if result is not None else 1,
                linestyle="-" if result is not None else ":",
                color=color if result is not None else "#a0a0a0",
                shrinkA=2,
                shrinkB=2,
                capstyle="butt",
                clip_on=False,
            )
        )

    def _label(
        self, x: float, y: float, route: str, width: float = _LABEL_WIDTH, *, with_backend: bool = False
    ) -> None:
        """A route's name, bandwidth and range, below one another."""
        result = self._best.get(route)
        self._write(x, y + 0.035, route, width, 8.5)
        if result is None:
            self._write(x, y, "not measured", width, 8.5, color=_FAINT)
            return
        self._write(x, y, f"{format_figure(result.median_gb_s)} GB/s", width, 12, bold=True)
        words = f"{_range(result)} · {result.backend}" if with_backend else _range(result)
        self._write(x, y - 0.034, words, width, 8, color=_FAINT)

    def _draw_through(self) -> None:
        """The route past host memory."""
        route, low, high = "nvme->device", self._NVME[1], self._DEVICE[0]
        self._draw_arrow(0.89, low, high, route, _UP)
        result = self._best.get(route)
        words = "not measured" if result is None else f"{format_figure(result.median_gb_s)} GB/s  ({_range(result)})"
        self._write(0.935, low + 0.03, f"{route}  {words}", high - low - 0.06, 9, bold=result is not None, rotation=90)


def _range(result: Result) -> str:
    return f"{format_figure(min(result.gb_s))} - {format_figure(max(result.gb_s))}"
