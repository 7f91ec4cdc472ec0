"""``Resources``: the threads, memory, files and hooks of an engine."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from infinity.engine.compiled import CompiledBlocks
from infinity.engine.hooks import ModuleHooks
from infinity.engine.lent import LentThread
from infinity.engine.persistence.durability import Durability
from infinity.engine.ranks.job import Job
from infinity.engine.refusals import Refusals
from infinity.engine.stream import StepStream
from infinity.engine.worker import OptimizerThread, Worker
from infinity.store.device import DeviceTier
from infinity.store.loop import LoopThread, register_exit, unregister_exit
from infinity.store.nvme import NvmeTier
from infinity.store.state import OpenState
from infinity.store.store import TieredStore


class Resources:
    """What an engine must give back, kept apart from it so that it is given back also when the engine is forgotten.

    And when the interpreter exits: early enough for threads and executors to take part (``register_exit``), and only in
    the process that made it, since a forked child has neither the loop's thread nor the directories.

    Args:
        device: where training computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._pid = os.getpid()
        self.loop = LoopThread()
        self.stream: StepStream | None = None
        self.state: OpenState | None = None
        self.nvme: NvmeTier | None = None
        self.store: TieredStore | None = None
        self.device: DeviceTier | None = None
        self.worker: Worker = LentThread() if device.type == "cpu" else OptimizerThread()
        self.loop.waiter = self.worker
        self.hooks: ModuleHooks | None = None
        self.compiled: CompiledBlocks | None = None
        self.refusals: Refusals | None = None
        self.handles: list[Any] = []
        self.durability: Durability | None = None
        self.job: Job | None = None
        register_exit(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Nobody has closed the engine: what has been taken for a commit is still written."""
        if self.durability is not None and os.getpid() == self._pid:
            with contextlib.suppress(Exception):  # nobody is left to be told
                self.durability.join()
        self.close()

    def close(self) -> None:
        """Undo everything, in the reverse order of its making, whatever fails. Closing twice is harmless."""
        if os.getpid() != self._pid:
            return
        unregister_exit(self._close_at_exit)
        with contextlib.ExitStack() as stack:
            if self.job is not None:
                stack.callback(self.job.leave)
            if self.refusals is not None:
                stack.callback(self.refusals.close)
            if self.state is not None:
                stack.callback(self.state.close)
            stack.callback(self.loop.close)
            below = self.store or self.nvme
            if below is not None:
                stack.callback(lambda: self.loop.run(below.aclose()))
            stack.callback(self.worker.shutdown)
            if (device := self.device) is not None:
                stack.callback(lambda: self.loop.run(device.aclose()))
            if self.job is not None:
                stack.callback(self.job.stop)  # what waits for other ranks ends, and with it its memory is free
            for handle in self.handles:
                stack.callback(handle.remove)
            if self.hooks is not None:
                stack.callback(self.hooks.remove)
            if self.compiled is not None:
                stack.callback(self.compiled.remove)
            if (stream := self.stream) is not None:
                stack.callback(lambda: self.loop.run(stream.aclose()))
            self.hooks = self.compiled = self.refusals = self.stream = self.device = self.store = self.nvme = (
                self.state
            ) = None
            self.handles = []
