"""``Making``: the part of a commit that runs on the loop, beside training (``durable.py``)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from safetensors.torch import save

from infinity.engine.persistence.capture import Capture
from infinity.engine.persistence.documents import Writer
from infinity.engine.persistence.pending import Holding, Pending
from infinity.io.completion import call_in_thread
from infinity.store.commits import Commit, Commits
from infinity.store.store import TieredStore
from infinity.trace import COMMIT, Recorder


class Making:
    """Holds the bytes of commits that are due, and makes the commits. All coroutines belong to the loop thread.

    Args:
        store: the shards.
        commits: those there are.
        capture: takes what is beside shards.
        recorder: is told of each commit.
        stepped: ends when no sub-group is on its way, or raises what a step failed with.
    """

    def __init__(
        self,
        store: TieredStore,
        commits: Commits,
        capture: weakref.ref[Capture],
        recorder: Recorder,
        *,
        stepped: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._commits = commits
        self._capture_of = capture
        self._recorder = recorder
        self._stepped = stepped

    @property
    def _capture(self) -> Capture:
        capture = self._capture_of()
        assert capture is not None, "the engine has been forgotten"
        return capture

    async def hold(self) -> Holding:
        """Wait for the step's end, and hold all shards as they are then.

        Raises:
            BaseException: what the step failed with.
            StorageError: something could not be written.
        """
        await self._stepped()
        await self._commits.tidy()
        writer = Writer("s")
        states, dtypes = self._capture.of_states(writer), self._capture.dtypes()
        before = self._store.statistics().written_bytes
        held = await self._store.hold(dtypes)
        return Holding(held, dtypes, states, writer, self._store.statistics().written_bytes - before)

    async def let_go(self, held: concurrent.futures.Future[Holding]) -> None:
        """There is to be no such commit."""
        nvme = self._store.nvme
        assert nvme is not None
        with contextlib.suppress(Exception):  # then nothing is held
            nvme.versions.let_go((await asyncio.wrap_future(held)).held)

    async def make(self, pending: Pending) -> tuple[Commit, int]:
        """Make what is held durable, and write the record; the commit, and the bytes that had to be written.

        Raises:
            ModelError: something cannot be kept.
            StorageError: it could not be written; the one before stands.
        """
        try:
            holding, engine, content = await self._describe(pending)
        except BaseException as error:
            await self._commits.skip(pending.step, error)
            raise
        held = time.perf_counter()
        commit = await self._commits.make(holding.held, holding.dtypes, engine, content)
        written_bytes = holding.written_bytes + (0 if content is None else len(content))
        ended, number = time.perf_counter(), commit.manifest.number
        self._recorder.record(COMMIT, "make durable", held, ended)
        self._recorder.record(COMMIT, "commit", pending.begun, ended, num_bytes=written_bytes, number=number)
        return commit, written_bytes

    async def _describe(self, pending: Pending) -> tuple[Holding, dict[str, Any], bytes | None]:
        """What is held, and what goes beside it."""
        holding = await asyncio.wrap_future(pending.held)
        tensors: dict[str, torch.Tensor] = {}
        for writer in (*pending.writers, holding.writer):
            tensors |= writer.tensors
        try:
            engine, content = await call_in_thread(
                lambda: (
                    self._capture.snapshot(pending.step, *pending.moments, holding.states).model_dump(mode="json"),
                    save(tensors) if tensors else None,
                )
            )
        except BaseException:
            await self.let_go(pending.held)
            raise
        return holding, engine, content
