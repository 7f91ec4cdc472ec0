"""One resident of a pool of memory, and the set of those that may leave it."""

from __future__ import annotations

import asyncio
import enum
import heapq
import math
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Generic, TypeVar

from infinity.store.pool import Lease, StreamEvent
from infinity.store.ranking import Ranking

K = TypeVar("K", bound=Hashable)


class State(enum.Enum):
    """Where a resident's bytes stand against the tier below."""

    FILLING = "filling"
    CLEAN = "clean"
    DIRTY = "dirty"
    WRITING = "writing"


@dataclass(slots=True, eq=False)
class Resident(Generic[K]):
    """The bytes of one key.

    Attributes:
        key: whose bytes.
        lease: where they are.
        state: where they stand against the tier below.
        pins: how often each owner holds it.
        num_joined: how many wait for its movement to end, and hold it until their turn.
        task: its movement, until the state has followed.
        error: why its fill failed.
        void: it was reserved, and has not been released with content yet.
        leaving: it is, or was, written so that it can leave, and nobody has used it since.
        after: accelerator work that still reads the memory.
    """

    key: K
    lease: Lease
    state: State
    pins: Counter[str] = field(default_factory=Counter)
    num_joined: int = 0
    task: asyncio.Task[None] | None = None
    error: BaseException | None = None
    void: bool = False
    leaving: bool = False
    after: StreamEvent | None = None

    @property
    def size_bytes(self) -> int:
        """What it takes of the budget."""
        return self.lease.size_bytes

    @property
    def held(self) -> bool:
        """Whether it must stay."""
        return bool(self.pins) or self.num_joined > 0

    def unpin(self, owner: str) -> None:
        """End one pin of ``owner``."""
        assert self.pins[owner] > 0, f"{self.key} released more often than fetched by {owner}"
        self.pins[owner] -= 1
        if not self.pins[owner]:
            del self.pins[owner]


@dataclass(slots=True)
class ResidencyStatistics:
    """Counters since the start.

    Attributes:
        num_hits: fetches that found their bytes resident, or on the way.
        num_misses: fetches that did not.
        num_evictions: residents that left to make room.
        num_write_backs: writes that ended well.
        room_seconds: time that demands waited for room, added up.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    num_write_backs: int = 0
    room_seconds: float = 0.0


class Leavers(Generic[K]):
    """The residents that may leave: those that nobody holds and whose bytes are not on the way in.

    Those that were written in order to leave go first, since others that are needed later by now would have to be
    written too. Of the rest, clean ones may leave at once and dirty ones when they are written, but they are ranked
    together: the choice does not depend on what is quick.

    Args:
        distance: how far away the next use of a key is.
        dirty: whether dirty residents may leave, once they are written.
    """

    def __init__(self, distance: Callable[[K], float], *, dirty: bool) -> None:
        def ranking() -> Ranking[Resident[K]]:
            return Ranking(lambda resident: distance(resident.key))

        self._leaving, self._clean, self._dirty = ranking(), ranking(), ranking()
        self._dirty_leave = dirty

    def update(self, resident: Resident[K], *, present: bool) -> None:
        """Let a resident in or out, as its state and its holders say, and whether it is still ``present``."""
        idle = present and not resident.held and resident.state is not State.FILLING
        is_clean = resident.state is State.CLEAN
        _put(self._leaving, resident, idle and resident.leaving)
        _put(self._clean, resident, idle and not resident.leaving and is_clean)
        _put(self._dirty, resident, idle and not resident.leaving and not is_clean and self._dirty_leave)

    def needed_last(self, num_bytes: int, *, beyond: float = -math.inf) -> list[Resident[K]]:
        """Those who are to leave so that there are ``num_bytes``, first ones first; fewer if that is all there are.

        Args:
            num_bytes: how much is wanted.
            beyond: leave out who is needed no later than this.
        """
        chosen: list[Resident[K]] = []
        others = heapq.merge(self._clean.latest_first(), self._dirty.latest_first(), key=itemgetter(0), reverse=True)
        for ranked in (self._leaving.latest_first(), others):  # stable: of two equals the clean one comes first
            for distance, resident in ranked:
                if num_bytes <= 0 or distance <= beyond:
                    break
                chosen.append(resident)
                num_bytes -= resident.size_bytes
        return chosen


def _put(ranking: Ranking[Resident[K]], resident: Resident[K], belongs: bool) -> None:
    if belongs != (resident in ranking):
        (ranking.add if belongs else ranking.discard)(resident)
