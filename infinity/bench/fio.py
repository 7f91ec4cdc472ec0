"""``Fio``: the same traffic by fio, beside ours, so that a reader sees what the device gives to others.

What is the same: the file (laid out by the caller), direct I/O, block size, queue depth, one job. What flatters fio is
left to it: it fills its buffers once (``refill_buffers=0``, ``scramble_buffers=0``) and does not sync at the end.

CPU time is fio's own account of its job (``usr_cpu`` and ``sys_cpu`` of the job's thread over ``job_runtime``), less
that of a job of one block for each place in the queue, which is what touching fresh buffers costs. Rejected: resource
usage of the whole process (``wait4``) less that of its start. Its start spins for 0.18 +- 0.01 s to calibrate a clock,
as much as moving several GB takes; over many runs both agree, but one run drowns in the difference of two starts. The
account leaves out kernel workers of io_uring, which direct I/O on a laid-out file does not need: at worst it flatters
fio. A timed run (``seconds``) is measured after a moment of the same traffic, so there is no start in it.

fio is started through a line of Python that asks the kernel to kill it when this process dies; a ``preexec_fn`` would
do that too, but may deadlock in a process with threads. The job is a thread of fio (``thread=1``), so it dies with it.
It is in a session of its own: Ctrl-C reaches us, and we end it.
"""

from __future__ import annotations

import errno as _errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infinity.bench.results import Latency, Run
from infinity.errors import ConfigError, InfinityError

ROUTE_MODES = {"nvme->host": "read", "host->nvme": "write", "nvme<->host": "rw"}
"""What fio calls the routes that it can take."""

_DIRECTIONS = ("read", "write")
_RAMP_SECONDS = 0.2
_PAGE_BYTES = 4096
_MEMINFO = Path("/proc/meminfo")
_DIES_WITH_PARENT = (
    "import ctypes, os, sys; "
    "ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid() == int(sys.argv[1]) or os._exit(1); "  # it died before we asked
    "os.execv(sys.argv[2], sys.argv[2:])"
)


class FioError(InfinityError, RuntimeError):
    """fio failed, or said something that cannot be understood."""


class FioEngineError(FioError):
    """fio was built without this engine, or the system refuses it."""


class FioHugePagesError(FioError):
    """Too few huge pages are reserved for fio's buffers."""


class FioStoppedError(FioError):
    """``Fio.kill`` was called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FioRun(Run):
    """One timed run of fio.

    Attributes:
        latency: of blocks, from before submission to completion; of two directions at once the slower one's.
    """

    latency: Latency


@dataclass(frozen=True, slots=True)
class _Job:
    """One job, as fio's flags have it; ``size_bytes`` of ``file``, once or until ``seconds`` are over."""

    file: Path
    mode: str
    block_bytes: int
    queue_depth: int
    engine: str
    huge_page_bytes: int | None
    size_bytes: int
    io_bytes: int | None = None
    seconds: float | None = None

    def arguments(self) -> list[str]:
        escaped = str(self.file).replace("\\", "\\\\").replace(":", "\\:")
        arguments = {
            "name": "infinity",
            "filename": escaped,
            "allow_file_create": 0,
            "overwrite": 1,
            "thread": 1,
            "direct": 1,
            "rw": self.mode,
            "ioengine": self.engine,
            "bs": self.block_bytes,
            "iodepth": self.queue_depth,
            "size": self.size_bytes,
            "refill_buffers": 0,
            "scramble_buffers": 0,
            "clat_percentiles": 0,
            "lat_percentiles": 1,
            "percentile_list": "50:99",
        }
        if self.huge_page_bytes is not None:
            arguments |= {"iomem": "mmaphuge", "hugepage-size": self.huge_page_bytes}
        if self.io_bytes is not None:
            arguments["io_size"] = self.io_bytes
        flags = [f"--{name}={value}" for name, value in arguments.items()]
        if self.seconds is not None:
            runtime, ramp = (f"{max(1, round(seconds * 1e6))}us" for seconds in (self.seconds, _RAMP_SECONDS))
            flags += ["--time_based", f"--runtime={runtime}", f"--ramp_time={ramp}"]
        return ["--output-format=json", *flags]


