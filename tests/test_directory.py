"""JobDirectory: whose it is, what it refuses, what a crash at any step leaves, and that exactly one starter wins."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import infinity
from fakes_system import Crash, FaultySystem, System
from infinity.errors import DirectoryError, DirectoryInUseError, DiskFullError, StorageError
from infinity.store import directory as module
from infinity.store import held as held_module
from infinity.store import owner as owner_module
from infinity.store.directory import JobDirectory, open_directories
from infinity.store.owner import SCHEMA

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(infinity.__file__).parents[1])}

HOLDER = """
import sys
from infinity.store.directory import JobDirectory
directory = JobDirectory.open(sys.argv[1])
(directory.path / "shards.bin").write_bytes(b"x" * 8192)
print("held", flush=True)
sys.stdin.read()
"""


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


@pytest.fixture(autouse=True)
def no_descriptor_is_leaked() -> Iterator[None]:
    before = num_descriptors()
    yield
    assert num_descriptors() == before


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the job directory below ``tmp_path``."""
    with start(HOLDER, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    )


def abandon(path: Path, *, rank: int = 0, data: bytes = b"state") -> Path:
    """Leave what a job that died leaves: everything but the lock."""
    directory = JobDirectory.open(path, rank=rank)
    (directory.path / "shards.bin").write_bytes(data)
    module._open_here.discard(directory)
    directory._close_descriptors()
    return directory.path


# --- what it makes, and removes


def test_directory_is_private_marked_and_removed(tmp_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        directory = JobDirectory.open(tmp_path, rank=3)
    finally:
        os.umask(old_umask)
    assert directory.path == tmp_path / "infinity-rank3"
    assert names(directory.path) == {"lock", "owner.json"}
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in directory.path.iterdir()} == {0o600}
    owner = json.loads((directory.path / "owner.json").read_text())
    assert owner["pid"] == os.getpid()
    assert owner["hostname"] == socket.gethostname()
    assert owner["schema"] == SCHEMA
    assert {"boot_id", "process_start_time", "time", "version", "rank"} <= set(owner)
    (directory.path / "shards.bin").write_bytes(b"x")
    (directory.path / ".infinity-probe-0123456789abcdef").write_bytes(b"x")
    directory.close()
    directory.close()
    assert names(tmp_path) == set()


def test_free_bytes_are_those_of_the_file_system(tmp_path: Path) -> None:
    directory = JobDirectory.open(tmp_path)
    status = os.statvfs(tmp_path)
    assert abs(directory.free_bytes() - status.f_bavail * status.f_frsize) < 1 << 30
    assert directory.device == tmp_path.stat().st_dev
    directory.close()


def test_relative_path_and_link_to_the_users_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    directory = JobDirectory.open("link")
    monkeypatch.chdir("/")
    assert directory.path.is_absolute()
    assert names(tmp_path / "real") == {"infinity-rank0"}
    directory.close()
    assert names(tmp_path / "real") == set()


def test_close_leaves_strangers_files_and_the_next_start_names_them(tmp_path: Path) -> None:
    directory = JobDirectory.open(tmp_path)
    (directory.path / "shards.bin").write_bytes(b"x")
    (directory.path / "thesis.txt").write_text("two years")
    (directory.path / ".infinity-probe-00000000000000ff").mkdir()
    directory.close()
    assert names(directory.path) == {"lock", "owner.json", "thesis.txt", ".infinity-probe-00000000000000ff"}
    with pytest.raises(DirectoryError, match=r"not infinity's \(\.infinity-probe-00000000000000ff, thesis\.txt\)"):
        JobDirectory.open(tmp_path)
    assert (directory.path / "thesis.txt").read_text() == "two years"
    (directory.path / "thesis.txt").rename(tmp_path / "thesis.txt")
    (directory.path / ".infinity-probe-00000000000000ff").rmdir()
    JobDirectory.open(tmp_path).close()
    assert names(tmp_path) == {"thesis.txt"}


def test_close_removes_nothing_where_its_path_leads_elsewhere(tmp_path: Path) -> None:
    directory = JobDirectory.open(tmp_path)
    directory.path.rename(tmp_path / "moved")
    directory.path.mkdir()
    (directory.path / "shards.bin").write_bytes(b"stranger's")
    directory.close()
    assert names(directory.path) == {"shards.bin"}
    assert names(tmp_path / "moved") == {"lock", "owner.json"}


