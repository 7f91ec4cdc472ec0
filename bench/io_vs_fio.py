"""Our I/O against fio's, interleaved in one run on one file; and matrix products beside each.

Each round gives every contender, at each block size and queue depth and in each direction, a window of time after a
short ramp: our backends, driven from asyncio with requests of 64 MiB as the engine moves shards, and fio with
``--direct=1`` over io_uring and libaio, each with its default buffers and with buffers in huge pages. The order of the
contenders is turned by one in every round, so that a drift of the disk hits all alike. Figures are medians over the
rounds, least and largest in brackets; ratios are of the medians, against the fio with the largest median. CPU time is
that of the whole process for ours, and fio's own account of its job (its start is left out).

Then, in each round: I/O alone, two torch threads multiplying matrices alone, both at once, and the products beside fio.

Huge pages for fio come from ``vm.nr_hugepages``; as root the script reserves them and gives them back. It writes one
file of ``--size`` below ``--nvme`` and removes it. Exit code 1: a target was missed.

    python bench/io_vs_fio.py --nvme DIR [--size 1GiB] [--rounds 7] [--seconds 0.7] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter

from infinity.bench.fio import Fio, find_fio
from infinity.bench.results import GB, Run
from infinity.errors import ConfigError, StorageError
from infinity.io.backend import Backend, File, Priority
from infinity.io.completion import call_in_thread
from infinity.io.memory import HUGE_PAGE_BYTES, allocate, as_bytes
from infinity.io.open import open_backend
from infinity.io.tasks import gather_all
from infinity.machine.memory import cpu_name

MIB = 1 << 20
REQUEST_BYTES = 64 * MIB
SETTINGS = ((4 * MIB, 8), (32 * MIB, 2))
ROUTES = ("nvme->host", "host->nvme", "nvme<->host")
ENGINES = ("io_uring", "libaio")
OURS = ("threads", "uring")
MATRIX = 1024
RAMP_SECONDS = 0.2
COMPUTE_SETTING = (32 * MIB, 2)
COMPUTE_ENGINE = "io_uring"
FIO_START_SECONDS = 0.6
SLACK_SECONDS = 0.1

BANDWIDTH_TARGETS = {"nvme->host": 0.97, "host->nvme": 0.97, "nvme<->host": 0.95}
CPU_TARGET = 1.0
IO_BESIDE_COMPUTE_TARGET = 0.85
COMPUTE_BESIDE_IO_TARGET = 0.95


@dataclass
class Contender:
    """Who moves the bytes, and what it reached: runs by route and setting."""

    name: str
    move: Callable[[str, int, int, float], Awaitable[Run]]
    ours: bool
    runs: dict[tuple[str, int, int], list[Run]] = field(default_factory=dict)

    def gb_s(self, case: tuple[str, int, int]) -> list[float]:
        """Of each round."""
        return [run.num_bytes / run.seconds / GB for run in self.runs[case]]

    def cpu(self, case: tuple[str, int, int]) -> list[float]:
        """CPU seconds for each GB, of each round."""
        return [run.cpu_seconds / run.num_bytes * GB for run in self.runs[case]]


class Ours:
    """Our backends, opened once for each setting, over one file."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._opened: dict[tuple[str, int, int], tuple[Backend, File]] = {}
        self._buffers = [as_bytes(allocate(REQUEST_BYTES)) for _ in range(4)]

    async def open(self, name: str, block_bytes: int, depth: int) -> None:
        """Open a backend at a setting; a ``StorageError`` says why it does not work here."""
        backend, choice = await open_backend(
            name,  # type: ignore[arg-type]
            self._path.parent,
            num_threads=depth,
            block_bytes=block_bytes,
        )
        if not choice.direct:
            await backend.aclose()
            raise ConfigError(f"--nvme: no direct I/O in {self._path.parent}: {'; '.join(choice.reasons)}")
        self._opened[name, block_bytes, depth] = backend, await backend.open_file(self._path)

    async def lay_out(self, name: str) -> None:
        """Write the whole file once: first writes into fresh extents are slower than all later ones."""
        backend, file = next(opened for (owner, *_), opened in self._opened.items() if owner == name)
        await backend.preallocate(file, self._size_bytes)
        for offset in range(0, self._size_bytes, REQUEST_BYTES):
            await backend.write_from(file, offset, self._buffers[0])

    async def move(self, name: str, route: str, block_bytes: int, depth: int, seconds: float) -> Run:
        """Go through the file again and again; what moves in a window of so many seconds, after a ramp."""
        backend, file = self._opened[name, block_bytes, depth]
        half = self._size_bytes // 2
        lanes = {
            "nvme->host": [(False, 0, self._size_bytes, self._buffers)],
            "host->nvme": [(True, 0, self._size_bytes, self._buffers)],
            "nvme<->host": [(False, 0, half, self._buffers[:2]), (True, half, self._size_bytes, self._buffers[2:])],
        }[route]
        stop = False

        async def work(offsets: Iterator[int], write: bool, buffer: memoryview) -> None:
            while not stop:
                if write:
                    await backend.write_from(file, next(offsets), buffer, priority=Priority.DEMAND)
                else:
                    await backend.read_into(file, next(offsets), buffer)

        async def watch() -> Run:
            nonlocal stop
            try:
                await asyncio.sleep(RAMP_SECONDS)
                began, cpu_began, bytes_began = time.perf_counter(), time.process_time(), moved_bytes()
                await asyncio.sleep(seconds)
                return Run(moved_bytes() - bytes_began, time.perf_counter() - began, time.process_time() - cpu_began)
            finally:
                stop = True

        def moved_bytes() -> int:
            statistics = backend.statistics()
            return statistics.read_bytes + statistics.written_bytes

        working = []
        for write, start, stop_offset, buffers in lanes:
            lane = itertools.cycle(range(start, stop_offset, REQUEST_BYTES))
            working += [work(lane, write, buffer) for buffer in buffers]
        watching = asyncio.ensure_future(watch())
        await gather_all(working)
        return await watching

    async def aclose(self) -> None:
        """Close all backends."""
        for backend, _ in self._opened.values():
            await backend.aclose()


