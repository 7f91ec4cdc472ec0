"""``Figures``: what passes showed, by what they measured, on the way to becoming results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from infinity.bench.passes import Sample
from infinity.bench.results import Latency, Result, Run
from infinity.io.latency import LatencyHistogram


@dataclass(frozen=True, slots=True)
class Row:
    """What makes one result different from others: the fields of ``Result`` without its figures."""

    route: str
    backend: str
    block_bytes: int
    queue_depth: int
    size_bytes: int
    verified: bool | None = None
    reference: bool = False
    path: str | None = None

    def at(self, path: str | None) -> Row:
        """The same in one directory alone."""
        return replace(self, path=path)


@dataclass(slots=True)
class _Repeats:
    runs: list[Run] = field(default_factory=list)
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    peer_latencies: list[Latency] = field(default_factory=list)

    def summary(self) -> Latency | None:
        """Percentiles over all repeats; of a peer, which tells its own, those of its slowest repeat."""
        if self.peer_latencies:
            return max(self.peer_latencies, key=lambda latency: latency.p99_seconds)
        if not len(self.latency):
            return None
        return Latency(self.latency.percentile(50), self.latency.percentile(99))


class Figures:
    """Repeats of many measurements."""

    def __init__(self) -> None:
        self._repeats: dict[Row, _Repeats] = {}

    def without(self, other: Figures) -> Figures:
        """Those whose rows ``other`` does not have."""
        rest = Figures()
        rest._repeats = {row: repeats for row, repeats in self._repeats.items() if row not in other._repeats}
        return rest

    def add(self, row: Row, sample: Sample) -> None:
        """One more repeat of our own."""
        repeats = self._repeats.setdefault(row, _Repeats())
        repeats.runs.append(sample.as_run())
        repeats.latency += sample.latency

    def add_peer(self, row: Row, run: Run, latency: Latency) -> None:
        """One more repeat of a peer."""
        repeats = self._repeats.setdefault(row, _Repeats())
        repeats.runs.append(run)
        repeats.peer_latencies.append(latency)

    def results(self) -> Iterator[Result]:
        """All of them, in the order in which they were first measured."""
        for row, repeats in self._repeats.items():
            yield Result(
                route=row.route,
                backend=row.backend,
                block_bytes=row.block_bytes,
                queue_depth=row.queue_depth,
                size_bytes=row.size_bytes,
                runs=tuple(repeats.runs),
                latency=repeats.summary(),
                verified=row.verified,
                reference=row.reference,
                path=row.path,
            )


def in_order(final: Figures, swept: Figures, routes: tuple[str, ...]) -> list[Result]:
    """Results of one route one after another: ours in the chosen settings, single directories, peers, then the sweep.

    Args:
        final: the repeated measurements.
        swept: short looks; those that ``final`` has as well are left out.
        routes: names in the order in which they are shown.
    """
    ours = sorted(final.results(), key=lambda result: (result.reference, result.path is not None))
    looks = (replace(result, in_passing=True) for result in swept.without(final).results())
    return sorted([*ours, *looks], key=lambda result: routes.index(result.route))
