from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from rich.console import Console

from fakes_io import HookedSyscalls, Operation, supports_direct
from infinity.__main__ import command_names, main
from infinity.bench.cautions import machine_cautions, path_cautions
from infinity.bench.machine import PathFacts, available_memory_bytes, parse_mounts, path_facts
from infinity.bench.passes import InterruptedRunError, Lane, Limit, Sample, run_pass
from infinity.bench.pattern import MismatchError, Pattern
from infinity.bench.report import Report, Result
from infinity.bench.routes import BOTH, LOAD, READ, ROUTES
from infinity.bench.run import run
from infinity.bench.settings import BenchSettings, Point
from infinity.bench.sizing import plan_sizes
from infinity.bench.tiers import Ring
from infinity.config import BackendName
from infinity.console.interrupt import StopRequest
from infinity.errors import BudgetError, ConfigError, DirectoryError, DirectoryInUseError, DiskFullError, StorageError
from infinity.io.backend import Backend
from infinity.io.memory import allocate
from infinity.io.open import Choice
from infinity.io.syscalls import Syscalls
from infinity.io.threads import ThreadBackend
from infinity.store.directory import JobDirectory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POINTS = "64KiBx4,256KiBx2"
ROUTE_NAMES = ["nvme->host", "host->nvme", "nvme<->host", "host->device", "device->host", "nvme->device"]


