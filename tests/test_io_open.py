"""Which backend a directory gets: by what works in it, and io_uring by what a race shows; never by its name."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import fakes_io
import infinity.io.open as module
import infinity.io.race as racing
from fakes_io import Gate, HookedSyscalls, Operation, buffer, files_in, noise, spin
from infinity.config import BackendName
from infinity.errors import DirectoryError, DiskFullError, StorageError
from infinity.io.aiofile import AiofilesBackend
from infinity.io.backend import Backend
from infinity.io.open import Choice, open_backend
from infinity.io.pagecache import declared_alignment, is_cached
from infinity.io.race import Lap, Round, Verdict, judge, race
from infinity.io.ring import Ring
from infinity.io.syscalls import SYSCALLS, Syscalls
from infinity.io.threads import ThreadBackend
from infinity.io.uring import UringBackend

PAGE = 4096
BACKENDS = {"threads": ThreadBackend, "uring": UringBackend, "aiofiles": AiofilesBackend}

needs_ring = pytest.mark.skipif(fakes_io.ring_refusal() is not None, reason=f"no io_uring: {fakes_io.ring_refusal()}")
of_each = pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("auto", "threads"),
        ("threads", "threads"),
        pytest.param("uring", "uring", marks=needs_ring),
        ("aiofiles", "aiofiles"),
    ],
)


@pytest.fixture(autouse=True)
def races(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """No race is run: threads win. Returns the directories where one was asked for."""
    directories: list[Path] = []

    async def decided(directory: Path, syscalls: Syscalls) -> Verdict:
        directories.append(directory)
        return Verdict(False, "threads win")

    monkeypatch.setattr(module, "race", decided)
    monkeypatch.setattr(module, "_verdicts", {})
    return directories


async def choose(directory: Path, name: BackendName = "auto", syscalls: Syscalls = SYSCALLS) -> Choice:
    """Open, use and close a backend; nothing may be left of it, nor of the probe."""
    before, files = fakes_io.resources(), files_in(directory)
    try:
        backend, choice = await open_backend(name, directory, num_threads=2, block_bytes=8 * PAGE, syscalls=syscalls)
        await use(backend, directory, choice)
    finally:
        assert fakes_io.resources() == before
        assert files_in(directory) == files
    return choice


async def use(backend: Backend, directory: Path, choice: Choice) -> None:
    assert isinstance(backend, BACKENDS[choice.name])
    assert (backend.name, backend.direct) == (choice.name, choice.direct)
    file = await backend.open_file(directory / "used", create=True)
    data, target = buffer(20 * PAGE + 1, fill=noise(PAGE)), buffer(20 * PAGE + 1)
    await backend.write_from(file, 0, data)
    await backend.read_into(file, 0, target)
    await backend.aclose()
    (directory / "used").unlink()
    assert target == data


def refuse(code: int, *, action: str = "open", direct: bool | None = None, nth: int = 0) -> Syscalls:
    """System calls of which one kind fails, from the ``nth`` on; ``direct``: only with or only without ``O_DIRECT``."""
    num_calls = 0

    def hook(operation: Operation) -> None:
        nonlocal num_calls
        if operation.action == action and direct in (None, operation.direct):
            num_calls += 1
            if num_calls > nth:
                raise OSError(code, os.strerror(code))

    return HookedSyscalls(hook)


@pytest.fixture
def direct_directory(tmp_path: Path) -> Path:
    """Where direct I/O is real: it is accepted, and not declared absent."""
    if not fakes_io.supports_direct(tmp_path):
        pytest.skip(f"no O_DIRECT in {tmp_path}")
    probe = tmp_path / "probe"
    probe.touch()
    declared = declared_alignment(probe)
    probe.unlink()
    if declared is None or not 0 < declared <= PAGE:
        pytest.skip(f"no direct I/O with 4096-byte alignment declared in {tmp_path}")
    return tmp_path


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    """On tmpfs, which refuses ``O_DIRECT`` or accepts and ignores it."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@of_each
async def test_direct_io_where_it_works(direct_directory: Path, name: BackendName, chosen: str) -> None:
    choice = await choose(direct_directory, name)
    assert (choice.name, choice.direct) == (chosen, True)
    assert choice.reasons[-1].startswith(f"{chosen}, direct I/O: chosen; ")
    assert choice.reasons[:-1] == (("uring, direct I/O: passed over; threads win",) if name == "auto" else ())


