"""``ShardCache``: shards of commits on disk that were read, kept in memory within a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import torch

from infinity.engine.planes import Residuals
from infinity.engine.unit import RESIDUAL, Part
from infinity.errors import ManifestError
from infinity.store.shard import ShardKey
from infinity.store.stored import StoredCommit

T = TypeVar("T")


class ShardCache:
    """The shards that were read last, of a commit or of those of all ranks.

    Args:
        memory_bytes: how much to keep of parts that are not in use, and of other ranks' pieces of a part.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._kept: OrderedDict[tuple[StoredCommit, ShardKey], tuple[str, torch.Tensor]] = OrderedDict()

    def get(self, commit: StoredCommit, key: ShardKey, purpose: str) -> torch.Tensor:
        """A shard; those of the same part of the same commit for the same purpose stay as well.

        Raises:
            StorageError: it could not be read.
        """
        commit.check_open()
        if (commit, key) not in self._kept:
            self._make_room(commit, key, purpose)
            self._kept[commit, key] = (purpose, commit.read(key))
        self._kept.move_to_end((commit, key))
        return self._kept[commit, key][1]

    def _make_room(self, commit: StoredCommit, key: ShardKey, purpose: str) -> None:
        needed = commit.shard(key).num_bytes + sum(each.numel() for _, each in self._kept.values())
        in_use = commit, key.unit, key.part, purpose
        for (other_commit, other), (others_purpose, shard) in list(self._kept.items()):
            if needed <= self._memory_bytes:
                break
            if (other_commit, other.unit, other.part, others_purpose) != in_use:
                del self._kept[other_commit, other]
                needed -= shard.numel()


class StoredShelf:
    """A part's shards, as ``formats.py`` reads them."""

    def __init__(self, shards: ShardCache, commit: StoredCommit, part: Part) -> None:
        self._shards = shards
        self._commit = commit
        self._part = part

    def __contains__(self, kind: str) -> bool:
        return self._part.key(kind) in self._commit

    def look(self, kind: str, take: Callable[[torch.Tensor], T]) -> T:
        """See ``formats.Shelf``."""
        shard = self._shards.get(self._commit, self._part.key(kind), "weights")
        if kind == RESIDUAL and not Residuals(shard, self._part.num_elements).table.is_sound(self._part.num_elements):
            raise ManifestError(f"shard {self._part.key(kind)} holds no residuals", path=self._commit.path)
        with torch.inference_mode(False):  # what is taken may be used in training
            return take(shard)
