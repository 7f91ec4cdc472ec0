"""Many small jobs on 1-4 ranks, each in processes of its own, for the price of one import of torch.

A ``RankServer`` is a process that has imported everything and has no threads. For each job it forks the ranks; so a
job finds nothing of another's, whatever that one has left or died of, and meets in process groups of its own. What
one job had to import, the server imports for the next.

A job is a function ``job(rank, **arguments)`` of an importable module. Arguments are what JSON can hold; each rank's
result is what ``torch.load(weights_only=True)`` gives back.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lib_forks import Ranks, die_with_parent, import_all, num_threads

_SAID_BYTES = 6000


@dataclass(frozen=True, slots=True)
class Rank:
    """What a job is told.

    Attributes:
        index: this rank's number.
        num_ranks: how many there are.
        directory: an empty one that all ranks of the job have in common.
    """

    index: int
    num_ranks: int
    directory: Path


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank ended.

    Attributes:
        code: as in ``subprocess``; ``None``: it was still running when time was up.
        said: what it wrote, tracebacks included.
        result: what the job returned; ``None`` where it did not return.
    """

    code: int | None
    said: str
    result: Any


class JobError(AssertionError):
    """A job did not end well on all ranks; the message has what each said."""


class Job:
    """One that runs; made by ``RankServer.start``.

    Attributes:
        pids: of each rank.
        directory: what its ranks have in common.
    """

    def __init__(self, server: RankServer, name: str, directory: Path, seconds: float) -> None:
        self.pids: list[int] = server.read()["pids"]
        self.seconds = seconds
        self._server = server
        self._name = name
        self._directory = directory
        self.directory = directory / "work"

    def end(self) -> list[Ended]:
        """Wait until it has ended, or has been ended because time was up."""
        codes = self._server.read()["codes"]
        ended = [self._ended(rank, code) for rank, code in enumerate(codes)]
        shutil.rmtree(self._directory)
        return ended

    def results(self) -> list[Any]:
        """What each rank returned.

        Raises:
            JobError: a rank ended otherwise.
        """
        ended = self.end()
        if any(each.code for each in ended) or any(each.code is None for each in ended):
            raise JobError(self.story(ended))
        return [each.result for each in ended]

    def story(self, ended: Sequence[Ended]) -> str:
        """How each rank ended, in words."""
        words = [f"{self._name} on {len(ended)} ranks:"]
        for rank, each in enumerate(ended):
            how = f"was still running after {self.seconds:g} s" if each.code is None else f"ended with {each.code}"
            words.append(f"--- rank {rank} {how}\n{each.said[-_SAID_BYTES:].strip()}")
        return "\n".join(words)

    def _ended(self, rank: int, code: int | None) -> Ended:
        import torch

        said = (self._directory / f"said-{rank}").read_text(encoding="utf-8", errors="replace")
        result = torch.load(self._directory / f"result-{rank}.pt", weights_only=True) if code == 0 else None
        return Ended(code, said, result)


class RankServer:
    """Forks ranks; a context manager that leaves no process and no file.

    Args:
        modules: imported before the first job.
    """

    def __init__(self, *modules: str) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="infinity-ranks-"))
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sys.path]))
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", f"import ranks_harness; ranks_harness.serve({modules!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def start(
        self, name: str, num_ranks: int = 2, *, seconds: float = 60.0, hosts: Sequence[int] = (), **arguments: Any
    ) -> Job:
        """Begin a job.

        Args:
            name: ``"module:function"``.
            num_ranks: on how many ranks.
            seconds: after that its ranks say where they are, and are killed.
            hosts: for each rank a process whose host it shares; see ``lib_forks.Ranks``.
            arguments: of the function; ``environment`` is none of them, but variables for the ranks.
        """
        directory = Path(tempfile.mkdtemp(dir=self._root))
        order = {
            "name": name,
            "num_ranks": num_ranks,
            "seconds": seconds,
            "hosts": [*hosts],
            "directory": str(directory),
            "environment": arguments.pop("environment", {}),
            "arguments": arguments,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Job(self, name, directory, seconds)

    def run(self, name: str, num_ranks: int = 2, **options: Any) -> list[Any]:
        """``start``, and what each rank returned.

        Raises:
            JobError: a rank ended otherwise.
        """
        return self.start(name, num_ranks, **options).results()

    def read(self) -> dict[str, Any]:
        """What the server has to say next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise JobError(f"the server of ranks has ended with {self._process.wait(60)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()  # its ranks die with it
        self._process.communicate()
        shutil.rmtree(self._root, ignore_errors=True)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankServer]:
    """A server of ranks for a test module; its jobs are in the modules that ``start`` names."""
    with RankServer() as server:
        yield server


def serve(modules: Sequence[str]) -> None:
    """Do what comes on standard input, one job after the other, until it ends."""
    die_with_parent()
    import torch

    torch.set_num_threads(1)
    for module in modules:
        importlib.import_module(module)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        _serve_one(json.loads(line), answers)


def _serve_one(order: dict[str, Any], answers: Any) -> None:
    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    directory = Path(order["directory"])
    module, _, function = order["name"].partition(":")
    job = functools.partial(getattr(importlib.import_module(module), function), **order["arguments"])
    (directory / "work").mkdir()

    def work(index: int) -> None:
        import torch

        os.environ.pop("PYTEST_CURRENT_TEST", None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        before = {*sys.modules}
        result = job(Rank(index, order["num_ranks"], directory / "work"))
        torch.save(result, directory / f"result-{index}.pt")
        if index == 0:
            (directory / "modules").write_text("\n".join(sorted({*sys.modules} - before)), encoding="utf-8")

    running = Ranks(work, order["num_ranks"], directory, order["environment"], order["hosts"])
    answer(pids=running.pids)
    running.wait(order["seconds"])
    late = [code is None for code in running.codes]
    running.end(tell=True)
    with contextlib.suppress(FileNotFoundError):
        import_all((directory / "modules").read_text(encoding="utf-8").split("\n"))
    assert num_threads() == 1, "something that was imported has begun a thread"
    answer(codes=[None if was_late else code for was_late, code in zip(late, running.codes, strict=True)])
