"""What the figures mean for training: the settings to take, and how much arithmetic hides the traffic.

The traffic of a step. With AdamW, and nothing kept in host memory from one use to the next, the engine moves for each
parameter (``engine/partition.py`` and ``engine/optimizer.py`` say what is read and written):

=======================  =======================  ===============================
bytes per parameter      fp32                     bf16
=======================  =======================  ===============================
forward reads            parameter 4              parameter 2
backward reads           parameter 4              parameter 2
backward writes          gradient 4               gradient 2
step reads               parameter 4, gradient 4  master 4, gradient 2 and
                         and two moments 8        two moments 8
step writes              parameter 4 and          parameter 2, master 4 and
                         two moments 8            two moments 8
all reads, all writes    24, 16                   18, 16
=======================  =======================  ===============================

What is written meets as many bytes being read, at the bandwidth measured for both at once; the other reads go at that
of reading alone. What stays in host memory is not moved, so this is the most that a step moves.

Arithmetic. A parameter costs 2 operations per token forward and 4 backward, so T tokens on a device of F operations per
second take 6 N T / F seconds for N parameters. Traffic of s seconds per parameter takes s N, hence T >= s F / 6, for
any N. It is a lower bound: attention, recomputation and the optimizer itself are left out, and so is whatever cannot
be overlapped.

The setting. One that was measured on more of the routes comes first, since a step needs them all; then what moves a
step's bytes soonest; and among those that noise cannot tell from it, what costs least CPU, more than ``_FREE_BYTES`` in
flight counting as CPU would: up to there an urgent read waits for some tens of milliseconds at most, beyond it longer.
One block in flight at a time is taken only where nothing else was measured: here requests are large, but in training
small shards, flushes and reads would wait for one another.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from infinity.bench.memory import OPTIMIZER_BYTES_PER_PARAMETER
from infinity.bench.results import GB, Report, Result
from infinity.bench.table import format_figure
from infinity.config import BackendName
from infinity.console.formats import format_bytes

READ, WRITE, BOTH = "nvme->host", "host->nvme", "nvme<->host"

OPERATIONS_PER_PARAMETER = 6
"""Of one token: 2 forward, 4 backward."""

EXAMPLE_PARAMETERS = 7e9
"""A model that most people have an idea of."""

_EXAMPLE_TFLOPS = 100.0
_SMALLEST_NOISE, _LARGEST_NOISE = 0.02, 0.1
_FREE_BYTES = 32 << 20
_WEIGHT_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one step moves for each parameter when nothing stays in host memory.

    Attributes:
        read_bytes: from NVMe.
        written_bytes: to NVMe; never more than are read.
        state_bytes: what NVMe holds.
    """

    read_bytes: int
    written_bytes: int
    state_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Both ways."""
        return self.read_bytes + self.written_bytes

    def seconds(self, gb_s: Mapping[str, float]) -> float | None:
        """How long it takes for one parameter, or ``None`` where not enough is known.

        Args:
            gb_s: bandwidth by route. Without one for both directions at once, they are taken to follow one another.
        """
        if READ not in gb_s or not (BOTH in gb_s or WRITE in gb_s):
            return None
        if BOTH in gb_s:
            paired = 2 * self.written_bytes
            return (paired / gb_s[BOTH] + (self.moved_bytes - paired) / gb_s[READ]) / GB
        return (self.read_bytes / gb_s[READ] + self.written_bytes / gb_s[WRITE]) / GB


TRAFFIC: Mapping[str, Traffic] = {
    "fp32": Traffic(read_bytes=24, written_bytes=16, state_bytes=16),
    "bf16": Traffic(read_bytes=18, written_bytes=16, state_bytes=20),
}
"""By ``Config.precision``. NVMe holds the parameter, its gradient (under bf16 also a place for an fp32 sum of several
backwards), the master and two moments."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One setting with what was measured of it, by route."""

    results: Mapping[str, Result]

    @property
    def any_result(self) -> Result:
        return next(iter(self.results.values()))

    @property
    def in_flight_bytes(self) -> int:
        return self.any_result.block_bytes * self.any_result.queue_depth

    @property
    def seconds(self) -> float:
        """For one parameter's step; by whatever is known, where that is not enough."""
        known = {route: result.median_gb_s for route, result in self.results.items()}
        traffic = TRAFFIC["fp32"]
        seconds = traffic.seconds(known)
        return sum(traffic.moved_bytes / gb_s / GB for gb_s in known.values()) if seconds is None else seconds

    @property
    def noise(self) -> float:
        """By what part a figure may be off: half the range of the repeats, within reason."""
        off = max((max(r.gb_s) - min(r.gb_s)) / 2 / r.median_gb_s for r in self.results.values())
        return min(_LARGEST_NOISE, max(_SMALLEST_NOISE, off))

    @property
    def cost(self) -> tuple[float, int, int]:
        cpu = sum(result.cpu_s_per_gb for result in self.results.values())
        return cpu * max(1.0, self.in_flight_bytes / _FREE_BYTES), self.in_flight_bytes, self.any_result.queue_depth


def recommend(report: Report) -> dict[str, Any]:
    """Fields of ``infinity.Config`` to train with; empty where no NVMe was measured.

    The NVMe directories are absolute, so that the fields mean the same wherever they are used. Speeds relative to the
    fastest are given for them where each was measured alone.
    """
    chosen = _choose(result for result in report.results if result.path is None)
    if chosen is None:
        return {}
    result = chosen.any_result
    fields: dict[str, Any] = {
        "nvme": [os.path.abspath(path) for path in report.nvme],  # noqa: PTH100  # Path.absolute() keeps the ".."
        "io_backend": result.backend if result.backend in get_args(BackendName) else "auto",
        "io_num_threads": result.queue_depth,
        "io_block_bytes": result.block_bytes,
    }
    alone = [_choose(result for result in report.results if result.path == path) for path in report.nvme]
    if len(alone) > 1 and None not in alone:
        speeds = [1 / candidate.seconds for candidate in alone if candidate is not None]
        fields["nvme_weights"] = [_round(speed / max(speeds)) for speed in speeds]
    return fields


