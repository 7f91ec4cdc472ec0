"""``Together``: what all ranks do at the same point of the training program, done on all of them or an error on all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

from infinity.engine.persistence.agreement import OneRank, Ranks
from infinity.errors import EngineStateError, RankFailedError
from infinity.store.loop import LoopThread

T = TypeVar("T")


class Together:
    """Belongs to the training thread.

    Args:
        loop: the loop thread; one rank alone needs none.
        ranks: of the run.
        path: where this rank's state is, for errors.

    Attributes:
        ranks: of the run.
    """

    def __init__(
        self, loop: LoopThread | None = None, ranks: Ranks | None = None, path: str | os.PathLike[str] = ""
    ) -> None:
        self.ranks = ranks or OneRank()
        self._loop = loop
        self._path = path

    def do(self, kind: str, act: Callable[[], T]) -> T:
        """Do this rank's part, and wait until all have done theirs.

        Args:
            kind: what it is, in words; the same on all ranks.
            act: does it.

        Raises:
            BaseException: what ``act`` raised, once the others know.
            RankFailedError: it failed on another rank, or that one is about to do something else.
            RanksApartError: the ranks have lost each other.
        """
        return self.tell(kind, act, lambda result: None)[0]

    def tell(self, kind: str, act: Callable[[], T], fact: Callable[[T], Any]) -> tuple[T, list[Any]]:
        """As ``do``, and tell a fact of what came of it; returns that, and the facts of all ranks in their order."""
        if self.ranks.num_ranks == 1:
            result = act()
            return result, [fact(result)]
        assert self._loop is not None
        try:
            result = act()
            told = fact(result)
        except BaseException as error:
            with contextlib.suppress(EngineStateError):  # the loop has ended, and the others see that this one has
                self._loop.run(self.ranks.tell_error(kind, error))
            raise
        return result, self._loop.run(self.ranks.tell(kind, told))

    def same(self, kind: str, act: Callable[[], T], fact: Callable[[T], Any]) -> T:
        """As ``do``, where the fact must be the same on all ranks.

        Raises:
            RankFailedError: it is not, too.
        """
        result, told = self.tell(kind, act, fact)
        if any(each != told[0] for each in told):
            facts = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(told))
            raise RankFailedError(f"{kind}: the ranks do not choose the same ({facts}); call it alike", path=self._path)
        return result
