"""What a run finds on NVMe when it starts: whether it may start there, and how much room it then needs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from infinity.config import Config
from infinity.engine.budget import Plan
from infinity.engine.persistence.agreement import OneRank, Ranks
from infinity.engine.persistence.common import RankState, take_common
from infinity.errors import DirectoryError, NoCommitError
from infinity.io.completion import call_in_thread
from infinity.store.finding import states_in
from infinity.store.state import OpenState, open_state

_KIND = "opening the state"
_OF_RANK = re.compile(r"rank-\d+")


async def open_for(config: Config, ranks: Ranks | None = None) -> OpenState | None:
    """Take over the state directories that a configuration names; ``None`` where it wants none.

    With several ranks each takes over its own, and all are left with the commits up to the newest that all have.

    Args:
        config: the engine's, with this rank's own directories.
        ranks: of the run.

    Raises:
        DirectoryError: there is a state already, and it is not to be resumed; or a directory cannot be used, or is new
            where other ranks have commits, or has those of another number of ranks.
        ManifestError: the ranks have commits of different runs, or one is damaged.
        NoCommitError: there is none, and there must be; or none that all ranks have.
        RankFailedError: it has failed on another rank.
        StorageError: what there is cannot be read.
    """
    if config.durability == "off":
        return None
    ranks = ranks or OneRank()
    try:
        await call_in_thread(lambda: _refuse_other_number(config.nvme, ranks))
        state = await call_in_thread(lambda: open_state(config.nvme, rank=ranks.rank))
    except Exception as error:
        await ranks.tell_error(_KIND, error)
        raise
    try:
        try:
            _check(state, config)
        except Exception as error:
            await ranks.tell_error(_KIND, error)
            raise
        told = await ranks.tell(_KIND, RankState.of(ranks.rank, state).told())
        if ranks.num_ranks > 1 or state.manifests:
            await call_in_thread(lambda: take_common(state, [RankState(**each) for each in told]))
        await call_in_thread(state.tidy)
    except BaseException:
        state.close()
        raise
    return state


def _refuse_other_number(paths: Sequence[Path], ranks: Ranks) -> None:
    """Refuse to begin beside the state of a run of one rank with several, or the other way round."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # told by who opens it
            if ranks.num_ranks == 1:
                found = [
                    each for below in path.iterdir() if _OF_RANK.fullmatch(below.name) for each in states_in(below)
                ]
            else:
                found = states_in(path.parent) if _OF_RANK.fullmatch(path.name) else []
            if found:
                made = "several ranks" if ranks.num_ranks == 1 else "one rank"
                raise DirectoryError(
                    f"this directory holds the state of a run of {made}, and this one has {ranks.num_ranks}: start as "
                    "many as then; or give another NVMe directory, and have engine.load_checkpoint() read "
                    f"{path if ranks.num_ranks == 1 else path.parent}",
                    path=found[0],
                )


def _check(state: OpenState, config: Config) -> None:
    """Refuse what ``Config.resume`` rules out."""
    if state.manifests and config.resume == "never":
        newest = state.manifests[-1]
        raise DirectoryError(
            f"this NVMe directory holds the state of a run (commit {newest.number} of {newest.time}): go on with "
            "it by resume='auto' in Config (--resume), or remove it by python -m infinity.checkpoint prune --all "
            f"{state.files.path}, or give another directory",
            path=state.files.path,
        )
    if not state.manifests and config.resume == "must":
        raise NoCommitError(
            "expected a commit to resume from, and found none: the run before ended before its first, or used "
            "another directory; give that one, or begin anew by resume='auto'",
            path=state.files.path,
        )


def capacity_bytes(plan: Plan, config: Config, state: OpenState | None, *, saved_bytes: int = 0) -> int:
    """What NVMe is to hold: what training needs, and all commits that are kept beside it.

    Args:
        plan: the sizes of all state.
        config: what else is kept.
        state: the commits there are.
        saved_bytes: the most that steps on trial save.
    """
    needed = plan.nvme_bytes + config.activation_bytes + saved_bytes
    if state is None:
        return needed
    found = {
        (manifest.files[shard.extents[0].file].name, shard.extents[0].offset): shard.num_bytes
        for manifest in state.manifests
        for shard in manifest.shards
    }
    return needed + max(config.retained_commits * plan.committed_bytes, sum(found.values()))
