"""Checkpoints in directories of their own: ``CheckpointSaver`` writes the engine's state, ``CheckpointLoader`` reads.

A checkpoint is a commit like those of a durable run (``store/manifest.py``), with data files beside it. It is written
and read shard by shard, through host memory and within its budget.

Loading copies the bytes of shards where they are cut and stored like the engine's. Else, with other budgets, another
precision or other sub-groups, it goes parameter by parameter, through full-precision values: the same weights and
optimizer states, as far as the new precision holds them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch
from safetensors.torch import save

from infinity.engine.loading import ModelLoader
from infinity.engine.optimizer import OffloadedOptimizer
from infinity.engine.persistence.agreement import OneRank, Ranks
from infinity.engine.persistence.capture import Capture
from infinity.engine.persistence.documents import Reader, Writer
from infinity.engine.persistence.stored_state import StoredState
from infinity.engine.prefetch import PrefetchScheduler
from infinity.io.completion import call_in_thread
from infinity.io.memory import as_bytes
from infinity.store.loop import LoopThread
from infinity.store.manifest import Manifest, StoredTensors, long_checksum
from infinity.store.saving import NewCheckpoint
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore
from infinity.store.stored import StoredCommit

_OWNER = "checkpoint"


class CheckpointSaver:
    """Writes checkpoints. Belongs to the training thread; nothing is under way.

    Args:
        loop: the loop thread.
        store: the shards.
        capture: takes what is beside them.
        ranks: of the run, of which each writes its own; ``None``: there is one.
    """

    def __init__(self, loop: LoopThread, store: TieredStore, capture: Capture, ranks: Ranks | None = None) -> None:
        self._loop = loop
        self._store = store
        self._capture = capture
        self._ranks = ranks or OneRank()

    def save(
        self, path: str | os.PathLike[str], *, step: int, state: str, number: int, later: Path | None = None
    ) -> int:
        """Write a checkpoint; returns the bytes of its shards.

        Args:
            path: of its directory; a checkpoint that is there is replaced once this one is whole.
            later: where it will be found, if it is one rank's part of a checkpoint (``saving_together.py``).
            step: how many steps were taken.
            state: names the run's state.
            number: the commit's.

        Raises:
            DirectoryError: something else is at ``path``, or the directory that is to hold it is missing.
            ModelError: something cannot be kept.
            StorageError: the system reported an error; what was at ``path`` stays.
        """
        writer = Writer()
        moments = [self._capture.at_step(writer), self._capture.at_next_use(writer), self._capture.of_states(writer)]
        engine = self._capture.snapshot(step, *moments).model_dump(mode="json")
        tensors = save(writer.tensors) if writer.tensors else None
        dtypes = self._capture.dtypes()
        num_bytes = sum(map(self._store.num_bytes, dtypes))
        manifest = Manifest(
            state=state,
            number=number,
            rank=self._ranks.rank,
            world_size=self._ranks.num_ranks,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            files=[],
            shards=[],
            tensors=None if tensors is None else StoredTensors(num_bytes=len(tensors), checksum=long_checksum(tensors)),
            engine=engine,
        )
        total_bytes = num_bytes + (0 if tensors is None else len(tensors))
        with NewCheckpoint(path, total_bytes, later=later) as checkpoint:
            for key, dtype in sorted(dtypes.items()):
                self._loop.run(self._add(checkpoint, key, dtype, number))
            checkpoint.complete(manifest, tensors)
        return num_bytes

    async def _add(self, checkpoint: NewCheckpoint, key: ShardKey, dtype: str, number: int) -> None:
        lease = await self._store.fetch(key, owner=_OWNER)
        try:
            await call_in_thread(lambda: checkpoint.add(key, dtype, number, as_bytes(lease.tensor)))
        finally:
            self._store.release(key, owner=_OWNER)


class CheckpointLoader:
    """Takes checkpoints. Belongs to the training thread; nothing is under way, and there are no gradients.

    Args:
        loop: the loop thread.
        store: the shards.
        scheduler: brings nothing in meanwhile.
        capture: gives back what is beside shards.
        model_loader: takes weights by name.
        optimizer: takes optimizer states.
        fail: told what has failed half-way, when the state is whole no more.
        rank: of this process.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        scheduler: PrefetchScheduler,
        capture: Capture,
        model_loader: ModelLoader,
        optimizer: OffloadedOptimizer,
        *,
        fail: Callable[[BaseException], None],
        rank: int = 0,
    ) -> None:
        self._loop = loop
        self._store = store
        self._scheduler = scheduler
        self._capture = capture
        self._model_loader = model_loader
        self._optimizer = optimizer
        self._fail = fail
        self._rank = rank

    def load(self, stored: StoredState, recover: Callable[[], None] = lambda: None) -> None:
        """Make a checkpoint's state the engine's; random states too, and what is tracked: this rank's own.

        Args:
            stored: the checkpoint's.
            recover: called before anything is changed.

        Raises:
            ModelError: it is of another model or optimizer; nothing has been changed.
            StorageError: it could not be read, or is damaged, or a shard could not be written.
        """
        own = stored.of_rank(self._rank)
        taken = self._capture.read(own.snapshot, Reader(own.commit.tensors()))
        self._capture.check(stored.snapshot, taken)
        recover()
        try:
            if self._capture.has_layout_of(own.snapshot):
                self._loop.run(self._copy(own.commit))
                self._capture.restore_states(own.snapshot, taken)
            else:
                self._capture.restore_buffers(taken)  # so that those that have a value are the same
                self._model_loader.load(stored.weights, strict=True)
                self._optimizer.adopt(stored.optimizer_state_dict)
            self._capture.restore(taken)
        except BaseException as error:
            self._fail(error)
            raise
        self._capture.restore_random(taken)

    async def _copy(self, commit: StoredCommit) -> None:
        """Give all shards the bytes of a commit."""
        async with self._scheduler.replacing():
            for key in set(self._capture.dtypes()) - set(commit.shards):
                await self._store.delete(key)
            for key, shard in sorted(commit.shards.items()):
                lease = await self._store.put(key, shard.num_bytes, owner=_OWNER)
                is_filled = False
                try:
                    await call_in_thread(functools.partial(_fill, commit, key, lease.tensor))
                    is_filled = True
                finally:
                    self._store.release(key, owner=_OWNER, dirty=is_filled)


def _fill(commit: StoredCommit, key: ShardKey, target: torch.Tensor) -> None:
    memory, end = as_bytes(target), 0
    for block in commit.blocks(key):
        memory[end : end + len(block)] = block
        end += len(block)
