"""Several ranks in one process: a group in which their threads tell each other facts, and ends that tests want."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from fakes_state import Rig, make_paths, opened
from infinity.engine.persistence.agreement import RanksAgreement
from infinity.engine.persistence.common import RankState, take_common
from infinity.store.state import open_state

PATIENCE_SECONDS = 20.0


class LostError(RuntimeError):
    """Another rank has ended."""


class Group:
    """Ranks that exchange facts, each from a thread of its own.

    Attributes:
        deaf: of an exchange, by its number, the ranks that get no facts of it, and have lost the others.
        log: by rank, the kinds of the exchanges in which it has taken part.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.deaf: dict[int, set[int]] = {}
        self.log: dict[int, list[str]] = defaultdict(list)
        self._changed = threading.Condition()
        self._facts: dict[int, dict[int, str]] = defaultdict(dict)
        self._rounds = [0] * num_ranks
        self._ended: set[int] = set()

    def of(self, rank: int) -> Member:
        """What a rank exchanges facts with."""
        return Member(self, rank)

    def end(self, rank: int) -> None:
        """A rank ends: others wait for it no longer."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()

    def exchange(self, rank: int, fact: Any) -> list[Any]:
        """See ``Exchange``."""
        with self._changed:
            number = self._rounds[rank]
            self._rounds[rank] += 1
            facts = self._facts[number]
            self.log[rank].append(fact["kind"])
            facts[rank] = json.dumps(fact)
            self._changed.notify_all()
            came = self._changed.wait_for(
                lambda: len(facts) == self.num_ranks or self._ended - set(facts), PATIENCE_SECONDS
            )
            if rank in self.deaf.get(number, ()):
                self._ended.add(rank)
                self._changed.notify_all()
                raise LostError("the facts were lost on the way")
            if not came or len(facts) < self.num_ranks:
                raise LostError("a rank has ended" if came else "a rank did not come")
            return [json.loads(facts[each]) for each in range(self.num_ranks)]


class Member:
    """One rank of a group."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group = group
        self._rank = rank

    def exchange(self, fact: Any) -> list[Any]:
        """See ``Exchange``."""
        return self._group.exchange(self._rank, fact)


def agreements(group: Group, root: Path) -> list[RanksAgreement]:
    """What each rank of a group agrees by."""
    return [
        RanksAgreement(group.of(rank), rank=rank, num_ranks=group.num_ranks, path=root / f"rank{rank}")
        for rank in range(group.num_ranks)
    ]


def paths_of(root: Path, num_ranks: int, num_paths: int = 1) -> list[list[Path]]:
    """Directories for each rank."""
    return [make_paths(root / f"rank{rank}", num_paths) for rank in range(num_ranks)]


@asynccontextmanager
async def opened_ranks(
    paths: Sequence[Sequence[Path]], group: Group, *, num_retained: int = 1
) -> AsyncIterator[list[Rig]]:
    """The states of all ranks, each with its tier and commits, as runs open them."""
    async with AsyncExitStack() as stack:
        rigs = []
        told: list[RankState] = []
        for rank, own in enumerate(paths):  # what each would tell
            state = open_state(own, rank=rank)
            told.append(RankState.of(rank, state))
            state.close()
        for rank, (own, agreement) in enumerate(zip(paths, agreements(group, paths[0][0].parent), strict=True)):
            rig = await stack.enter_async_context(
                opened(
                    own,
                    num_retained=num_retained,
                    rank=rank,
                    world_size=len(paths),
                    agreement=agreement,
                    before=lambda state: take_common(state, told),
                )
            )
            rigs.append(rig)
        yield rigs
