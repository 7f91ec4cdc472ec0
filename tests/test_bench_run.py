"""Whole runs of the benchmark: what is measured, what comes out, and with whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes_bench import KIB, MIB, POINTS, Harness, environment, opener
from fakes_io import HookedSyscalls, Operation
from infinity.__main__ import command_names, main
from infinity.bench.baseline import read_baseline
from infinity.bench.results import Report
from infinity.bench.run import RegressionError
from infinity.config import BackendName, Config
from infinity.errors import DirectoryError
from infinity.io.backend import Backend
from infinity.io.open import Choice
from infinity.io.syscalls import Syscalls
from infinity.machine.paths import path_facts

FILE_ROUTES = ["nvme->host", "host->nvme", "nvme<->host"]
MEMORY_ROUTES = ["memcpy", "optimizer", "checksum"]
ROUTES = [*FILE_ROUTES, "host->device", "device->host", "device<->host", "nvme->device", *MEMORY_ROUTES]
TWO_ROUTES_AND_MORE = {"nvme<->host": {"read", "write"}, "device<->host": {"upload", "download"}}


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    directory = tmp_path / "nvme"
    directory.mkdir()
    return Harness(directory)


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    shm = Path("/dev/shm")
    if not shm.is_dir() or path_facts(shm).filesystem != "tmpfs" or not os.access(shm, os.W_OK):
        pytest.skip("no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir=shm) as directory:
        yield Path(directory)


# What comes out.


def test_the_document_has_the_documented_form(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    harness.run(json=file, time=10)
    document = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert document["schema"] == 1
    machine = document["machine"]
    assert machine.keys() >= {"cpu", "cores", "ram", "kernel", "python", "torch", "device", "paths"}
    assert (machine["cores"], machine["torch"]) == (os.cpu_count(), torch.__version__)
    assert "host memory" in machine["device"]
    [path] = machine["paths"]
    assert path.keys() >= {"path", "device", "filesystem", "options", "rotational", "model"}
    assert path["path"] == str(harness.directory)
    assert path["backend"] == "threads"
    results = document["results"]
    assert list(dict.fromkeys(result["route"] for result in results)) == ROUTES
    for result in results:
        assert result.keys() >= {"backend", "queue_depth", "size", "gb_s", "cpu_s_per_gb", "latency_ms", "verified"}
        assert result["repeats"] == 2
        assert 0 < result["gb_s"]["min"] <= result["gb_s"]["median"] <= result["gb_s"]["max"]
        assert result["cpu_s_per_gb"] >= 0
        assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["p99"]
        assert result.get("gb_s_each", {}).keys() == TWO_ROUTES_AND_MORE.get(result["route"], set())
        assert result["verified"] is (None if result["route"] in MEMORY_ROUTES else True)
    for route in (*FILE_ROUTES, "nvme->device"):
        points = [(r["block_size"], r["queue_depth"], r["size"]) for r in results if r["route"] == route]
        assert points == [(64 * KIB, 4, MIB), (256 * KIB, 2, MIB)]
    assert list(document["best"]) == ROUTES
    for route, best in document["best"].items():
        assert best in results
        assert best["gb_s"]["median"] == max(r["gb_s"]["median"] for r in results if r["route"] == route)
    assert document["recommended"]["nvme"] == [str(harness.directory)]
    assert 0 < document["seconds"] < 60


def test_without_points_a_sweep_finds_the_setting_and_config_takes_it(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    report = harness.run(points=(), size=2 * MIB, io_backend="auto", config=file, time=6)
    cells = {(r.backend, r.block_bytes, r.queue_depth) for r in report.results if r.route == "nvme->host"}
    assert {backend for backend, _, _ in cells} == {"threads", "uring", "aiofiles"} & {name for name, _, _ in cells}
    assert len({backend for backend, _, _ in cells}) >= 2
    assert len(cells) >= 4
    assert all(block * depth <= 2 * MIB for _, block, depth in cells)
    for route in FILE_ROUTES:
        assert all(result.verified for result in report.results if result.route == route)
    chosen = {(r.backend, r.block_bytes, r.queue_depth) for r in report.results if r.route == "nvme<->host"}
    assert chosen <= cells
    config = Config.from_json(file)
    assert config.nvme == (harness.directory,)
    assert (config.io_backend, config.io_block_bytes, config.io_num_threads) in chosen
    assert "looking for the best of" in harness.printed.getvalue()
    assert "best so far: read" in harness.printed.getvalue()


def test_a_backend_that_does_not_work_here_is_left_out_and_said(harness: Harness, tmp_path: Path) -> None:
    working = opener(Syscalls())

    async def some(name: BackendName, directory: Path, *, num_threads: int, block_bytes: int) -> tuple[Backend, Choice]:
        if name == "threads":
            raise DirectoryError("no threads today", path=directory)
        return await working(name, directory, num_threads=num_threads, block_bytes=block_bytes)

    file = tmp_path / "figures.json"
    report = harness.run(open_backend=some, io_backend="auto", points=("64KiBx4",), repeats=1, json=file)
    assert "threads" not in {result.backend for result in report.results}
    assert "aiofiles" in {result.backend for result in report.results}
    assert "no threads today" in str(json.loads(file.read_text())["machine"]["paths"])
    with pytest.raises(DirectoryError, match="no threads today"):
        harness.run(open_backend=some)
    assert list(harness.directory.iterdir()) == []


def test_backends_are_opened_as_the_engine_opens_them(harness: Harness) -> None:
    opened: list[tuple[int, int]] = []
    working = opener(Syscalls())

    async def watching(
        name: BackendName, directory: Path, *, num_threads: int, block_bytes: int
    ) -> tuple[Backend, Choice]:
        opened.append((num_threads, block_bytes))
        return await working(name, directory, num_threads=num_threads, block_bytes=block_bytes)

    sizes: set[int] = set()

    def hook(operation: Operation) -> None:
        if operation.action in ("read", "write"):
            sizes.add(operation.num_bytes)

    working = opener(HookedSyscalls(hook))
    harness.run(open_backend=watching, repeats=1)
    assert set(opened) == {(4, 64 * KIB), (2, 256 * KIB)}
    assert max(sizes) == 256 * KIB


def test_everything_is_removed_at_the_end(harness: Harness, tmp_path: Path) -> None:
    seen: list[int] = []
    syscalls = HookedSyscalls(lambda _: seen.append(new.stat().st_mode & 0o777))
    new = tmp_path / "new"
    harness.run(syscalls, nvme=[new, harness.directory])
    assert set(seen) == {0o700}
    assert f"created {new}" in harness.printed.getvalue()
    assert list(harness.directory.iterdir()) == []
    assert list(tmp_path.iterdir()) == [harness.directory]


def test_several_directories_are_measured_at_once_and_each_alone(harness: Harness, tmp_path: Path) -> None:
    paths: set[str] = set()

    class Watching(Syscalls):
        def write_from(self, descriptor: int, view: memoryview, offset: int) -> int:
            paths.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            assert offset + len(view) <= MIB // 2
            return super().write_from(descriptor, view, offset)

    other = tmp_path / "other"
    report = harness.run(Watching(), nvme=[harness.directory, other])
    assert len(paths) == 2
    together = [result for result in report.results if result.route in FILE_ROUTES and result.path is None]
    assert {result.size_bytes for result in together} == {MIB}
    alone = {(result.route, result.path, result.size_bytes) for result in report.results if result.path is not None}
    assert alone == {
        (route, str(path), MIB // 2) for route in ("nvme->host", "host->nvme") for path in (harness.directory, other)
    }
    assert any("are on one device" in warning for warning in report.warnings)


def test_where_there_is_no_terminal_each_stage_is_a_plain_line(harness: Harness) -> None:
    harness.run()
    printed = harness.printed.getvalue()
    assert "\x1b" not in printed
    assert printed.index("writing and checking\n") < printed.index("checking what the timed passes wrote\n")
    for route in ROUTES:
        assert route in printed
    assert "Your NVMe reads" in printed


def test_a_terminal_gets_a_line_that_lives(harness: Harness) -> None:
    harness.run(terminal=True, points=(), size=2 * MIB)
    printed = harness.printed.getvalue()
    assert "\x1b[" in printed
    assert "left" in printed
    assert "best so far" in printed


def test_the_command_writes_only_json_to_standard_output(harness: Harness, capfd: pytest.CaptureFixture[str]) -> None:
    assert "bench" in command_names()
    arguments = ["bench", "--nvme", str(harness.directory), "--size", "1MiB", "--points", POINTS, "--repeats", "1"]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--time", "3", "--device", "cpu", "--json", "-"])
    assert exit_.value.code == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["schema"] == 1
    assert "writing and checking" in err


def test_a_picture_is_drawn(harness: Harness, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "figures.png"
    harness.run(points=(), size=2 * MIB, plot=file, repeats=1)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_a_size_what_is_slow_to_write_is_left_out(harness: Harness) -> None:
    report = harness.run(size=None, quick=True, time=1e-6, points=("64KiBx4", "1MiBx3"), repeats=3)
    sizes = {result.size_bytes for result in report.results if result.route in FILE_ROUTES}
    assert len(sizes) == 1
    assert 3 * MIB <= min(sizes) < 256 * MIB
    assert {len(result.runs) for result in report.results} == {1}
    assert "only 1 of 3 repeats fitted into the time: a larger --time gives steadier figures" in report.warnings
    assert "more would take too long to write here" in harness.printed.getvalue()


def test_the_time_is_kept(harness: Harness) -> None:
    began = time.perf_counter()
    harness.run(points=(), size=4 * MIB, time=4, io_backend="auto", repeats=100)
    assert time.perf_counter() - began < 8


# Comparing with earlier figures.


class Slow(Syscalls):
    """A device that takes its time, in the thread that calls."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def read_into(self, descriptor: int, view: memoryview, offset: int) -> int:
        time.sleep(self._seconds)
        return super().read_into(descriptor, view, offset)

    def write_from(self, descriptor: int, view: memoryview, offset: int) -> int:
        time.sleep(self._seconds)
        return super().write_from(descriptor, view, offset)


