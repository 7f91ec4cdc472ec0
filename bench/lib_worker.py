"""Processes that train on request, so that two ways of training can take turns and each has its own peak of memory.

A worker answers JSON lines with JSON lines. Its first line says that it is ready, with what it has to say of itself.
What libraries print goes to a log file: answers have a descriptor of their own.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_LOG_TAIL_LINES = 12
_CLOSING_SECONDS = 60


class WorkerError(Exception):
    """A worker ended, or reported an error, or did not answer in time."""


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident since it began, or since ``reset_peak_rss``."""
    match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert match is not None, "/proc/self/status has no VmHWM"
    return int(match[1]) * 1024


def reset_peak_rss() -> None:
    """Forget the peak so far."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def serve(start: Callable[[], dict[str, Any]], answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests until standard input ends.

    Args:
        start: called once; what it returns is the first line.
        answer: called with each request.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)  # whatever is printed from now on is no answer

        def reply(make: Callable[[], dict[str, Any]]) -> bool:
            try:
                document = make()
            except Exception as error:
                traceback.print_exc()
                document = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(document) + "\n")
            replies.flush()
            return "error" not in document

        if not reply(start):
            return
        for line in sys.stdin:
            request = json.loads(line)
            if not reply(lambda request=request: answer(request)):  # type: ignore[misc]
                return


class Worker:
    """A worker process, seen from who asks; a context manager that ends it.

    Attributes:
        ready: the worker's first line.
    """

    def __init__(
        self, command: Sequence[str], log: Path, *, seconds: float, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it and wait until it is ready.

        Raises:
            WorkerError: it was not ready within ``seconds``, or ended, or reported an error.
        """
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=dict(os.environ if environment is None else environment),
                start_new_session=True,  # its own group, so that whatever it starts ends with it
            )
        self._rest = b""
        try:
            self.ready = self._answer(seconds)
        except BaseException:
            self.close(at_once=True)
            raise

    def ask(self, request: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            WorkerError: none came within ``seconds``, the worker ended, or reported an error.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._error("ended") from None
        return self._answer(seconds)

    def close(self, *, at_once: bool = False) -> None:
        """End the process: it is told to, and killed if it goes on. Closing twice is harmless."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            if not at_once:
                self._process.wait(_CLOSING_SECONDS)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(at_once=error is not None)

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(seconds):
                    raise self._error(f"did not answer within {seconds:.0f} s")
                received = os.read(descriptor, 1 << 16)
                if not received:
                    raise self._error("ended")
                self._rest += received
        line, _, self._rest = self._rest.partition(b"\n")
        document = json.loads(line)
        assert isinstance(document, dict)
        if "error" in document:
            raise WorkerError(document["error"])
        return document

    def _error(self, what: str) -> WorkerError:
        code = self._process.poll()
        tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        ending = "" if code is None else f" (exit code {code})"
        return WorkerError(f"worker {what}{ending}; the end of {self._log}:\n" + "\n".join(tail))
