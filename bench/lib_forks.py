"""Forked processes as the ranks of one job: what they need is imported once, however many jobs there are.

Whoever forks has no threads. A rank ends with whoever forked it, however that one ends; what it says goes to a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TELL = signal.SIGUSR1
"""Has a rank write down where each of its threads is."""

_PR_SET_PDEATHSIG = 1
_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000


class Ranks:
    """Processes that each run ``work(rank)``, with the environment variables of torchrun.

    Args:
        work: a rank's; what it raises ends that rank with status 1.
        num_ranks: how many.
        directory: an existing one; what ranks say is added to ``said-0``, ``said-1``, ...
        environment: further variables.
        hosts: for each rank a process in whose network namespace it lives, on a host of its own; none: all on this one.

    Attributes:
        pids: of each rank.
        codes: how each has ended, as in ``subprocess``; ``None`` while it runs.
    """

    def __init__(
        self,
        work: Callable[[int], None],
        num_ranks: int,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        hosts: Sequence[int] = (),
    ) -> None:
        assert num_threads() == 1, "a process with threads may not be forked"
        self.pids: list[int] = []
        self.codes: list[int | None] = []
        port = free_port()
        for rank in range(num_ranks):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": "0" if hosts else str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **(environment or {}),
            }
            pid = os.fork()
            if not pid:
                _live(lambda: work(rank), directory / f"said-{rank}", variables, hosts[rank : rank + 1])  # noqa: B023
            self.pids.append(pid)
            self.codes.append(None)

    def wait(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all have ended, or something else is so, but not longer; whether all have ended."""
        deadline = time.monotonic() + seconds
        while True:
            for rank, pid in enumerate(self.pids):
                if self.codes[rank] is None:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        self.codes[rank] = os.waitstatus_to_exitcode(status)
            if None not in self.codes:
                return True
            if until() or time.monotonic() >= deadline:
                return False
            time.sleep(0.001)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one, or to all, as far as they run."""
        for each, pid in enumerate(self.pids):
            if self.codes[each] is None and rank in {None, each}:
                os.kill(pid, number)

    def end(self, *, tell: bool = False) -> None:
        """Kill those that run; with ``tell`` they write down before where they are."""
        if tell and not self.wait(0):
            self.signal(TELL)
            self.wait(1.0)
        self.signal(signal.SIGKILL)
        self.wait(60.0)


def num_threads() -> int:
    """Of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


def free_port() -> int:
    """One that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def import_all(names: Sequence[str]) -> None:
    """Import what others have had to import, as far as it can be."""
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # made by others, not by import
                importlib.import_module(name)


def die_with_parent() -> None:
    """Be killed when the process that has made this one ends."""
    _check(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def enter(pid: int) -> None:
    """Be on another host from now on: in the network namespace of a process, and with a host's name of one's own."""
    libc, name = ctypes.CDLL(None, use_errno=True), f"host-{pid}".encode()
    with Path(f"/proc/{pid}/ns/net").open("rb") as file:
        _check(libc.setns(file.fileno(), _CLONE_NEWNET))
    _check(libc.unshare(_CLONE_NEWUTS))
    _check(libc.sethostname(name, len(name)))


def _live(work: Callable[[], None], said: Path, variables: Mapping[str, str], hosts: Sequence[int]) -> None:
    """A rank's life, which does not return."""
    code = 1
    try:
        die_with_parent()
        os.environ.update(variables)
        with said.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        faulthandler.enable(2)
        faulthandler.register(TELL, 2, all_threads=True)
        for pid in hosts:
            enter(pid)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
