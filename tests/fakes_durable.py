"""A disk that fails on purpose under a whole engine: every system call on data files and small files passes a plan.

``FaultyDisk`` stands below everything: its hook decides for the data files (``fakes_io.HookedSyscalls``) and for the
small files of commits (``DirectoryFiles``). ``FailingRun`` trains a tiny model on it, step by step, as one that is
never disturbed does, and knows the numbers of that one.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from fakes_io import HookedSyscalls, Operation, fail
from infinity import Config, Engine
from infinity.io.open import open_backend
from infinity.store.files import DirectoryFiles
from infinity.store.nvme import NvmeTier
from infinity.store.state import open_state
from parity import assert_same, build, smallest

WRITES = ("write", "reserve", "create")
"""What takes room."""

SMALL = ("create", "rename", "unlink", "sync directory")
"""What is done to the small files of commits."""

FOR_EVER = math.inf
SEED = 100
WIDTH = 32


class FaultyDisk:
    """Counts operations, and lets some fail.

    Attributes:
        num_seen: operations of the armed kind since ``arm``.
        num_failed: how many of them have failed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._actions: Sequence[str] = ()
        self._moved_bytes: int | None = None
        self.repair()
        self.num_failed = 0

    def arm(
        self, *actions: str, at: int, code: int = errno.EIO, times: float = 1, moved_bytes: int | None = None
    ) -> None:
        """The operation ``at`` (from 0) of these fails, and ``times - 1`` more; or moves so many bytes only."""
        with self.lock:
            self._actions, self._at, self._code, self._times = actions, at, code, times
            self._moved_bytes = moved_bytes
            self.num_seen = self.num_failed = 0

    def repair(self) -> None:
        """From now on all goes well."""
        with self.lock:
            self._actions, self._at, self._times = (), 0, 0.0
            self._code, self._moved_bytes = 0, None
            self.num_seen = 0

    def __call__(self, operation: Operation) -> int | None:
        with self.lock:
            if operation.action not in self._actions:
                return None
            place = self.num_seen - self._at
            self.num_seen += 1
            if not 0 <= place < self._times:
                return None
            self.num_failed += 1
            code, moved_bytes = self._code, self._moved_bytes
        if moved_bytes is not None:
            return moved_bytes
        raise fail(code)


