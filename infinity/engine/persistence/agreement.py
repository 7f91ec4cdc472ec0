"""``RanksAgreement``: what ranks agree on about their durable states, over a group that nobody else uses.

Whatever is agreed on is one *exchange*: every rank tells a small fact of a kind, and gets those of all. All ranks take
part in the same exchanges in the same order, since commits, rollbacks and checkpoints come in the order of the training
program; where a program has come to another point on some rank, the kinds differ, and all ranks get an error that says
what each was about to do. All get the same facts, so all come to the same end. An exchange that breaks off may leave
some ranks with the facts and others without: so what follows from facts only ever takes away what not all ranks have,
or what is older than what all have.

A rank that cannot do its part tells that in the place of its fact, so nobody waits for it.
"""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from infinity.engine.ranks.awaited import Awaited
from infinity.errors import RankFailedError, RanksApartError
from infinity.io.completion import call_in_thread
from infinity.store.agreement import Agreement, Alone

_MAX_LETTERS = 2000


class Exchange(Protocol):
    """A group of ranks that tell each other facts."""

    def exchange(self, fact: Any) -> Sequence[Any]:
        """The facts of all ranks, in their order; each such that JSON can hold it. Blocks until all have come.

        Raises:
            Exception: another rank has ended, or did not come in time.
        """
        ...


class Ranks(Agreement):
    """The ranks of a run, seen by one of them.

    Attributes:
        rank: its number.
        num_ranks: how many there are.
    """

    rank: int
    num_ranks: int

    def awaited(self) -> contextlib.AbstractContextManager[None]:
        """A context in which training does nothing but wait for what they agree on."""
        return contextlib.nullcontext()

    @abstractmethod
    async def tell(self, kind: str, fact: Any) -> list[Any]:
        """Tell a fact; what all have told, in the order of ranks.

        Args:
            kind: what it is about, in words; the same on all ranks.
            fact: such that JSON can hold it.

        Raises:
            RankFailedError: another rank has failed, or has come to another point.
            RanksApartError: the ranks have lost each other.
        """

    @abstractmethod
    async def tell_error(self, kind: str, error: BaseException) -> None:
        """Tell, in the place of a fact, what this rank has failed with. Raises nothing of its own."""


class OneRank(Alone, Ranks):
    """There is one, which agrees with itself."""

    rank = 0
    num_ranks = 1

    async def tell(self, kind: str, fact: Any) -> list[Any]:
        """See ``Ranks``."""
        return [fact]

    async def tell_error(self, kind: str, error: BaseException) -> None:
        """See ``Ranks``."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank has told.

    Attributes:
        kind: what it is about.
        fact: the fact.
        error: what the rank has failed with, in words.
    """

    kind: str
    fact: Any
    error: str | None


class RanksAgreement(Awaited, Ranks):
    """The ranks of a run with several.

    Args:
        group: of these ranks, for nothing but this.
        rank: this one's number.
        num_ranks: how many there are.
        path: where this rank's state is, for errors.
    """

    def __init__(self, group: Exchange, *, rank: int, num_ranks: int, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.rank = rank
        self.num_ranks = num_ranks
        self._group = group
        self._path = Path(path)
        self._lost: BaseException | None = None

    def check(self) -> None:
        """See ``Agreement``."""
        if self._lost is not None:
            raise self._apart(self._lost)

    async def made(self, number: int, step: int | None) -> BaseException | None:
        """See ``Agreement``."""
        told, interrupt = await self._exchange("commit", [number, step], None)
        self._judge(told)
        return interrupt

    async def failed(self, number: int, step: int | None, error: BaseException) -> None:
        """See ``Agreement``."""
        with contextlib.suppress(RanksApartError):
            await self._exchange("commit", [number, step], error)

    async def tell(self, kind: str, fact: Any) -> list[Any]:
        """See ``Ranks``."""
        with self.awaited():
            told, interrupt = await self._exchange(kind, fact, None)
        self._judge(told, same=False)
        if interrupt is not None:
            raise interrupt
        return [each.fact for each in told]

    async def tell_error(self, kind: str, error: BaseException) -> None:
        """See ``Ranks``."""
        with contextlib.suppress(RanksApartError):
            await self._exchange(kind, None, error)

    async def _exchange(
        self, kind: str, fact: Any, error: BaseException | None
    ) -> tuple[list[_Told], BaseException | None]:
        """What all ranks have told, and a cancellation that came meanwhile."""
        self.check()
        words = None if error is None else f"{type(error).__name__}: {error}"[:_MAX_LETTERS]
        asking = _Asking(self._group, {"kind": kind, "fact": fact, "error": words}, self.num_ranks)
        interrupt: BaseException | None = None
        self.waits_for = kind
        try:
            await call_in_thread(asking.run)
        except BaseException as reason:
            if asking.told is None:
                self._lost = asking.error or reason
                raise self._apart(self._lost) from self._lost
            interrupt = reason
        finally:
            self.waits_for = None
            self.num_ended += 1
        assert asking.told is not None
        numbers = [each.fact[0] for each in asking.told if each.kind == "commit"]
        self.highest_number = max([self.highest_number, *numbers])
        return asking.told, interrupt

    def _judge(self, told: Sequence[_Told], *, same: bool = True) -> None:
        """Refuse what has not gone well on all ranks.

        Args:
            told: by all.
            same: whether their facts are to be the same, too.

        Raises:
            RankFailedError: it says what each has told that is not as it should be.
        """
        mine = told[self.rank]
        failed = [f"rank {rank}: {each.error}" for rank, each in enumerate(told) if each.error is not None]
        if any(each.kind != mine.kind for each in told) or (same and any(each.fact != mine.fact for each in told)):
            points = ", ".join(f"rank {rank}: {_point(each)}" for rank, each in enumerate(told))
            reason = (
                f"the ranks have come to different points ({points}); every rank must take the same steps, and call "
                "commit(), rollback(), save_checkpoint() and load_checkpoint() alike"
            )
            failed = [reason, *failed]
        if failed:
            raise RankFailedError(f"{mine.kind} failed, and counts on no rank: {'; '.join(failed)}", path=self._path)

    def _apart(self, reason: BaseException) -> RanksApartError:
        return RanksApartError(
            f"rank {self.rank} of {self.num_ranks} has lost the others ({reason}): start all of them again, and they "
            "go on from the newest commit that all have",
            path=self._path,
        )


class _Asking:
    """One exchange, on a thread of its own.

    Attributes:
        told: what came of it.
        error: or what it failed with.
    """

    def __init__(self, group: Exchange, mine: dict[str, Any], num_ranks: int) -> None:
        self._group = group
        self._mine = mine
        self._num_ranks = num_ranks
        self.told: list[_Told] | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Take part."""
        try:
            facts = self._group.exchange(self._mine)
            if len(facts) != self._num_ranks:
                raise RuntimeError(f"expected facts of {self._num_ranks} ranks, got {len(facts)}")
            self.told = [_Told(each["kind"], each["fact"], each["error"]) for each in facts]
        except BaseException as error:
            self.error = error
            raise


def _point(told: _Told) -> str:
    if told.kind == "commit" and isinstance(told.fact, list):
        return f"commit {told.fact[0]} of step {told.fact[1]}"
    return told.kind
