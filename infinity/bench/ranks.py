"""``Ranks``: how fast several ranks bring a tensor together, and reduce and scatter one.

The figure is *algorithm bandwidth*: bytes of the whole tensor, all ranks' parts together, over the time that the
slowest rank took; it is what a step waits for. (*Bus bandwidth*, what each link carries, is (n - 1) / n of it for
both collectives among n ranks.) CPU seconds are those of all ranks' processes.

All ranks run the same: rank 0 decides, and its word is exchanged. Each timed run begins at a barrier and is long enough
that the ranks' small differences in leaving it do not matter. Every case is checked once, every byte, before it is
timed; its contents make every sum exact in every dtype.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinity.bench.passes import InterruptedRunError
from infinity.bench.pattern import Pattern
from infinity.bench.results import Latency, Result, Run
from infinity.engine.collectives import Collectives
from infinity.engine.meeting import open_process_group, started_as_ranks
from infinity.errors import RanksError
from infinity.io.memory import allocate
from infinity.machine.memory import available_memory_bytes

ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"

_MIB = 1 << 20
_PART_BYTES = (_MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB)
"""One rank's part of the tensor: from a small unit's to a large embedding's."""

_KINDS = ((ALL_GATHER, torch.uint8), (REDUCE_SCATTER, torch.float32), (REDUCE_SCATTER, torch.bfloat16))
"""What is measured; a gather moves bytes, whatever they mean."""

_MEMORY_FRACTION = 4
"""Ranks of one host take at most one part in so many of its free memory, all together."""

_MAX_CALLS = 1000
_PIECE_ELEMENTS = 1 << 20
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_LARGEST_DIGIT = 3
_EXACT = 256
"""Up to here bf16 holds every whole number."""


@dataclass(frozen=True, slots=True)
class Case:
    """One collective, of parts of one size and dtype; ``uint8`` where values do not matter."""

    route: str
    part_bytes: int
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Of one rank's part."""
        return self.part_bytes // self.dtype.itemsize

    @property
    def values(self) -> str:
        """What is summed, in words; empty where nothing is."""
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(self.dtype, "")

    def __str__(self) -> str:
        return f"{self.route}, {self.part_bytes >> 20} MiB {self.values} per rank".replace("  ", " ")


