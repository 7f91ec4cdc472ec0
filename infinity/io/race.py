"""Whether io_uring pays on a device: a short race against worker threads, and the rule that judges it.

Both are right and both saturate a drive with blocks of several MiB, so what is at stake is a few percent of bandwidth
or CPU time, and a wrong choice costs more than none. The race is therefore short (about a tenth of a second, once for
each device in the life of a process), interleaved (both run in every round, each goes first in every other one, so
that a drift of the device or of the machine hits both), and judged by what nearly all rounds show. Threads win every
doubt: a difference within the noise, too few rounds in the time, a device too slow or a machine too busy for a race.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import storage_error
from infinity.io.backend import Backend, File
from infinity.io.completion import call_in_thread
from infinity.io.memory import allocate, as_bytes
from infinity.io.syscalls import Syscalls
from infinity.io.threads import ThreadBackend
from infinity.io.uring import UringBackend

MIN_ROUNDS = 4
FASTER = 1.1
AS_FAST = 0.97
CHEAPER = 0.75

_MAX_ROUNDS = 6
_LAP_BYTES = 16 << 20
_BLOCK_BYTES = 4 << 20
_STEP_BYTES = 1 << 20
_DEPTH = 4
_FILL_SECONDS = 0.03
_TICK_SECONDS = 1e-6  # of a clock: two times below it are equal
_RACE_SECONDS = 0.09


@dataclass(frozen=True, slots=True)
class Lap:
    """One contender moving the same number of bytes as the other, one way.

    Attributes:
        seconds: how long that took.
        cpu_seconds: CPU time of all threads of the process meanwhile.
    """

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Round:
    """A lap of threads and one of io_uring, one right after the other."""

    threads: Lap
    uring: Lap

    @property
    def speed(self) -> float:
        """Bandwidth of io_uring as a multiple of that of threads."""
        return self.threads.seconds / self.uring.seconds

    @property
    def cost(self) -> float:
        """CPU time of io_uring as a multiple of that of threads."""
        return (self.uring.cpu_seconds + _TICK_SECONDS) / (self.threads.cpu_seconds + _TICK_SECONDS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether io_uring is to be taken, and the figures in words."""

    uring_pays: bool
    words: str


def judge(reads: Sequence[Round], writes: Sequence[Round]) -> Verdict:
    """Apply the rule.

    io_uring pays where its median speed is at least ``AS_FAST`` that of threads both ways, and besides, in all rounds
    but one,

    * it is at least ``FASTER`` times as fast one way, or
    * it takes at most ``CHEAPER`` of their CPU time both ways.

    Args:
        reads: rounds of reading.
        writes: rounds of writing.
    """
    num_rounds = min(len(reads), len(writes))
    if num_rounds < MIN_ROUNDS:
        return Verdict(False, f"only {num_rounds} rounds against threads in the time there was, which proves nothing")
    speeds = [sorted(lap.speed for lap in rounds) for rounds in (reads, writes)]
    costs = [sorted(lap.cost for lap in rounds) for rounds in (reads, writes)]
    read_speed, write_speed, read_cost, write_cost = (statistics.median(values) for values in speeds + costs)
    words = (
        f"it reads at {read_speed:.2f} and writes at {write_speed:.2f} of the speed of threads, for {read_cost:.2f} "
        f"and {write_cost:.2f} of their CPU time (medians of {num_rounds} rounds)"
    )
    faster = any(values[1] >= FASTER for values in speeds)
    cheaper = all(values[-2] <= CHEAPER for values in costs)
    if min(read_speed, write_speed) >= AS_FAST and (faster or cheaper):
        return Verdict(True, words)
    return Verdict(False, f"{words}, which is not clearly better")


@contextlib.asynccontextmanager
async def scratch_file(directory: Path) -> AsyncIterator[Path]:
    """A name for a file to try things on; removed at the end, whoever has made it.

    Raises:
        StorageError: it cannot be removed.
    """
    path = directory / f".infinity-probe-{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        await call_in_thread(lambda: _remove(path))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error("removal of the probe", error, path=path) from error


async def race(directory: Path, syscalls: Syscalls) -> Verdict:
    """Run the race in a directory, on a file that is removed again.

    Raises:
        OSError: the kernel refuses io_uring.
        StorageError: one of the two does not work here; ``DiskFullError`` where there is no room for the file.
    """
    async with contextlib.AsyncExitStack() as cleanup:
        uring = UringBackend(_DEPTH, _BLOCK_BYTES, True, syscalls)
        cleanup.push_async_callback(uring.aclose)
        threads = ThreadBackend(_DEPTH, _BLOCK_BYTES, True, syscalls)
        cleanup.push_async_callback(threads.aclose)
        path = await cleanup.enter_async_context(scratch_file(directory))
        contenders: list[tuple[Backend, File]] = [(threads, await threads.open_file(path, create=True))]
        contenders.append((uring, await uring.open_file(path)))
        memory = await call_in_thread(lambda: as_bytes(allocate(_LAP_BYTES)))
        if not await _fill(*contenders[0], memory):
            return Verdict(
                False, "the file for a race took so long to write that a difference from threads would not show"
            )
        return await _run(contenders, memory)


async def _fill(backend: Backend, file: File, memory: memoryview) -> bool:
    """Write the file, in steps that grow as long as it goes fast; whether it did."""
    started = time.perf_counter()
    done = 0
    while done < len(memory):
        step_bytes = max(_STEP_BYTES, done)
        await backend.write_from(file, done, memory[done : done + step_bytes])
        if time.perf_counter() - started > _FILL_SECONDS:
            return False
        done += step_bytes
    return True


async def _run(contenders: Sequence[tuple[Backend, File]], memory: memoryview) -> Verdict:
    reads: list[Round] = []
    writes: list[Round] = []
    started = time.perf_counter()
    while len(reads) < _MAX_ROUNDS and time.perf_counter() - started < _RACE_SECONDS:
        for write, rounds in ((False, reads), (True, writes)):
            laps: dict[str, Lap] = {}
            for backend, file in contenders if len(rounds) % 2 else reversed(contenders):
                laps[backend.name] = await _lap(backend, file, memory, write=write)
            rounds.append(Round(**laps))
    return judge(reads, writes)


async def _lap(backend: Backend, file: File, memory: memoryview, *, write: bool) -> Lap:
    cpu_started, started = time.process_time(), time.perf_counter()
    if write:
        await backend.write_from(file, 0, memory)
    else:
        await backend.read_into(file, 0, memory)
    return Lap(time.perf_counter() - started, time.process_time() - cpu_started)
