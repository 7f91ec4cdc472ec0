from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from infinity.bench.results import Latency, Report, Result, Run
from infinity.bench.table import as_table, fit, format_block, format_figure

KIB, MIB = 1 << 10, 1 << 20
CHOSEN = {"io_backend": "threads", "io_block_bytes": 8 * MIB, "io_num_threads": 4}


def result(
    route: str,
    gb_s: float | list[float],
    backend: str = "threads",
    block_bytes: int = 4 * MIB,
    queue_depth: int = 8,
    *,
    cpu_s_per_gb: float = 0.015,
    **others: Any,
) -> Result:
    rates = gb_s if isinstance(gb_s, list) else [gb_s]
    runs = [Run(num_bytes=10**9, seconds=1 / rate, cpu_seconds=cpu_s_per_gb) for rate in rates]
    return Result(route, backend, block_bytes, queue_depth, 1 << 30, runs, **others)


def report(*results: Result, **fields: Any) -> Report:
    return Report({}, ["/mnt/a"], results, [], 1.0, **fields)


def lines(of: Report, *, plain: bool = True, width: int = 80) -> list[str]:
    """The rows of the table, without its title and caption."""
    printed = io.StringIO()
    table = as_table(of, plain=plain, width=width)
    table.caption = None
    Console(file=printed, width=width, color_system=None, force_terminal=not plain).print(table)
    return [line.rstrip() for line in printed.getvalue().splitlines()][4:]


def caption(of: Report) -> str:
    printed = io.StringIO()
    Console(file=printed, width=300).print(as_table(of, plain=True).caption)
    return printed.getvalue()


def test_a_row_says_everything() -> None:
    [row] = lines(
        report(result("nvme->host", [1.4, 1.52, 1.6], latency=Latency(0.018, 0.0251), verified=True)), plain=False
    )
    fields = row.split()
    assert fields[:7] == ["nvme->host", "threads", "4MiB", "x", "8", "1.52", "1.40-1.60"]
    assert set(fields[7]) == {"█"}
    assert fields[8:] == ["0.015", "18.0/25.1", "✓"]


def test_of_a_sweep_only_what_says_something_is_shown() -> None:
    sweep = [
        result("nvme->host", 1.0 + block / 100 + depth / 1000 + extra, backend, block * MIB, depth)
        for backend, extra in (("uring", 0.0), ("threads", 0.01))
        for block in (1, 2, 4, 8)
        for depth in (1, 2, 4, 8)
    ]
    rows = lines(report(*sweep, result("memcpy", 9.0), recommended=CHOSEN))
    assert [row.split()[:5] for row in rows if row] == [
        ["nvme->host", "threads", "8MiB", "x", "8"],
        ["threads*", "8MiB", "x", "4", "1.09"],
        ["uring", "8MiB", "x", "8", "1.09"],
        ["memcpy", "threads", "4MiB", "x", "8"],
    ]
    assert "*: recommended" in caption(report(*sweep, recommended=CHOSEN))
    assert "*" not in caption(report(*sweep))


def test_the_recommended_setting_is_marked_where_it_is_the_best_too() -> None:
    best = result("nvme->host", 2.0, "threads", 8 * MIB, 4)
    assert [row.split()[1] for row in lines(report(best, recommended=CHOSEN))] == ["threads*"]
    assert [row.split()[1] for row in lines(report(best, recommended=CHOSEN | {"io_num_threads": 8}))] == ["threads"]


def test_what_was_measured_in_passing_stands_back() -> None:
    of = report(
        result("nvme->host", [9.0] * 57, "threads", 16 * MIB, in_passing=True),
        result("nvme->host", 8.0, "aiofiles", in_passing=True),
        result("nvme->host", 2.0, "threads"),
        result("nvme->host", 2.2, "uring"),
    )
    assert [row[:20].split() for row in lines(of)] == [["nvme->host", "uring"], ["threads"], ["aiofiles"]]
    assert of.best()["nvme->host"].backend == "uring"
    assert report(*of.results[:2]).best()["nvme->host"].median_gb_s == 9.0


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("width", [20, 40, 50, 60, 70, 79])
def test_where_it_is_narrow_columns_are_left_out_and_no_figure_is_cut(width: int, plain: bool) -> None:
    of = report(
        result("device<->host", [98.1, 98.9], "copy thread", 512 * KIB, 16, latency=Latency(0.1, 0.2)),
        result("nvme->host", [1.23, 1.55], "uring", latency=Latency(0.01, 0.02), verified=True),
    )
    printed = io.StringIO()
    console = Console(file=printed, width=width, color_system=None, force_terminal=not plain)
    console.print(as_table(of, plain=plain, width=width), crop=False)
    rows = [line for line in printed.getvalue().splitlines() if line.startswith(("device<->host", "nvme->host"))]
    for row, figures in zip(rows, (["1.39", "1.23-1.55", "10.0/20.0"], ["98.5", "98.1-98.9", "100/200"]), strict=True):
        shown = row.split()
        first, *others = shown[shown.index("x") + 2 :]
        assert first == figures[0]
        assert set(others) <= {*figures, "0.015", "ok", "✓"} or width == 79
    assert max(map(len, rows)) <= max(width, 52)


def test_peers_and_single_directories_are_rows_of_their_own() -> None:
    rows = lines(
        report(
            result("nvme->host", 2.0),
            result("nvme->host", 1.2, path="/mnt/some/where/far/away"),
            result("nvme->host", 0.8, path="/mnt/b"),
            result("nvme->host", 4.0, "fio io_uring", reference=True),
            result("nvme->host", 1.0, "fio io_uring", reference=True),
        )
    )
    assert [row[:28].split() for row in rows] == [
        ["nvme->host", "threads"],
        ["~ere/far/away", "threads"],
        ["/mnt/b", "threads"],
        ["fio", "io_uring"],
    ]
    bars = [row.count("#") for row in rows]
    assert bars[3] == max(bars)
    assert bars[0] == pytest.approx(bars[3] / 2, abs=1)


