"""Workers (``lib_worker``) that are the ranks of one job: started together, asked together."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from lib_worker import Worker

T = TypeVar("T")


class RankGroup:
    """The ranks of one job, seen from who asks; a context manager that ends them.

    Attributes:
        ready: each rank's first line.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Mapping[str, Any],
        log: Path,
        *,
        num_ranks: int,
        seconds: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start them and wait until all are ready.

        Args:
            command: what each runs, before its settings as JSON.
            settings: the same for all.
            log: where they say what is no answer.
            num_ranks: how many.
            seconds: how long the start may take, and each answer.
            environment: variables; ``None``: this process's.

        Raises:
            WorkerError: one was not ready in time, ended, or reported an error.
        """
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(num_ranks)
        threads = max((os.cpu_count() or 1) // num_ranks, 1)
        common = {
            **(os.environ if environment is None else environment),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
        }
        self._workers: list[Worker] = []

        def start(rank: int) -> None:
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._workers.append(Worker([*command, json.dumps(settings)], log, seconds=seconds, environment=own))

        try:
            self._all(start, range(num_ranks))
        except BaseException:
            self.close(at_once=True)
            raise
        self._workers.sort(key=lambda worker: int(worker.ready["rank"]))
        self.ready = [worker.ready for worker in self._workers]

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Each rank's answer to a request.

        Raises:
            WorkerError: one did not answer in time, ended, or reported an error.
        """
        return self._all(lambda worker: worker.ask(request, seconds=self._seconds), self._workers)

    def close(self, *, at_once: bool = False) -> None:
        """End them. Closing twice is harmless."""
        self._all(lambda worker: worker.close(at_once=at_once), self._workers)
        self._pool.shutdown()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(at_once=error is not None)

    def _all(self, do: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """Do it to all at the same time; afterwards the first error, if any."""
        return [done.result() for done in [self._pool.submit(do, item) for item in items]]
