"""``Result`` and ``Report``: the figures, apart from how they are shown; and the JSON document that holds them.

The document's form is a promise: scripts read it, and ``--baseline`` compares with one of an earlier version. Fields
may be added; a change of what is there needs another ``SCHEMA``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1
"""Version of the JSON document."""

GB = 1e9
"""Bytes of the GB of all figures."""


@dataclass(frozen=True, slots=True)
class Latency:
    """How long one block took, from submission to completion, in seconds: percentiles over all repeats."""

    p50_seconds: float
    p99_seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One timed repeat.

    Attributes:
        num_bytes: bytes moved, all directions together.
        seconds: wall time.
        cpu_seconds: CPU time of the whole process (of all ranks' processes) meanwhile.
        direction_bytes: by name of direction, where a route has several at once; they add up to ``num_bytes``.
    """

    num_bytes: int
    seconds: float
    cpu_seconds: float
    direction_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """One route, measured in one way.

    Attributes:
        route: from where to where: ``"nvme->host"``, or what is done: ``"memcpy"``.
        backend: what moved the bytes: an I/O backend's name, or words.
        block_bytes: size of one system call or copy.
        queue_depth: how many of them were in flight, per directory.
        size_bytes: of the data that was gone through in turn.
        runs: one for each repeat.
        latency: of blocks; ``None`` where a route has no such thing.
        verified: whether every byte that a verification pass wrote this way was read back and compared; ``None`` where
            nothing is written that could be compared.
        reference: a peer's figure measured beside ours (fio): shown, and never among the best or the recommended.
        path: where several directories are given, the one that was measured alone; ``None``: all of them together.
        in_passing: a short look on the way to the settings that were then measured; the largest of many is luck.
    """

    route: str
    backend: str
    block_bytes: int
    queue_depth: int
    size_bytes: int
    runs: Sequence[Run]
    latency: Latency | None = None
    verified: bool | None = None
    reference: bool = False
    path: str | None = None
    in_passing: bool = False

    @property
    def gb_s(self) -> list[float]:
        """Of each repeat; GB = 1e9 bytes."""
        return [run.num_bytes / run.seconds / GB for run in self.runs]

    @property
    def median_gb_s(self) -> float:
        """Of the repeats."""
        return statistics.median(self.gb_s)

    @property
    def standing(self) -> tuple[bool, float]:
        """Larger is better: what was measured in passing stands back behind all else."""
        return not self.in_passing, self.median_gb_s

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds for each GB: median of the repeats."""
        return statistics.median(run.cpu_seconds / run.num_bytes * GB for run in self.runs)

    def as_document(self) -> dict[str, Any]:
        """The figures as JSON holds them: bytes, GB/s, milliseconds."""
        document: dict[str, Any] = {
            "route": self.route,
            "backend": self.backend,
            "block_size": self.block_bytes,
            "queue_depth": self.queue_depth,
            "size": self.size_bytes,
            "repeats": len(self.runs),
            "gb_s": {"median": self.median_gb_s, "min": min(self.gb_s), "max": max(self.gb_s)},
            "cpu_s_per_gb": self.cpu_s_per_gb,
            "latency_ms": None
            if self.latency is None
            else {"p50": self.latency.p50_seconds * 1e3, "p99": self.latency.p99_seconds * 1e3},
            "verified": self.verified,
        }
        if self.runs[0].direction_bytes:
            document["gb_s_each"] = {
                name: statistics.median(run.direction_bytes[name] / run.seconds / GB for run in self.runs)
                for name in self.runs[0].direction_bytes
            }
        if self.reference:
            document["reference"] = True
        if self.path is not None:
            document["path"] = self.path
        if self.in_passing:
            document["in_passing"] = True
        return document


def best_results(results: Iterable[Result]) -> dict[str, Result]:
    """Of each route, our result with the largest median; neither references nor single directories.

    What was measured in passing counts only where a route has nothing else.
    """
    best: dict[str, Result] = {}
    for result in results:
        if result.reference or result.path is not None:
            continue
        held = best.get(result.route)
        if held is None or result.standing > held.standing:
            best[result.route] = result
    return best


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found out.

    Attributes:
        machine: what was measured, as JSON holds it (see ``machine.py``).
        nvme: the directories, as the user gave them.
        results: all of them, those of one route one after another, routes in the order in which they are shown.
        warnings: what may make the figures misleading.
        seconds: how long it took.
        recommended: fields of ``infinity.Config`` to train with (see ``recommend.py``).
    """

    machine: Mapping[str, Any]
    nvme: Sequence[str]
    results: Sequence[Result]
    warnings: Sequence[str]
    seconds: float
    recommended: Mapping[str, Any] = field(default_factory=dict)

    def routes(self) -> list[str]:
        """Names of the routes, in order."""
        return list(dict.fromkeys(result.route for result in self.results))

    def best(self) -> dict[str, Result]:
        """See ``best_results``."""
        return best_results(self.results)

    def as_document(self) -> dict[str, Any]:
        """The figures as JSON holds them."""
        return {
            "schema": SCHEMA,
            "machine": dict(self.machine),
            "seconds": self.seconds,
            "results": [result.as_document() for result in self.results],
            "best": {route: result.as_document() for route, result in self.best().items()},
            "recommended": dict(self.recommended),
            "warnings": list(self.warnings),
        }
