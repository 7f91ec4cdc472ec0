"""What NVMe moves in a step of several micro-batches: horizontally it grows with their number, vertically not.

Two engines that differ in ``accumulation`` only train the same model on the same micro-batches in turns, round by
round, with each number of micro-batches: one step that does not count, so that the order of uses is known, and then
those that do. Bytes are those of ``engine.last_step``, those of parameters also by themselves; times end when
``step()`` returns. Losses are compared bitwise. The optimizer's steps begin at ``step()``: with ``accumulation_steps``
the number could not change.

The default model is tiny, and its budgets are near the smallest that train it: what is measured is traffic. Nearly all
time is then that of many small reads, so that times say little of a model whose units take milliseconds to read.

    python bench/accumulation.py --nvme DIR [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lib_checks import Check, report, require_room
from lib_training import machine, make_engine, num_parameters, smallest_budgets
from lib_work import (
    GB,
    Batch,
    Work,
    add_model_flags,
    batches,
    end_on_sigterm,
    parse_flags,
    parse_work,
    shape_fields,
    shape_of,
    spread,
)

from infinity.config import Config
from infinity.engine.engine import Engine
from infinity.train.model import GPTShape

SHAPE = GPTShape(num_layers=6, hidden_size=128, num_heads=4, seq_length=32, vocab_size=256)
SCHEDULES: tuple[Literal["horizontal", "vertical"], ...] = ("horizontal", "vertical")
COUNTS = (1, 4, 16)
FLAT = 1.05
FILE_BYTES, MEMORY_BYTES = 24, 12
"""Per parameter, for the room that is asked for: an engine's files; and activations of many micro-batches beside it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One step.

    Attributes:
        seconds: from the end of the step before to the end of this one.
        read_bytes: from NVMe.
        written_bytes: to NVMe.
        param_bytes: those of them that are parameters for forward and backward.
    """

    seconds: float
    read_bytes: int
    written_bytes: int
    param_bytes: int


class Runner:
    """An engine with one schedule, its samples by number of micro-batches, and all its losses."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.samples: dict[int, list[Sample]] = {count: [] for count in COUNTS}
        self.losses: list[float] = []

    def train(self, count: int, micro_batches: Iterator[Batch], num_steps: int) -> None:
        """A step that does not count, and some that do."""
        for number in range(num_steps + 1):
            chosen = [next(micro_batches) for _ in range(count)]
            begun = time.perf_counter()
            losses = self.engine.accumulate(chosen, lambda batch: self.engine(*batch) / count)
            self.engine.step()
            seconds = time.perf_counter() - begun
            self.losses += [loss.item() for loss in losses]
            if number:
                self.samples[count].append(self._sample(seconds))
        self.engine.synchronize()

    def _sample(self, seconds: float) -> Sample:
        step = self.engine.last_step
        assert step is not None
        param_bytes = sum(unit.moved_bytes.get("nvme_read", {}).get("param", 0) for unit in step.units.values())
        return Sample(seconds, step.nvme_read_bytes, step.nvme_written_bytes, param_bytes)


def measure(arguments: argparse.Namespace, scratch: Path) -> tuple[dict[str, Any], list[Check]]:
    """Train in turns; the document and the bars."""
    shape = shape_of(arguments, recompute=arguments.recompute)
    parameters = num_parameters(shape)
    tokens = max(COUNTS) * arguments.work.num_tokens
    activations = 0 if arguments.recompute else tokens * shape.num_layers * shape.hidden_size * 4 * 24
    require_room(
        scratch, disk_bytes=2 * FILE_BYTES * parameters, memory_bytes=MEMORY_BYTES * parameters + 2 * activations
    )
    runners = {
        schedule: Runner(make_engine(shape, _config(arguments, shape, scratch, schedule))) for schedule in SCHEDULES
    }
    sources = {schedule: batches(arguments.work, shape.vocab_size) for schedule in SCHEDULES}
    try:
        state_bytes = runners["vertical"].engine.state_bytes
        for number in range(arguments.rounds):
            for count in COUNTS:
                for schedule in SCHEDULES if number % 2 else SCHEDULES[::-1]:
                    runners[schedule].train(count, sources[schedule], arguments.steps)
    finally:
        for runner in runners.values():
            runner.engine.close()
    document: dict[str, Any] = {
        "machine": machine(),
        "model": shape_fields(shape),
        "parameters": parameters,
        "state_bytes": state_bytes,
        "precision": arguments.precision,
        "micro_batch": str(arguments.work),
        "hbm_bytes": int(runners["vertical"].engine.config.hbm),
        "ram_bytes": int(runners["vertical"].engine.config.ram),
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "rows": [_row(schedule, count, runners[schedule].samples[count]) for count in COUNTS for schedule in SCHEDULES],
        "same_losses": runners["horizontal"].losses == runners["vertical"].losses,
    }
    for row in document["rows"]:
        ratios = zip(
            runners[row["schedule"]].samples[row["micro_batches"]],
            runners["horizontal"].samples[row["micro_batches"]],
            strict=True,
        )
        row["over_horizontal"] = spread([one.seconds / other.seconds for one, other in ratios])
    return document, checks_of(document)