class Multiplying:
    """Matrix products on all of torch's threads."""

    def __init__(self) -> None:
        self._factors = [torch.randn(MATRIX, MATRIX) for _ in range(3)]

    def products(self, seconds: float) -> float:
        """Multiply for a while; products per second."""
        began = time.perf_counter()
        num = 0
        while (now := time.perf_counter()) < began + seconds:
            torch.mm(*self._factors[:2], out=self._factors[2])
            num += 1
        return num / (now - began)


@contextlib.contextmanager
def huge_pages(num_pages: int) -> Iterator[str | None]:
    """See to it that so many huge pages are free; yields why there are not, or ``None``."""
    knob = Path("/proc/sys/vm/nr_hugepages")

    def free() -> int:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("HugePages_Free:"))

    former = None
    try:
        missing = num_pages - free()
        if missing > 0:
            former = int(knob.read_text(encoding="ascii"))
            knob.write_text(str(former + missing), encoding="ascii")
        yield None if free() >= num_pages else f"{free()} of {num_pages} huge pages free; set vm.nr_hugepages"
    except PermissionError:
        former = None
        yield f"{free()} of {num_pages} huge pages free, and only root may reserve more (sysctl vm.nr_hugepages)"
    finally:
        if former is not None:
            knob.write_text(str(former), encoding="ascii")


def fio_contenders(fio: Fio, path: Path, size_bytes: int, no_huge_pages: str | None) -> list[Contender]:
    """Fio over each engine, with each kind of buffers."""
    contenders = []
    for engine, huge in itertools.product(ENGINES, (False, True)):
        if huge and no_huge_pages is not None:
            continue

        async def move(
            route: str, block: int, depth: int, seconds: float, engine: str = engine, huge: bool = huge
        ) -> Run:
            return await call_in_thread(
                lambda: fio.run(
                    path,
                    route,
                    block_bytes=block,
                    queue_depth=depth,
                    engine=engine,
                    huge_pages=huge,
                    size_bytes=size_bytes,
                    seconds=seconds,
                )
            )

        contenders.append(Contender(f"fio {engine}{', huge' if huge else ''}", move, ours=False))
    return contenders


