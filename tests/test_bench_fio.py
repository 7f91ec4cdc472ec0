"""fio beside ours: what it is told, what its document says, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes_bench import KIB, MIB, Harness
from infinity.bench.fio import (
    ROUTE_MODES,
    Fio,
    FioEngineError,
    FioError,
    FioHugePagesError,
    FioRun,
    FioStoppedError,
    find_fio,
)
from infinity.bench.results import Latency
from infinity.errors import ConfigError
from infinity.io.completion import call_in_thread

BLOCK = MIB
DEPTH = 4
SIZE = 16 * MIB

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")

FAKE = """
import json, os, signal, sys, time
from pathlib import Path
here = Path(__file__).parent
if sys.argv[1:] == ["--version"]:
    print((here / "version").read_text())
    raise SystemExit
flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in sys.argv[1:])
with (here / "runs").open("a") as runs:
    print(json.dumps({**flags, "pid": os.getpid()}), file=runs)
exec((here / "body").read_text())
"""


class FakeFio:
    """A program that says what a test wants, and notes how it was called."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.path = directory / "fio"
        self.path.write_text(f"#!{sys.executable}\n{FAKE}")
        self.path.chmod(0o755)
        self.says(version="fio-3.33", body="")

    def says(self, **files: str) -> None:
        for name, text in files.items():
            (self.path.parent / name).write_text(textwrap.dedent(text))

    def runs(self) -> list[dict[str, Any]]:
        file = self.path.parent / "runs"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def fake(tmp_path: Path) -> FakeFio:
    return FakeFio(tmp_path / "fake")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(SIZE))
    return path


def run(fio: Fio, file: Path, route: str = "nvme->host", **changes: Any) -> FioRun:
    options: dict[str, Any] = {
        "block_bytes": BLOCK,
        "queue_depth": DEPTH,
        "engine": "libaio",
        "huge_pages": False,
        "size_bytes": SIZE,
    }
    return fio.run(file, route, **(options | changes))


def document(num_bytes: int = SIZE, runtime: int = 8, job_runtime: int = 10, error: int = 0) -> dict[str, Any]:
    percentile = {"50.000000": 2_000_000, "99.000000": 5_000_000}
    nothing = {"io_bytes": 0, "runtime": 0, "lat_ns": {}}
    read = {"io_bytes": num_bytes, "runtime": runtime, "lat_ns": {"percentile": percentile}}
    job = {"error": error, "job_runtime": job_runtime, "usr_cpu": 10.0, "sys_cpu": 40.0, "read": read, "write": nothing}
    return {"jobs": [job]}


def test_fio_that_is_not_there_is_asked_for(tmp_path: Path, fake: FakeFio) -> None:
    with pytest.raises(ConfigError, match="apt install fio"):
        find_fio(str(tmp_path / "nothing"))
    fake.says(version="fio-2.19")
    with pytest.raises(ConfigError, match=r"expected fio 3\.0 or newer, got 'fio-2\.19'"):
        find_fio(str(fake.path))
    fake.says(version="not a number for text()")
    with pytest.raises(ConfigError, match="expected fio"):
        find_fio(str(fake.path))
    fake.path.write_text(f"#!{sys.executable}\nraise SystemExit(3)")
    with pytest.raises(ConfigError, match="does not start"):
        find_fio(str(fake.path))