@of_each
async def test_buffered_io_on_tmpfs(memory_directory: Path, name: BackendName, chosen: str) -> None:
    choice = await choose(memory_directory, name)
    assert (choice.name, choice.direct) == (chosen, False)
    assert "O_DIRECT is accepted, but" in choice.reasons[-2] or "EINVAL" in choice.reasons[-2]
    assert choice.reasons[-1] == f"{chosen}, buffered I/O: chosen; through the page cache"


async def test_buffered_io_where_o_direct_is_refused(tmp_path: Path) -> None:
    choice = await choose(tmp_path, syscalls=refuse(errno.EINVAL, direct=True))
    assert (choice.name, choice.direct) == ("threads", False)
    assert "EINVAL" in choice.reasons[1]


@pytest.mark.parametrize("action", ["read", "write"])
async def test_buffered_io_where_direct_transfers_fail(tmp_path: Path, action: str) -> None:
    choice = await choose(tmp_path, "threads", refuse(errno.EINVAL, action=action, direct=True))
    assert (choice.name, choice.direct) == ("threads", False)
    assert len(choice.reasons) == 2


async def test_aiofiles_where_positioned_reads_fail(tmp_path: Path) -> None:
    choice = await choose(tmp_path, syscalls=refuse(errno.ENOSYS, action="read"))
    assert choice.name == "aiofiles"
    assert [reason.split(":")[0] for reason in choice.reasons[1:3]] == ["threads, direct I/O", "threads, buffered I/O"]


@pytest.mark.parametrize("wrong_offset", [0, 3], ids=["aligned", "ragged"])
async def test_a_system_that_returns_wrong_bytes_is_refused(tmp_path: Path, wrong_offset: int) -> None:
    class Wrong(Syscalls):
        def read_into(self, descriptor: int, view: memoryview, offset: int) -> int:
            num_bytes = super().read_into(descriptor, view, offset)
            if offset == wrong_offset:
                view[7] ^= 1
            return num_bytes

    with pytest.raises(DirectoryError, match="wrong bytes were read back, from byte 7 "):
        await choose(tmp_path, "threads", Wrong())


@pytest.mark.parametrize(
    ("alignment", "cached", "direct", "words"),
    [
        (512, False, True, "it bypasses the page cache"),
        (4096, None, True, "it bypasses the page cache"),
        (None, False, True, "it bypasses the page cache"),
        (None, None, True, "whether it really bypasses the page cache, this system does not say"),
        (0, None, False, "the file system declares that it has no direct I/O"),
        (65536, False, False, "direct I/O here needs 65536-byte alignment, not 4096"),
        (512, True, False, "what was written stays in the page cache"),
    ],
)
async def test_what_the_kernel_knows_decides(
    direct_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    alignment: int | None,
    cached: bool | None,
    direct: bool,
    words: str,
) -> None:
    monkeypatch.setattr(module, "declared_alignment", lambda path: alignment)
    monkeypatch.setattr(module, "is_cached", lambda path, num_bytes: cached)
    choice = await choose(direct_directory)
    assert choice.direct == direct
    assert words in choice.reasons[1]


async def test_the_page_cache_is_seen(direct_directory: Path, memory_directory: Path) -> None:
    for directory, expected in ((direct_directory, False), (memory_directory, True)):
        backend = ThreadBackend(1, PAGE, direct=directory == direct_directory)
        file = await backend.open_file(directory / "file", create=True)
        await backend.write_from(file, 0, buffer(8 * PAGE))
        assert is_cached(file.path, 8 * PAGE) is expected
        await backend.aclose()
    (direct_directory / "file").read_bytes()
    assert is_cached(direct_directory / "file", 8 * PAGE)
    assert is_cached(direct_directory / "nothing", PAGE) is None
    assert declared_alignment(direct_directory / "nothing") is None


# Refusals


async def test_unusable_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match=r"create it, or give another.*ENOENT") as caught:
        await choose(tmp_path / "missing")
    assert caught.value.path == tmp_path / "missing"
    with pytest.raises(DirectoryError, match="expected a directory, found a file"):
        await choose(tmp_path / "file")
    with pytest.raises(DirectoryError, match="ENOTDIR"):
        await choose(tmp_path / "file" / "below")


async def test_a_directory_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(DirectoryError, match="may not write to the directory"):
        await choose(tmp_path)


