"""Demands that wait for room in a pool, who is told of room, and the refusal of demands in vain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from infinity.errors import BudgetError
from infinity.store.pool import BufferPool, lease_bytes
from infinity.store.resident import Resident


class Demands:
    """Those who need room in ``pool`` and have not got it yet.

    Args:
        pool: where.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._demands: list[tuple[str, int]] = []
        self._waiters: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._demands)

    @property
    def owners(self) -> set[str]:
        """Who waits, and so releases nothing until it has been served."""
        return {owner for owner, _ in self._demands}

    @property
    def any_fits(self) -> bool:
        """Whether there is room for one of them."""
        return any(lease_bytes(num_bytes) <= self._pool.free_bytes for _, num_bytes in self._demands)

    @property
    def missing_bytes(self) -> int:
        """What has to leave for all of them to have room."""
        return sum(lease_bytes(num_bytes) for _, num_bytes in self._demands) - self._pool.free_bytes

    def are_in_vain(self, residents: Collection[Resident[Any]]) -> bool:
        """Whether nothing is left that could make room: all who hold memory wait for room, and none can have it."""
        if self.any_fits or any(resident.task is not None or resident.num_joined for resident in residents):
            return False
        return all(owner in self.owners for resident in residents for owner in resident.pins)

    @contextlib.contextmanager
    def enter(self, owner: str, num_bytes: int) -> Iterator[None]:
        """Be one of them; the others look again when this one has gone, served or not."""
        demand = (owner, num_bytes)
        self._demands.append(demand)
        try:
            yield
        finally:
            self._demands.remove(demand)
            self.look_again()

    async def change(self) -> None:
        """Wait until there may be more room, or less to wait for."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def look_again(self) -> None:
        """Something has changed."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Notice:
    """Something to tell a listener, once per turn of the loop at most and never from within what caused it.

    Args:
        listener: who is told.
    """

    def __init__(self, listener: Callable[[], None]) -> None:
        self._listener = listener
        self._given = False

    def give(self) -> None:
        """Tell it soon."""
        if not self._given:
            self._given = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._given = False
        self._listener()


def too_small(pool: BufferPool, key: object, num_bytes: int, staying: Collection[Resident[Any]]) -> BudgetError:
    """The error of a demand for ``num_bytes`` that can never be met, given who stays."""
    largest = sorted(staying, key=lambda resident: -resident.size_bytes)
    held = ", ".join(f"{resident.key} ({resident.size_bytes} bytes)" for resident in largest[:8]) or "nothing"
    needed = lease_bytes(num_bytes) + sum(resident.size_bytes for resident in staying)
    return BudgetError(
        f"{pool.name} budget of {pool.budget_bytes} bytes is too small: {key} needs {num_bytes} bytes"
        f" while in use at the same time: {held}{', ...' if len(largest) > 8 else ''};"
        f" raise it to at least {needed} bytes"
    )
