"""Draw one step of a trace: reads, compute, waits, optimizer and writes side by side.

    python -m infinity.train --nvme DIR --trace trace.json
    python bench/trace_picture.py trace.json docs/trace.png [--step N]

Needs matplotlib (`pip install 'infinity[plot]'`). Transfers at the same time are darker. Exits with 2
and one line where the trace cannot be read or has no such step, or where the picture cannot be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (13.0, 5.2)
DOTS_PER_INCH = 110
FONT = "DejaVu Sans"
INK, FAINT, PAPER = "#1a1a1a", "#5a5a5a", "#ffffff"
TITLES = {
    "read": "NVMe reads",
    "copy": "copies",
    "training": "training",
    "stall": "waits",
    "optimizer": "optimizer",
    "write": "NVMe writes",
}
COLOURS = {
    "read": "#56b4e9",
    "copy": "#999999",
    "forward": "#009e73",
    "backward": "#00664b",
    "stall": "#d00000",
    "optimizer": "#e69f00",
    "write": "#9467bd",
}
"""By the name of a slice, else by its track. Told apart by place as well: each track has a row of its own."""

TRANSFERS = ("read", "copy", "write")
CAUSES = {"read": "disk", "room": "memory"}

Event = Mapping[str, Any]


class TraceError(Exception):
    """The trace is none, or has no such step."""


@dataclass(frozen=True)
class Step:
    """One step of a trace.

    Attributes:
        name: as in the trace, such as ``step 12``.
        start: where it begins, in microseconds of the trace.
        stop: where it ends.
        rows: for each track that has slices in it, the threads' slices; both from top to bottom.
    """

    name: str
    start: float
    stop: float
    rows: Mapping[str, Sequence[Sequence[Event]]]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.stop - self.start) / 1e6

    def busy_seconds(self, track: str) -> float:
        """In how much of the step's time the track was busy."""
        edges = sorted(
            (max(event["ts"], self.start), min(event["ts"] + event["dur"], self.stop))
            for thread in self.rows.get(track, ())
            for event in thread
        )
        busy, until = 0.0, self.start
        for start, stop in edges:
            busy += max(0.0, stop - max(start, until))
            until = max(until, stop)
        return busy / 1e6


