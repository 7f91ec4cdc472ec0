from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from infinity.bench.baseline import Baseline, Comparison, compare, read_baseline
from infinity.bench.results import Report, Result, Run
from infinity.errors import ConfigError

MIB = 1 << 20
PATH = {"path": "/mnt/a", "device": "/dev/vda", "filesystem": "ext4", "model": None}
MACHINE: dict[str, Any] = {
    "cpu": "A CPU",
    "cores": 2,
    "kernel": "Linux 6.1",
    "device": "cpu",
    "paths": [PATH],
}


def result(route: str, gb_s: float | list[float], block_mib: int = 4, queue_depth: int = 8, **others: Any) -> Result:
    rates = gb_s if isinstance(gb_s, list) else [gb_s]
    runs = [Run(10**9, 1 / rate, 0.01) for rate in rates]
    return Result(route, others.pop("backend", "threads"), block_mib * MIB, queue_depth, 1 << 30, runs, **others)


def report(*results: Result, machine: dict[str, Any] | None = None) -> Report:
    return Report(MACHINE if machine is None else machine, ["/mnt/a"], results, [], 1.0)


@pytest.fixture
def earlier(tmp_path: Path) -> Callable[[Report], Baseline]:
    """Through a file, as a user does it."""

    def write_and_read(of: Report) -> Baseline:
        file = tmp_path / "earlier.json"
        file.write_text(json.dumps(of.as_document()))
        return read_baseline(file)

    return write_and_read


Earlier = Callable[[Report], Baseline]


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {str(change.subject): change.verdict for change in comparison.changes}


# What is a regression.


@pytest.mark.parametrize(
    ("now", "verdict"),
    [(1.79, "regression"), (1.81, "same"), (2.0, "same"), (2.21, "same"), (2.23, "improvement")],
)
def test_a_median_past_the_tolerance_is_a_change(earlier: Earlier, now: float, verdict: str) -> None:
    comparison = compare(report(result("memcpy", [0.1, now, 9.0])), earlier(report(result("memcpy", 2.0))), 0.1)
    assert verdicts(comparison) == {"memcpy": verdict}
    assert len(comparison.regressions) == (verdict == "regression")
    assert len(comparison.improvements) == (verdict == "improvement")
    [change] = comparison.changes
    assert change.ratio == pytest.approx(now / 2)


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0, 0.99))
def test_the_same_figures_are_never_a_regression_and_a_change_is_one_one_way_only(
    first: float, second: float, tolerance: float
) -> None:
    def changed(before: float, now: float) -> Comparison:
        baseline = read_document(report(result("memcpy", before)))
        return compare(report(result("memcpy", now)), baseline, tolerance)

    assert verdicts(changed(first, first)) == {"memcpy": "same"}
    forth, back = changed(first, second), changed(second, first)
    assert len(forth.regressions) == len(back.improvements)
    assert not (forth.regressions and back.regressions)


def read_document(of: Report) -> Baseline:
    class File:
        def read_text(self, encoding: str) -> str:
            return json.dumps(of.as_document())

    return read_baseline(File())  # type: ignore[arg-type]


def test_the_best_of_each_route_and_backend_is_compared(earlier: Earlier) -> None:
    before = report(
        result("nvme->host", 2.0, backend="uring"),
        result("nvme->host", 1.5, 1, backend="uring"),
        result("nvme->host", 1.9),
        result("host->nvme", 1.0),
    )
    now = report(
        result("nvme->host", 1.2, backend="uring"),
        result("nvme->host", 1.95, 8),
        result("host->nvme", 1.0),
    )
    comparison = compare(now, earlier(before), 0.1)
    assert verdicts(comparison) == {
        "nvme->host": "same",
        "nvme->host uring": "regression",
        "nvme->host threads": "same",
        "host->nvme": "same",
    }


def test_settings_are_compared_like_for_like(earlier: Earlier) -> None:
    before = report(*(result("nvme->host", rate, depth, depth) for rate, depth in ((1.0, 1), (2.0, 2), (4.0, 4))))
    now = report(
        *(result("nvme->host", rate, depth, depth) for rate, depth in ((0.5, 1), (1.8, 2), (4.0, 4), (9.0, 8)))
    )
    [change] = compare(now, earlier(before), 0.1).changes
    assert change.like_for_like == pytest.approx(0.9)
    assert change.verdict == "improvement"
    [change] = compare(report(result("nvme->host", 4.0, 16)), earlier(before), 0.1).changes
    assert change.like_for_like is None


def test_a_slow_directory_shows_and_a_slow_peer_is_no_fault_of_ours(earlier: Earlier) -> None:
    def measured(alone: float, peer: float) -> Report:
        return report(
            result("nvme->host", 2.0),
            result("nvme->host", alone, path="/mnt/a"),
            result("nvme->host", peer, backend="fio libaio", reference=True),
        )

    comparison = compare(measured(0.5, 0.5), earlier(measured(1.0, 1.0)), 0.1)
    assert verdicts(comparison) == {
        "nvme->host": "same",
        "nvme->host threads /mnt/a": "regression",
        "nvme->host fio libaio": "same",
    }
    assert [change.ratio for change in comparison.changes] == [1.0, 0.5, 0.5]