class FaultySyscalls(HookedSyscalls):
    """Those of data files; with the chance to change what is read."""

    flip: Callable[[], bool] = staticmethod(lambda: False)

    def read_into(self, descriptor: int, view: memoryview, offset: int) -> int:
        return self._flipped(super().read_into(descriptor, view, offset), [view])

    def read_into_many(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        return self._flipped(super().read_into_many(descriptor, views, offset), views)

    def _flipped(self, num_bytes: int, views: Sequence[memoryview]) -> int:
        if num_bytes and type(self).flip():
            view = views[0].cast("B")
            view[min(len(view), num_bytes) // 2] ^= 16
        return num_bytes


class FaultyFiles(DirectoryFiles):
    """Those of small files."""

    disk: FaultyDisk

    def _create(self, name: str, content: bytes) -> None:
        with self.disk.lock:
            try:
                self.disk(Operation("create", num_bytes=len(content)))
            except OSError:
                super()._create(name, content[: len(content) // 2])  # what a full disk leaves
                raise
            super()._create(name, content)

    def _rename(self, name: str, other: str) -> None:
        with self.disk.lock:
            self.disk(Operation("rename"))
            super()._rename(name, other)

    def _unlink(self, name: str) -> None:
        with self.disk.lock:
            self.disk(Operation("unlink"))
            super()._unlink(name)

    def _sync(self) -> None:
        with self.disk.lock:
            self.disk(Operation("sync directory"))
            super()._sync()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyDisk]:
    """The one below every engine that the test makes."""
    made = FaultyDisk()
    files = type("Files", (FaultyFiles,), {"disk": made})
    opener = functools.partial(open_backend, syscalls=FaultySyscalls(made))
    monkeypatch.setitem(NvmeTier.open.__func__.__kwdefaults__, "open_backend", opener)  # type: ignore[attr-defined]
    monkeypatch.setitem(open_state.__kwdefaults__, "open_files", files)  # type: ignore[arg-type]
    yield made
    made.repair()


class Chain(nn.Module):
    """Three layers, with dropout, so that a number drawn too many shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return x.square().mean()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def batch(step: int) -> torch.Tensor:
    """What step ``step`` (from 0) trains on."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(SEED + step))


@dataclass(frozen=True)
class Expected:
    """A run in plain PyTorch that nothing disturbs.

    Attributes:
        losses: of each step.
        weights: by name, before the first step and after each.
        momenta: of each parameter, likewise.
    """

    losses: list[torch.Tensor]
    weights: list[dict[str, torch.Tensor]]
    momenta: list[list[torch.Tensor]]


@functools.cache
def expected(num_steps: int = 250) -> Expected:
    """What comes of so many steps; random numbers are left as they were."""
    found = Expected([], [], [])
    with torch.random.fork_rng():
        model, optimizer = build(Chain, momentum)
        for step in range(num_steps + 1):
            found.weights.append(copy.deepcopy(dict(model.state_dict())))
            found.momenta.append([each["momentum_buffer"].clone() for each in optimizer.state.values()])
            loss = model(batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.losses.append(loss.detach().clone())
    return found


def check_state(engine: Engine) -> None:
    """Its weights and optimizer states are those of a run that nothing has disturbed."""
    assert_same(dict(engine.state_dict()), expected().weights[engine.num_steps], "weights")
    states = engine.optimizer.state_dict()["state"].values()
    assert_same([each["momentum_buffer"] for each in states], expected().momenta[engine.num_steps], "momenta")


class FailingRun:
    """Trains from NVMe, one step after the other, and compares each loss with plain PyTorch's.

    Attributes:
        engine: the one that trains now.
    """

    def __init__(self, directory: Path, disk: FaultyDisk, **fields: Any) -> None:
        self.directory = directory
        self.disk = disk
        fields = {"io_backend": "threads", "durability": 1, **fields}
        self.config = smallest(Chain, momentum, nvme=directory, **fields)
        self.engine = self.start(self.config)
        self._is_left: list[str] = []

    @staticmethod
    def start(config: Config) -> Engine:
        model, optimizer = build(Chain, momentum)
        return infinity.initialize(model, optimizer, config)

    def step(self) -> None:
        """Take the next one, and make a commit if none is made without being asked for."""
        step = self.engine.num_steps
        loss = self.engine(batch(step))
        assert_same(loss.detach(), expected().losses[step], f"loss of step {step + 1}")
        self.engine.backward(loss)
        self._is_left = ["step", "commit"] if self.config.durability == "checkpoint" else ["step"]
        self.finish()

    def steps(self, num_steps: int) -> None:
        """Take so many."""
        for _ in range(num_steps):
            self.step()

    def finish(self) -> None:
        """What is left to do after backward."""
        while self._is_left:
            getattr(self.engine, self._is_left[0])()
            self._is_left.pop(0)

    def recover(self) -> str:
        """Go on once the cause is gone, as a user would; in which way.

        What failed after backward is tried again. A forward that is tried again draws other random numbers: to have
        the same ones one goes back, and so does who is told that a step has failed half-way.
        """
        if self._is_left:
            try:
                self.finish()
            except infinity.InfinityError:
                self._is_left.clear()
            else:
                return "tried again"
        self.engine.rollback()
        return "rolled back"

    def roll_back(self) -> None:
        """To the newest commit."""
        self._is_left.clear()
        self.engine.rollback()

    def check_last_commit(self, where: Path) -> int:
        """Copy what is on the disk now, as a crash would leave it; repair the disk; go on from there in another engine.

        Returns:
            The step of the commit.
        """
        copy = where / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        with self.disk.lock:
            shutil.copytree(self.directory, copy)
            self.disk.repair()
        config = self.config.model_copy(update={"nvme": (copy,), "resume": "must"})
        with torch.random.fork_rng(), self.start(config) as other:
            check_state(other)
            loss = other(batch(other.num_steps))
            assert_same(loss.detach(), expected().losses[other.num_steps], "the loss that comes next")
            return other.num_steps

    def close(self) -> None:
        self.disk.repair()
        self.engine.close()


@contextlib.contextmanager
def running(directory: Path, disk: FaultyDisk, **fields: Any) -> Iterator[FailingRun]:
    """A run on a disk that works, in ``directory / "nvme"``, with a commit."""
    (directory / "nvme").mkdir()
    run = FailingRun(directory / "nvme", disk, **fields)
    try:
        run.step()
        run.engine.commit()
        yield run
    except BaseException:
        with contextlib.suppress(Exception):  # what came first counts
            run.close()
        raise
    run.close()
