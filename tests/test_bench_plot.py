from __future__ import annotations

import dataclasses
import io
import itertools
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.text import Text

from infinity.bench import plot
from infinity.bench.plot import check_plot, draw, write_plot
from infinity.bench.results import Report, Result, Run
from infinity.errors import ConfigError, StorageError

KIB, MIB = 1 << 10, 1 << 20
ROUTES = (
    "nvme->host",
    "host->nvme",
    "nvme<->host",
    "nvme->device",
    "host->device",
    "device->host",
    "device<->host",
    "memcpy",
    "optimizer",
    "checksum",
    "all-gather",
    "reduce-scatter",
)
LONG = "An accelerator with $\\frac{a very}{long}$ name_{that} 漢字 goes on, and on, and on, and on, and on, and on"


def result(route: str, gb_s: float, block_bytes: int = 4 * MIB, queue_depth: int = 8, **others: Any) -> Result:
    runs = [Run(10**9, 1 / rate, 0.01) for rate in (0.9 * gb_s, gb_s, 1.1 * gb_s)]
    return Result(
        **{"backend": "threads"} | others,
        route=route,
        block_bytes=block_bytes,
        queue_depth=queue_depth,
        size_bytes=1 << 30,
        runs=runs,
    )


def report(*results: Result, machine: dict[str, Any] | None = None, nvme: tuple[str, ...] = ("/mnt/a",)) -> Report:
    return Report(machine or {}, nvme, results, [], 1.0)


def texts(figure: Figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]


def words(of: Report) -> list[str]:
    return [text.get_text() for text in texts(draw(of))]


