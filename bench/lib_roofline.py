"""What ``roofline.py`` measures: phases in which all train in turns, and processes of their own."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib_disk import Bandwidth, measure_bandwidth, median_bandwidth
from lib_training import BlockClock, Runner, Sample, make_engine, make_plain, num_parameters, smallest_budgets
from lib_work import GB, Batch, Work, batches, shape_fields, shape_of, spread
from lib_worker import Worker

from infinity.config import Config
from infinity.engine.engine import Engine
from infinity.store.optimum import Moved, least_moved
from infinity.train.model import GPTShape

LARGE_PARAMETERS = 1_000_000_000
WORK_NAMES = ("few tokens", "balanced", "many tokens")
WORK_SHARES = (0.25, 1.0, 2.5)
"""Forward and backward over the time that the disk is expected to need."""

SWEEP = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
QUICK_SWEEP = (0.0, 0.25, 1.0)
QUARTER = 0.25
EXPECTED_BYTES = 12
"""Read and written per parameter and step where nothing stays: for choosing the work, not for any figure."""

PLAIN_BYTES, STATE_BYTES, FILE_BYTES = 20, 16, 22
"""Per parameter, for the room that is asked for: plain training, an engine's state, and its files."""

OWN_BYTES = 400 << 20
"""Of a process beside its budgets and its activations."""

WORKER_SECONDS = 3600


@dataclass
class Measured:
    """The samples of one runner on one work, round by round."""

    rounds: list[list[Sample]] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """All of them."""
        return list(itertools.chain.from_iterable(self.rounds))

    @property
    def seconds(self) -> float:
        """Median of all steps."""
        return statistics.median(sample.seconds for sample in self.samples)

    def median(self, name: str) -> float:
        """Median of an attribute of ``Sample``."""
        return float(statistics.median(getattr(sample, name) for sample in self.samples))

    def figure(self, name: str) -> float | None:
        """Median of what the engine says itself; ``None`` where it does not."""
        values = [sample.figures[name] for sample in self.samples if name in sample.figures]
        return statistics.median(values) if values else None

    def over(self, other: Measured) -> list[float]:
        """Time over that of another in the same round, for each round."""
        return [
            statistics.median(s.seconds for s in own) / statistics.median(s.seconds for s in base)
            for own, base in zip(self.rounds, other.rounds, strict=True)
        ]