@pytest.fixture
def only_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what a busy machine's other tenants slow down ten times."""
    monkeypatch.setattr("infinity.bench.measure.memory_routes", lambda source, target: [])
    monkeypatch.setattr("infinity.bench.measure.DEVICE_ROUTES", ())


def test_a_look_of_the_sweep_is_marked_and_never_the_best(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    harness.run(points=(), size=2 * MIB, repeats=1, json=file)
    document = json.loads(file.read_text())
    swept = {route: [r for r in document["results"] if r["route"] == route] for route in ("nvme->host", "nvme<->host")}
    chosen = {(r["block_size"], r["queue_depth"]) for r in swept["nvme<->host"]}
    assert not any("in_passing" in r for r in swept["nvme<->host"])
    assert {(r["block_size"], r["queue_depth"]) for r in swept["nvme->host"] if "in_passing" not in r} == chosen
    assert len(swept["nvme->host"]) > len(chosen)
    assert "in_passing" not in document["best"]["nvme->host"]


@pytest.mark.usefixtures("only_files")
def test_a_slowed_backend_is_a_regression_and_its_figures_are_written(harness: Harness, tmp_path: Path) -> None:
    before, now = tmp_path / "before.json", tmp_path / "now.json"
    pace: dict[str, Any] = {"size": 2 * MIB, "points": ("256KiBx2",), "repeats": 3}
    harness.run(Slow(0.002), json=before, **pace)
    # On a busy machine the same pace may differ several times, and a fast one suffers most.
    harness.run(Slow(0.002), baseline=before, tolerance="98%", json=now, **pace)
    with pytest.raises(RegressionError) as caught:
        harness.run(Slow(0.06), baseline=before, tolerance="40%", json=now, **pace)
    regressed = {change.subject.route for change in caught.value.comparison.regressions}
    assert regressed == {*FILE_ROUTES, "nvme->device"}
    read_baseline(now)  # raises where the form is wrong
    assert json.loads(now.read_text())["best"]["nvme->host"]["gb_s"]["median"] == pytest.approx(
        caught.value.report.best()["nvme->host"].median_gb_s
    )


@pytest.mark.usefixtures("only_files")
def test_a_regression_ends_the_command_with_3(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    arguments = ["bench", "--nvme", str(harness.directory), "--size", "2MiB", "--points", "256KiBx2", "--device", "cpu"]
    arguments += ["--io-backend", "threads", "--time", "1", "--json", str(file)]
    for seconds, tolerance, code in ((0.002, "", 0), (0.002, "98%", 0), (0.06, "40%", 3)):
        monkeypatch.setattr(
            "infinity.bench.run.run.__kwdefaults__", {"open_backend": opener(Slow(seconds)), "began": None}
        )
        compared = ["--baseline", str(file), "--tolerance", tolerance] if file.exists() else []
        with pytest.raises(SystemExit) as exit_:
            main([*arguments, *compared])
        assert exit_.value.code == code, capfd.readouterr()
    assert "Traceback" not in capfd.readouterr().err


# The page cache, and accelerators.


def test_memory_that_looks_like_a_disk_is_warned_of(memory_directory: Path) -> None:
    report = Harness(memory_directory).run()
    assert any("tmpfs is memory, not a disk" in warning for warning in report.warnings)
    [path] = report.machine["paths"]
    if not path["direct"]:
        assert any("the page cache is in the way, and some of it cannot be dropped" in w for w in report.warnings)
    assert list(memory_directory.iterdir()) == []


def test_a_page_cache_in_the_way_is_dropped_and_said(harness: Harness) -> None:
    dropped: list[tuple[int, int]] = []
    fadvise = os.posix_fadvise

    def watched(descriptor: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append((offset, length))
        fadvise(descriptor, offset, length, advice)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fadvise", watched)
        report = harness.run(open_backend=opener(Syscalls(), direct=False), repeats=1, points=("64KiBx2",))
    # Once to see what it does, at two checks, and before each of the three routes that read.
    assert dropped == [(0, 0)] * (1 + 2 + 3)
    assert any("no direct I/O here, the page cache is in the way" in warning for warning in report.warnings)


@pytest.mark.gpu
def test_an_accelerator_is_measured(harness: Harness) -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        pytest.skip("no accelerator")
    report: Report = harness.run(device="auto")
    device: Any = report.machine["device"]
    assert device.startswith(accelerator.type)
    assert all(result.verified for result in report.results if result.route == "nvme->device")


# Several ranks.


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = ["--time", "2", "--repeats", "1", "--points", "256KiBx2", "--io-backend", "threads", "--device", "cpu"]
    return subprocess.run(
        [*command, "-m", "infinity.bench", *flags, *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env={**environment(), "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.slow
def test_under_torchrun_one_rank_measures_the_tiers_and_all_the_collectives(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    ended = torchrun("--nvme", str(harness.directory), "--size", "4MiB", "--json", str(file))
    assert ended.returncode == 0, ended.stderr
    document = json.loads(file.read_text())
    assert list(document["best"]) == [*ROUTES, "all nvme->host", "all host->nvme", "all-gather", "reduce-scatter"]
    for route in ("all-gather", "reduce-scatter"):
        assert document["best"][route]["verified"] is True
        assert "gloo" in document["best"][route]["backend"]
    assert document["machine"]["ranks"]["num_ranks"] == 2
    assert f"ranks: 2: {document['machine']['ranks']['transport']}\n" in ended.stdout
    assert ended.stdout.count("writing and checking") == 1
    assert list(harness.directory.iterdir()) == []


@pytest.mark.slow
def test_where_rank_0_fails_the_others_end_soon(harness: Harness) -> None:
    began = time.perf_counter()
    ended = torchrun("--nvme", str(harness.directory), "--size", "100TiB")
    assert ended.returncode != 0
    assert "short by" in ended.stderr
    assert time.perf_counter() - began < 60
    assert list(harness.directory.iterdir()) == []
