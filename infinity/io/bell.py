"""``Bell``: how other threads wake coroutines of an event loop, many at once and at little cost.

``call_soon_threadsafe`` makes a handle and a context for each call, sends a byte through a pair of sockets and receives
it in two calls and an exception. A bell is an eventfd that the loop's selector watches for as long as the bell is open:
one write and one read for all that ends meanwhile, and nothing is made.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterable

from infinity.io.completion import Completion


class Bell:
    """Finishes completions on the loop on which it was made.

    Raises:
        OSError: no descriptor is left.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: deque[Completion] = deque()
        self._ringing = False
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._loop.add_reader(self._descriptor, self._answer)

    def ring(self, ended: Iterable[Completion]) -> None:
        """Have completions finished; from any thread.

        Without a lock: they are put down before the flag is looked at, and the flag is taken down before they are
        looked for; so whoever saw it up has put down what will be found.
        """
        self._ended.extend(ended)
        if not self._ringing:
            self._ringing = True
            os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        """Give the descriptor back, on the loop; when nobody rings any more."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _answer(self) -> None:
        os.eventfd_read(self._descriptor)
        self._ringing = False
        while self._ended:
            self._ended.popleft().finish()
