"""Runs of the benchmark that go wrong: wrong bytes, errors of use and of devices, signals; and what is left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes_bench import KIB, MIB, POINTS, Harness, environment, opener
from fakes_io import HookedSyscalls, Operation
from infinity.__main__ import main
from infinity.config import BackendName
from infinity.errors import DirectoryError, DirectoryInUseError, DiskFullError, MismatchError, StorageError
from infinity.io.backend import Backend
from infinity.io.open import Choice
from infinity.io.syscalls import Syscalls
from infinity.store.directory import JobDirectory


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    directory = tmp_path / "nvme"
    directory.mkdir()
    return Harness(directory)


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


@pytest.mark.parametrize("points", [(POINTS), ""])
def test_a_flipped_bit_is_found_and_named(harness: Harness, points: str) -> None:
    position = 700_001
    with pytest.raises(MismatchError, match=r"wrong bytes came back from the file: the first is 0x") as caught:
        harness.run(Flipping(position), size=2 * MIB, points=tuple(points.split(",")) if points else ())
    assert caught.value.offset == position
    assert caught.value.path.parent.parent == harness.directory
    assert "1 of the" in str(caught.value)
    assert list(harness.directory.iterdir()) == []


def test_a_lost_write_is_found(harness: Harness) -> None:
    with pytest.raises(MismatchError) as caught:
        harness.run(Losing())
    assert caught.value.offset == 192 * KIB


def test_a_setting_of_the_sweep_that_moves_wrong_bytes_is_found(harness: Harness) -> None:
    async def one_is_bad(
        name: BackendName, directory: Path, *, num_threads: int, block_bytes: int
    ) -> tuple[Backend, Choice]:
        syscalls = Flipping(5) if block_bytes == MIB else Syscalls()
        return await opener(syscalls)(name, directory, num_threads=num_threads, block_bytes=block_bytes)

    with pytest.raises(MismatchError):
        harness.run(open_backend=one_is_bad, points=(), size=2 * MIB, time=100)


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
    monkeypatch.setattr("infinity.bench.run.run.__kwdefaults__", {"open_backend": opener(Flipping(5)), "began": None})
    file = tmp_path / "figures.json"
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--nvme", str(harness.directory), "--size", "1MiB", "--points", POINTS, "--json", str(file)])
    assert exit_.value.code == 1
    err = capfd.readouterr().err
    assert f"{harness.directory}/infinity-rank0/shards.bin, offset 5" in err
    assert "Traceback" not in err
    assert not file.exists()


# What can go wrong.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--nvme: expected a directory"),
        (["--nvme", "{}/typo/x"], "--nvme: directory {}/typo does not exist; create it first"),
        (["--nvme", "{}/file"], "the NVMe path is not a directory; give a directory"),
        (["--nvme", "{}/nvme,{}/nvme/."], "NVMe paths {}/nvme and {}/nvme are"),
        (["--nvme", "{}/nvme", "--size", "100TiB"], "short by"),
        (["--nvme", "{}/nvme", "--size", "4KiB"], "--size: expected at least"),
        (["--nvme", "{}/nvme", "--size", "much"], "--size: expected a size such as 512MiB or 2GB, got 'much'"),
        (["--nvme", "{}/nvme", "--size", "1e9"], "--size: expected a size such as 512MiB or 2GB, got '1e9'"),
        (["--nvme", "{}/" + "x" * 300], "ENAMETOOLONG"),
        (["--nvme", "{}/nvme", "--json", "{}/" + "x" * 300], "--json: {}/xxx"),
        (["--nvme", "{}/typo/x", "--nvme", "{}/nvme"], "--nvme: directory {}/typo does not exist"),
        (["--nvme", "{}/nvme", "--points", "4MiB"], "--points: expected a size and a number in flight"),
        (["--nvme", "{}/nvme", "--points", "1000x4"], "--points: expected a size from 4KiB"),
        (["--nvme", "{}/nvme", "--points", "4KiBx0"], "--points: expected from 1 to 64"),
        (["--nvme", "{}/nvme", "--points", "32MiBx4"], "--points: expected at most 64MiB in flight"),
        (["--nvme", "{}/nvme", "--points", "4MiBx2,4MiBx2"], "--points: expected different ones"),
        (["--nvme", "{}/nvme", "--time", "0"], "--time: "),
        (["--nvme", "{}/nvme", "--device", "abacus"], "device: torch does not know 'abacus'"),
        (["--nvme", "{}/nvme", "--json", "{}/typo/x.json"], "--json: directory"),
        (["--nvme", "{}/nvme", "--config", "{}/typo/x.json"], "--config: directory"),
        (["--nvme", "{}/nvme", "--config", "-"], "--config: expected a file"),
        (["--nvme", "{}/nvme", "--plot", "{}/x.txt"], "--plot"),
        (["--nvme", "{}/nvme", "--baseline", "{}/typo.json"], "typo.json"),
        (["--nvme", "{}/nvme", "--baseline", "{}/file"], "{}/file"),
        (["--nvme", "{}/nvme", "--baseline", "{}/file", "--tolerance", "2"], "--tolerance: expected a part"),
        (["--nvme", "{}/nvme", "--baseline", "{}/file", "--tolerance", "nan"], "--tolerance: expected a part"),
        (["--nvme", "{}/nvme", "--baseline", "{}/file", "--tolerance", "a%"], "--tolerance: expected a part"),
        (["--nvme", "{}/nvme", "--tolerance", "10%"], "--tolerance: expected with --baseline FILE"),
        (["--nvme", "{}/nvme", "--json", "{}/x", "--config", "{}/x"], "--json and --config: expected different files"),
        (["--nvme", "{}/nvme", "--json", "{}/x", "--config", "{}/nvme/../x"], "{}/x for each"),
        (["--nvme", "{}/nvme", "--json", "{}/link", "--plot", "{}/file"], "--json and --plot: expected different"),
        (
            ["--nvme", "{}/nvme", "--baseline", "{}/x", "--config", "{}/x"],
            "--config and --baseline: expected different",
        ),
    ],
)
def test_errors_are_one_clear_line(
    harness: Harness, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    parent = harness.directory.parent
    (parent / "file").touch()
    (parent / "link").symlink_to("file")
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *(argument.replace("{}", str(parent)) for argument in arguments)])
    assert exit_.value.code == 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert message.replace("{}", str(parent)) in line
    assert list(harness.directory.iterdir()) == []


def test_what_may_not_be_looked_at_is_one_clear_line(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As for a user who is not root, who runs these tests in a container."""
    closed, stat = tmp_path / "closed", os.stat

    def refusing(path: Any, *arguments: Any, **flags: Any) -> os.stat_result:
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *arguments, **flags)

    monkeypatch.setattr(os, "stat", refusing)
    nvme = ["--nvme", str(harness.directory)]
    for arguments, words in (
        (["--nvme", f"{closed}/x"], f"creating the directory for --nvme failed (file {closed}/x, EACCES"),
        ([*nvme, "--json", f"{closed}/x"], f"--json: {closed}/x cannot be written (Permission denied); give another"),
        ([*nvme, "--plot", f"{closed}/d/x.png"], f"--plot: {closed}/d/x.png cannot be written (Permission denied)"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(["bench", *arguments])
        assert exit_.value.code == 2
        [line] = capfd.readouterr().err.splitlines()
        assert words in line


def test_fio_that_is_not_there_is_said_before_any_work(
    harness: Harness, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--nvme", str(harness.directory), "--fio"])
    assert exit_.value.code == 2
    out, err = capfd.readouterr()
    assert "fio is not installed" in err
    assert "writing" not in out


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


ENDLESS = ["--points", "1MiBx4", "--time", "100000", "--repeats", "100000"]


@pytest.mark.parametrize(
    ("flags", "stage", "signals"),
    [
        (ENDLESS, "writing", [signal.SIGINT]),
        (ENDLESS, "measuring", [signal.SIGTERM]),
        (["--time", "100000"], "looking", [signal.SIGHUP]),
        (ENDLESS, "measuring", [signal.SIGINT] * 3),
    ],
)
def test_a_signal_ends_the_command_and_leaves_nothing(
    tmp_path: Path, flags: list[str], stage: str, signals: list[signal.Signals]
) -> None:
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "figures.json"
    old.mkdir()
    command = [sys.executable, "-m", "infinity.bench", "--nvme", f"{old},{new}", "--size", "16MiB", "--json", str(file)]
    with subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
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


# Output that nobody takes.

FEW = ["--size", "1MiB", "--points", POINTS, "--repeats", "1", "--time", "1", "--io-backend", "threads"]


def bench(directory: Path, *flags: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infinity.bench", "--nvme", str(directory), *FEW, *flags]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **{"env": environment()} | streams)


@pytest.mark.parametrize("flags", [[], ["--json", "-"]])
def test_output_that_cannot_be_written_is_one_clear_line(tmp_path: Path, flags: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = bench(tmp_path / "x", *flags, stdout=full)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "error: the output cannot be written (No space left on device); send it elsewhere"
    )
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_seen_enough_ends_the_command_as_a_signal_would(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = bench(tmp_path / "x", stdout=writer)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")
    assert list(tmp_path.iterdir()) == []


def test_names_that_the_terminal_has_no_letters_for_are_shown_by_number(tmp_path: Path) -> None:
    ended = bench(tmp_path / "é…", stdout=subprocess.PIPE, env={**environment(), "PYTHONIOENCODING": "ascii"})
    assert ended.returncode == 0, ended.stderr
    assert "\\xe9\\u2026, to be removed at the end" in ended.stdout


def test_a_terminal_that_knows_no_more_than_ascii_gets_plain_lines(tmp_path: Path) -> None:
    main_end, terminal = pty.openpty()
    environ = {**environment(), "PYTHONIOENCODING": "ascii", "TERM": "xterm"}
    try:
        ended = bench(tmp_path / "x", "--json", str(tmp_path / "figures.json"), stdout=terminal, env=environ)
    finally:
        os.close(terminal)
    printed = b""
    with contextlib.suppress(OSError):  # how Linux says that nothing more will come
        while piece := os.read(main_end, 1 << 16):
            printed += piece
    os.close(main_end)
    assert ended.returncode == 0, ended.stderr
    assert b"\\u" not in printed
    assert b"writing and checking" in printed
