"""``Agreement``: what ranks tell each other about their commits, as one contract; ``Alone`` is that of a single rank.

Each rank has commits of its own, of the same numbers. A commit counts when all ranks have made theirs durable, and only
then may older ones go: so at any moment, whoever ends, there is one that all ranks have whole. Once a rank has begun a
commit it tells how that has ended, exactly once, however that is: else the others would wait for it.

All coroutines belong to the loop thread; one runs at a time, in the order of the commits, which all ranks share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class Agreement(ABC):
    """Tells the other ranks, and listens to them.

    Attributes:
        highest_number: the highest that any rank has told of; the next commit of all has a higher one.
    """

    highest_number: int = 0

    @abstractmethod
    def check(self) -> None:
        """Refuse to begin what can never be agreed on.

        Raises:
            RanksApartError: the ranks have lost each other.
        """

    @abstractmethod
    async def made(self, number: int, step: int | None) -> BaseException | None:
        """This rank's commit is durable; returns when those of all ranks are.

        Args:
            number: the commit's.
            step: after which step.

        Returns:
            A cancellation that came meanwhile.

        Raises:
            RankFailedError: another rank's has failed, and all know: it counts nowhere, and is to be undone.
            RanksApartError: whether the others have made theirs is not known, nor can be any more.
        """

    @abstractmethod
    async def failed(self, number: int, step: int | None, error: BaseException) -> None:
        """This rank's commit has failed, and left nothing. Raises nothing of its own.

        Args:
            number: the commit's.
            step: after which step.
            error: with what.
        """


class Alone(Agreement):
    """There is one rank."""

    def check(self) -> None:
        """Nobody can be lost."""

    async def made(self, number: int, step: int | None) -> BaseException | None:
        """All have made it."""
        return None

    async def failed(self, number: int, step: int | None, error: BaseException) -> None:
        """Nobody else is to know."""


ALONE = Alone()
