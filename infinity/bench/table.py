"""The figures as a table that a person reads at a glance, and how figures and sizes are written for a person.

A sweep measures dozens of settings, and almost all of them say nothing once the best is known. Of each route the table
has the best setting of each I/O backend, the recommended setting where it is another one, each directory alone where
there are several, and what a peer made of it. The bar is against the fastest of the kind, since what is worth knowing
is how far apart the tiers are; within a route the numbers are close together, and say so themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from infinity.bench.results import Report, Result

KINDS: Mapping[str, Sequence[str]] = {
    "disk": ("nvme->host", "host->nvme", "nvme<->host", "nvme->device"),
    "device": ("host->device", "device->host", "device<->host"),
    "memory": ("memcpy", "optimizer", "checksum"),
    "disks of all ranks": ("all nvme->host", "all host->nvme"),
    "ranks": ("all-gather", "reduce-scatter"),
}
"""The routes whose bandwidths are worth comparing with one another."""

PLAIN_BOX = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
"""Rich's ``SIMPLE_HEAD`` in ASCII."""

_WIDEST_ROUTE, _NARROWEST_BY = 14, 14
_NARROWEST_BAR, _WIDEST_BAR = 4, 24
_BAR_COLUMN = 5
_ENDLESS = 1000
_EIGHTHS = " ▏▎▍▌▋▊▉"


def format_figure(figure: float) -> str:
    """A figure that is not negative, to two or three digits: ``.012``, ``1.52``, ``12.3``; at most seven characters."""
    if figure == 0:
        return "0"
    if not 0.0095 <= figure < 99_999.5:
        return f"{figure:.{0 if figure < 1 else 1}e}"
    if figure < 0.0995:
        return f"{figure:.3f}"[1:]
    return f"{figure:.{2 if figure < 9.995 else 1 if figure < 99.95 else 0}f}"


def format_block(num_bytes: int, space: str = "") -> str:
    """The size of a block in binary units, as ``--points`` takes it: ``4MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g}{space}{unit}"
    return f"{num_bytes}{space}B"


def as_table(report: Report, *, plain: bool, width: int = 80) -> Table:
    """The figures for a person, one line each.

    Args:
        report: the figures.
        plain: in ASCII, without colours.
        width: of where they will be shown, in columns; from 80 on nothing wraps. Names take what there is beyond.
            Where there is less, what matters least is left out.
    """
    by_width = max(_NARROWEST_BY, _NARROWEST_BY + width - 80)
    table = Table(
        title="infinity bench",
        box=PLAIN_BOX if plain else box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
        title_justify="left",
        caption_justify="left",
        caption=_caption(report, plain),
    )
    for name in ("route", "by", "block x depth", "GB/s", "min-max", "", "CPU s/GB", "ms p50/p99", ""):
        is_bar = len(table.columns) == _BAR_COLUMN
        table.add_column(
            Text(name.replace(" x ", "\nx ").replace("CPU ", "CPU\n").replace("ms ", "ms\n")),
            justify="left" if is_bar or name in ("route", "by") else "right",
            no_wrap=not is_bar,
            overflow="crop" if plain else "ellipsis",
        )
    for rows in _rows_of_kinds(report):
        fastest = max(row.result.median_gb_s for row in rows)
        for row in rows:
            table.add_row(
                *(Text(printable(cell, plain=plain)) for cell in row.cells(by_width)),
                _Bar(row.result.median_gb_s / fastest if fastest > 0 else 0.0, plain),
                *(Text(printable(cell, plain=plain)) for cell in row.cost_cells(plain)),
                style=None if plain else row.style,
                end_section=row is rows[-1],
            )
    by_name = {str(column.header): column for column in table.columns}
    bar = table.columns[_BAR_COLUMN]
    fit_columns(table, width, [bar, *(by_name[name] for name in ("ms\np50/p99", "CPU\ns/GB", "min-max"))])
    return table


def fit_columns(table: Table, width: int, expendable: Sequence[Column]) -> None:
    """Leave out columns until the others fit, since a figure that is cut looks like another one.

    Args:
        table: filled; where even the rest does not fit, it becomes wider than ``width``.
        width: columns of the screen.
        expendable: what may be left out, in this order.
    """
    left = list(expendable)
    while (needed := _least_width(table)) > width:
        if not left:
            table.width = needed
            return
        table.columns.remove(left.pop(0))


def _least_width(table: Table) -> int:
    bars = any(isinstance(cell, _Bar) for column in table.columns for cell in column.cells)
    return Console(width=_ENDLESS).measure(table).maximum - (_WIDEST_BAR - _NARROWEST_BAR) * bars


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the table."""

    result: Result
    first: bool
    recommended: bool

    @property
    def style(self) -> str | None:
        return "bold" if self.first else "dim" if self.result.reference else None

    def cells(self, by_width: int) -> Iterator[str]:
        result = self.result
        path = "" if result.path is None else " " + fit(result.path, _WIDEST_ROUTE - 1, keep_start=False)
        yield result.route if self.first else path
        yield fit(result.backend, by_width - self.recommended) + "*" * self.recommended
        yield f"{format_block(result.block_bytes)} x {result.queue_depth}"
        yield format_figure(result.median_gb_s)
        yield f"{format_figure(min(result.gb_s))}-{format_figure(max(result.gb_s))}"

    def cost_cells(self, plain: bool) -> Iterator[str]:
        result = self.result
        cpu = result.cpu_s_per_gb
        yield f"{cpu:.3f}" if cpu < 10 else format_figure(cpu)
        yield (
            ""
            if (latency := result.latency) is None
            else (f"{format_figure(latency.p50_seconds * 1e3)}/{format_figure(latency.p99_seconds * 1e3)}")
        )
        yield {None: "", True: "ok" if plain else "✓", False: "no" if plain else "✗"}[result.verified]