def test_names_are_whole_where_there_is_room() -> None:
    name = "fio io_uring, huge pages"
    of = report(result("nvme->host", 1.0, name))
    assert name in lines(of, width=100)[0]
    assert " fio io_~ pages " in lines(of, width=80)[0]


def test_bars_are_against_the_fastest_of_the_kind() -> None:
    rows = lines(
        report(
            result("nvme->host", 1.0),
            result("host->nvme", 2.0),
            result("host->device", 20.0),
            result("device->host", 5.0),
            result("memcpy", 10.0),
            result("all-gather", 0.01),
            result("something new", 3.0),
        ),
        width=120,
    )
    assert [row.count("#") for row in rows] == [12, 24, 0, 24, 6, 0, 24, 0, 24, 0, 24]


def test_routes_stand_by_kind_in_the_order_of_the_report() -> None:
    rows = lines(report(*(result(route, 1.0) for route in ("memcpy", "host->nvme", "all-gather", "nvme->host"))))
    assert [row.split()[0] if row else "" for row in rows] == [
        "host->nvme",
        "nvme->host",
        "",
        "memcpy",
        "",
        "all-gather",
    ]


@pytest.mark.parametrize(("verified", "plain", "mark"), [(True, True, "ok"), (False, True, "no"), (False, False, "✗")])
def test_what_was_verified_is_marked(verified: bool, plain: bool, mark: str) -> None:
    [row] = lines(report(result("nvme->host", 1.0, verified=verified)), plain=plain)
    assert row.endswith(mark)
    assert ("read back and compared" in caption(report(result("nvme->host", 1.0, verified=verified)))) == verified


def test_names_are_no_markup() -> None:
    rows = lines(report(result("nvme->host", 1.0, "[/red]"), result("nvme->host", 1.0, path="[b]/x")))
    assert "[/red]" in rows[0]
    assert "[b]/x" in rows[1]


def test_nothing_measured_is_an_empty_table() -> None:
    assert lines(report()) == []


names = st.text(st.characters(exclude_categories=["C", "Z", "M"]), min_size=1, max_size=40)


@examples(deadline=None, max_examples=60)
@given(
    st.lists(
        st.builds(
            lambda route, rates, backend, size, depth, cpu, latency, path, peer: result(
                route,
                rates,
                backend,
                size,
                depth,
                cpu_s_per_gb=cpu,
                latency=Latency(*latency),
                path=path,
                reference=peer,
                verified=True,
            ),
            st.sampled_from(["nvme->host", "reduce-scatter", "device<->host", "memcpy"]),
            st.lists(st.floats(0.1, 99_000), min_size=1, max_size=3),
            names,
            st.sampled_from([512, 4 * KIB, 768 * KIB, 64 * MIB, 1 << 30]),
            st.integers(1, 64),
            st.floats(0, 99),
            st.tuples(st.floats(1e-3, 1.0), st.floats(1e-3, 1.0)),
            st.none() | names,
            st.booleans(),
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_nothing_wraps_or_is_cut_at_80_columns(results: list[Result], plain: bool) -> None:
    of = report(*results)
    printed = lines(of, plain=plain)
    assert all(cell_len(line) <= 80 for line in printed)
    shown = {(r.route, r.reference, r.backend if r.path is None or r.reference else r.path) for r in results}
    kinds = {{"reduce-scatter": 0, "memcpy": 1, "device<->host": 2}.get(r.route, 3) for r in results}
    assert sum(bool(line) for line in printed) >= len(shown)
    assert len(printed) <= len(results) + len(kinds)
    if plain:
        assert all(line.isascii() for line in printed)
    for each in of.best().values():
        assert any(format_figure(each.median_gb_s) in line for line in printed)
        assert any(line.startswith(each.route) for line in printed)


@given(st.floats(0, 1e300))
def test_a_figure_is_short_and_right(figure: float) -> None:
    text = format_figure(figure)
    assert len(text) <= 8
    assert len(text) <= 7 or figure >= 1e99 or figure < 1e-99
    assert float(text) == pytest.approx(figure, rel=0.055) or figure < 0.0095
    assert figure == 0 or float(text) == pytest.approx(figure, rel=0.5)


def test_figures_and_sizes_as_people_write_them() -> None:
    assert [format_figure(x) for x in (0, 0.0123, 0.0996, 1.5, 9.996, 12.34, 99.96, 1234.5)] == (
        ["0", ".012", "0.10", "1.50", "10.0", "12.3", "100", "1234"]
    )
    assert [format_block(x) for x in (512, 4096, 3 * MIB // 2, 1 << 30)] == ["512B", "4KiB", "1.5MiB", "1GiB"]
    assert format_block(4 * MIB, " ") == "4 MiB"


@given(names, st.integers(2, 20), st.booleans())
def test_a_name_keeps_its_ends(name: str, width: int, keep_start: bool) -> None:
    fitted = fit(name, width, keep_start=keep_start)
    assert cell_len(fitted) <= width
    if cell_len(name) <= width:
        assert fitted == name
    else:
        start, _, end = fitted.rpartition("…")
        assert name.startswith(start)
        assert name.endswith(end)
        assert keep_start or not start


def test_repeats_are_said() -> None:
    once, thrice = result("memcpy", 1.0), result("nvme->host", [1.0, 1.0, 1.0])
    assert "largest of 1-3 repeats" in caption(report(once, thrice))
    assert "largest of 3 repeats" in caption(dataclasses.replace(report(thrice)))
