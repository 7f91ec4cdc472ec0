"""One resident of a pool of memory, and the set of those that may leave it."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
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
    """Counters since the start: fetches that found their bytes resident or not, evictions and write-backs."""

    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    num_write_backs: int = 0


class Leavers(Generic[K]):
    """The residents that may leave: those that nobody holds and that do not move.

    Args:
        distance: how far away the next use of a key is.
        dirty: whether dirty residents may leave, once they are written.
    """

    def __init__(self, distance: Callable[[K], float], *, dirty: bool) -> None:
        self._clean: Ranking[Resident[K]] = Ranking(lambda resident: distance(resident.key))
        self._dirty: Ranking[Resident[K]] = Ranking(lambda resident: distance(resident.key))
        self._rankings = [self._clean, self._dirty] if dirty else [self._clean]
        self.clean_bytes = 0

    def update(self, resident: Resident[K], *, present: bool) -> None:
        """Let a resident in or out, as its state and its holders say, and whether it is still ``present``."""
        idle = present and not resident.held
        is_clean, is_dirty = idle and resident.state is State.CLEAN, idle and resident.state is State.DIRTY
        if is_clean != (resident in self._clean):
            self.clean_bytes += resident.size_bytes if is_clean else -resident.size_bytes
            (self._clean.add if is_clean else self._clean.discard)(resident)
        if is_dirty != (resident in self._dirty):
            (self._dirty.add if is_dirty else self._dirty.discard)(resident)

    def needed_last(self) -> Resident[K] | None:
        """Who must leave next; a clean one if it makes no difference."""
        last: tuple[float, Resident[K]] | None = None
        for ranking in self._rankings:
            first = next(ranking.latest_first(), None)
            if first is not None and (last is None or first[0] > last[0]):
                last = first
        return None if last is None else last[1]

    def clean_after(self, distance: float, num_bytes: int) -> list[Resident[K]] | None:
        """Clean residents needed later than ``distance`` that take ``num_bytes``; ``None`` if there are too few."""
        chosen: list[Resident[K]] = []
        for age, resident in self._clean.latest_first():
            if num_bytes <= 0 or age <= distance:
                break
            chosen.append(resident)
            num_bytes -= resident.size_bytes
        return chosen if num_bytes <= 0 else None

    def dirty_last(self, num_bytes: int) -> list[Resident[K]]:
        """The dirty residents needed last that take ``num_bytes``, or all of them."""
        chosen: list[Resident[K]] = []
        for _, resident in self._dirty.latest_first():
            if num_bytes <= 0:
                break
            chosen.append(resident)
            num_bytes -= resident.size_bytes
        return chosen