def _rows_of_kinds(report: Report) -> Iterator[list[_Row]]:
    routes = report.routes()
    known = [route for kind in KINDS.values() for route in kind]
    kinds = [[route for route in routes if route in kind] for kind in KINDS.values()]
    kinds.append([route for route in routes if route not in known])
    for kind in filter(None, kinds):
        yield [row for route in kind for row in _rows(report, route)]


def _rows(report: Report, route: str) -> Iterator[_Row]:
    """What is worth showing of a route."""
    ours: dict[str, Result] = {}
    alone: dict[str, Result] = {}
    peers: dict[str, Result] = {}
    recommended: Result | None = None
    for result in report.results:
        if result.route != route:
            continue
        if result.reference:
            _keep_faster(peers, result.backend, result)
        elif result.path is not None:
            _keep_faster(alone, result.path, result)
        else:
            _keep_faster(ours, result.backend, result)
            if is_recommended(result, report.recommended):
                recommended = result
    shown = sorted(ours.values(), key=lambda result: result.standing, reverse=True)
    if recommended is not None and recommended not in shown:
        shown.insert(1, recommended)
    for index, result in enumerate([*shown, *alone.values(), *peers.values()]):
        yield _Row(result, index == 0, result is recommended)


def _keep_faster(fastest: dict[str, Result], key: str, result: Result) -> None:
    held = fastest.get(key)
    if held is None or result.standing > held.standing:
        fastest[key] = result


def is_recommended(result: Result, recommended: Mapping[str, Any]) -> bool:
    """Whether a result was measured with the recommended setting."""
    setting = (recommended.get(name) for name in ("io_backend", "io_block_bytes", "io_num_threads"))
    return tuple(setting) == (result.backend, result.block_bytes, result.queue_depth)


def fit(text: str, width: int, *, keep_start: bool = True) -> str:
    """The text, or where it is too wide for so many columns, its two ends.

    Args:
        text: one line.
        width: columns, at least 2.
        keep_start: keep the beginning as well as the end; of paths, the end is what tells them apart.
    """
    start, end, middle = (text[: len(text) // 2], text[len(text) // 2 :], "") if keep_start else ("", text, "")
    while cell_len(start + middle + end) > width:
        middle = "…"
        if cell_len(start) > cell_len(end):
            start = start[:-1]
        else:
            end = end[1:]
    return start + middle + end


def printable(text: str, *, plain: bool) -> str:
    """The text, in ASCII where it must be plain."""
    return text.replace("…", "~").encode("ascii", "replace").decode("ascii") if plain else text


def _caption(report: Report, plain: bool) -> Text:
    nums = sorted({len(result.runs) for result in report.results})
    repeats = "-".join(map(str, dict.fromkeys([nums[0], nums[-1]]))) if nums else "0"
    mark = "ok" if plain else "✓"
    words = [
        f"Median and least to largest of {repeats} repeats; GB = 1e9 bytes. Bars: against the fastest of the kind.",
        "Depth: blocks in flight per directory. CPU: of the whole process. ms: of a block.",
    ]
    if any(is_recommended(result, report.recommended) for result in report.results):
        words.append("*: recommended to train with.")
    if any(result.verified for result in report.results):
        words.append(f"{mark}: every byte written was read back and compared.")
    return Text(" ".join(words))


class _Bar:
    """A bar in proportion to a share, as wide as there is room for."""

    def __init__(self, share: float, plain: bool) -> None:
        self._share = min(1.0, share)
        self._plain = plain

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        eighths = round(min(options.max_width, _WIDEST_BAR) * self._share * 8)
        if self._plain:
            yield Text("#" * max(1, round(eighths / 8)), no_wrap=True)
        else:
            yield Text("█" * (eighths // 8) + (_EIGHTHS[max(1, eighths) % 8].strip()), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_NARROWEST_BAR, _WIDEST_BAR)
