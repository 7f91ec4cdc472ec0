"""Structured waiting: for several coroutines at once, and for a call on another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run ``coroutines`` side by side, wait until *all* have ended, then raise the first error among them, if any.

    ``asyncio.gather`` returns at the first error while the others still run; here nothing still uses a buffer when the
    await is over. Cancelling it cancels all, and waits for them.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    if not tasks:
        return
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    errors = [error for task in tasks if (error := task.exception()) is not None]
    if errors:
        raise errors[0]


async def call_in_executor(executor: Executor, function: Callable[..., T], *args: Any) -> T:
    """Call ``function(*args)`` on an executor's thread and return what it returns; it has ended when this ends.

    Raises:
        CancelledError: only once ``function`` has ended.
        BaseException: what ``function`` raised.
    """
    job = asyncio.get_running_loop().run_in_executor(executor, function, *args)
    cancelled = False
    while not job.done():
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        job.exception()
        raise asyncio.CancelledError
    return job.result()
