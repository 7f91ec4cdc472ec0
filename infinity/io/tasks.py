"""Structured waiting for several coroutines at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


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
