"""``Report``: the figures, as a table for a person and as one JSON document."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil
import torch
from rich import box
from rich.table import Table

from infinity.bench.machine import PathFacts, cpu_name
from infinity.bench.passes import Sample
from infinity.bench.routes import Route
from infinity.bench.settings import Point
from infinity.console.formats import format_bytes
from infinity.io.open import Choice

SCHEMA = 1
"""Version of the JSON document."""

_GB = 1e9
_BAR_WIDTH = 10


@dataclass(frozen=True, slots=True)
class Result:
    """One route at one point.

    Attributes:
        route: from where to where.
        backend: what moved the bytes.
        point: size of a request, and how many the point asks for.
        depth: requests that were in flight per directory.
        size_bytes: of the data that the requests went through in turn.
        samples: one for each repeat.
        verified: whether what this point wrote was read back and compared, every byte.
    """

    route: Route
    backend: str
    point: Point
    depth: int
    size_bytes: int
    samples: Sequence[Sample]
    verified: bool

    @property
    def median_gb_s(self) -> float:
        """Of the repeats; GB = 1e9 bytes."""
        return statistics.median(self._gb_s)

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds of the whole process for each GB."""
        num_bytes = sum(sample.num_bytes for sample in self.samples)
        return sum(sample.cpu_seconds for sample in self.samples) / num_bytes * _GB

    @property
    def latency_ms(self) -> dict[str, float]:
        """Percentiles over the requests of all repeats."""
        latencies = [latency for sample in self.samples for latency in sample.latencies_seconds]
        return {f"p{part}": float(np.percentile(latencies, part, method="inverted_cdf")) * 1e3 for part in (50, 99)}

    @property
    def spread_gb_s(self) -> tuple[float, float]:
        """The slowest and the fastest repeat."""
        return min(self._gb_s), max(self._gb_s)

    def as_document(self) -> dict[str, Any]:
        """The figures as JSON holds them."""
        slowest, fastest = self.spread_gb_s
        document = {
            "route": self.route.name,
            "backend": self.backend,
            "block_size": self.point.block_bytes,
            "queue_depth": self.depth,
            "size": self.size_bytes,
            "repeats": len(self.samples),
            "gb_s": {"median": self.median_gb_s, "min": slowest, "max": fastest},
            "cpu_s_per_gb": self.cpu_s_per_gb,
            "latency_ms": self.latency_ms,
            "verified": self.verified,
        }
        if len(self.route.directions) > 1:
            document["gb_s_each"] = {
                direction.name.lower(): statistics.median(
                    sample.lane_bytes[index] / sample.seconds / _GB for sample in self.samples
                )
                for index, direction in enumerate(self.route.directions)
            }
        return document

    @property
    def _gb_s(self) -> list[float]:
        return [sample.bytes_per_second / _GB for sample in self.samples]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found out.

    Attributes:
        paths: what is under each directory.
        choices: for each directory, which I/O backend and why.
        device: name of the device tier.
        results: in the order of routes and points.
        warnings: what may make the figures misleading.
        seconds: how long it took.
    """

    paths: Sequence[PathFacts]
    choices: Sequence[Choice]
    device: str
    results: Sequence[Result]
    warnings: Sequence[str]
    seconds: float

    def best(self) -> dict[str, Result]:
        """The result with the largest median of each route."""
        best: dict[str, Result] = {}
        for result in self.results:
            route = result.route.name
            if route not in best or result.median_gb_s > best[route].median_gb_s:
                best[route] = result
        return best

    def as_document(self) -> dict[str, Any]:
        """The figures as JSON holds them: bytes, GB/s with GB = 1e9 bytes, milliseconds."""
        return {
            "schema": SCHEMA,
            "machine": {
                "cpu": cpu_name(),
                "cores": os.cpu_count(),
                "ram": psutil.virtual_memory().total,
                "kernel": f"{platform.system()} {platform.release()}",
                "python": platform.python_version(),
                "torch": torch.__version__,
                "device": self.device,
                "paths": [
                    {**asdict(facts), "backend": choice.name, "direct": choice.direct, "reasons": list(choice.reasons)}
                    for facts, choice in zip(self.paths, self.choices, strict=True)
                ],
            },
            "seconds": self.seconds,
            "results": [result.as_document() for result in self.results],
            "best": {route: result.as_document() for route, result in self.best().items()},
            "warnings": list(self.warnings),
        }

    def as_table(self, *, plain: bool) -> Table:
        """The figures for a person.

        Args:
            plain: in ASCII.
        """
        table = Table(title="infinity bench", box=box.ASCII if plain else box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("route", no_wrap=True)
        table.add_column("request", justify="right", no_wrap=True)
        table.add_column("GB/s", justify="right", no_wrap=True)
        table.add_column("min-max", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("CPU s/GB", justify="right")
        table.add_column("ms p50/p99", justify="right", no_wrap=True)
        best = self.best()
        for index, result in enumerate(self.results):
            name, slowest_fastest, latency = result.route.name, result.spread_gb_s, result.latency_ms
            first = index == 0 or self.results[index - 1].route.name != name
            last = index + 1 == len(self.results) or self.results[index + 1].route.name != name
            table.add_row(
                name if first else "",
                f"{format_block(result.point)} x {result.depth}",
                _short(result.median_gb_s),
                "-".join(map(_short, slowest_fastest)),
                round(_BAR_WIDTH * result.median_gb_s / best[name].median_gb_s) * ("#" if plain else "█"),
                f"{result.cpu_s_per_gb:.3f}",
                f"{_short(latency['p50'])}/{_short(latency['p99'])}",
                style="bold" if result is best[name] and not plain else None,
                end_section=last,
            )
        verified = "every byte written was read back and compared" if all(r.verified for r in self.results) else ""
        table.caption = (
            f"{format_bytes(self.results[0].size_bytes)} of data, median of {len(self.results[0].samples)}; GB = 1e9 "
            f"bytes; bars: against the route's best; requests in flight per directory; {verified}"
        )
        return table


def format_block(point: Point) -> str:
    """The size of a request."""
    return str(point).partition(" x ")[0]


def _short(figure: float) -> str:
    return f"{figure:.2f}" if figure < 10 else f"{figure:.1f}" if figure < 100 else f"{figure:.0f}"