def _config(arguments: argparse.Namespace, shape: GPTShape, scratch: Path, schedule: str) -> Config:
    """Budgets so small that hardly a parameter stays from one use to the next."""
    directory = scratch / schedule
    directory.mkdir()
    config = Config(device="cpu", precision=arguments.precision, nvme=directory, accumulation=schedule)
    hbm, ram = smallest_budgets(shape, config)
    return config.model_copy(update={"hbm": arguments.units * hbm, "ram": ram * 3 // 2})


def _row(schedule: str, count: int, samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "schedule": schedule,
        "micro_batches": count,
        "step_seconds": spread([sample.seconds for sample in samples]),
        "read_bytes": statistics.median(sample.read_bytes for sample in samples),
        "written_bytes": statistics.median(sample.written_bytes for sample in samples),
        "param_bytes": statistics.median(sample.param_bytes for sample in samples),
    }


def checks_of(document: dict[str, Any]) -> list[Check]:
    """The bars: flat where it is to be flat, equal where it is to be equal."""
    param_bytes = {(row["schedule"], row["micro_batches"]): row["param_bytes"] for row in document["rows"]}
    most, few = max(COUNTS), sorted(COUNTS)[1]
    flat = param_bytes["vertical", most] / max(param_bytes["vertical", few], 1)
    saved = param_bytes["vertical", most] / max(param_bytes["horizontal", most], 1)
    return [
        Check(f"vertical: parameters read with {most} micro-batches / with {few}", flat, "<=", FLAT),
        Check(f"{most} micro-batches: parameters read vertically / horizontally", saved, "<=", 2 / most),
        Check("losses of both schedules bitwise equal", float(document["same_losses"]), ">=", 1.0, "of all"),
    ]


def print_table(document: dict[str, Any]) -> None:
    """The document for a person."""
    print(
        f"{document['parameters'] / 1e6:.1f}M parameters, {document['precision']}, state "
        f"{document['state_bytes'] / GB:.2f} GB, hbm {document['hbm_bytes'] / 1e6:.0f} MB, ram "
        f"{document['ram_bytes'] / 1e6:.0f} MB; micro-batches of {document['micro_batch']} tokens; medians of "
        f"{document['rounds']} rounds of {document['steps_per_round']} steps (least-largest)"
    )
    columns = f"{'step s':>20}{'x horizontal':>20}{'read':>8}{'written':>8}{'param':>8} GB"
    print(f"{'micro-batches':>13}  {'schedule':10}{columns}")
    for row in document["rows"]:
        step, ratio = row["step_seconds"], row["over_horizontal"]
        print(
            f"{row['micro_batches']:>13}  {row['schedule']:10}"
            f"{step['median']:8.2f} ({step['min']:.2f}-{step['max']:.2f})"
            f"{ratio['median']:8.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"
            f"{row['read_bytes'] / GB:8.3f}{row['written_bytes'] / GB:8.3f}{row['param_bytes'] / GB:8.3f}"
        )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory on the disk to measure")
    add_model_flags(parser, SHAPE)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--work", type=parse_work, default=Work(1, 32), help="BATCHxSEQ of a micro-batch")
    parser.add_argument("--units", type=int, default=2, help="hbm, in multiples of the smallest that does")
    parser.add_argument("--recompute", action="store_true", help="blocks keep no activations")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="counted steps of each turn")
    parser.add_argument("--json", type=Path, help="write the document here")
    return parse_flags(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print; 0 where every target is met, else 1."""
    arguments = parse(argv)
    end_on_sigterm()
    with tempfile.TemporaryDirectory(dir=arguments.nvme, prefix="infinity-accumulation-") as scratch:
        document, checks = measure(arguments, Path(scratch))
    print_table(document)
    return report(document, checks, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