def test_looks_in_passing_are_neither_compared_with_nor_judged(earlier: Earlier) -> None:
    before = report(
        result("nvme->host", 2.0),
        result("nvme->host", [9.0] * 50, 16, in_passing=True),
        result("nvme->host", 1.0, backend="uring", in_passing=True),
        result("nvme->host", 1.5, backend="aiofiles"),
    )
    now = report(
        result("nvme->host", 1.95),
        result("nvme->host", 0.1, 16, in_passing=True),
        result("nvme->host", 0.1, backend="uring"),
        result("nvme->host", 0.1, backend="aiofiles"),
    )
    comparison = compare(now, earlier(before), 0.1)
    assert verdicts(comparison) == {
        "nvme->host": "same",
        "nvme->host threads": "same",
        "nvme->host uring": "same",
        "nvme->host aiofiles": "regression",
    }
    assert comparison.changes[0].before.median == 2.0


def test_where_it_is_narrow_no_figure_is_cut(earlier: Earlier) -> None:
    of = report(result("device<->host", 98.7), result("nvme->host", 1.23))
    comparison = dataclasses.replace(compare(of, earlier(of), 0.1), file=Path("x.json"))
    for width in (20, 40, 60):
        printed = io.StringIO()
        Console(file=printed, width=width).print(comparison.as_table(plain=True, width=width), crop=False)
        rows = printed.getvalue().splitlines()
        assert [row.split()[:4] for row in rows[3:5]] == [
            ["device<->host", "best", "98.7", "98.7"],
            ["nvme->host", "best", "1.23", "1.23"],
        ]
        assert max(map(len, rows)) <= max(width, 48)


# What else a reader must know.


def test_what_only_one_run_measured_is_said(earlier: Earlier) -> None:
    before = report(result("nvme->host", 1.0), result("nvme->host", 1.0, backend="aiofiles"), result("memcpy", 1.0))
    now = report(result("nvme->host", 1.0), result("nvme->host", 1.0, backend="uring"), result("checksum", 1.0))
    comparison = compare(now, earlier(before), 0.1)
    assert comparison.notes == [
        "measured in the baseline only: nvme->host aiofiles, memcpy",
        "new: nvme->host uring, checksum",
    ]
    assert comparison.regressions == []


def test_another_machine_is_said(earlier: Earlier) -> None:
    other = {**MACHINE, "cpu": "Another", "kernel": "Linux 7", "paths": [{**PATH, "filesystem": "xfs"}]}
    notes = compare(report(result("memcpy", 1.0), machine=other), earlier(report(result("memcpy", 1.0))), 0.1).notes
    assert notes == [
        "another machine: cpu was A CPU, is Another",
        "another machine: kernel was Linux 6.1, is Linux 7",
        "another machine: filesystem of /mnt/a was ext4, is xfs",
    ]
    more = {**MACHINE, "paths": [PATH, {}]}
    notes = compare(report(result("memcpy", 1.0), machine=more), earlier(report(result("memcpy", 1.0))), 0.1).notes
    assert notes == ["the baseline has 1 NVMe directories, this run 2"]
    for unsaid in ({}, {"cpu": "A CPU"}, {"paths": "none"}):
        notes = compare(
            report(result("memcpy", 1.0)), earlier(report(result("memcpy", 1.0), machine=unsaid)), 0.1
        ).notes
        assert [note for note in notes if "machine" in note] == []


# How it is shown.


def shown(comparison: Comparison, *, plain: bool = True) -> list[str]:
    printed = io.StringIO()
    Console(file=printed, width=80, force_terminal=not plain).print(comparison.as_table(plain=plain))
    return printed.getvalue().splitlines()


def test_the_table_says_what_got_slower(earlier: Earlier) -> None:
    before = report(result("nvme->host", 2.0), result("host->nvme", 1.0), result("memcpy", 5.0))
    now = report(result("nvme->host", [1.4, 1.5, 1.6]), result("host->nvme", 1.0), result("memcpy", 9.0))
    lines = shown(compare(now, earlier(before), 0.1))
    assert lines[3].split() == ["nvme->host", "best", "2.00", "1.50", "1.40-1.60", "0.75", "0.75", "SLOWER"]
    assert lines[4].split() == ["host->nvme", "best", "1.00", "1.00", "1.00-1.00", "1.00", "1.00"]
    assert lines[5].split() == ["memcpy", "best", "5.00", "9.00", "9.00-9.00", "1.80", "1.80", "faster"]
    assert lines[6].startswith("1 slower and 1 faster by more than 10% than ")
    assert "\x1b[1;31m" in "".join(shown(compare(now, earlier(before), 0.1), plain=False))