def assert_readable(figure: Figure) -> None:
    """No text leaves the picture, and none overlaps another or an arrow."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    width, height = figure.get_size_inches() * figure.dpi
    for name, box in boxes:
        assert box.x0 >= 0, name
        assert box.y0 >= 0, name
        assert box.x1 <= width, name
        assert box.y1 <= height, name
    arrows = [("an arrow", each.get_window_extent()) for each in figure.findobj(FancyArrowPatch)]
    for (first, one), (second, other) in itertools.combinations(boxes + arrows, 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        down = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert across <= 1 or down <= 1, (first, second)


def everything(scale: float = 1.0) -> Report:
    sweep = [
        result(route, scale * (block.bit_length() + depth), block, depth)
        for route in ("nvme->host", "host->nvme")
        for block in (256 * KIB, MIB, 8 * MIB)
        for depth in (1, 4, 8)
    ]
    others = [result(route, scale * (index + 1)) for index, route in enumerate(ROUTES[2:])]
    alone = [result("nvme->host", scale, path="/mnt/a")]
    paths = [{"path": "/mnt/a", "filesystem": "ext4", "device": "/dev/nvme0n1", "model": "Fast One"}]
    machine = {"cpu": "A CPU", "cores": 4, "ram": 16 * 10**9, "kernel": "Linux 6", "torch": "2", "device": "cuda: H"}
    return report(*sweep, *others, *alone, machine={**machine, "paths": paths})


def test_everything_that_was_measured_is_there() -> None:
    said = words(everything())
    for text in ("32.0", "20.0"):  # the best and the slowest cell
        assert said.count(text) == 2
    for route in ROUTES[:7]:
        assert sum(text.startswith(route) for text in said) == 1, route
    assert "by threads; framed: best, 8 MiB x 8" in said
    assert "/mnt/a: ext4 · /dev/nvme0n1 · Fast One · alone: read 1.00 GB/s" in said
    assert {
        "32.0 GB/s",
        "1.00 GB/s",
        "memcpy",
        "9.00 GB/s",
        "8.10 - 9.90 · threads",
        "4 cores · 16 GB",
        "cuda: H",
    } <= set(said)
    assert {"256 KiB", "512 KiB", "8 MiB", "1", "2", "4", "8"} <= set(said)
    assert "A CPU · Linux 6 · torch 2" in said
    assert "not measured" not in said
    assert_readable(draw(everything()))


def boxes(figure: Figure, *, filled: bool) -> list[Rectangle]:
    """Of the first heat map: its cells, or its frames."""
    found = [each for each in figure.axes[1].patches if isinstance(each, Rectangle)]
    return [each for each in found if (to_rgba(each.get_facecolor())[3] > 0) == filled]


def test_unmeasured_cells_are_blank_and_the_best_is_framed() -> None:
    of = report(*(result("nvme->host", rate, block, 4) for rate, block in ((1.0, MIB), (3.0, 4 * MIB), (2.0, 8 * MIB))))
    of = dataclasses.replace(of, recommended={"io_backend": "threads", "io_block_bytes": 8 * MIB, "io_num_threads": 4})
    figure = draw(of)
    assert sorted(round(cell.get_y(), 2) for cell in boxes(figure, filled=True)) == [0.0, 0.5, 0.75]  # 2 MiB has none
    frames = boxes(figure, filled=False)
    assert [(round(each.get_y(), 1), each.get_linestyle()) for each in frames[:2]] == [(0.8, "--"), (0.5, "-")]
    assert any("dashed: recommended" in text for text in (each.get_text() for each in texts(figure)))


def test_in_grey_lighter_is_faster() -> None:
    rates = [1.0, 2.0, 3.0, 4.0, 5.0]
    of = report(*(result("nvme->host", rate, MIB, depth) for depth, rate in enumerate(rates, 1)))
    fills = [
        to_rgba(each.get_facecolor()) for each in sorted(boxes(draw(of), filled=True), key=lambda cell: cell.get_x())
    ]
    greys = [0.299 * red + 0.587 * green + 0.114 * blue for red, green, blue, _ in fills]
    assert greys == sorted(greys)
    assert min(later - earlier for earlier, later in itertools.pairwise(greys)) > 0.05


def test_only_the_best_backend_and_all_directories_together_are_mapped() -> None:
    said = words(
        report(
            result("nvme->host", 2.0),
            result("nvme->host", 1.1, backend="aiofiles"),
            result("nvme->host", 7.7, backend="fio", reference=True),
            result("nvme->host", 1.3, path="/mnt/a"),
        )
    )
    assert "2.00" in said
    assert not {"1.10", "7.70", "1.30"} & set(said)


def test_each_cell_is_the_fastest_backends_and_the_frame_is_around_the_steady_best() -> None:
    steady = [
        result("nvme->host", 2.0, backend="uring"),
        result("nvme->host", 1.9, backend="threads"),
        result("nvme->host", 1.5, 8 * MIB, backend="threads"),
    ]
    lucky = result("nvme->host", 1.8, 8 * MIB, backend="uring")
    once = result("nvme->host", 3.0, 16 * MIB, backend="threads", in_passing=True)
    said = words(report(*steady, lucky, once))
    assert "by the fastest backend; framed: best, 4 MiB x 8 uring" in said
    assert {"2.00", "1.80", "3.00"} <= set(said)
    assert not {"1.90", "1.50"} & set(said)


def test_a_legend_is_whole() -> None:
    best, recommended = result("nvme->host", 2.0, 256 * KIB, 16, backend="aiofiles"), result("nvme->host", 1.9)
    chosen = {"io_backend": "threads", "io_block_bytes": 4 * MIB, "io_num_threads": 8}
    of = dataclasses.replace(report(best, recommended), recommended=chosen)
    assert "by the fastest backend; framed: best, 256 KiB x 16 aiofiles; dashed: recommended" in words(of)


def test_what_was_not_measured_is_said() -> None:
    said = words(report())
    assert said.count("not measured") == 2 + 6 + 3
    assert "nvme->device  not measured" in said
    assert not any("all-gather" in text for text in said)
    assert_readable(draw(report()))


rates = st.sampled_from([1e-7, 1e-4, 0.0096, 0.5, 9.996, 99.96, 12345.0, 99_999.0, 1e6, 1.5e12])
long_names = st.sampled_from(["", "x", "w" * 200, LONG, "line\nfeed\ttab", "\U0001f600 /\u200b", "$"])


@examples(deadline=None, max_examples=12)
@given(
    st.lists(
        st.builds(
            lambda route, rate, block, depth, name, path: result(route, rate, block, depth, backend=name, path=path),
            st.sampled_from(ROUTES),
            rates,
            st.sampled_from([4 * KIB, 6 * MIB, 64 * MIB, 1 << 30]),
            st.integers(1, 64),
            long_names,
            st.sampled_from([None, None, None, "/0"]),
        ),
        max_size=40,
    ),
    st.integers(0, 7),
    long_names,
)
def test_any_figures_and_names_are_readable(results: list[Result], num_paths: int, name: str) -> None:
    paths = [{"path": name, "filesystem": name, "device": name, "model": name}] * num_paths
    machine = {"cpu": name, "kernel": name, "torch": name, "cores": 1024, "ram": 10**15, "device": name, "paths": paths}
    figure = draw(report(*results, machine=machine, nvme=tuple(f"/{i}" for i in range(num_paths))))
    assert_readable(figure)
    figure.savefig(io.BytesIO(), format="png")  # a glyph that is missing would warn


def test_a_full_sweep_is_readable() -> None:
    blocks, depths = [1 << bits for bits in range(12, 27)], [*range(1, 9), 12, 16, 24, 32, 48, 64]
    figure = draw(report(*(result("nvme->host", 1e-4 * d, b, d) for b in blocks for d in depths)))
    assert_readable(figure)
    assert sum(text.get_text() == "1e-04" for text in texts(figure)) == len(blocks)


def test_a_picture_is_written(tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    write_plot(everything(), file)
    width, height = struct.unpack(">II", file.read_bytes()[16:24])
    assert (width, height) == (1430, 924)
    with pytest.raises(StorageError, match="writing the picture for --plot"):
        write_plot(everything(), tmp_path / "missing" / "picture.png")


def test_another_users_settings_of_matplotlib_neither_matter_nor_change(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(2)]
    write_plot(everything(), files[0])
    odd = {
        "text.usetex": True,
        "font.family": ["monospace"],
        "figure.facecolor": "black",
        "savefig.facecolor": "red",
        "savefig.bbox": "tight",
        "savefig.dpi": 20,
        "text.color": "white",
        "image.cmap": "jet",
        "axes.facecolor": "blue",
        "lines.linewidth": 9,
        "patch.linewidth": 9,
    }
    with mpl.rc_context(odd):
        before = dict(mpl.rcParams)
        write_plot(everything(), files[1])
        assert dict(mpl.rcParams) == before
    assert files[0].read_bytes() == files[1].read_bytes()
    assert isinstance(draw(everything()).canvas, FigureCanvasAgg)


def test_matplotlib_is_only_loaded_for_a_picture(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from infinity.bench.plot import check_plot, write_plot; "
        "from infinity.bench.results import Report; assert 'matplotlib' not in sys.modules; "
        "check_plot(pathlib.Path(sys.argv[1])); write_plot(Report({}, [], [], [], 1.0), pathlib.Path(sys.argv[1])); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    root = Path(plot.__file__).parents[2]
    subprocess.run([sys.executable, "-W", "error", "-c", script, str(tmp_path / "x.png")], check=True, cwd=root)


def test_what_cannot_be_drawn_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot(tmp_path / "x.png")
    check_plot(tmp_path / "x.PNG")
    with pytest.raises(ConfigError, match=r"--plot: expected a file name that ends in \.png, got .*x\.pdf"):
        check_plot(tmp_path / "x.pdf")
    with pytest.raises(ConfigError, match=r"--plot: directory .*missing does not exist"):
        check_plot(tmp_path / "missing" / "x.png")
    (tmp_path / "y.png").mkdir()
    with pytest.raises(ConfigError, match=r"--plot: .* is a directory"):
        check_plot(tmp_path / "y.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib.*pip install 'infinity\[plot\]'"):
        check_plot(tmp_path / "x.png")


def test_a_matplotlib_that_does_not_load_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError('built for another numpy')")
    script = "import sys, pathlib; from infinity.bench.plot import check_plot; check_plot(pathlib.Path('x.png'))"
    root = Path(plot.__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": f"{tmp_path}:{root}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "does not load here (built for another numpy); install it anew" in ended.stderr