class Ranks:
    """The ranks of this job, as the benchmark sees them; made by ``open_ranks``.

    Args:
        collectives: what they do together.

    Attributes:
        rank: this rank's number.
        num_ranks: how many there are; at least two.
        transport: the way between them, in words.
        collectives: what they do together.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.rank = collectives.rank
        self.num_ranks = collectives.num_ranks
        self.transport = collectives.transport
        self._collectives = collectives

    @property
    def place(self) -> tuple[int, int, int, str]:
        """For ``nvme_for_rank``, with directories that ranks share: the benchmark makes its own in them."""
        return self.rank, 1, self._collectives.local_rank, self._collectives.hosts[self.rank]

    def as_document(self) -> dict[str, Any]:
        """Who they are and how they are joined, as JSON holds it."""
        return {
            "num_ranks": self.num_ranks,
            "hosts": list(self._collectives.hosts),
            "transport": self.transport,
            "reduction": self._collectives.reduction,
        }

    def measure(
        self,
        *,
        seconds: float = 5.0,
        repeats: int = 3,
        largest_bytes: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[str], object] = lambda step: None,
    ) -> list[Result]:
        """Measure all-gather and reduce-scatter; every rank calls it, and blocks until rank 0 does.

        Args:
            seconds: about how long to take; rank 0's counts.
            repeats: timed runs of each case; rank 0's counts.
            largest_bytes: the most memory that one rank may take; the least of all ranks' counts. ``None``: a quarter
                of what is free, shared by the ranks of one host.
            stop: whether this rank has been asked to stop; one rank is enough.
            on_step: told what goes on.

        Returns:
            The same on every rank.

        Raises:
            InterruptedRunError: a rank was asked to stop.
            RanksError: another rank has ended or did not come in time, or a collective gave wrong bytes.
        """
        try:
            self._collectives.barrier("waiting for rank 0 to have measured the other tiers")
            return self._measure(seconds, repeats, largest_bytes or self._memory_share_bytes(), stop, on_step)
        except RanksError:
            if stop():  # who stopped first has gone
                raise InterruptedRunError from None
            raise

    def _measure(
        self,
        seconds: float,
        repeats: int,
        largest_bytes: int,
        stop: Callable[[], bool],
        on_step: Callable[[str], object],
    ) -> list[Result]:
        facts = self._collectives.exchange([seconds, repeats, largest_bytes], "agreeing on what to measure")
        seconds, repeats = float(facts[0][0]), int(facts[0][1])
        sizes = _part_sizes(self.num_ranks, min(int(fact[2]) for fact in facts))
        bench = _Bench(self._collectives, sizes[-1], stop)
        calls: dict[Case, int] = {}
        for route, dtype in _KINDS:
            call_seconds = 0.0
            for before, size in zip([sizes[0], *sizes], sizes, strict=False):
                if call_seconds * size / before * (repeats + 2) > seconds / len(_KINDS) / 2:
                    break  # larger ones would take too long
                case = Case(route, size, dtype)
                on_step(f"checking {case}")
                call_seconds = bench.prepare(case)
                calls[case] = round(seconds / (len(_KINDS) * len(sizes) * repeats) / call_seconds)
        runs: dict[Case, list[Run]] = {case: [] for case in calls}
        latencies: dict[Case, list[float]] = {case: [] for case in calls}
        for repeat in range(repeats):
            for case, num_calls in calls.items():
                on_step(f"{case}, {repeat + 1} of {repeats}")
                run, durations = bench.run(case, max(1, min(_MAX_CALLS, num_calls)))
                runs[case].append(run)
                latencies[case] += durations
        return [self._result(case, runs[case], latencies[case]) for case in calls]

    def _result(self, case: Case, runs: Sequence[Run], durations: Sequence[float]) -> Result:
        return Result(
            route=case.route,
            backend=", ".join(filter(None, (self.transport, case.values))),
            block_bytes=case.part_bytes,
            queue_depth=1,
            size_bytes=case.part_bytes * self.num_ranks,
            runs=runs,
            latency=Latency(*(float(np.percentile(durations, part)) for part in (50, 99))) if durations else None,
            verified=True,
        )

    def _memory_share_bytes(self) -> int:
        """What this rank may take of its host's memory, or of its device's."""
        device = self._collectives.device
        if device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0] // _MEMORY_FRACTION
        hosts = self._collectives.hosts
        return available_memory_bytes() // (_MEMORY_FRACTION * hosts.count(hosts[self.rank]))


class _Bench:
    """Memory for the largest case, and the cases done with it."""

    def __init__(self, collectives: Collectives, part_bytes: int, stop: Callable[[], bool]) -> None:
        self._collectives = collectives
        self._stop = stop
        self._whole = _memory(part_bytes * collectives.num_ranks, collectives.device)
        self._part = _memory(part_bytes, collectives.device)

    def prepare(self, case: Case) -> float:
        """Check a case; the seconds that one call takes."""
        self._fill(case)
        self._call(case)
        self._check(case)
        self._collectives.barrier(f"starting {case}")
        began = time.perf_counter()
        self._call(case)
        return max(float(seconds) for seconds in self._agree(time.perf_counter() - began, f"timing {case}"))

    def run(self, case: Case, num_calls: int) -> tuple[Run, list[float]]:
        """One timed run; and of each call the time of the slowest rank, where a call's return is its end."""
        self._collectives.barrier(f"starting {case}")
        on_cpu = self._collectives.device.type == "cpu"
        began, cpu_began = time.perf_counter(), time.process_time()
        times = [began]
        for _ in range(num_calls):
            self._call(case, wait=on_cpu)
            times.append(time.perf_counter())
        self._synchronize()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        durations = [after - before for before, after in itertools.pairwise(times)]
        ranks = self._agree([seconds, cpu_seconds, durations if on_cpu else []], f"ending {case}")
        run = Run(
            num_bytes=case.part_bytes * self._collectives.num_ranks * num_calls,
            seconds=max(rank[0] for rank in ranks),
            cpu_seconds=sum(rank[1] for rank in ranks),
        )
        return run, [max(durations) for durations in zip(*(rank[2] for rank in ranks), strict=True)]

    def _agree(self, fact: Any, phase: str) -> list[Any]:
        """Exchange a fact, and stop together where one of us has been asked to."""
        answers = self._collectives.exchange([fact, bool(self._stop())], phase)
        if any(stopped for _, stopped in answers):
            raise InterruptedRunError
        return [fact for fact, _ in answers]

    def _call(self, case: Case, *, wait: bool = True) -> None:
        whole, part = self._tensors(case)
        if case.route == ALL_GATHER:
            self._collectives.all_gather_into(whole, part, phase=str(case))
        else:
            self._collectives.reduce_scatter_into(part, whole, phase=str(case))
        if wait:
            self._synchronize()

    def _synchronize(self) -> None:
        if self._collectives.device.type != "cpu":
            torch.accelerator.synchronize(self._collectives.device)

    def _tensors(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        whole_bytes = case.part_bytes * self._collectives.num_ranks
        return self._whole[:whole_bytes].view(case.dtype), self._part[: case.part_bytes].view(case.dtype)

    def _fill(self, case: Case) -> None:
        """This rank's input; and nothing of the kind in the output."""
        whole, part = self._tensors(case)
        rank, num_ranks = self._collectives.rank, self._collectives.num_ranks
        if case.route == ALL_GATHER:
            whole.zero_()
            part.copy_(_bytes_of(rank, case.part_bytes))
            return
        part.fill_(-1)
        for start, piece in _pieces(whole):
            piece.copy_(torch.from_numpy(digits(start, len(piece), rank, num_ranks)))

    def _check(self, case: Case) -> None:
        whole, part = self._tensors(case)
        rank, num_ranks = self._collectives.rank, self._collectives.num_ranks
        if case.route == ALL_GATHER:
            right = all(
                torch.equal(got.cpu(), _bytes_of(number, case.part_bytes))
                for number, got in enumerate(whole.view(num_ranks, -1))
            )
        else:
            right = all(
                np.array_equal(piece.float().cpu().numpy(), whole_sum(rank * len(part) + start, len(piece), num_ranks))
                for start, piece in _pieces(part)
            )
        if not right:
            raise RanksError(
                f"rank {rank} of {num_ranks}, {case}: the result is wrong over {self._collectives.transport}; do not "
                "train over it"
            )


def _part_sizes(num_ranks: int, memory_bytes: int) -> list[int]:
    """Those that fit; at least the smallest."""
    parts = 2 * num_ranks + 1  # all parts, one part, and what an all-to-all receives
    return [size for size in _PART_BYTES if parts * size <= memory_bytes] or list(_PART_BYTES[:1])


def _memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """As the engine's: huge pages on the CPU."""
    return allocate(num_bytes) if device.type == "cpu" else torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, tensor.numel(), _PIECE_ELEMENTS):
        yield start, tensor[start : start + _PIECE_ELEMENTS]