def _choose(results: Iterable[Result]) -> _Candidate | None:
    """The setting to take, of ours and with bandwidths that are not zero."""
    settings: dict[tuple[str, int, int], dict[str, Result]] = {}
    for result in results:
        if result.route in (READ, WRITE, BOTH) and not result.reference and result.median_gb_s > 0:
            measured = settings.setdefault((result.backend, result.block_bytes, result.queue_depth), {})
            if result.route not in measured or len(result.runs) >= len(measured[result.route].runs):
                measured[result.route] = result
    if not settings:
        return None
    candidates = [_Candidate(measured) for measured in settings.values()]
    widest = max(map(_coverage, candidates))
    candidates = [candidate for candidate in candidates if _coverage(candidate) == widest]
    candidates = [each for each in candidates if each.any_result.queue_depth > 1] or candidates
    fastest = min(candidates, key=lambda candidate: candidate.seconds)
    near = [each for each in candidates if each.seconds <= fastest.seconds * (1 + fastest.noise)]
    return min(near, key=lambda candidate: candidate.cost)


def _coverage(candidate: _Candidate) -> tuple[bool, ...]:
    return tuple(route in candidate.results for route in (READ, BOTH, WRITE))


def _round(share: float) -> float:
    return float(f"{share:.{_WEIGHT_DIGITS}g}")


def closing_words(report: Report) -> str:
    """What the bandwidths of NVMe mean for training, in plain words; empty where it was not measured.

    Where ``report.machine`` has ``"tflops"``, the device's rate of arithmetic by precision in 1e12 operations per
    second, tokens are counted for it; else for each such unit.
    """
    gb_s = {route: result.median_gb_s for route, result in report.best().items() if result.median_gb_s > 0}
    parts = [
        f"{verb} {_in_words(gb_s[route])} GB/s"
        for route, verb in ((READ, "reads"), (WRITE, "writes"), (BOTH, "does both at once at"))
        if route in gb_s
    ]
    if not parts:
        return ""
    sentences = [f"Your NVMe {_join(parts)}."]
    for index, (precision, traffic) in enumerate(TRAFFIC.items()):
        seconds = traffic.seconds(gb_s)
        if seconds is not None:
            sentences.append(_on_traffic(precision, traffic, seconds, _tflops(report, precision), first=index == 0))
    if len(sentences) > 1:
        if "optimizer" in gb_s:
            seconds = OPTIMIZER_BYTES_PER_PARAMETER * EXAMPLE_PARAMETERS / gb_s["optimizer"] / GB
            sentences.append(f"AdamW itself steps such a model in {_duration(seconds)} here.")
        sentences.append(
            "This takes AdamW, nothing kept in host memory between uses (what stays there is not moved), and "
            f"{OPERATIONS_PER_PARAMETER} operations per parameter and token; the number of tokens does not depend on "
            "the size of the model."
        )
    return " ".join(sentences)


def _tflops(report: Report, precision: str) -> float | None:
    rates = report.machine.get("tflops")
    rate = rates.get(precision) if isinstance(rates, Mapping) else None
    return float(rate) if isinstance(rate, (int, float)) and rate > 0 and math.isfinite(rate) else None


def _on_traffic(precision: str, traffic: Traffic, seconds: float, tflops: float | None, *, first: bool) -> str:
    num_tokens = seconds * (tflops or 1.0) * 1e12 / OPERATIONS_PER_PARAMETER
    model = f"A model of {EXAMPLE_PARAMETERS / 1e9:.0f} billion parameters" if first else "The same"
    least = f"hiding it behind arithmetic takes at least {_count(num_tokens)} tokens per step"
    if tflops is not None:
        rate = f"at this device's {_in_words(tflops)} TFLOP/s"
    else:
        many = f"{_count(num_tokens * _EXAMPLE_TFLOPS)} at {_EXAMPLE_TFLOPS:.0f} TFLOP/s"
        rate = f"for each TFLOP/s that your device reaches ({many})"
    return (
        f"{model} in {precision} keeps {format_bytes(traffic.state_bytes * EXAMPLE_PARAMETERS)} there and moves at "
        f"most {format_bytes(traffic.moved_bytes * EXAMPLE_PARAMETERS)} per step ({traffic.read_bytes} bytes read and "
        f"{traffic.written_bytes} written per parameter), which takes {_duration(seconds * EXAMPLE_PARAMETERS)}: "
        f"{least} {rate}."
    )


def _in_words(figure: float) -> str:
    """As in the table, but with the zero before the point."""
    text = format_figure(figure)
    return f"0{text}" if text.startswith(".") else text


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _duration(seconds: float) -> str:
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{_two_digits(seconds / size)} {unit}"
    return f"{_two_digits(seconds)} s"


def _count(number: float) -> str:
    """A number of tokens, rounded up to two digits, with a word for the thousands where there are many."""
    number = max(1.0, number)
    digits = 10.0 ** (math.floor(math.log10(number)) - 1)
    number = math.ceil(number / digits - 1e-9) * digits
    for word, size in ((" billion", 1e9), (" million", 1e6)):
        if number >= size:
            return f"{number / size:,.3g}{word}"
    return f"{math.ceil(number - 1e-9):,}"


def _two_digits(figure: float) -> str:
    return f"{figure:.0f}" if figure >= 99.5 else f"{figure:.2g}"