def test_what_fio_is_told(file: Path, fake: FakeFio, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.says(body=f"print({json.dumps(document())!r})")
    monkeypatch.chdir(file.parent)
    fio = find_fio("fake/fio")
    assert fio.version == "fio-3.33"
    file.rename(file.parent / "a:b c")
    run(fio, Path("a:b c"), "nvme<->host", engine="io_uring", seconds=1.5)
    [flags] = fake.runs()
    del flags["pid"]
    assert flags.pop("filename") == f"{file.parent}/a\\:b c"
    assert (flags["time_based"], flags["runtime"], flags["ramp_time"]) == ("", "1500000us", "200000us")
    assert {name: flags[name] for name in ("direct", "rw", "ioengine", "bs", "iodepth", "size", "overwrite")} == {
        "direct": "1",
        "rw": "rw",
        "ioengine": "io_uring",
        "bs": str(BLOCK),
        "iodepth": str(DEPTH),
        "size": str(SIZE),
        "overwrite": "1",
    }
    assert (flags["refill_buffers"], flags["scramble_buffers"], flags["allow_file_create"]) == ("0", "0", "0")
    assert "iomem" not in flags


def test_cpu_time_is_that_of_the_bytes_and_not_of_the_start(file: Path, fake: FakeFio) -> None:
    # 8 ms for the whole, of which 2 ms for the first four of 16 blocks: 6 ms for 12 blocks, 8 ms for 16.
    fake.says(
        body=f"""
        document = json.loads({json.dumps(document())!r})
        if "io_size" in flags:
            document["jobs"][0]["read"]["io_bytes"] = int(flags["io_size"])
        document["jobs"][0]["job_runtime"] = 4 if "io_size" in flags else 16
        print(json.dumps(document))
        """
    )
    fio = find_fio(str(fake.path))
    for _ in range(2):
        measured = run(fio, file)
        assert (measured.num_bytes, measured.seconds, dict(measured.direction_bytes)) == (SIZE, 0.008, {})
        assert measured.cpu_seconds == pytest.approx(0.008)
        assert measured.latency.p50_seconds == pytest.approx(0.002)
        assert measured.latency.p99_seconds == pytest.approx(0.005)
    assert [flags.get("io_size") for flags in fake.runs()] == [None, str(BLOCK * DEPTH), None]  # measured once
    assert run(fio, file, seconds=1.0).cpu_seconds == pytest.approx(0.008)  # without a start there is nothing to take
    assert len(fake.runs()) == 4


def failure(error: int, complaint: str) -> str:
    return f"print({complaint!r}); print(json.dumps({{'jobs': [{{'error': {error}}}]}})); sys.exit(1)"


NOT_LOADABLE = "print('fio: engine nosuch not loadable', file=sys.stderr); sys.exit(1)"
EPERM = failure(1, "fio: pid=1, err=1/file:engines/io_uring.c:998, func=io_queue_init, error=Operation not permitted")
EIO = failure(5, "fio: io_u error on file /x: Input/output error: read offset=0, buflen=4")


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        pytest.param(NOT_LOADABLE, FioEngineError, "built without the engine", id="no-engine"),
        pytest.param(EPERM, FioEngineError, "refuses this engine .EPERM.*kernel.io_uring_disabled", id="eperm"),
        pytest.param(EIO, FioError, "io_u error on file /x: Input/output error", id="eio"),
        pytest.param("print('{\"jobs\": [')", FioError, "failed: exit status 0", id="cut"),
        pytest.param('print(\'{"jobs": [{"error": 0}]}\')', FioError, "not as expected: KeyError", id="no-figures"),
        pytest.param("sys.exit(7)", FioError, "failed: exit status 7", id="status"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", FioError, "killed by SIGKILL", id="killed"),
        pytest.param(f"print({json.dumps(document(runtime=0))!r})", FioError, "too little to measure", id="no-time"),
        pytest.param(f"print({json.dumps(document(num_bytes=0))!r})", FioError, "not as expected", id="no-bytes"),
        pytest.param(f"print({json.dumps(document())!r}); sys.exit(2)", FioError, "exit status 2", id="late-status"),
    ],
)
def test_what_fails_is_said_in_fios_words(
    body: str, kind: type[FioError], words: str, file: Path, fake: FakeFio
) -> None:
    fake.says(body=body)
    with pytest.raises(kind, match=words) as caught:
        run(find_fio(str(fake.path)), file)
    assert caught.type is kind
    assert f"fio-3.33, ioengine=libaio, rw=read, {file}" in str(caught.value)


def test_a_file_that_fio_would_make_anew_is_refused(file: Path, fake: FakeFio) -> None:
    fio = find_fio(str(fake.path))
    with pytest.raises(ConfigError, match=f"at least {SIZE + 1} bytes"):
        run(fio, file, size_bytes=SIZE + 1)
    with pytest.raises(ConfigError, match="laid out before"):
        run(fio, file.parent / "nothing")
    assert fake.runs() == []


def test_huge_pages_are_counted_before_fio_is_asked(file: Path, tmp_path: Path, fake: FakeFio) -> None:
    meminfo = tmp_path / "meminfo"
    fake.says(body=f"print({json.dumps(document())!r})")
    fio = Fio(fake.path, "fio-3.33", meminfo=meminfo)

    def pages(total: int, free: int, reserved: int) -> str:
        names = {"HugePages_Total": total, "HugePages_Free": free, "HugePages_Rsvd": reserved}
        return "".join(f"{name}:  {number}\n" for name, number in names.items()) + "Hugepagesize:  2048 kB\n"

    meminfo.write_text(pages(5, 4, 1))  # 4 MiB of buffers and room to align them take 4
    with pytest.raises(FioHugePagesError, match=r"need 4 free huge pages of 2048 KiB, 3 are; .*vm\.nr_hugepages=6$"):
        run(fio, file, huge_pages=True)
    assert fake.runs() == []
    meminfo.write_text(pages(5, 4, 0))
    run(fio, file, huge_pages=True, seconds=1.0)
    [flags] = fake.runs()
    assert (flags["iomem"], flags["hugepage-size"]) == ("mmaphuge", str(2 * MIB))
    fake.says(body="print(json.dumps({'jobs': [{'error': 12}]})); sys.exit(1)")
    with pytest.raises(FioHugePagesError, match="taken by others"):
        run(fio, file, huge_pages=True)
    meminfo.write_text("MemTotal:  1 kB\n")
    with pytest.raises(FioHugePagesError, match="no huge pages to reserve"):
        run(fio, file, huge_pages=True)


