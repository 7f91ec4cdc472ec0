"""What a run finds on NVMe when it starts: whether it may start there, and how much room it then needs."""

from __future__ import annotations

from infinity.config import Config
from infinity.engine.budget import Plan
from infinity.errors import DirectoryError, NoCommitError
from infinity.io.completion import call_in_thread
from infinity.store.state import OpenState, open_state


async def open_for(config: Config) -> OpenState | None:
    """Take over the state directories that a configuration names; ``None`` where it wants none.

    Raises:
        DirectoryError: there is a state already, and it is not to be resumed; or a directory cannot be used.
        NoCommitError: there is none, and there must be.
        StorageError: what there is cannot be read.
    """
    if config.durability == "off":
        return None
    state = await call_in_thread(lambda: open_state(config.nvme))
    try:
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
        await call_in_thread(state.tidy)
    except BaseException:
        state.close()
        raise
    return state


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