class Harness:
    """Runs in a directory, and keeps what was printed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.printed = io.StringIO()
        self.stop = StopRequest()

    def run(self, syscalls: Syscalls | None = None, *, terminal: bool = False, **flags: Any) -> Report:
        """Measure a megabyte; ``syscalls``: what the I/O backend calls, in place of the real ones."""
        defaults: dict[str, Any] = {
            "nvme": [self.directory],
            "size": MIB,
            "repeats": 2,
            "time": 60,
            "points": tuple(POINTS.split(",")),
            "device": "cpu",
        }
        settings = BenchSettings(**defaults | flags)
        console = Console(file=self.printed, width=100, force_terminal=terminal)
        with self.stop:
            if syscalls is None:
                return run(settings, console, self.stop)
            return run(settings, console, self.stop, open_backend=opener(syscalls))


def opener(syscalls: Syscalls) -> Any:
    async def open_backend(
        name: BackendName, directory: Path, *, num_threads: int, block_bytes: int
    ) -> tuple[Backend, Choice]:
        direct = supports_direct(directory)
        return ThreadBackend(num_threads, block_bytes, direct, syscalls), Choice("threads", direct, ("by the test",))

    return open_backend


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
    harness.run(json=file)
    document = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert document["schema"] == 1
    machine = document["machine"]
    assert machine.keys() == {"cpu", "cores", "ram", "kernel", "python", "torch", "device", "paths"}
    assert (machine["cores"], machine["torch"]) == (os.cpu_count(), torch.__version__)
    assert "host memory" in machine["device"]
    [path] = machine["paths"]
    assert path.keys() >= {"path", "device", "filesystem", "options", "rotational", "model"}
    assert path["path"] == str(harness.directory)
    assert path["backend"] == "threads"
    assert "chosen" in path["reasons"][-1]
    results = document["results"]
    assert [(r["route"], r["block_size"]) for r in results] == [
        (route, block) for route in ROUTE_NAMES for block in (64 * KIB, 256 * KIB)
    ]
    for result in results:
        assert result.keys() >= {"backend", "queue_depth", "size", "gb_s", "cpu_s_per_gb", "latency_ms", "verified"}
        assert result["queue_depth"] == (4 if result["block_size"] == 64 * KIB else 2)
        assert (result["size"], result["repeats"], result["verified"]) == (MIB, 2, True)
        assert 0 < result["gb_s"]["min"] <= result["gb_s"]["median"] <= result["gb_s"]["max"]
        assert result["cpu_s_per_gb"] > 0
        assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["p99"]
    assert list(document["best"]) == ROUTE_NAMES
    for route, best in document["best"].items():
        assert best in results
        assert best["gb_s"]["median"] == max(r["gb_s"]["median"] for r in results if r["route"] == route)


def test_everything_is_removed_at_the_end(harness: Harness, tmp_path: Path) -> None:
    seen: list[int] = []
    syscalls = HookedSyscalls(lambda _: seen.append(new.stat().st_mode & 0o777))
    new = tmp_path / "new"
    harness.run(syscalls, nvme=[new, harness.directory])
    assert set(seen) == {0o700}
    assert f"created {new}" in harness.printed.getvalue()
    assert list(harness.directory.iterdir()) == []
    assert list(tmp_path.iterdir()) == [harness.directory]


def test_several_directories_are_striped(harness: Harness, tmp_path: Path) -> None:
    paths: set[str] = set()

    class Watching(Syscalls):
        def write_from(self, descriptor: int, view: memoryview, offset: int) -> int:
            paths.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            assert offset + len(view) <= MIB // 2
            return super().write_from(descriptor, view, offset)

    other = tmp_path / "other"
    report = harness.run(Watching(), nvme=[harness.directory, other])
    assert len(paths) == 2
    assert {result.size_bytes for result in report.results} == {MIB}
    assert any("are on one device" in warning for warning in report.warnings)


def test_the_table_is_plain_ascii_where_there_is_no_terminal(harness: Harness) -> None:
    harness.run()
    printed = harness.printed.getvalue()
    table = printed[printed.index("infinity bench") :]
    assert table.isascii()
    assert "##########" in table
    assert "\x1b" not in printed
    for route in ROUTE_NAMES:
        assert route in table
    assert "checking what the timed passes wrote" in printed


def test_a_terminal_gets_a_line_that_lives(harness: Harness) -> None:
    harness.run(terminal=True)
    assert "\x1b[" in harness.printed.getvalue()
    assert "█" in harness.printed.getvalue()


def test_the_command_writes_only_json_to_standard_output(harness: Harness, capfd: pytest.CaptureFixture[str]) -> None:
    assert "bench" in command_names()
    arguments = ["bench", "--nvme", str(harness.directory), "--size", "1MiB", "--points", POINTS, "--repeats", "1"]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--json", "-"])
    assert exit_.value.code == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["schema"] == 1
    assert "infinity bench" in err


def test_without_a_size_what_is_slow_to_write_is_left_out(harness: Harness) -> None:
    report = harness.run(size=None, quick=True, time=1e-6, points=("64KiBx4", "1MiBx3"), repeats=3)
    assert {result.size_bytes for result in report.results} == {3 * MIB}
    assert {len(result.samples) for result in report.results} == {1}
    assert "only 1 of 3 repeats fitted into the time: a larger --time gives steadier figures" in report.warnings
    assert "more would take too long to write here" in harness.printed.getvalue()
    for result in report.results:
        assert [sum(sample.lane_requests) for sample in result.samples] == [result.depth]


# Whether the bytes are right.


class Flipping(Syscalls):
    """Turns one bit of one byte of a file whenever it is read, once told to."""

    def __init__(self, position: int, num_syncs: int = 0) -> None:
        self.position = position
        self.num_syncs = num_syncs

    def read_into(self, descriptor: int, view: memoryview, offset: int) -> int:
        num_bytes = super().read_into(descriptor, view, offset)
        if self.num_syncs <= 0 and offset <= self.position < offset + num_bytes:
            view[self.position - offset] ^= 0x10
        return num_bytes

    def sync_data(self, descriptor: int) -> None:
        super().sync_data(descriptor)
        self.num_syncs -= 1


class Losing(Syscalls):
    """Claims that the writes of one block are done, and does only the first."""

    def __init__(self) -> None:
        self.num_writes = 0

    def write_from(self, descriptor: int, view: memoryview, offset: int) -> int:
        if offset == 192 * KIB:
            self.num_writes += 1
            if self.num_writes > 1:
                return len(view)
        return super().write_from(descriptor, view, offset)


class Straying(Syscalls):
    """Writes to the wrong place once the contents have been checked."""

    def __init__(self, num_syncs: int) -> None:
        self.num_syncs = num_syncs

    def write_from(self, descriptor: int, view: memoryview, offset: int) -> int:
        return super().write_from(descriptor, view, 0 if self.num_syncs <= 0 else offset)

    def sync_data(self, descriptor: int) -> None:
        super().sync_data(descriptor)
        self.num_syncs -= 1


def test_a_flipped_bit_is_found_and_named(harness: Harness) -> None:
    position = 700_001
    with pytest.raises(MismatchError, match=r"wrong bytes came back from the file: the first is 0x") as caught:
        harness.run(Flipping(position))
    assert caught.value.offset == position
    assert caught.value.path.parent.parent == harness.directory
    assert "1 of the" in str(caught.value)
    assert list(harness.directory.iterdir()) == []


def test_a_lost_write_is_found(harness: Harness) -> None:
    with pytest.raises(MismatchError) as caught:
        harness.run(Losing())
    assert caught.value.offset == 192 * KIB


NUM_SYNCS_BEFORE_TIMING = 1 + len(POINTS.split(","))  # after the first write, and after each point's own


@pytest.mark.parametrize("syscalls", [Straying(NUM_SYNCS_BEFORE_TIMING), Flipping(5, NUM_SYNCS_BEFORE_TIMING + 1)])
def test_what_goes_wrong_in_the_timed_passes_is_found(harness: Harness, syscalls: Syscalls) -> None:
    with pytest.raises(MismatchError, match="the file"):
        harness.run(syscalls)
    assert "checking what the timed passes wrote" in harness.printed.getvalue()


def test_a_copy_to_the_device_that_fails_is_found(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: object, source: torch.Tensor, target: torch.Tensor) -> None: ...

    monkeypatch.setattr("infinity.store.host.HostTier.copy", nothing)
    with pytest.raises(MismatchError, match="from device memory, copied there from host memory"):
        harness.run()


def test_a_mismatch_ends_the_command_with_1(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("infinity.bench.run.run.__kwdefaults__", {"open_backend": opener(Flipping(5))})
    file = tmp_path / "figures.json"
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--nvme", str(harness.directory), "--size", "1MiB", "--points", POINTS, "--json", str(file)])
    assert exit_.value.code == 1
    err = capfd.readouterr().err
    assert f"{harness.directory}/infinity-rank0/shards.bin, offset 5" in err
    assert "Traceback" not in err
    assert not file.exists()


@examples(deadline=None, max_examples=50)
@given(st.integers(0, 1), st.integers(0, 40_000), st.integers(1, 255), st.integers(0, 1 << 40))
def test_a_pattern_sees_any_change(file: int, position: int, flip: int, page: int) -> None:
    pattern, offset = Pattern(3), page * 4096
    data = np.empty(40_008, np.uint8)
    pattern.fill(data, file, offset)
    pattern.check(data, file, offset, path=Path("f"), source="x")
    data[position] ^= flip
    with pytest.raises(MismatchError) as caught:
        pattern.check(data, file, offset, path=Path("f"), source="x")
    assert caught.value.offset == offset + position


def test_a_pattern_differs_everywhere_between_places_files_and_generations() -> None:
    def words(generation: int, file: int, offset: int, num_bytes: int = MIB) -> Any:
        data = np.empty(num_bytes, np.uint8)
        Pattern(generation).fill(data, file, offset)
        return data.view(np.uint64)

    first = words(0, 0, 0, 4 * MIB)
    assert len(np.unique(first)) == len(first)
    assert (first[: MIB // 8] != words(1, 0, 0)).all()
    assert (first[: MIB // 8] != words(0, 1, 0)).all()
    assert (first[MIB // 8 : MIB // 4] == words(0, 0, MIB)).all()


# What can go wrong.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--nvme: expected a directory"),
        (["--nvme", "{}/typo/x"], "--nvme: directory {}/typo does not exist; create it first"),
        (["--nvme", "{}/file"], "the NVMe path is not a directory; give a directory"),
        (["--nvme", "{}/nvme,{}/nvme/."], "NVMe paths {}/nvme and {}/nvme are"),
        (["--nvme", "{}/nvme", "--size", "100TiB"], "short by"),
        (["--nvme", "{}/nvme", "--size", "4KiB"], "--size: expected at least one round of the largest of --points"),
        (["--nvme", "{}/nvme", "--size", "much"], "--size: "),
        (["--nvme", "{}/nvme", "--points", "4MiB"], "--points: expected a size and a number in flight"),
        (["--nvme", "{}/nvme", "--points", "1000x4"], "--points: expected a size from 4KiB"),
        (["--nvme", "{}/nvme", "--points", "4KiBx0"], "--points: expected from 1 to 64 requests"),
        (["--nvme", "{}/nvme", "--time", "0"], "--time: "),
        (["--nvme", "{}/nvme", "--device", "abacus"], "device: torch does not know 'abacus'"),
        (["--nvme", "{}/nvme", "--json", "{}/typo/x.json"], "--json: directory"),
    ],
)
def test_errors_are_one_clear_line(
    harness: Harness, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    parent = harness.directory.parent
    (parent / "file").touch()
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *(argument.replace("{}", str(parent)) for argument in arguments)])
    assert exit_.value.code == 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert message.replace("{}", str(parent)) in line
    assert list(harness.directory.iterdir()) == []


def test_a_directory_in_use_is_refused_and_left_alone(harness: Harness) -> None:
    job = JobDirectory.open(harness.directory)
    try:
        with pytest.raises(DirectoryInUseError, match=f"in use by process {os.getpid()}"):
            harness.run()
        assert (job.path / "lock").exists()
    finally:
        job.close()


def test_a_stranger_in_our_place_is_refused_and_left_alone(harness: Harness) -> None:
    stranger = harness.directory / "infinity-rank0"
    stranger.mkdir()
    (stranger / "precious").touch()
    with pytest.raises(DirectoryError):
        harness.run()
    assert (stranger / "precious").exists()


@pytest.mark.parametrize("action", ["reserve", "write"])
def test_a_disk_that_fills_up_meanwhile_is_an_error(harness: Harness, action: str) -> None:
    def full(operation: Operation) -> int | None:
        if operation.action == action:
            raise OSError(errno.ENOSPC, "No space left on device")
        return None

    with pytest.raises(DiskFullError, match="the file system is full"):
        harness.run(HookedSyscalls(full))
    assert list(harness.directory.iterdir()) == []


def test_a_device_that_fails_is_an_error(harness: Harness) -> None:
    def fail(operation: Operation) -> int | None:
        if operation.action == "read" and operation.offset >= 512 * KIB:
            raise OSError(errno.EIO, "Input/output error")
        return None

    with pytest.raises(StorageError, match="EIO"):
        harness.run(HookedSyscalls(fail))
    assert list(harness.directory.iterdir()) == []


@pytest.mark.parametrize(
    ("stage", "signals"),
    [("writing", [signal.SIGINT]), ("measuring", [signal.SIGTERM]), ("measuring", [signal.SIGINT] * 3)],
)
def test_a_signal_ends_the_command_and_leaves_nothing(
    tmp_path: Path, stage: str, signals: list[signal.Signals]
) -> None:
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "figures.json"
    old.mkdir()
    command = [sys.executable, "-m", "infinity.bench", "--nvme", f"{old},{new}", "--size", "16MiB", "--json", str(file)]
    endless = ["--points", "1MiBx4", "--time", "100000", "--repeats", "100000"]
    with subprocess.Popen(
        [*command, *endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(stage):
                break
        for number in signals:
            process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signals[0], err
    assert "interrupted; nothing was left behind" in out
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [old]
    assert list(old.iterdir()) == []


def environment() -> dict[str, str]:
    root = str(Path(__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


# How much is measured with.


class Disk:
    """What sizing asks of a job directory."""

    def __init__(self, device: int, free_bytes: int) -> None:
        self.path = Path(f"/disk{device}")
        self.device = device
        self.free_bytes = lambda: free_bytes


def sizes(*disks: Disk, available_bytes: int = 64 * GIB, **flags: Any) -> tuple[int, int]:
    settings = BenchSettings(nvme=["unused"], **flags)
    planned = plan_sizes(settings, cast("list[JobDirectory]", disks), available_bytes)
    assert planned.memory_bytes <= available_bytes
    return planned.share_bytes, planned.ring_bytes


def test_sizes_fit_what_is_free() -> None:
    disk = Disk(1, 100 * GIB)
    assert sizes(disk) == (GIB, 256 * MIB)
    assert sizes(disk, quick=True) == (256 * MIB, 256 * MIB)
    assert sizes(disk, disk) == (512 * MIB, 256 * MIB)
    assert sizes(disk, size="5GiB") == (5 * GIB, 256 * MIB)
    assert sizes(disk, available_bytes=GIB) == (256 * MIB, 256 * MIB)
    assert sizes(Disk(1, 416 * MIB)) == (100 * MIB, 100 * MIB)
    assert sizes(disk, Disk(2, 416 * MIB)) == (100 * MIB, 200 * MIB)
    assert sizes(Disk(1, 816 * MIB), Disk(1, 816 * MIB)) == (100 * MIB, 200 * MIB)
    assert sizes(Disk(1, 80 * MIB)) == (64 * MIB, 64 * MIB)


def test_what_cannot_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(DiskFullError, match=r"needs 67.1 MB in each directory; .* has 66.1 MB for each: short by 1"):
        sizes(Disk(1, 79 * MIB))
    with pytest.raises(DiskFullError, match="short by"):
        sizes(Disk(1, 100 * MIB), Disk(1, 100 * MIB), size="200MiB")
    with pytest.raises(BudgetError, match=r"in all 1.6 GB, but .* are free: short by 537 MB"):
        sizes(Disk(1, 100 * GIB), available_bytes=GIB, size="1GiB")
    with pytest.raises(BudgetError):
        sizes(Disk(1, 100 * GIB), available_bytes=191 * MIB)
    with pytest.raises(ConfigError, match="--size"):
        sizes(Disk(1, 100 * GIB), size="63MiB")


# What a pass is.


def lane(depth: int, log: list[str], name: str = "x", fail_at: int | None = None) -> Lane:
    async def move() -> int:
        log.append(name)
        number = len(log)
        await asyncio.sleep(0)
        if number == fail_at:
            raise StorageError("no", path="f")
        return 10

    return Lane(depth, move)


async def test_a_pass_moves_one_round_however_short_its_time() -> None:
    log: list[str] = []
    sample = await run_pass([lane(3, log)], Limit(100, seconds=0.0), StopRequest())
    assert (len(log), sample.num_bytes, len(sample.latencies_seconds)) == (3, 30, 3)
    sample = await run_pass([lane(3, log)], Limit(100, 0.0, min_requests=7), StopRequest())
    assert sample.lane_requests == [7]
    sample = await run_pass([lane(3, log)], Limit(2), StopRequest())
    assert sample.lane_requests == [2]


async def test_a_lane_that_is_through_ends_the_pass() -> None:
    log: list[str] = []
    sample = await run_pass([lane(1, log, "slow"), lane(4, log, "fast")], Limit(20), StopRequest())
    slow, fast = sample.lane_requests
    assert fast == 20
    assert 4 <= slow <= 6
    assert sample.lane_bytes == [10 * slow, 200]


async def test_an_error_ends_the_pass_and_finish_is_not_called() -> None:
    log: list[str] = []

    async def finish() -> None:
        log.append("finish")

    with pytest.raises(StorageError):
        await run_pass([lane(2, log, fail_at=5)], Limit(1000), StopRequest(), finish)
    assert "finish" not in log
    assert len(log) <= 6
    sample = await run_pass([lane(2, log)], Limit(2), StopRequest(), finish)
    assert log[-1] == "finish"
    assert sample.seconds > 0


async def test_a_signal_ends_a_pass_after_the_requests_in_flight() -> None:
    stop, ended = StopRequest(), []

    async def move() -> int:
        stop.signal = signal.SIGINT
        await asyncio.sleep(0)
        ended.append(True)
        return 1

    with pytest.raises(InterruptedRunError):
        await run_pass([Lane(1, move)], Limit(100), stop)
    assert ended == [True]


def test_a_ring_uses_its_places_in_turn() -> None:
    ring = Ring(allocate(4096 * 4), 4096)
    with ring.place(4096) as first:
        addresses = [first.data_ptr()]
        for _ in range(3):
            with ring.place(100) as place:
                addresses.append(place.data_ptr())
                assert place.numel() == 100
    assert len(set(addresses)) == 4


def test_the_figures_of_a_result() -> None:
    def sample(num_bytes: int, latencies: list[float]) -> Sample:
        return Sample([num_bytes, num_bytes], [1, 1], seconds=2.0, cpu_seconds=0.5, latencies_seconds=latencies)

    samples = [sample(10**9, [0.001] * 49), sample(3 * 10**9, [0.001, 0.1]), sample(2 * 10**9, [0.001] * 49)]
    figures = Result(BOTH, "threads", Point(4 * MIB, 8), 8, GIB, samples, verified=True).as_document()
    assert figures["gb_s"] == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert figures["gb_s_each"] == {"read": 1.0, "write": 1.0}
    assert figures["cpu_s_per_gb"] == pytest.approx(1.5 / 12)
    assert figures["latency_ms"] == {"p50": 1.0, "p99": 1.0}
    assert "gb_s_each" not in Result(READ, "threads", Point(4 * MIB, 8), 8, GIB, samples, verified=True).as_document()


# What machine it is.

MOUNTS = r"""
21 1 259:2 / / rw,relatime - ext4 /dev/nvme0n1p2 rw,discard
22 21 0:5 / /dev rw - devtmpfs devtmpfs rw
23 21 0:40 / /mnt/a\040b ro,noatime shared:1 master:2 - tmpfs none rw,size=1k
24 21 253:0 / /mnt/raid rw - xfs /dev/mapper/raid rw
25 21 0:41 / /mnt/nfs rw - nfs4 host:/share rw,vers=4.2
26 21 8:1 / /mnt/nfs rw - ext4 /dev/sda1 rw
no line of mounts
"""


@pytest.fixture
def system(tmp_path: Path) -> Callable[[Path], PathFacts]:
    """A made-up /proc and /sys."""
    devices = tmp_path / "devices"
    for name, rotational, model in [("nvme0n1", 0, "Fast One"), ("nvme1n1", 0, "Fast Two"), ("sda", 1, "Slow")]:
        (devices / name / "queue").mkdir(parents=True)
        (devices / name / "device").mkdir()
        (devices / name / "queue/rotational").write_text(f"{rotational}\n")
        (devices / name / "device/model").write_text(f"{model}   \n")
        (devices / name / f"{name}p1").mkdir()
        (devices / name / f"{name}p1/partition").write_text("1\n")
    (devices / "dm-0/slaves").mkdir(parents=True)
    (devices / "dm-0/queue").mkdir()
    (devices / "dm-0/queue/rotational").write_text("0\n")
    (devices / "dm-0/slaves/nvme0n1").symlink_to(devices / "nvme0n1")
    (devices / "dm-0/slaves/nvme1n1p1").symlink_to(devices / "nvme1n1/nvme1n1p1")
    numbers = tmp_path / "block"
    numbers.mkdir()
    for number, target in {"259:2": "nvme0n1/nvme0n1p1", "253:0": "dm-0", "8:1": "sda/sdap1"}.items():
        (numbers / number).symlink_to(devices / target)
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(MOUNTS)
    return lambda path: path_facts(path, mountinfo=mountinfo, block_devices=numbers)


def test_the_device_under_a_path_is_found(system: Callable[[Path], PathFacts]) -> None:
    assert system(Path("/mnt/x")) == PathFacts(
        "/mnt/x", "/dev/nvme0n1", "ext4", "rw,relatime,discard", rotational=False, model="Fast One", nvme=True
    )
    assert system(Path("/mnt/a b/c")) == PathFacts("/mnt/a b/c", "none", "tmpfs", "ro,noatime,rw,size=1k")
    raid = system(Path("/mnt/raid/x"))
    assert (raid.device, raid.model, raid.nvme) == ("/dev/dm-0", "Fast One, Fast Two", True)
    hidden = system(Path("/mnt/nfs"))
    assert (hidden.device, hidden.filesystem, hidden.rotational, hidden.nvme) == ("/dev/sda", "ext4", True, False)


def test_a_system_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert path_facts(tmp_path, mountinfo=missing, block_devices=missing) == PathFacts(str(tmp_path))
    assert list(parse_mounts("")) == []
    assert available_memory_bytes(own_cgroup=missing, cgroups=missing) > 0


def test_the_memory_of_a_container_is_its_cgroups(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/job\n0::/job\n")
    for group, files in {
        "job": {"memory.max": "1000000", "memory.current": "700000", "memory.stat": "anon 1\ninactive_file 200000\n"},
        "memory/job": {"memory.limit_in_bytes": "900000", "memory.usage_in_bytes": "100000"},
        ".": {"memory.max": "max", "memory.current": "5"},
    }.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / group / name).write_text(text)
    assert available_memory_bytes(own_cgroup=own, cgroups=tmp_path) == 500_000
    (tmp_path / "job/memory.max").write_text("10")
    assert available_memory_bytes(own_cgroup=own, cgroups=tmp_path) == 0


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (PathFacts("/p", "none", "tmpfs"), "is memory, not a disk"),
        (PathFacts("/p", "/dev/zram0", "ext4", rotational=False, nvme=False), "is memory, not a disk"),
        (PathFacts("/p", "overlay", "overlay"), "container's layered"),
        (PathFacts("/p", "host:/share", "nfs4"), "network or shared"),
        (PathFacts("/p", "bucket", "fuse.s3fs"), "network or shared"),
        (PathFacts("/p", "/dev/vda", "ext4", rotational=True, nvme=False), "virtual disk"),
        (PathFacts("/p", "/dev/sda", "ext4", rotational=True, nvme=False), "rotating"),
        (PathFacts("/p", "/dev/sdb", "ext4", rotational=False, nvme=False), "not NVMe"),
        (PathFacts("/p", "pool/set", "zfs"), "does not say what device"),
        (PathFacts("/p"), "does not say which file system"),
    ],
)
def test_what_is_not_nvme_is_said(facts: PathFacts, words: str) -> None:
    [caution] = path_cautions([facts])
    assert caution.startswith("/p: ")
    assert words in caution


def test_a_machine_as_it_should_be_gets_no_warning() -> None:
    nvme = [PathFacts(f"/p{i}", f"/dev/nvme{i}n1", "xfs", rotational=False, nvme=True) for i in range(2)]
    assert list(path_cautions(nvme)) == []
    assert list(machine_cautions(0.9, 2, 8 * GIB)) == []
    assert ["busy" in caution for caution in machine_cautions(1.1, 2, 8 * GIB)] == [True]
    assert ["little host memory" in caution for caution in machine_cautions(0.0, 2, GIB)] == [True]


def test_memory_that_looks_like_a_disk_is_warned_of(memory_directory: Path) -> None:
    report = Harness(memory_directory).run()
    assert any("tmpfs is memory, not a disk" in warning for warning in report.warnings)
    if not report.choices[0].direct:
        assert any("the page cache is in the way, and some of it cannot be dropped" in w for w in report.warnings)
    assert list(memory_directory.iterdir()) == []


def test_a_page_cache_in_the_way_is_dropped_and_said(harness: Harness) -> None:
    dropped: list[tuple[int, int]] = []

    async def buffered(
        name: BackendName, directory: Path, *, num_threads: int, block_bytes: int
    ) -> tuple[Backend, Choice]:
        return ThreadBackend(num_threads, block_bytes, False), Choice("threads", False, ("by the test",))

    fadvise = os.posix_fadvise

    def watched(descriptor: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append((offset, length))
        fadvise(descriptor, offset, length, advice)

    settings = BenchSettings(nvme=[harness.directory], size=MIB, repeats=1, points=("64KiBx2",), device="cpu")
    with pytest.MonkeyPatch.context() as patch, harness.stop:
        patch.setattr(os, "posix_fadvise", watched)
        report = run(settings, Console(file=harness.printed), harness.stop, open_backend=buffered)
    num_reading = sum(route.reads for route in ROUTES)
    assert dropped == [(0, 0)] * (1 + 2 + 2 * num_reading)  # once to see what it does, at two checks, in two rounds
    assert any("no direct I/O here, the page cache is in the way" in warning for warning in report.warnings)


@pytest.mark.gpu
def test_an_accelerator_is_measured(harness: Harness) -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        pytest.skip("no accelerator")
    report = harness.run(device="auto")
    assert report.device.startswith(accelerator.type)
    assert all(result.verified for result in report.results if result.route is LOAD)
