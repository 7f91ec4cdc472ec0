"""Comparison with an earlier run's JSON document.

What is compared is what a user gets: the best of each route, the best of each route by each I/O backend that both runs
measured, and each directory alone. A regression is a median below the earlier one by more than the tolerance, nothing
cleverer: whoever gates on it chooses the tolerance by the noise of their machine, which the table shows as ranges.

Single settings of the sweep are compared too, as one figure per row: the median over all settings that both runs
measured of the ratio between them. It says whether a best fell because everything did or because the sweep went another
way. They are no regressions by themselves: of a hundred settings measured once or twice some always fall. Neither is a
backend of which one of the runs has such looks in passing only; ``--io-backend`` measures it. Nor are a peer's figures,
which are shown because they tell a slower machine from slower software.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich import box
from rich.table import Table
from rich.text import Text

from infinity.bench.results import SCHEMA, Report
from infinity.bench.table import PLAIN_BOX, fit, fit_columns, format_figure, printable
from infinity.errors import ConfigError

Verdict = Literal["regression", "improvement", "same"]

_MACHINE = ("cpu", "cores", "kernel", "device")
_PATH = ("device", "filesystem", "options", "model", "scheduler")
_WIDEST = 14

Bandwidth = Annotated[float, Field(gt=0, strict=True)]


class _Form(BaseModel):
    """What is read of a document; other fields may be there."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, strict=True)


class Figures(_Form):
    """Bandwidth in GB/s (1e9 bytes) over the repeats."""

    median: Bandwidth
    min: Bandwidth
    max: Bandwidth


class Entry(_Form):
    """One result, as JSON holds it (see ``Result.as_document``)."""

    route: str
    backend: str
    block_size: int
    queue_depth: int
    gb_s: Figures
    reference: bool = False
    path: str | None = None
    in_passing: bool = False


class _Document(_Form):
    machine: dict[str, Any]
    results: list[Entry]