def test_data_with_a_second_name_keeps_its_contents(tmp_path: Path) -> None:
    directory = JobDirectory.open(tmp_path)
    (directory.path / "shards.bin").write_bytes(b"kept")
    (tmp_path / "copy").hardlink_to(directory.path / "shards.bin")
    directory.close()
    assert (tmp_path / "copy").read_bytes() == b"kept"


# --- what it refuses


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, r"does not exist; create it first: mkdir -p '.*/a path'"),
        (lambda path: path.write_text("file"), "not a directory; give a directory"),
        (lambda path: path.symlink_to("nowhere"), "does not exist"),
    ],
)
def test_path_that_cannot_be_used(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "a path"
    make(path)
    for open_it in (lambda: JobDirectory.open(path), lambda: open_directories([path])):
        with pytest.raises(DirectoryError, match=message) as caught:
            open_it()
        assert caught.value.path == path
    assert not path.is_dir()


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (errno.EACCES, DirectoryError, "may not be read and written by this user.*chown"),
        (errno.EPERM, DirectoryError, "may not be read and written by this user"),
        (errno.EROFS, DirectoryError, "read-only file system"),
        (errno.ENOSPC, DiskFullError, "file system is full"),
        (errno.EIO, StorageError, "EIO"),
    ],
)
def test_system_refuses_to_make_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError], message: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    use_system(monkeypatch, System({"mkdir": refuse}))
    with pytest.raises(kind, match=message) as caught:
        JobDirectory.open(tmp_path)
    assert type(caught.value) is kind
    assert caught.value.errno == number
    assert names(tmp_path) == set()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(DirectoryError, match="without flock; give a directory on a local disk"):
        JobDirectory.open(tmp_path)
    assert names(tmp_path) == set()


def put_file(path: Path) -> None:
    path.write_text("mine")


def put_link(path: Path) -> None:
    path.with_name("elsewhere").mkdir()
    path.symlink_to("elsewhere")


def put_marker(path: Path, text: str) -> None:
    path.mkdir()
    (path / "owner.json").write_text(text)
    (path / "lock").touch()


def put_marker_without_lock(path: Path) -> None:
    put_marker(path, '{"application": "infinity", "schema": 1}')
    (path / "lock").unlink()


def put_directory_as_marker(path: Path) -> None:
    (path / "owner.json").mkdir(parents=True)
    (path / "lock").touch()


def put_link_as_lock(path: Path) -> None:
    put_marker_without_lock(path)
    (path / "lock").symlink_to("shards.bin")


@pytest.mark.parametrize(
    "put",
    [
        put_file,
        put_link,
        Path.mkdir,
        lambda path: put_marker(path, ""),
        lambda path: put_marker(path, "[" * 50_000),
        lambda path: put_marker(path, '{"application": "other", "schema": 1}'),
        lambda path: put_marker(path, '{"application": "infinity", "schema": 99}'),
        put_marker_without_lock,
        put_directory_as_marker,
        put_link_as_lock,
    ],
)
def test_strangers_thing_in_our_place_is_refused_untouched(tmp_path: Path, put: Callable[[Path], None]) -> None:
    place = tmp_path / "infinity-rank0"
    put(place)
    if place.is_dir():
        (place / "shards.bin").write_bytes(b"stranger's")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(DirectoryError, match="stays untouched: remove it, or give another"):
        JobDirectory.open(tmp_path)
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    JobDirectory.open(tmp_path, rank=1).close()
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_another_users_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = abandon(tmp_path)
    use_system(monkeypatch, System({"geteuid": lambda: os.geteuid() + 1}))
    with pytest.raises(DirectoryError, match="another user's"):
        JobDirectory.open(tmp_path)
    assert names(left) == {"lock", "owner.json", "shards.bin"}