def read_step(path: Path, number: int | None) -> Step:
    """Read one step of a trace file; the last one, if not told which.

    Raises:
        TraceError: the file is no trace that infinity wrote, or has no such step.
        OSError: the file cannot be read.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        slices = [event for event in events if event["ph"] == "X"]
        marks = {event["name"]: event for event in slices if event["cat"] == "steps"}
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{path}: expected a trace of infinity train --trace, got something else ({error!r})"
        ) from None
    name = f"step {number}" if number is not None else next(reversed(marks), "")
    if name not in marks:
        there = ", ".join(marks) or "none"
        raise TraceError(f"{path}: expected {name or 'at least one step'}, got {there}")
    start = marks[name]["ts"]
    stop = start + marks[name]["dur"]
    inside = [
        event
        for event in slices
        if event["ts"] < stop and event["ts"] + event["dur"] > start and _colour(event) is not None
    ]
    rows: dict[str, Sequence[Sequence[Event]]] = {}
    for track in TITLES:
        threads = sorted({event["tid"] for event in inside if event["cat"] == track})
        if threads:
            rows[track] = [[event for event in inside if event["tid"] == thread] for thread in threads]
    return Step(name, start, stop, rows)


def draw(step: Step) -> Figure:
    """The picture of a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, facecolor=PAPER)
    axes = figure.add_axes((0.105, 0.12, 0.88, 0.74))
    figure.text(0.105, 0.93, "One training step: who did what when", color=INK, size=14, family=FONT)
    figure.text(0.105, 0.883, _summary(step), color=FAINT, size=9.5, family=FONT)
    for left, kind in ((0.84, "forward"), (0.91, "backward")):
        figure.text(left, 0.883, "\u25a0", color=COLOURS[kind], size=9.5, family=FONT)
        figure.text(left + 0.012, 0.883, kind, color=FAINT, size=9.5, family=FONT)
    top = 0.0
    for track, threads in step.rows.items():
        if track in TRANSFERS:
            _bars(axes, step, [event for thread in threads for event in thread], top + 0.1, 0.8)
        else:
            for number, thread in enumerate(threads):
                _bars(axes, step, thread, top + 0.1 + number * 0.8 / len(threads), 0.8 / len(threads))
        share = step.busy_seconds(track) / step.seconds
        axes.text(-0.008, top + 0.42, TITLES[track], transform=axes.get_yaxis_transform(), **_words(INK, 10.5))
        axes.text(-0.008, top + 0.68, f"{share:.0%} busy", transform=axes.get_yaxis_transform(), **_words(FAINT, 8.5))
        top += 1.0
    axes.set_xlim(0.0, step.seconds * 1e3)
    axes.set_ylim(top, 0.0)
    axes.set_yticks([])
    axes.set_xlabel("milliseconds", color=INK, size=9.5, family=FONT)
    for label in axes.get_xticklabels():
        label.set(color=INK, size=9.0, family=FONT)
    for line in range(1, int(top)):
        axes.axhline(line, color="#dddddd", linewidth=0.8, zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure


def _summary(step: Step) -> str:
    kinds = {
        kind: sum(
            min(event["ts"] + event["dur"], step.stop) - max(event["ts"], step.start)
            for thread in step.rows.get("training", ())
            for event in thread
            if _label(event)[0] == kind
        )
        / 1e6
        for kind in ("forward", "backward")
    }
    moved = {
        track: sum(event["args"]["num_bytes"] for thread in step.rows.get(track, ()) for event in thread)
        for track in ("read", "write")
    }
    return (
        f"{step.name}, {step.seconds:.2f} s: forward {kinds['forward']:.2f} s, backward {kinds['backward']:.2f} s, "
        f"waits {step.busy_seconds('stall'):.2f} s, optimizer {step.busy_seconds('optimizer'):.2f} s; "
        f"{moved['read'] / 1e9:.2f} GB read, {moved['write'] / 1e9:.2f} GB written"
    )


def _label(event: Event) -> tuple[str, str]:
    """What a slice is, and whose."""
    unit = event["args"].get("unit", "")
    return str(event["name"]).removesuffix(f" {unit}"), unit


def _bars(axes: Axes, step: Step, events: Sequence[Event], top: float, height: float) -> None:
    """Slices at one height, and the names of those that have room. Transfers show through where they overlap."""
    points_per_ms = 0.88 * SIZE_INCHES[0] * 72 / (step.seconds * 1e3)
    for event in events:
        start = max(event["ts"], step.start)
        left, width = (start - step.start) / 1e3, (min(event["ts"] + event["dur"], step.stop) - start) / 1e3
        look: dict[str, Any] = {"facecolor": _colour(event), "edgecolor": PAPER}
        look["alpha"] = 0.6 if event["cat"] in TRANSFERS else 1.0
        look["linewidth"] = 0.5 if width * points_per_ms > 4 and event["cat"] not in TRANSFERS else 0.0
        axes.broken_barh([(left, width)], (top, height), **look)
        short = _short(event)
        if short and width * points_per_ms > 6.5 * len(short):
            place: dict[str, Any] = {"ha": "center", "va": "center", "clip_on": True}
            axes.text(left + width / 2, top + height / 2, short, **place, **_font(PAPER, 8.0))


def _short(event: Event) -> str:
    """What may stand on a bar: whose it is, as short as that is clear; of a wait, what for; of a transfer nothing."""
    name, unit = _label(event)
    if event["cat"] == "stall":
        return CAUSES.get(name, name)
    return str(unit).rpartition(".")[2] if event["cat"] in ("training", "optimizer") else ""


def _colour(event: Event) -> str | None:
    """Of what is shown: transfers, waits, the optimizer, and of training forward and backward."""
    return COLOURS.get(_label(event)[0] if event["cat"] == "training" else event["cat"])


def _font(colour: str, size: float) -> dict[str, Any]:
    return {"color": colour, "size": size, "family": FONT, "parse_math": False}


def _words(colour: str, size: float) -> dict[str, Any]:
    return {"ha": "right", "va": "center", **_font(colour, size)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("trace", type=Path, help="file that `infinity train --trace` wrote")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    parser.add_argument("--step", type=int, help="number of the step; by default the last in the trace")
    given = parser.parse_args(arguments)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(draw(read_step(given.trace, given.step)))
        canvas.print_png(given.picture)  # type: ignore[no-untyped-call]
    except ImportError as error:
        print(f"error: matplotlib does not load ({error}); pip install 'infinity[plot]'", file=sys.stderr)
        return 2
    except (TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