@dataclass(frozen=True, slots=True)
class Baseline:
    """An earlier run.

    Attributes:
        file: where it was read from.
        machine: what it was measured on.
        results: all of it.
    """

    file: Path
    machine: Mapping[str, Any]
    results: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is compared: a route, or one way to take it.

    Attributes:
        route: from where to where.
        backend: the I/O backend or the peer; ``None``: whichever is best.
        path: the directory measured alone; ``None``: all together.
        reference: whether it is a peer's figure.
    """

    route: str
    backend: str | None = None
    path: str | None = None
    reference: bool = False

    def __str__(self) -> str:
        return " ".join(part for part in (self.route, self.backend, self.path) if part is not None)


@dataclass(frozen=True, slots=True)
class Change:
    """One subject, then and now.

    Attributes:
        subject: what.
        before: the earlier figures, in GB/s.
        now: those of this run.
        like_for_like: median ratio over the settings that both runs measured; ``None`` where there are none.
        verdict: what it amounts to; ``"same"`` for every reference, and for what was measured in passing.
    """

    subject: Subject
    before: Figures
    now: Figures
    like_for_like: float | None
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """Now over before; below 1 is slower."""
        return self.now.median / self.before.median

    def as_document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "route": self.subject.route,
            "backend": self.subject.backend,
            "path": self.subject.path,
            "reference": self.subject.reference,
            "before_gb_s": self.before.model_dump(),
            "now_gb_s": self.now.model_dump(),
            "ratio": self.ratio,
            "like_for_like": self.like_for_like,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """This run beside an earlier one.

    Attributes:
        file: the earlier one's document.
        tolerance: by what part a median may fall.
        changes: each subject that both measured, in the order of this run.
        notes: what a reader must know to judge it: another machine, routes that only one of them measured.
    """

    file: Path
    tolerance: float
    changes: Sequence[Change]
    notes: Sequence[str]

    @property
    def regressions(self) -> list[Change]:
        """What got slower by more than the tolerance."""
        return [change for change in self.changes if change.verdict == "regression"]

    @property
    def improvements(self) -> list[Change]:
        """What got faster by more than the tolerance."""
        return [change for change in self.changes if change.verdict == "improvement"]

    def as_document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "file": str(self.file),
            "tolerance": self.tolerance,
            "changes": [change.as_document() for change in self.changes],
            "regressions": [str(change.subject) for change in self.regressions],
            "notes": list(self.notes),
        }

    def as_table(self, *, plain: bool, width: int = 80) -> Table:
        """For a person; no row takes more than one line of 80 columns.

        Args:
            plain: in ASCII, without colours.
            width: of where it will be shown; what matters least is left out where it is too narrow.
        """
        table = Table(
            title="against the baseline",
            box=PLAIN_BOX if plain else box.SIMPLE_HEAD,
            show_edge=False,
            padding=0,
            title_justify="left",
            caption_justify="left",
            caption=Text(self._summary(plain)),
        )
        for name in ("route", "by", "before", "now", "min-max", "times", "alike", ""):
            table.add_column(name, justify="left" if name in ("route", "by", "") else "right", no_wrap=True)
        for change in self.changes:
            cells = (Text(printable(cell, plain=plain)) for cell in _cells(change))
            table.add_row(*cells, style=None if plain else _style(change))
        fit_columns(table, width, [column for column in table.columns if column.header in ("alike", "min-max")][::-1])
        return table

    def _summary(self, plain: bool) -> str:
        num_slower, num_faster = len(self.regressions), len(self.improvements)
        words = (
            f"{num_slower} slower and {num_faster} faster by more than {100 * self.tolerance:.3g}% than {self.file}. "
            "In GB/s; alike: times, over the settings that both runs measured."
        )
        return printable("\n".join([words, *(f"note: {note}" for note in self.notes)]), plain=plain)


def read_baseline(path: Path) -> Baseline:
    """Read the document that an earlier run wrote with ``--json``.

    Raises:
        ConfigError: it cannot be read, is not JSON (``NaN`` and ``Infinity`` are not JSON either), is of another
            schema, or a field is missing or has an impossible value; the message names the file and the field.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise ConfigError(f"--baseline: {path}: {error.strerror}; give a file that --json wrote") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--baseline: {path}: not valid JSON: {error}; give a file that --json wrote") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if type(schema) is not int:
        raise ConfigError(f"--baseline: {path}: schema: expected a number, got none; give a file that --json wrote")
    if schema != SCHEMA:
        repair = "update infinity" if schema > SCHEMA else "measure it anew"
        raise ConfigError(f"--baseline: {path}: schema: expected {SCHEMA}, got {schema}; {repair}")
    try:
        form = _Document.model_validate(document)
    except ValidationError as error:
        item = error.errors()[0]
        field = ".".join(map(str, item["loc"]))
        came = "nothing" if item["type"] == "missing" else _shorten(repr(item["input"]))
        raise ConfigError(f"--baseline: {path}: {field}: {item['msg']}, got {came}; measure it anew") from None
    if not any(not entry.reference for entry in form.results):
        raise ConfigError(f"--baseline: {path}: results: expected at least one that is not a reference, got none")
    return Baseline(path, form.machine, form.results)


def compare(report: Report, baseline: Baseline, tolerance: float) -> Comparison:
    """Put a run beside an earlier one.

    Args:
        report: this run.
        baseline: the earlier one.
        tolerance: by what part of it a median may be below the earlier one, from 0 to 1.
    """
    results = [Entry.model_validate(result.as_document()) for result in report.results]
    now, before = _group(results), _group(baseline.results)
    changes = [
        _change(subject, before[subject], entries, tolerance)
        for subject, entries in now.items()
        if subject in before and not (_is_whole(subject, now) and _is_whole(subject, before))
    ]
    notes = [*_differences(baseline.machine, report.machine), *_unmatched(before, now)]
    return Comparison(baseline.file, tolerance, changes, notes)