@given(
    st.floats(0.1, 99_999),
    st.sampled_from(["threads", "fio io_uring, huge pages, and more", "[/b]", "漢字" * 20]),
    st.none() | st.just("/mnt/漢字/" + "x" * 90),
    st.booleans(),
)
def test_nothing_wraps_at_80_columns(gb_s: float, backend: str, path: str | None, plain: bool) -> None:
    of = report(
        result("reduce-scatter", gb_s, backend=backend),
        result("reduce-scatter", gb_s, backend="other"),
        result("reduce-scatter", gb_s, backend=backend, path=path),
    )
    comparison = compare(of, read_document(of), 0.1)
    baseline_file = dataclasses.replace(comparison, file=Path("/mnt/x.json"))
    lines = shown(baseline_file, plain=plain)
    assert all(cell_len(line.rstrip()) <= 80 for line in lines if "\x1b" not in line)
    assert sum("1.00" in line for line in lines) == len(comparison.changes)
    assert not plain or all(line.isascii() for line in lines)


def test_the_document_holds_the_same(earlier: Earlier) -> None:
    comparison = compare(report(result("memcpy", 1.0)), earlier(report(result("memcpy", 2.0))), 0.1)
    document = json.loads(json.dumps(comparison.as_document(), allow_nan=False))
    assert document == {
        "file": str(comparison.file),
        "tolerance": 0.1,
        "changes": [
            {
                "route": "memcpy",
                "backend": None,
                "path": None,
                "reference": False,
                "before_gb_s": {"median": 2.0, "min": 2.0, "max": 2.0},
                "now_gb_s": {"median": 1.0, "min": 1.0, "max": 1.0},
                "ratio": 0.5,
                "like_for_like": 0.5,
                "verdict": "regression",
            }
        ],
        "regressions": ["memcpy"],
        "notes": [],
    }


# What is read.


def broken(change: Callable[[dict[str, Any]], object]) -> str:
    document = report(result("memcpy", 1.0), result("checksum", 1.0)).as_document()
    change(document)
    return json.dumps(document)


def set_median(value: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["results"][1]["gb_s"].update(median=value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (broken(set_median(float("nan"))), "not valid JSON: NaN is not allowed"),
        (broken(set_median(float("-inf"))), "not valid JSON: -Infinity is not allowed"),
        (broken(set_median(12345)).replace("12345", "1e999"), "results.1.gb_s.median: .*, got inf"),
        (broken(set_median(0)), "results.1.gb_s.median: .*, got 0"),
        (broken(set_median(-1.0)), "results.1.gb_s.median: .*, got -1.0"),
        (broken(set_median("fast" * 100)), "results.1.gb_s.median: .*, got 'fastfast.*…"),
        (broken(set_median(None)), "results.1.gb_s.median: .*, got None"),
        (broken(lambda d: d["results"][0].pop("route")), "results.0.route: .*, got nothing"),
        (broken(lambda d: d["results"][0].update(queue_depth="8")), "results.0.queue_depth: .*, got '8'"),
        (broken(lambda d: d.pop("results")), "results: .*, got nothing"),
        (broken(lambda d: d.update(results={})), "results: .*, got {}"),
        (broken(lambda d: d.update(results=[])), "results: expected at least one"),
        (broken(lambda d: [each.update(reference=True) for each in d["results"]]), "results: expected at least one"),
        (broken(lambda d: d.update(machine=[])), r"machine: .*, got \[\]"),
        (broken(lambda d: d.pop("schema")), "schema: expected a number, got none"),
        (broken(lambda d: d.update(schema=True)), "schema: expected a number"),
        (broken(lambda d: d.update(schema=2)), "schema: expected 1, got 2; update infinity"),
        (broken(lambda d: d.update(schema=0)), "schema: expected 1, got 0; measure it anew"),
        ("[1]", "schema: expected a number"),
        ('{"schema": 1}', "machine: .*, got nothing"),
    ],
)
def test_what_cannot_be_compared_with_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "earlier.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_baseline(file)
    assert str(caught.value).startswith(f"--baseline: {file}: ")
    assert len(str(caught.value)) < 400


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*; give a file that --json wrote"):
        read_baseline(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_baseline(tmp_path)
    (tmp_path / "binary").write_bytes(b"\x89PNG\xff\xff")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_baseline(tmp_path / "binary")


def test_fields_of_a_later_version_are_passed_over(earlier: Earlier, tmp_path: Path) -> None:
    document = report(result("memcpy", 2.0)).as_document()
    document["more"], document["results"][0]["more"] = 1, {"x": 1}
    file = tmp_path / "later.json"
    file.write_text(json.dumps(document))
    assert read_baseline(file).results == earlier(report(result("memcpy", 2.0))).results
