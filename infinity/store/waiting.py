"""Demands that wait for room in a pool, the changes that let them look again, and the refusal of those in vain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping

from infinity.errors import BudgetError
from infinity.store.pool import BufferPool, lease_bytes


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


def too_small(pool: BufferPool, key: str, num_bytes: int, staying: Mapping[str, int]) -> BudgetError:
    """The error of a demand for ``num_bytes`` that can never be met, given what stays: bytes by key."""
    largest = sorted(staying.items(), key=lambda item: -item[1])
    held = ", ".join(f"{name} ({size} bytes)" for name, size in largest[:8]) or "nothing"
    needed = lease_bytes(num_bytes) + sum(staying.values())
    return BudgetError(
        f"{pool.name} budget of {pool.budget_bytes} bytes is too small: {key} needs {num_bytes} bytes"
        f" while in use at the same time: {held}{', ...' if len(largest) > 8 else ''};"
        f" raise it to at least {needed} bytes"
    )