async def test_a_cancelled_run_ends_at_once_and_leaves_no_process(file: Path, fake: FakeFio) -> None:
    fake.says(body="time.sleep(100)")
    fio = find_fio(str(fake.path))
    task = asyncio.create_task(call_in_thread(lambda: run(fio, file), on_cancel=fio.kill))
    await call_in_thread(lambda: wait_until(lambda: bool(fake.runs())))
    began = time.perf_counter()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.perf_counter() - began < 10
    assert not is_running(fake.runs()[0]["pid"])
    with pytest.raises(FioStoppedError):
        run(fio, file)
    assert len(fake.runs()) == 1


def test_fio_dies_with_its_parent(file: Path, fake: FakeFio) -> None:
    fake.says(body="time.sleep(100)")
    script = f"""
        from pathlib import Path
        from infinity.bench.fio import find_fio
        find_fio({str(fake.path)!r}).run(
            Path({str(file)!r}), "nvme->host", block_bytes=4096, queue_depth=1, engine="libaio", huge_pages=False,
            size_bytes=4096,
        )
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)]) as parent:
        wait_until(lambda: bool(fake.runs()))
        pid = fake.runs()[0]["pid"]
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_running(pid))


@needs_fio
@pytest.mark.parametrize(
    ("route", "names"), [("nvme->host", set()), ("host->nvme", set()), ("nvme<->host", {"read", "write"})]
)
def test_real_fio_moves_the_file(route: str, names: set[str], file: Path) -> None:
    before = file.read_bytes()
    measured = run(find_fio(), file, route)
    assert measured.num_bytes == SIZE
    assert measured.direction_bytes.keys() == names
    assert not names or sum(measured.direction_bytes.values()) == SIZE
    assert measured.seconds > 0
    assert measured.cpu_seconds >= 0
    assert 0 < measured.latency.p50_seconds <= measured.latency.p99_seconds < 60
    assert file.stat().st_size == SIZE
    assert (file.read_bytes() == before) == (route == "nvme->host")
    assert [path.name for path in file.parent.iterdir()] == ["data"]


@needs_fio
def test_real_fio_runs_for_a_time(file: Path) -> None:
    measured = run(find_fio(), file, seconds=0.3)
    assert 0.25 < measured.seconds < 30
    assert measured.num_bytes > 0


@needs_fio
def test_real_fio_says_what_it_cannot_do(file: Path, tmp_path: Path) -> None:
    fio = find_fio()
    with pytest.raises(FioEngineError, match="built without the engine"):
        run(fio, file, engine="no-such-engine")
    with pytest.raises(FioError, match="Invalid argument"):
        run(fio, file, block_bytes=1000)
    colon = file.rename(tmp_path / "a:b,c d")
    assert run(fio, colon).num_bytes == SIZE


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Beside ours, in a run of the benchmark.


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    directory = tmp_path / "nvme"
    directory.mkdir()
    return Harness(directory)


class Recorder:
    """fio's place: overwrites the file as fio does."""

    version = "fio-9"

    def __init__(self) -> None:
        self.runs: list[tuple[str, int, int, str, bool]] = []

    def run(
        self,
        file: Path,
        route: str,
        *,
        block_bytes: int,
        queue_depth: int,
        engine: str,
        huge_pages: bool,
        size_bytes: int,
        seconds: float | None = None,
    ) -> FioRun:
        if huge_pages:
            raise FioHugePagesError("no huge pages")
        self.runs.append((route, block_bytes, queue_depth, engine, huge_pages))
        assert size_bytes % block_bytes == 0
        assert file.stat().st_size >= size_bytes
        if route != "nvme->host":
            with file.open("r+b") as opened:
                opened.write(b"fio" * (size_bytes // 3))
        return FioRun(size_bytes, 1e-6, 0.1, {}, latency=Latency(0.001, 0.002))

    def kill(self) -> None: ...


def test_fio_runs_beside_ours_and_is_never_the_best(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    fio = Recorder()
    monkeypatch.setattr("infinity.bench.run.find_fio", lambda: fio)
    report = harness.run(fio=True)  # and what the timed passes wrote is right: fio's bytes were replaced
    expected = [
        (route, block, depth, engine, False)
        for route in ROUTE_MODES
        for block, depth in ((64 * KIB, 4), (256 * KIB, 2))
        for engine in ("io_uring", "libaio")
    ]
    assert fio.runs == expected * 2
    references = [result for result in report.results if result.reference]
    assert {result.backend for result in references} == {"fio io_uring", "fio libaio"}
    assert {len(result.runs) for result in references} == {2}
    assert not any(result.reference for result in report.best().values())
    assert [warning for warning in report.warnings if "no huge pages" in warning] == ["left out: no huge pages"]


def test_fio_runs_in_settings_that_are_measured_in_the_same_rounds(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    fio = Recorder()
    monkeypatch.setattr("infinity.bench.run.find_fio", lambda: fio)
    report = harness.run(fio=True, points=(), size=2 * MIB, quick=True, repeats=1)
    for route in ROUTE_MODES:
        ours = {(r.block_bytes, r.queue_depth) for r in report.results if r.route == route and r.reference is False}
        looks = {(r.block_bytes, r.queue_depth) for r in report.results if r.route == route and r.in_passing}
        assert {(block, depth) for name, block, depth, *_ in fio.runs if name == route} <= ours - looks
