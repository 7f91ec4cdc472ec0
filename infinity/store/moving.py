"""What is on the move: the transfers that bring a resident's bytes in or write them out, and how each one ends.

A movement is a task of this class, whoever asked for it: who waits may be cancelled, the movement goes on. The state
of its resident follows before anyone who waits for it runs, also when the task is cancelled before it has begun. A
failed fill marks the resident with its error; a failed write leaves it dirty and readable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic

from infinity.errors import EngineStateError
from infinity.io.backend import Priority
from infinity.store.pool import Lease
from infinity.store.resident import K, Resident, State

Fill = Callable[[K, Lease, Priority], Coroutine[Any, Any, None]]
Spill = Callable[[K, Lease, Priority], Coroutine[Any, Any, None]]


class Movements(Generic[K]):
    """Starts the movements of residents.

    Args:
        fill: brings a key's bytes into a lease.
        spill: writes a key's bytes to the tier below; ``None`` where there is none.
        begun: called when a resident has begun to move.
        ended: called when it has ended, with its new state.

    Attributes:
        num_written: how many writes have ended well.
        last_write_failed: whether the latest write to end has failed.
    """

    def __init__(
        self,
        fill: Fill[K],
        spill: Spill[K] | None,
        *,
        begun: Callable[[Resident[K]], None],
        ended: Callable[[Resident[K]], None],
    ) -> None:
        self._fill = fill
        self._spill = spill
        self._begun = begun
        self._ended = ended
        self.num_written = 0
        self.last_write_failed = False

    @property
    def can_write(self) -> bool:
        """Whether there is a tier below to write to."""
        return self._spill is not None

    def fill(self, resident: Resident[K], priority: Priority) -> None:
        """Bring a new resident's bytes in; its ``error`` says afterwards whether that failed."""

        def end(error: BaseException | None) -> None:
            resident.error = error
            if error is None:
                resident.state = State.CLEAN

        self._start(resident, self._fill(resident.key, resident.lease, priority), end)

    def write(self, resident: Resident[K], priority: Priority, *, leaving: bool = False) -> asyncio.Task[None]:
        """Write a dirty resident back; ``leaving`` says that this is to make room."""
        assert self._spill is not None
        assert resident.state is State.DIRTY

        def end(error: BaseException | None) -> None:
            self.last_write_failed = error is not None
            if error is None:
                resident.state = State.CLEAN
                self.num_written += 1
            else:
                resident.state = State.DIRTY
                resident.leaving = False

        resident.state = State.WRITING
        resident.leaving = leaving
        return self._start(resident, self._spill(resident.key, resident.lease, priority), end)

    def _start(
        self, resident: Resident[K], movement: Coroutine[Any, Any, None], end: Callable[[BaseException | None], None]
    ) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            resident.task = None
            end(failure(task))
            self._ended(resident)

        resident.task = asyncio.get_running_loop().create_task(movement)
        resident.task.add_done_callback(ended)
        self._begun(resident)
        return resident.task


def failure(task: asyncio.Task[None]) -> BaseException | None:
    """Why a movement that has ended did not end well; ``None`` if it did."""
    if task.cancelled():
        return EngineStateError("a transfer was cancelled: the engine is closing")
    return task.exception()


async def written(task: asyncio.Task[None]) -> None:
    """Wait for a write.

    Raises:
        StorageError: it failed.
    """
    await asyncio.wait([task])
    raise_failed([task])


def raise_failed(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Raise the error of the first movement that has ended with one.

    Raises:
        StorageError: it failed.
    """
    for task in tasks:
        error = failure(task) if task.done() else None
        if error is not None:
            raise error