class Fio:
    """An installed fio; made by ``find_fio``.

    Args:
        executable: the program.
        version: as it says, such as ``"fio-3.33"``.
        meminfo: where the kernel says how many huge pages are free.
    """

    def __init__(self, executable: Path, version: str, *, meminfo: Path = _MEMINFO) -> None:
        self.version = version
        self._executable = executable
        self._meminfo = meminfo
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._killed = False
        self._start_cpu_seconds: dict[_Job, float] = {}

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
        """Move bytes between a file and memory; blocks, so call it on a thread (``call_in_thread(…, on_cancel=kill)``).

        Args:
            file: at least ``size_bytes`` long, every block of it written before; its contents are overwritten where the
                route writes.
            route: one of ``ROUTE_MODES``. Of both directions at once, each moves about half.
            block_bytes: size of a block.
            queue_depth: blocks in flight.
            engine: fio's ``ioengine``: ``"io_uring"`` or ``"libaio"``.
            huge_pages: take buffers from reserved huge pages instead of fio's default pages.
            size_bytes: bytes to go through: once, or again and again where ``seconds`` is given.
            seconds: how long; 0.2 s more pass before the clock runs.

        Raises:
            ConfigError: ``file`` is too small: fio would make it anew.
            FioEngineError: the engine is missing or refused.
            FioHugePagesError: too few huge pages are free; the message says how many are needed, and how to get them.
            FioStoppedError: ``kill`` was called.
            FioError: anything else that went wrong, in fio's words.
        """
        if not file.is_file() or file.stat().st_size < size_bytes:
            raise ConfigError(f"fio: expected a file of at least {size_bytes} bytes, laid out before; got {file}")
        job = _Job(
            file.absolute(),
            ROUTE_MODES[route],
            block_bytes,
            queue_depth,
            engine,
            self._huge_page_bytes(block_bytes * queue_depth) if huge_pages else None,
            size_bytes,
            seconds=seconds,
        )
        run = _parse_run(self._execute(job), self._doing(job))
        if seconds is not None:
            return run
        return self._without_start(run, replace(job, io_bytes=min(block_bytes * queue_depth, size_bytes)))

    def kill(self) -> None:
        """End the run in progress, and refuse later ones; from any thread, at any time."""
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()

    def _without_start(self, run: FioRun, first: _Job) -> FioRun:
        """Charge ``run`` for its bytes only, at the price of those beyond the first for each place in the queue."""
        assert first.io_bytes is not None
        if run.num_bytes <= first.io_bytes:
            return run
        if first not in self._start_cpu_seconds:
            start = _parse_run(self._execute(first), self._doing(first))
            self._start_cpu_seconds[first] = start.cpu_seconds
        seconds = max(0.0, run.cpu_seconds - self._start_cpu_seconds[first])
        return FioRun(
            num_bytes=run.num_bytes,
            seconds=run.seconds,
            cpu_seconds=seconds * run.num_bytes / (run.num_bytes - first.io_bytes),
            direction_bytes=run.direction_bytes,
            latency=run.latency,
        )

    def _execute(self, job: _Job) -> dict[str, Any]:
        command = [sys.executable, "-I", "-S", "-c", _DIES_WITH_PARENT, str(os.getpid())]
        with self._lock:
            self._check_killed()
            self._child = child = subprocess.Popen(
                [*command, str(self._executable), *job.arguments()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                cwd="/",
                start_new_session=True,
            )
        try:
            output, complaints = child.communicate()
        except BaseException:  # an interrupt of the thread that waits
            child.kill()
            child.communicate()
            raise
        finally:
            with self._lock:
                self._child = None
        self._check_killed()
        return _check(output, complaints, child.returncode, job, self._doing(job))

    def _check_killed(self) -> None:
        if self._killed:
            raise FioStoppedError("fio was stopped")

    def _doing(self, job: _Job) -> str:
        """What was tried, to begin a message with."""
        return f"{self.version}, ioengine={job.engine}, rw={job.mode}, {job.file}"

    def _huge_page_bytes(self, buffer_bytes: int) -> int:
        """The size of a huge page, if enough are free for fio's buffers."""
        facts = dict(re.findall(r"^(\w+):\s+(\d+)", self._meminfo.read_text(encoding="ascii"), re.MULTILINE))
        page_bytes = int(facts.get("Hugepagesize", 0)) << 10
        if not page_bytes:
            raise FioHugePagesError("fio: this kernel has no huge pages to reserve; use fio's default buffers")
        num_free = int(facts.get("HugePages_Free", 0)) - int(facts.get("HugePages_Rsvd", 0))
        # fio makes room for aligning its buffers, twice.
        num_needed = -(-(buffer_bytes + _PAGE_BYTES - 1) // page_bytes) + 1
        if num_free < num_needed:
            num_total = int(facts.get("HugePages_Total", 0)) + num_needed - num_free
            raise FioHugePagesError(
                f"fio: huge-page buffers need {num_needed} free huge pages of {page_bytes >> 10} KiB, {num_free} are; "
                f"as root: sysctl vm.nr_hugepages={num_total}"
            )
        return page_bytes


def find_fio(executable: str = "fio") -> Fio:
    """The fio on this machine.

    Args:
        executable: a name to look up on PATH, or a path.

    Raises:
        ConfigError: there is none, or it does not start.
    """
    found = shutil.which(executable)
    if found is None:
        raise ConfigError(f"{executable} is not installed; for example: apt install fio, or dnf install fio")
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{found} does not start: {error}; install fio anew") from error
    match = re.fullmatch(r"fio-(\d+)\..*", done.stdout.strip())
    if match is None or int(match[1]) < 3:
        raise ConfigError(f"{found}: expected fio 3.0 or newer, got {done.stdout.strip()!r}; install a newer fio")
    return Fio(Path(found).absolute(), done.stdout.strip())


def _check(output: str, complaints: str, status: int, job: _Job, doing: str) -> dict[str, Any]:
    """The document, unless it holds an error, or there is none."""
    lines = [line for line in (complaints + "\n" + output.partition("\n{")[0]).splitlines() if line.startswith("fio:")]
    said = "; ".join(dict.fromkeys(line.removeprefix("fio: ") for line in lines[:2])) or f"exit status {status}"
    if "not loadable" in complaints:
        raise FioEngineError(f"{doing}: this fio was built without the engine, or its package is missing ({said})")
    try:
        document = json.loads(output[max(0, output.find("{")) :])
        error = int(document["jobs"][0]["error"])
    except (ValueError, LookupError, TypeError) as failure:
        if status < 0:
            said = f"killed by {signal.Signals(-status).name}"
        raise FioError(f"{doing}: failed: {said}") from failure
    if "func=io_queue_init" in output and error:
        name, reason = _errno.errorcode.get(error, str(error)), os.strerror(error)
        raise FioEngineError(
            f"{doing}: the system refuses this engine ({name}: {reason}); see sysctl kernel.io_uring_disabled, the "
            "container's seccomp profile, ulimit -l, and sysctl fs.aio-max-nr"
        )
    if error == _errno.ENOMEM and job.huge_page_bytes is not None:
        raise FioHugePagesError(f"{doing}: its huge pages were taken by others meanwhile ({said})")
    if error or status:
        raise FioError(f"{doing}: failed: {said}")
    return dict(document)


def _parse_run(document: Mapping[str, Any], doing: str) -> FioRun:
    try:
        [job] = document["jobs"]
        directions = {name: job[name] for name in _DIRECTIONS if int(job[name]["io_bytes"])}
        direction_bytes = {name: int(figures["io_bytes"]) for name, figures in directions.items()}
        percentiles = [figures["lat_ns"]["percentile"] for figures in directions.values()]
        run = FioRun(
            num_bytes=sum(direction_bytes.values()),
            seconds=max(int(figures["runtime"]) for figures in directions.values()) / 1e3,
            cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3,
            direction_bytes=direction_bytes if len(direction_bytes) > 1 else {},
            latency=Latency(
                p50_seconds=max(part["50.000000"] for part in percentiles) / 1e9,
                p99_seconds=max(part["99.000000"] for part in percentiles) / 1e9,
            ),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise FioError(f"{doing}: its document is not as expected: {type(error).__name__} {error}") from error
    if run.seconds <= 0:
        raise FioError(f"{doing}: too little to measure: {run.num_bytes} bytes took no time; give it more")
    return run