class Setup:
    """What all phases train, and where: a directory of its own for each engine."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self.shape = shape_of(arguments)
        self.precision, self.fused = arguments.precision, not arguments.unfused
        self.num_rounds, self.num_steps = arguments.rounds, arguments.steps
        self.num_parameters = num_parameters(self.shape)
        self._hbm, self._scratch = arguments.hbm, scratch
        self._names = (f"engine-{number}" for number in itertools.count())
        self.least_bytes = smallest_budgets(self.shape, self.config(1))[1]
        with make_engine(self.shape, self.config(self.least_bytes)) as engine:
            self.state_bytes = engine.state_bytes

    def fields(self, ram: int) -> dict[str, Any]:
        """Fields of ``Config``, less the precision, with a new directory."""
        directory = self._scratch / next(self._names)
        directory.mkdir()
        return {
            "device": "cpu", "hbm": self._hbm, "ram": int(ram), "nvme": str(directory), "accumulation_steps": 1,
        }  # fmt: skip

    def config(self, ram: int) -> Config:
        """The same as a ``Config``."""
        return Config(**self.fields(ram), precision=self.precision)

    def budget(self, share: float) -> int:
        """A share of the state, at least what the engine needs."""
        return max(self.least_bytes, int(share * self.state_bytes))

    def disk(self) -> Bandwidth:
        """The disk as it is now."""
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            return measure_bandwidth(Path(directory), self.config(self.least_bytes))

    def memory_bytes(self, budgets: Sequence[int], work: Work) -> float:
        """Of plain training and engines with these budgets, all at the same time."""
        activations = 40 * self.shape.num_layers * self.shape.hidden_size * work.num_tokens  # of one step
        engines = sum(budgets) + len(budgets) * self.config(1).hbm
        return PLAIN_BYTES * self.num_parameters + engines + 2 * activations + OWN_BYTES

    def file_bytes(self, num_engines: int) -> float:
        """Of so many engines."""
        return num_engines * FILE_BYTES * self.num_parameters + GB


def choose_works(setup: Setup) -> dict[str, Work]:
    """The three amounts of work for this machine: by what its arithmetic and its disk can do now."""
    disk = median_bandwidth([setup.disk() for _ in range(3)])
    moved = EXPECTED_BYTES * (1 - QUARTER) * setup.num_parameters
    seconds = disk.seconds(moved, moved)
    clock = BlockClock(setup.shape, setup.precision)
    return {
        name: clock.work(share * seconds, setup.shape.seq_length, most_tokens=64 * setup.shape.seq_length)
        for name, share in zip(WORK_NAMES, WORK_SHARES, strict=True)
    }


@contextlib.contextmanager
def made_runners(setup: Setup, budgets: Mapping[str, int]) -> Iterator[list[Runner]]:
    """Plain PyTorch and an engine for each host budget; closed at the end."""
    with contextlib.ExitStack() as stack:
        runners = [Runner("plain", make_plain(setup.shape, setup.precision, fused=setup.fused))]
        for name, ram in budgets.items():
            runners.append(
                Runner(name, stack.enter_context(make_engine(setup.shape, setup.config(ram), fused=setup.fused)))
            )
        yield runners


@dataclass
class Phase:
    """What a phase measured.

    Attributes:
        measured: samples by work and runner.
        disk: by round.
        used_shares: of its host budget, what each engine used at the end of its third step.
        same_losses: the share of each engine's losses that are plain PyTorch's, bit by bit.
        least: what no policy could undercut with each engine's uses of shards and its host budget.
    """

    measured: dict[str, dict[str, Measured]]
    disk: list[Bandwidth]
    used_shares: dict[str, float]
    same_losses: dict[str, float]
    least: dict[str, Moved] = field(default_factory=dict)


def run_phase(setup: Setup, works: Mapping[str, Work], budgets: Mapping[str, int]) -> Phase:
    """Train all runners on all works, round by round; the first three steps and a step of each turn do not count."""
    phase = Phase({}, [], {}, {})
    sources = {name: batches(work, setup.shape.vocab_size) for name, work in works.items()}
    with made_runners(setup, budgets) as runners:
        for name in works:
            phase.measured[name] = {runner.name: Measured() for runner in runners}
        first = next(iter(sources.values()))
        warming = [next(first) for _ in range(3)]
        for runner in runners:
            runner.train(warming, num_settling=3)
            engine = runner.trainer
            if isinstance(engine, Engine) and engine.config.ram < setup.state_bytes:
                phase.used_shares[runner.name] = engine.usage()["host"].used_bytes / engine.config.ram
        for number in range(setup.num_rounds):
            for name, source in sources.items():
                chosen = [next(source) for _ in range(setup.num_steps + 1)]
                for runner in runners if number % 2 else runners[::-1]:
                    phase.measured[name][runner.name].rounds.append(runner.train(chosen))
            phase.disk.append(setup.disk())
            print(f"  round {number + 1} of {setup.num_rounds}", file=sys.stderr, flush=True)
        last = [next(source)]
        for runner in runners:
            phase.least |= recorded(runner, last)
        for runner in runners[1:]:
            equal = [own == plain for own, plain in zip(runner.losses, runners[0].losses, strict=True)]
            phase.same_losses[runner.name] = sum(equal) / len(equal)
    return phase


def recorded(runner: Runner, batches: Sequence[Batch]) -> dict[str, Moved]:
    """Train, with an engine's uses of shards recorded, and what one such cycle must move at least."""
    if not isinstance(runner.trainer, Engine):
        runner.train(batches)
        return {}
    store = runner.trainer._store
    store.start_recording()
    runner.train(batches)
    return {runner.name: least_moved(store.stop_recording(), int(runner.trainer.config.ram))}


def phase_rows(setup: Setup, phase: Phase, works: Mapping[str, Work]) -> list[dict[str, Any]]:
    """A row for each work and runner."""
    disk = median_bandwidth(phase.disk)
    rows = []
    for work_name, by_runner in phase.measured.items():
        plain = by_runner["plain"]
        for name, measured in by_runner.items():
            read, written = measured.median("read_bytes"), measured.median("written_bytes")
            disk_seconds = disk.seconds(read, written)
            roofline = max(plain.seconds, disk_seconds)
            rows.append({
                "work": work_name,
                "tokens": works[work_name].num_tokens,
                "batch_x_seq": str(works[work_name]),
                "name": name,
                "num_steps": len(measured.samples),
                "step_seconds": spread([sample.seconds for sample in measured.samples]),
                "over_plain": spread(measured.over(plain)),
                "read_bytes": read,
                "written_bytes": written,
                "disk_seconds": disk_seconds,
                "roofline_seconds": roofline,
                "over_roofline": measured.seconds / roofline,
                "read_bytes_per_parameter": read / setup.num_parameters,
                "written_bytes_per_parameter": written / setup.num_parameters,
                "least_bytes": sum(phase.least.get(name, ())),
                "same_losses": phase.same_losses.get(name, 1.0),
                **{
                    figure: measured.figure(figure)
                    for figure in ("stall_seconds", "optimizer_seconds", "compute_seconds", "overlap_share", "achieved")
                },
            })  # fmt: skip
    return rows