async def our_contenders(ours: Ours) -> list[Contender]:
    """Our backends that work here; the first one is the default."""
    contenders = []
    for name in OURS:
        try:
            for block, depth in SETTINGS:
                await ours.open(name, block, depth)
        except StorageError as error:
            print(f"{name}: {error}")
            continue

        async def move(route: str, block: int, depth: int, seconds: float, name: str = name) -> Run:
            return await ours.move(name, route, block, depth, seconds)

        contenders.append(Contender(name, move, ours=True))
    await ours.lay_out(contenders[0].name)
    return contenders


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, least and largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def judge(contenders: Sequence[Contender], case: tuple[str, int, int]) -> dict[str, Any]:
    """Print one block of the table; our ratios against the best fio."""
    route, block, depth = case
    peers = [contender for contender in contenders if not contender.ours]
    best = max(peers, key=lambda peer: statistics.median(peer.gb_s(case)))
    best_gb_s, best_cpu = statistics.median(best.gb_s(case)), statistics.median(best.cpu(case))
    print(f"\n{route}, {block // MIB} MiB x {depth}")
    rows = {}
    for contender in contenders:
        gb_s, cpu = contender.gb_s(case), contender.cpu(case)
        ratio, cpu_ratio = statistics.median(gb_s) / best_gb_s, statistics.median(cpu) / best_cpu
        mark = "<- best fio" if contender is best else ""
        print(
            f"  {contender.name:<22} {spread(gb_s):>18} GB/s {spread(cpu, 4):>25} CPU s/GB"
            f"   {ratio:5.2f} {cpu_ratio:5.2f} {mark}"
        )
        rows[contender.name] = {"gb_s": gb_s, "cpu_s_per_gb": cpu, "ratio": ratio, "cpu_ratio": cpu_ratio}
    return {"route": route, "block_size": block, "queue_depth": depth, "best_fio": best.name, "contenders": rows}