@pytest.mark.parametrize("name", ["auto", "threads", pytest.param("uring", marks=needs_ring), "aiofiles"])
async def test_where_nothing_works_all_reasons_are_given(tmp_path: Path, name: BackendName) -> None:
    with pytest.raises(DirectoryError) as caught:
        await choose(tmp_path, name, refuse(errno.EROFS))
    assert caught.value.errno == errno.EROFS
    assert caught.value.path == tmp_path
    assert caught.value.message.count("I/O: open") == (4 if name == "auto" else 2)


async def test_a_full_disk_is_not_a_reason_to_try_another_way(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match="free space"):
        await choose(tmp_path, syscalls=refuse(errno.ENOSPC, action="write"))


async def test_an_interrupted_probe_leaves_nothing(tmp_path: Path) -> None:
    for action in ("open", "write", "read", "fdatasync", "close"):
        gate = Gate(action)
        task = asyncio.ensure_future(choose(tmp_path, "threads", HookedSyscalls(gate)))
        await gate.arrival()
        task.cancel()
        await spin()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_bug_is_not_a_reason_to_try_another_way(tmp_path: Path) -> None:
    def hook(operation: Operation) -> None:
        if operation.action == "write":
            raise AssertionError("a bug")

    with pytest.raises(AssertionError, match="a bug"):
        await choose(tmp_path, syscalls=HookedSyscalls(hook))


async def test_a_probe_that_cannot_be_removed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EPERM, "no")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(StorageError, match="removal of the probe failed"):
            await open_backend("threads", tmp_path, num_threads=1, block_bytes=PAGE)


# io_uring


def refuse_ring(code: int) -> Syscalls:
    class Refused(Syscalls):
        def open_ring(self, num_operations: int) -> Ring:
            raise OSError(code, os.strerror(code))

    return Refused()


def device_of(directory: Path) -> int:
    return directory.stat().st_dev


@pytest.mark.parametrize(
    ("code", "words"), [(errno.EPERM, "container"), (errno.ENOSYS, "Linux 5.7"), (errno.ENOMEM, "ulimit -l")]
)
async def test_where_the_kernel_refuses_a_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    monkeypatch.setattr(module, "race", race)
    with pytest.raises(DirectoryError, match=rf"{words}.*or use io_backend='threads'") as caught:
        await choose(tmp_path, "uring", refuse_ring(code))
    assert (caught.value.errno, caught.value.path) == (code, tmp_path)
    choice = await choose(tmp_path, "auto", refuse_ring(code))
    assert choice.name == "threads"
    assert choice.reasons[0].startswith("uring, direct I/O: passed over; ")
    assert words in choice.reasons[0]
    assert module._verdicts == {}  # it may be allowed another time


@needs_ring
async def test_auto_takes_io_uring_where_it_pays(
    direct_directory: Path, races: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module._verdicts, device_of(direct_directory), Verdict(True, "it pays"))
    choice = await choose(direct_directory)
    assert (choice.name, choice.direct) == ("uring", True)
    assert choice.reasons == ("uring, direct I/O: chosen; it bypasses the page cache",)
    choice = await choose(direct_directory, "auto", refuse_ring(errno.EMFILE))
    assert choice.name == "threads"
    assert "ulimit -n" in choice.reasons[0]
    monkeypatch.setattr(module, "is_cached", lambda path, num_bytes: True)
    choice = await choose(direct_directory)
    assert (choice.name, choice.direct) == ("threads", False)
    assert "stays in the page cache" in choice.reasons[0]
    assert races == []


async def test_there_is_one_race_for_each_device(tmp_path: Path, races: list[Path]) -> None:
    (tmp_path / "below").mkdir()
    for directory in (tmp_path, tmp_path / "below", tmp_path):
        assert "threads win" in (await choose(directory)).reasons[0]
    for name in ("threads", "aiofiles"):
        await choose(tmp_path, name)
    assert races == [tmp_path]


@needs_ring
async def test_a_race_for_real(direct_directory: Path) -> None:
    before = fakes_io.resources()
    verdict = await race(direct_directory, SYSCALLS)
    assert "threads" in verdict.words
    assert files_in(direct_directory) == []
    assert fakes_io.resources() == before


