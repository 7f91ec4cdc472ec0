"""What has been taken of a commit that is under way: ``durable.py``."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass, field
from typing import Any

from infinity.engine.persistence.documents import Writer
from infinity.store.commits import Commit
from infinity.store.versions import Held


@dataclass(slots=True, eq=False)
class Pending:
    """A commit that is due.

    Attributes:
        step: after which step.
        begun: when, as ``time.perf_counter`` tells it.
        writers: have the tensors of what was taken.
        moments: what was taken.
        held: the bytes, once the loop has them.
        made: the commit, once the record is being written.
    """

    step: int
    begun: float
    writers: list[Writer]
    moments: list[dict[str, Any]]
    held: concurrent.futures.Future[Holding]
    made: concurrent.futures.Future[tuple[Commit, int]] | None = None


@dataclass(slots=True)
class Holding:
    """Held bytes, and what is known of them.

    Attributes:
        held: the bytes.
        dtypes: by shard.
        states: what ``Capture.of_states`` returned.
        writer: has its tensors.
        written_bytes: what had to be written.
    """

    held: Held
    dtypes: dict[Any, str]
    states: dict[str, Any]
    writer: Writer = field(default_factory=lambda: Writer("s"))
    written_bytes: int = 0