def _group(results: Sequence[Entry]) -> dict[Subject, list[Entry]]:
    """The results that each subject is about, routes in order, each followed by the ways to take it."""
    groups: dict[Subject, list[Entry]] = {}
    for route in dict.fromkeys(entry.route for entry in results):
        for entry in results:
            if entry.route == route:
                if not entry.reference and entry.path is None:
                    groups.setdefault(Subject(route), []).append(entry)
                groups.setdefault(Subject(route, entry.backend, entry.path, entry.reference), []).append(entry)
    return groups


def _is_whole(subject: Subject, groups: Mapping[Subject, Sequence[Entry]]) -> bool:
    """Whether a backend is the only one of its route, so that nothing is to be said of it beyond the route's best."""
    return subject.backend is not None and groups[subject] == groups.get(Subject(subject.route))


def _change(subject: Subject, before: Sequence[Entry], now: Sequence[Entry], tolerance: float) -> Change:
    first, second = (
        max(entries, key=lambda entry: (not entry.in_passing, entry.gb_s.median)) for entries in (before, now)
    )
    earlier = {_setting(entry): entry.gb_s.median for entry in before}
    ratios = [entry.gb_s.median / earlier[key] for entry in now if (key := _setting(entry)) in earlier]
    verdict: Verdict = "same"
    if not (subject.reference or first.in_passing or second.in_passing):
        if second.gb_s.median < first.gb_s.median * (1 - tolerance):
            verdict = "regression"
        elif first.gb_s.median < second.gb_s.median * (1 - tolerance):
            verdict = "improvement"
    return Change(subject, first.gb_s, second.gb_s, statistics.median(ratios) if ratios else None, verdict)


def _setting(entry: Entry) -> tuple[str, int, int]:
    return entry.backend, entry.block_size, entry.queue_depth


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """In what the machines differ that bears on the figures, where both say it."""
    for name in _MACHINE:
        yield from _difference(name, before, now)
    paths_before, paths_now = (_paths(machine) for machine in (before, now))
    if len(paths_before) != len(paths_now):
        yield f"the baseline has {len(paths_before)} NVMe directories, this run {len(paths_now)}"
    for earlier, later in zip(paths_before, paths_now, strict=False):
        for name in _PATH:
            yield from _difference(name, earlier, later, f" of {later.get('path', 'a directory')}")


def _difference(name: str, before: Mapping[str, Any], now: Mapping[str, Any], of: str = "") -> Iterator[str]:
    if name in before and name in now and before[name] != now[name]:
        yield f"another machine: {name}{of} was {before[name]}, is {now[name]}"


def _paths(machine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    paths = machine.get("paths")
    return [path for path in paths if isinstance(path, Mapping)] if isinstance(paths, list) else []


def _unmatched(before: Mapping[Subject, object], now: Mapping[Subject, object]) -> Iterator[str]:
    for ones, others, words in ((before, now, "measured in the baseline only"), (now, before, "new")):
        routes = {subject.route for subject in others}
        names = [subject for subject in ones if subject not in others]
        names = [subject for subject in names if (subject.backend is None) != (subject.route in routes)]
        if names:
            yield f"{words}: {', '.join(map(str, names))}"


def _cells(change: Change) -> list[str]:
    subject = change.subject
    alike = "" if change.like_for_like is None else f"{change.like_for_like:.2f}"
    mark = {"regression": "SLOWER", "improvement": "faster", "same": ""}[change.verdict]
    return [
        subject.route if subject.backend is None else " " + fit(subject.path or "", _WIDEST - 1, keep_start=False),
        "best" if subject.backend is None else fit(subject.backend, _WIDEST),
        format_figure(change.before.median),
        format_figure(change.now.median),
        f"{format_figure(change.now.min)}-{format_figure(change.now.max)}",
        format_figure(change.ratio),
        alike,
        mark,
    ]


def _style(change: Change) -> str | None:
    if change.subject.reference:
        return "dim"
    return {"regression": "bold red", "improvement": "green", "same": None}[change.verdict]


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")