def test_one_directory_given_twice(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(DirectoryError, match=r"/a and .*/b are one directory; give it once"):
        open_directories([tmp_path / "a", tmp_path / "b"])
    assert names(tmp_path / "a") == set()


def test_all_directories_or_none(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    directories = open_directories(paths, rank=1)
    assert [directory.path for directory in directories] == [path / "infinity-rank1" for path in paths]
    for directory in directories:
        directory.close()
    put_file(tmp_path / "c" / "infinity-rank1")
    with pytest.raises(DirectoryError):
        open_directories(paths, rank=1)
    assert names(tmp_path / "a") == names(tmp_path / "b") == set()


# --- other jobs, alive and dead


def test_live_job_is_named_and_left_alone_and_a_killed_one_taken_over(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(DirectoryInUseError) as caught:
        JobDirectory.open(tmp_path)
    for part in (f"process {holder.pid} ", f"host {socket.gethostname()} ", "since 20", "give another directory"):
        assert part in str(caught.value)
    JobDirectory.open(tmp_path, rank=1).close()
    assert names(tmp_path / "infinity-rank0") == {"lock", "owner.json", "shards.bin"}
    holder.send_signal(signal.SIGKILL)
    assert holder.wait() == -signal.SIGKILL
    assert names(tmp_path / "infinity-rank0") == {"lock", "owner.json", "shards.bin"}
    directory = JobDirectory.open(tmp_path)
    assert names(directory.path) == {"lock", "owner.json"}
    directory.close()
    assert names(tmp_path) == set()


def test_same_process_cannot_open_it_twice(tmp_path: Path) -> None:
    directory = JobDirectory.open(tmp_path)
    with pytest.raises(DirectoryInUseError, match=f"process {os.getpid()} "):
        JobDirectory.open(tmp_path)
    directory.close()


def test_dead_jobs_of_all_ranks_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for rank in (0, 1, 12):
        abandon(tmp_path, rank=rank)
    live = JobDirectory.open(tmp_path / ".." / tmp_path.name, rank=7)
    abandon(tmp_path, rank=1)
    (tmp_path / "infinity-rank2").mkdir()
    (tmp_path / "infinity-rankings").mkdir()
    (tmp_path / "infinity-rank3").write_text("file")
    directory = JobDirectory.open(tmp_path, rank=5)
    kept = {"infinity-rank2", "infinity-rankings", "infinity-rank3", "infinity-rank5", "infinity-rank7"}
    assert names(tmp_path) == kept
    assert names(live.path) == {"lock", "owner.json"}
    directory.close()
    live.close()


def test_forked_child_neither_removes_nor_keeps_the_lock(tmp_path: Path) -> None:
    script = """
import os, sys
from infinity.store.directory import JobDirectory
directory = JobDirectory.open(sys.argv[1])
if os.fork() == 0:
    directory.close()
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait()
"""
    with start(script, tmp_path) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert names(tmp_path / "infinity-rank0") == {"lock", "owner.json"}
        with pytest.raises(DirectoryInUseError):
            JobDirectory.open(tmp_path)
        process.kill()
        process.wait()
        os.kill(child, 0)  # the child still lives
        JobDirectory.open(tmp_path).close()
    assert names(tmp_path) == set()


# --- races


def test_exactly_one_of_many_threads_wins(tmp_path: Path) -> None:
    for with_orphan in [True, False] * 10:
        if with_orphan:
            abandon(tmp_path)
        outcomes: list[object] = []
        barrier = threading.Barrier(4)

        def contend(barrier: threading.Barrier = barrier, outcomes: list[object] = outcomes) -> None:
            barrier.wait()
            try:
                outcomes.append(JobDirectory.open(tmp_path))
            except StorageError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=contend) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [outcome for outcome in outcomes if isinstance(outcome, JobDirectory)]
        assert len(winners) == 1, outcomes
        assert [type(outcome) for outcome in outcomes].count(DirectoryInUseError) == 3, outcomes
        assert names(winners[0].path) == {"lock", "owner.json"}
        winners[0].close()
        JobDirectory.open(tmp_path).close()  # also removes what a loser was kept from removing
        assert names(tmp_path) == set()


def test_exactly_one_of_two_processes_wins(tmp_path: Path) -> None:
    abandon(tmp_path)
    script = """
import sys
from infinity.errors import DirectoryInUseError
from infinity.store.directory import JobDirectory
print("ready", flush=True)
sys.stdin.readline()
try:
    JobDirectory.open(sys.argv[1])
    print("won", flush=True)
except DirectoryInUseError:
    print("in use", flush=True)
sys.stdin.read()
"""
    processes = [start(script, tmp_path) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outcomes = [process.stdout.readline() for process in processes if process.stdout is not None]
    for process in processes:
        with process:
            process.kill()
    assert sorted(outcomes) == ["in use\n", "won\n"]


def test_starting_while_another_closes(tmp_path: Path) -> None:
    held = JobDirectory.open(tmp_path)
    for _ in range(20):
        barrier = threading.Barrier(2)

        def close(directory: JobDirectory = held, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            directory.close()

        thread = threading.Thread(target=close)
        thread.start()
        barrier.wait()
        while True:
            try:
                held = JobDirectory.open(tmp_path)
                break
            except DirectoryInUseError:
                continue
        thread.join()
        assert names(held.path) == {"lock", "owner.json"}
    held.close()
    JobDirectory.open(tmp_path).close()
    assert names(tmp_path) == set()


def test_partial_directory_taken_before_its_lock_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_swept = 0

    def mkdir(name: str, mode: int, *, dir_fd: int) -> None:
        nonlocal num_swept
        os.mkdir(name, mode, dir_fd=dir_fd)
        if num_swept < 3:
            num_swept += 1
            use_system(monkeypatch, os)
            JobDirectory.open(tmp_path, rank=1).close()
            use_system(monkeypatch, System({"mkdir": mkdir}))

    use_system(monkeypatch, System({"mkdir": mkdir}))
    directory = JobDirectory.open(tmp_path)
    assert num_swept == 3
    assert names(tmp_path) == {"infinity-rank0"}
    directory.close()


def test_partial_directory_locked_by_another_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_flock = fcntl.flock
    sweepers: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        if not sweepers:
            (partial,) = tmp_path.glob("infinity-rank0.*.partial")
            sweepers.append(os.open(partial / "lock", os.O_RDWR))
            real_flock(sweepers[0], operation)
        real_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    directory = JobDirectory.open(tmp_path)
    assert names(tmp_path) == {"infinity-rank0"}
    directory.close()
    os.close(sweepers[0])


def test_lock_taken_on_a_directory_that_was_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan = abandon(tmp_path)
    real_flock = fcntl.flock
    others: list[JobDirectory] = []

    def flock(descriptor: int, operation: int) -> None:
        if not others:
            monkeypatch.setattr(fcntl, "flock", real_flock)
            others.append(JobDirectory.open(tmp_path))  # another job takes over after we opened the dead one's lock
        real_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(DirectoryInUseError, match=f"process {os.getpid()} "):
        JobDirectory.open(tmp_path)
    assert names(orphan) == {"lock", "owner.json"}
    others[0].close()
    assert names(tmp_path) == set()


# --- faults at every step


CALLS = ("open", "mkdir", "rename", "unlink", "rmdir", "ftruncate", "fsync", "stat", "fstat", "scandir", "listdir")


def use_system(monkeypatch: pytest.MonkeyPatch, system: Any) -> None:
    """Have the directory and its marker make their system calls through ``system``."""
    for caller in (module, held_module, owner_module):
        monkeypatch.setattr(caller, "os", system)


def run_life(path: Path) -> None:
    """All steps: taking over a dead job's directories, making one, removing it."""
    directory = JobDirectory.open(path)
    try:
        (directory.path / "shards.bin").write_bytes(b"y")
        directory.close()
    finally:
        module._open_here.discard(directory)


def test_crash_at_any_step_is_handled_by_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for step in range(1, 200):
        abandon(tmp_path)
        abandon(tmp_path, rank=1)
        system = FaultySystem(CALLS, step, Crash())
        use_system(monkeypatch, system)
        try:
            run_life(tmp_path)
        except Crash:
            crashed = True
        else:
            crashed = False
        use_system(monkeypatch, os)
        directory = JobDirectory.open(tmp_path)
        assert names(tmp_path) == {"infinity-rank0", "mine.txt"}, step
        assert names(directory.path) == {"lock", "owner.json"}, step
        directory.close()
        assert names(tmp_path) == {"mine.txt"}, step
        if not crashed:
            break
    assert not crashed
    assert step > 40


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_error_at_any_step_is_typed_and_leaves_nothing_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    errors: list[StorageError] = []
    for step in range(1, 200):
        abandon(tmp_path)
        abandon(tmp_path, rank=1)
        system = FaultySystem(CALLS, step, OSError(number, os.strerror(number)))
        use_system(monkeypatch, system)
        try:
            run_life(tmp_path)
        except StorageError as error:
            errors.append(error)
        use_system(monkeypatch, os)
        JobDirectory.open(tmp_path).close()
        assert names(tmp_path) == set(), step
        if system.num_calls < step:
            break
    assert system.num_calls < step
    assert {error.errno for error in errors} == {number}
    assert len(errors) > 40


def test_failed_start_in_a_clean_path_leaves_it_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_failed = 0
    for step in range(1, 200):
        system = FaultySystem(CALLS, step, OSError(errno.EIO, os.strerror(errno.EIO)))
        use_system(monkeypatch, system)
        try:
            directory = JobDirectory.open(tmp_path)
        except StorageError:
            num_failed += 1
            use_system(monkeypatch, os)
            assert names(tmp_path) == set(), step
        else:
            use_system(monkeypatch, os)
            directory.close()
            break
    assert num_failed > 8