def phase_document(setup: Setup, phase: Phase, works: Mapping[str, Work], budgets: Mapping[str, int]) -> dict[str, Any]:
    """What a phase measured, for JSON."""
    disk = {route: spread([getattr(one, route) for one in phase.disk]) for route in ("read", "write", "both")}
    return {
        "budgets": dict(budgets),
        "disk_gb_s": disk,
        "used_shares_after_3_steps": phase.used_shares,
        "rows": phase_rows(setup, phase, works),
    }


def worker_command(setup: Setup, shape: GPTShape, work: Work, config: dict[str, Any] | None) -> list[str]:
    """A process of its own that trains."""
    settings = {
        "shape": shape_fields(shape),
        "work": [work.batch_size, work.seq_length],
        "precision": setup.precision,
        "fused": setup.fused,
        "config": config,
    }
    return [sys.executable, str(Path(__file__).with_name("infinity_worker.py")), json.dumps(settings)]


def run_memory(setup: Setup, work: Work, budgets: Mapping[str, int], log: Path) -> dict[str, Any]:
    """The peak of memory of each way to train, from its first step on, in a process of its own."""
    rows = {}
    for name, ram in {"plain": None, **budgets}.items():
        config = None if ram is None else setup.fields(ram)
        with Worker(worker_command(setup, setup.shape, work, config), log, seconds=WORKER_SECONDS) as worker:
            answer = worker.ask({"steps": 4, "settling": 1}, seconds=WORKER_SECONDS)
        rows[name] = {
            "peak_rss_bytes": answer["peak_rss_bytes"],
            "start_rss_bytes": worker.ready["start_rss_bytes"],
            "peak_pool_bytes": answer["peak_pool_bytes"],
        }
    return rows


def run_linear(setup: Setup, work: Work, log: Path) -> dict[str, Any]:
    """This model and one of about 1B parameters, the same but for its layers, with the same budgets, in turns.

    With recomputation, so that what activations take is known: the input of each block.
    """
    small = GPTShape(**{**shape_fields(setup.shape), "recompute": True})
    per_layer = setup.num_parameters / small.num_layers
    large = GPTShape(**{**shape_fields(small), "num_layers": round(LARGE_PARAMETERS / per_layer)})
    shapes = {"small": small, "large": large}
    document: dict[str, Any] = {"ram": setup.least_bytes, "rows": {}}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in shapes}
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(
                Worker(worker_command(setup, shape, work, setup.fields(setup.least_bytes)), log, seconds=WORKER_SECONDS)
            )
            for name, shape in shapes.items()
        }
        for worker in workers.values():
            worker.ask({"steps": 3, "settling": 3}, seconds=WORKER_SECONDS)
        for number in range(-(-7 // setup.num_steps)):
            for name in list(shapes)[:: 1 if number % 2 else -1]:
                request = {"steps": setup.num_steps + 1, "settling": 1}
                answers[name].append(workers[name].ask(request, seconds=WORKER_SECONDS))
            print(f"  linear: round {number + 1}", file=sys.stderr, flush=True)
        for name, shape in shapes.items():
            seconds = [value for answer in answers[name] for value in answer["seconds"]]
            last, parameters = answers[name][-1], workers[name].ready["parameters"]
            activations = 2 * shape.num_layers * work.num_tokens * shape.hidden_size
            document["rows"][name] = {
                "parameters": parameters,
                "layers": shape.num_layers,
                "step_seconds": spread(seconds),
                "nanoseconds_per_parameter": statistics.median(seconds) / parameters * 1e9,
                "peak_rss_bytes": last["peak_rss_bytes"],
                "activation_bytes": activations,
                "peak_pool_bytes": last["peak_pool_bytes"],
            }
    return document