def _bytes_of(rank: int, num_bytes: int) -> torch.Tensor:
    words = np.empty(num_bytes, np.uint8)
    Pattern(0).fill(words, rank, 0)
    return torch.from_numpy(words)


def digits(start: int, count: int, rank: int, num_ranks: int) -> npt.NDArray[np.float32]:
    """What a rank contributes to a sum: whole numbers from 0 to 3 that look random, shape ``(count,)``.

    Where there are many ranks, each contributes to some places only.
    """
    stride = -(-num_ranks * (_LARGEST_DIGIT + 1) // _EXACT)
    places = np.arange(start, start + count, dtype=np.uint64) + np.uint64(rank)
    numbers = ((places + np.uint64(7919 * rank)) * _FACTOR) >> np.uint64(62)
    return np.where(places % np.uint64(stride) == 0, numbers, 0).astype(np.float32)


def whole_sum(start: int, count: int, num_ranks: int) -> npt.NDArray[np.float32]:
    """What all ranks' ``digits`` add up to: at most 256."""
    total = np.zeros(count, np.float32)
    for rank in range(num_ranks):
        total += digits(start, count, rank, num_ranks)
    return total


@contextlib.contextmanager
def open_ranks(device: torch.device, *, timeout_seconds: float = 60.0) -> Iterator[Ranks | None]:
    """Meet the other ranks where torchrun has started several; ``None`` where it has not.

    Leaving it, with an error or without, ends every wait of the other ranks for this one.

    Args:
        device: its type; on accelerators each rank takes its own.
        timeout_seconds: how long the ranks may be apart when they meet, and in a collective.

    Raises:
        RanksError: not all came.
    """
    if not started_as_ranks():
        yield None
        return
    collectives = open_process_group(device, timeout_seconds=timeout_seconds)
    try:
        yield Ranks(collectives)
    finally:
        collectives.close()
