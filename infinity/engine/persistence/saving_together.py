"""A checkpoint of all ranks: one directory with a part for each, which is there when all parts are whole.

    rank 0 makes <place>.<16 hex>.partial -> each rank writes its part in it, durable -> rank 0 sees all of them
        -> rank 0 gives it its place

Between two of these all ranks have told each other that it went well; where it did not, rank 0 removes the directory
and all get an error. All must see the place: on several hosts it is on a file system that they share.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from infinity.engine.persistence.together import Together
from infinity.errors import DirectoryError, system_errors
from infinity.store.owner import OWNER
from infinity.store.partial import PartialDirectory, part_name
from infinity.store.saving import check_place, refuse_strangers

_KIND = "save_checkpoint"

Write = Callable[[Path, Path | None], int]
"""Writes this rank's part to a place, and returns its bytes; given where it will be found, if that is elsewhere."""


def check_together(together: Together, path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint is to be, absolute, if all ranks may have it there; nothing is changed.

    Raises:
        InfinityError: as for ``check_place``, on this rank or another.
    """
    return together.do(_KIND, lambda: check_place(path))


def save_together(together: Together, place: Path, write: Write) -> int:
    """Write a checkpoint of all ranks; returns the bytes of this one's part.

    Args:
        together: all of them, which call this alike.
        place: where it is to be.
        write: writes this rank's part.

    Raises:
        DirectoryError: the ranks do not see the same place.
        RankFailedError: it has failed on another rank; what was there stays.
        StorageError: the system reported an error; what was there stays.
    """
    rank, num_ranks = together.ranks.rank, together.ranks.num_ranks
    if num_ranks == 1:
        return write(place, None)
    with contextlib.ExitStack() as stack:
        own, told = together.tell(_KIND, lambda: _make(place, stack) if rank == 0 else None, _name_of)
        shared, name = place.with_name(str(told[0])), part_name(rank, num_ranks)
        num_bytes = together.do(_KIND, lambda: _write_part(shared, write, name, place))
        together.do(_KIND, lambda: _put(own, place, num_ranks) if own is not None else None)
        return num_bytes


def _make(place: Path, stack: contextlib.ExitStack) -> PartialDirectory:
    with system_errors("making the checkpoint", place):
        partial = PartialDirectory(place)
    stack.callback(partial.close)
    return partial


def _name_of(partial: PartialDirectory | None) -> str | None:
    return None if partial is None else partial.path.name


def _write_part(shared: Path, write: Write, name: str, place: Path) -> int:
    if not (shared / OWNER).is_file():
        raise _unseen(f"what rank 0 has made ({shared.name})", place)
    return write(shared / name, place / name)


def _put(partial: PartialDirectory, place: Path, num_ranks: int) -> None:
    """All parts are whole: give the checkpoint its place."""
    with system_errors("completing the checkpoint", place):
        for rank in range(num_ranks):
            if not (partial.path / part_name(rank, num_ranks) / OWNER).is_file():
                raise _unseen(f"the part of rank {rank}", place)
        os.fsync(partial.descriptor)
        refuse_strangers(place)
        partial.put()


def _unseen(what: str, place: Path) -> DirectoryError:
    return DirectoryError(
        f"{what} is not seen here: all ranks must see the place of a checkpoint; give one on a file system that their "
        "hosts share",
        path=place,
    )