async def beside_compute(
    ours: Contender, fio: Contender, route: str, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Rates of each round: I/O alone, products alone, both at once, and products beside fio."""
    multiplying = Multiplying()
    rates: dict[str, list[float]] = {key: [] for key in ("io", "compute", "io_beside", "compute_beside", "beside_fio")}

    async def io_gb_s(contender: Contender, seconds: float) -> float:
        run = await contender.move(route, *COMPUTE_SETTING, seconds)
        return run.num_bytes / run.seconds / GB

    async def products(delay_seconds: float = 0.0) -> float:
        await asyncio.sleep(delay_seconds)
        return await call_in_thread(lambda: multiplying.products(seconds))

    async def both(contender: Contender, start_seconds: float) -> tuple[float, float]:
        """The products run while the traffic does, however long it takes to start."""
        return await asyncio.gather(
            io_gb_s(contender, seconds + start_seconds + SLACK_SECONDS), products(start_seconds + RAMP_SECONDS)
        )

    await products()
    for _ in range(rounds):
        rates["io"].append(await io_gb_s(ours, seconds))
        before = await products()
        io_beside, compute_beside = await both(ours, 0.0)
        between = await products()
        _, beside_fio = await both(fio, FIO_START_SECONDS)
        rates["compute"].append((before + between) / 2)
        rates["io_beside"].append(io_beside)
        rates["compute_beside"].append(compute_beside)
        rates["beside_fio"].append(beside_fio)
    return rates


async def measure(fio: Fio, path: Path, size_bytes: int, rounds: int, seconds: float) -> tuple[dict[str, Any], bool]:
    """Everything; the document, and whether every target was met by the default backend."""
    ours = Ours(path, size_bytes)
    num_pages = max(block * depth for block, depth in SETTINGS) // HUGE_PAGE_BYTES + 64
    try:
        with huge_pages(num_pages) as no_huge_pages:
            if no_huge_pages is not None:
                print(f"fio with huge pages is left out: {no_huge_pages}")
            contenders = [
                *await our_contenders(ours),
                *fio_contenders(fio, path, size_bytes, no_huge_pages),
            ]
            cases = [(route, block, depth) for block, depth in SETTINGS for route in ROUTES]
            for number in range(rounds):
                turned = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
                for case in cases:
                    for contender in turned:
                        contender.runs.setdefault(case, []).append(await contender.move(*case, seconds))
                print(f"round {number + 1} of {rounds}", file=sys.stderr)
            table = [judge(contenders, case) for case in cases]
            name = f"fio {COMPUTE_ENGINE}"
            peer = max((each for each in contenders if each.name.startswith(name)), key=lambda each: len(each.name))
            beside = {route: await beside_compute(contenders[0], peer, route, rounds, seconds) for route in ROUTES}
    finally:
        await ours.aclose()
    document = {
        "cpu": cpu_name(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "fio": fio.version,
        "size": size_bytes,
        "rounds": rounds,
        "seconds": seconds,
        "results": table,
        "beside_compute": beside,
    }
    return document, targets_met(document, contenders[0].name)


def targets_met(document: dict[str, Any], name: str) -> bool:
    """Print each target and whether it is met."""
    print(f"\ntargets, for {name}:")
    met = []
    for row in document["results"]:
        figures, target = row["contenders"][name], BANDWIDTH_TARGETS[row["route"]]
        case = f"{row['route']}, {row['block_size'] // MIB} MiB x {row['queue_depth']}"
        met.append(check(f"{case}: bandwidth / best fio's", figures["ratio"], target))
        met.append(check(f"{case}: CPU per byte / that fio's", figures["cpu_ratio"], CPU_TARGET, at_most=True))
    for route, rates in document["beside_compute"].items():
        parts = {
            "io": paired(rates["io_beside"], rates["io"]),
            "products": paired(rates["compute_beside"], rates["compute"]),
            "beside fio": paired(rates["beside_fio"], rates["compute"]),
        }
        case = f"{route} beside {MATRIX} x {MATRIX} products"
        met.append(check(f"{case}: I/O / alone", parts["io"], IO_BESIDE_COMPUTE_TARGET))
        met.append(check(f"{case}: products / alone", parts["products"], COMPUTE_BESIDE_IO_TARGET))
        print(f"         (beside fio the products reach {spread(parts['beside fio'])} of their own)")
    return all(met)


def paired(rates: Sequence[float], references: Sequence[float]) -> list[float]:
    """Ratios, round by round."""
    return [rate / reference for rate, reference in zip(rates, references, strict=True)]


def check(name: str, figures: float | list[float], target: float, *, at_most: bool = False) -> bool:
    """Print whether a ratio meets its target."""
    value = statistics.median(figures) if isinstance(figures, list) else figures
    met = value <= target if at_most else value >= target
    shown = spread(figures) if isinstance(figures, list) else f"{figures:.2f}"
    print(f"  {'met   ' if met else 'MISSED'} {name}: {shown}, target {'<=' if at_most else '>='} {target:.2f}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="existing directory for the file")
    parser.add_argument("--size", default="1GiB", help="of the file; default 1GiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.7, help="of each window")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    size_bytes = (
        max(1, TypeAdapter(ByteSize).validate_python(arguments.size) // (4 * REQUEST_BYTES)) * 4 * REQUEST_BYTES
    )
    with tempfile.TemporaryDirectory(dir=arguments.nvme, prefix="io-vs-fio-") as directory:
        path = Path(directory) / "data"
        path.touch(mode=0o600)
        document, met = asyncio.run(measure(find_fio(), path, size_bytes, arguments.rounds, arguments.seconds))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