@needs_ring
async def test_a_race_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "race", race)

    def hook(operation: Operation) -> None:
        if operation.action == "write" and operation.offset >= 1 << 20:
            raise OSError(errno.ENOSPC, "full")

    choice = await choose(tmp_path, syscalls=HookedSyscalls(hook))
    assert choice.name == "threads"
    assert choice.reasons[0] == "uring, direct I/O: passed over; no room for a race against threads"


@needs_ring
async def test_no_race_on_a_slow_device(direct_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "_FILL_SECONDS", 0.0)
    verdict = await race(direct_directory, SYSCALLS)
    assert not verdict.uring_pays
    assert verdict.words.startswith("the file for a race took so long to write")
    assert files_in(direct_directory) == []


@needs_ring
async def test_no_verdict_where_there_is_no_time(direct_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "_FILL_SECONDS", 60.0)
    monkeypatch.setattr(racing, "_RACE_SECONDS", 0.0)
    verdict = await race(direct_directory, SYSCALLS)
    assert not verdict.uring_pays
    assert verdict.words.startswith("only 0 rounds")


@needs_ring
@pytest.mark.parametrize("action", ["open", "write", "read", "close"])
async def test_an_interrupted_race_leaves_nothing(
    direct_directory: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    monkeypatch.setattr(racing, "_FILL_SECONDS", 60.0)
    monkeypatch.setattr(racing, "_RACE_SECONDS", 60.0)
    before = fakes_io.resources()
    gate = Gate(action)
    task = asyncio.ensure_future(race(direct_directory, HookedSyscalls(gate)))
    await gate.arrival()
    task.cancel()
    await spin()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fakes_io.resources() == before
    assert files_in(direct_directory) == []


def rounds(speeds: list[float], costs: list[float] | None = None) -> list[Round]:
    """Rounds in which io_uring was so many times as fast, for so much of the CPU time."""
    return [
        Round(Lap(0.004 * speed, 0.001), Lap(0.004, 0.001 * cost))
        for speed, cost in zip(speeds, costs or [1.0] * len(speeds), strict=True)
    ]


@pytest.mark.parametrize(
    ("reads", "writes", "pays"),
    [
        (rounds([1.0] * 5), rounds([1.0] * 5), False),
        (rounds([1.2] * 5), rounds([1.0] * 5), True),
        (rounds([1.0] * 5), rounds([1.2] * 5), True),
        (rounds([1.2] * 5), rounds([0.9] * 5), False),  # bought with slower writes
        (rounds([1.05] * 5), rounds([1.05] * 5), False),  # within the noise
        (rounds([1.3, 1.3, 1.3, 1.3, 0.5]), rounds([1.0] * 5), True),  # one round went wrong
        (rounds([1.3, 1.3, 1.3, 0.9, 0.9]), rounds([1.0] * 5), False),
        (rounds([1.0] * 5, [0.5] * 5), rounds([1.0] * 5, [0.6] * 5), True),
        (rounds([1.0] * 5, [0.5] * 5), rounds([1.0] * 5, [0.9] * 5), False),
        (rounds([0.9] * 5, [0.5] * 5), rounds([1.0] * 5, [0.5] * 5), False),  # cheaper, but slower
        (rounds([1.0] * 5, [0.5, 0.5, 0.5, 0.5, 9.0]), rounds([1.0] * 5, [0.5] * 5), True),
        (rounds([1.0] * 5, [0.5, 0.5, 0.5, 9.0, 9.0]), rounds([1.0] * 5, [0.5] * 5), False),
        (rounds([2.0] * 3), rounds([2.0] * 3), False),  # too few
        (rounds([2.0] * 4), rounds([2.0] * 4), True),
    ],
)
def test_the_rule(reads: list[Round], writes: list[Round], pays: bool) -> None:
    verdict = judge(reads, writes)
    assert verdict.uring_pays == pays
    assert ("not clearly better" in verdict.words or "only 3 rounds" in verdict.words) == (not pays)


def test_the_figures_are_given_in_words() -> None:
    words = judge(rounds([1.25] * 5, [0.5] * 5), rounds([0.75] * 5, [0.875] * 5)).words
    assert words == (
        "it reads at 1.25 and writes at 0.75 of the speed of threads, for 0.50 and 0.88 of their CPU time "
        "(medians of 5 rounds), which is not clearly better"
    )


def test_a_lap_too_short_for_the_clock_of_the_processor() -> None:
    still = [Round(Lap(0.001, 0.0), Lap(0.001, 0.0))] * 4
    assert not judge(still, still).uring_pays
