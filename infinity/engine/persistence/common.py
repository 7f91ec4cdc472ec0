"""Which commit the ranks of a run go on from: the newest that all of them have, as each has told of its own.

A commit is let go only once all ranks have a newer one. So a rank whose directory belongs to the state and has no
commit has never had one: none has ever counted, and what others have of the first is dropped. A directory that does
not belong to it is another one, and the rank's own is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infinity.errors import DirectoryError, ManifestError, NoCommitError
from infinity.store.state import OpenState


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank has found in its state directories, all of it whole as far as records tell.

    Attributes:
        rank: its number.
        path: its first directory.
        directories: all of them.
        state: names its state; a name that nobody has yet where there is no commit.
        commits: the number and the step of each, oldest first.
        made_by: the rank that made the newest, and how many there were; ``None``: there is none.
        member_of: the state to which the directory belongs, with or without commits.
    """

    rank: int
    path: str
    directories: list[str]
    state: str
    commits: list[list[int]]
    made_by: list[int] | None
    member_of: str | None = None

    @classmethod
    def of(cls, rank: int, state: OpenState) -> RankState:
        """That of this rank."""
        newest = state.manifests[-1] if state.manifests else None
        return cls(
            rank=rank,
            path=str(state.files.path),
            directories=[str(directory.path) for directory in state.directories],
            state=state.state,
            commits=[[each.number, _step(each.engine)] for each in state.manifests],
            made_by=None if newest is None else [newest.rank, newest.world_size],
            member_of=state.member_of,
        )

    def told(self) -> dict[str, Any]:
        """As a fact for other ranks."""
        return asdict(self)


def newest_common(ranks: Sequence[RankState]) -> int | None:
    """The number of the newest commit that all ranks have; ``None``: none has ever counted, and the run begins.

    Args:
        ranks: all of the run, in their order.

    Raises:
        DirectoryError: a rank has no commit and others do, or the commits are those of another number of ranks.
        ManifestError: the ranks have those of different states.
        NoCommitError: there is none that all have; it lists what each has.
    """
    having = [each for each in ranks if each.commits]
    if not having:
        return None
    for each in having:
        if each.made_by != [each.rank, len(ranks)]:
            made_by, num_ranks = each.made_by or [0, 0]
            raise DirectoryError(
                f"rank {each.rank} of {len(ranks)} has found the state of rank {made_by} of {num_ranks}: start with "
                f"{num_ranks} ranks; or give this run other NVMe directories, and have engine.load_checkpoint() read "
                "all directories of the run before, or what its engine.save_checkpoint() wrote",
                path=each.path,
            )
    new = [each for each in ranks if not each.commits and each.member_of != having[0].state]
    if new:
        names = ", ".join(f"rank {each.rank} ({each.path})" for each in new)
        newest = having[0].commits[-1][0]
        raise DirectoryError(
            f"{names} has no commit, and rank {having[0].rank} has commit {newest}: give each rank the NVMe "
            "directories that it had; where one is lost, begin in others, from a checkpoint",
            path=new[0].path,
        )
    if len({each.state for each in having}) > 1:
        listed = "; ".join(f"rank {each.rank}: {each.state} ({each.path})" for each in having)
        raise ManifestError(f"the ranks have commits of different runs: {listed}", path=ranks[0].path)
    if len(having) < len(ranks):
        return None
    common = _common_numbers(ranks)
    if not common:
        listed = "; ".join(
            f"rank {each.rank}: {', '.join(f'{number} of step {step}' for number, step in each.commits)} ({each.path})"
            for each in ranks
        )
        raise NoCommitError(f"there is no commit that all ranks have. {listed}", path=ranks[0].path)
    return max(common)


def _common_numbers(ranks: Sequence[RankState]) -> frozenset[int]:
    """The commits that all ranks have."""
    commits = [frozenset((number, step) for number, step in each.commits) for each in ranks]
    return frozenset(number for number, _ in frozenset.intersection(*commits))


def take_common(state: OpenState, ranks: Sequence[RankState]) -> None:
    """Leave a rank's state with the commits that all ranks have. Synchronous.

    Raises:
        DirectoryError: as for ``newest_common``; nothing has been changed.
        StorageError: the system reported an error.
    """
    number = newest_common(ranks)
    state.highest_number = max((each[0] for rank in ranks for each in rank.commits), default=0)
    state.of_ranks = [Path(directory) for rank in ranks for directory in rank.directories]
    state.keep_only(_common_numbers(ranks) if number is not None else frozenset())
    if number is None and len(ranks) > 1:
        state.state = ranks[0].state
        state.enlist()


def _step(engine: dict[str, Any]) -> int:
    step = engine.get("step")
    return step if isinstance(step, int) else -1
