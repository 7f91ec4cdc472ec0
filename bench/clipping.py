"""What steps on trial gain where gradients may be clipped: ``speculation="auto"`` against ``"off"``, which waits.

Two engines that differ in ``speculation`` only train the same model on the same batches in turns, round by round, for
each rate of clipped steps: one step that does not count, and then those that do. Losses are multiplied by a large or a
small number, so that exactly the wanted steps are clipped. Times end when ``step()`` returns; what the first counted
step finds still running, the last one leaves behind. Losses, norms and, at the end, all weights are compared bitwise.

    python bench/clipping.py --nvme DIR [--json FILE]
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

import torch
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

SHAPE = GPTShape(num_layers=12, hidden_size=512, num_heads=8, seq_length=128, vocab_size=8192)
MODES: tuple[Literal["auto", "off"], ...] = ("auto", "off")
RATES = (0.0, 0.1, 0.5, 1.0)
"""Which part of the steps is clipped."""

MAX_GRAD_NORM = 1.0
SMALL, LARGE = 1e-4, 1e4
"""What losses are multiplied by, so that gradients stay below the norm or exceed it."""

STATE_BYTES, FILE_BYTES, MEMORY_BYTES = 16, 32, 48
"""Per parameter: weights, gradients and states; an engine's files; memory for the making of two engines."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One step.

    Attributes:
        seconds: from the end of the step before to the end of this one.
        read_bytes: from NVMe.
        written_bytes: to NVMe.
    """

    seconds: float
    read_bytes: int
    written_bytes: int


class Runner:
    """An engine, its samples, and what it has computed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.samples: list[Sample] = []
        self.computed: list[torch.Tensor] = []
        self._num_steps = 0

    def train(self, source: Iterator[Batch], rate: float, num_steps: int) -> None:
        """A step that does not count, and some that do."""
        for number in range(num_steps + 1):
            begun = time.perf_counter()
            tokens, targets = next(source)
            loss = self.engine(tokens, targets)
            self.engine.backward(loss * (LARGE if is_clipped(self._num_steps, rate) else SMALL))
            self.engine.step()
            seconds = time.perf_counter() - begun
            self._num_steps += 1
            step, norm = self.engine.last_step, self.engine.grad_norm
            assert step is not None
            assert norm is not None
            self.computed += [loss.detach(), norm]
            if number:
                self.samples.append(Sample(seconds, step.nvme_read_bytes, step.nvme_written_bytes))
        self.engine.synchronize()


def is_clipped(step: int, rate: float) -> bool:
    """Whether a step is one of those that are clipped: as evenly spread as can be, the first one not among the last."""
    return int((step + 1) * rate) > int(step * rate)


def measure(arguments: argparse.Namespace, scratch: Path) -> tuple[dict[str, Any], list[Check]]:
    """Train in turns, rate by rate; the document and the bars."""
    shape = shape_of(arguments)
    parameters = num_parameters(shape)
    require_room(scratch, disk_bytes=2 * FILE_BYTES * parameters, memory_bytes=MEMORY_BYTES * parameters)
    document: dict[str, Any] = {
        "machine": machine(),
        "model": shape_fields(shape),
        "parameters": parameters,
        "precision": arguments.precision,
        "work": str(arguments.work),
        "ram_share": arguments.ram_share,
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "rows": [],
    }
    print_head(document)
    for rate in RATES:
        for row in _measure_rate(arguments, shape, rate, scratch):
            document["rows"].append(row)
            print_row(row)
    return document, checks_of(document)


def _measure_rate(arguments: argparse.Namespace, shape: GPTShape, rate: float, scratch: Path) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        runners = {mode: Runner(make_engine(shape, _config(arguments, shape, Path(directory), mode))) for mode in MODES}
        sources = {mode: batches(arguments.work, shape.vocab_size) for mode in MODES}
        try:
            for number in range(arguments.rounds):
                for mode in MODES if number % 2 else MODES[::-1]:
                    runners[mode].train(sources[mode], rate, arguments.steps)
            are_equal = _are_equal(runners["auto"], runners["off"])
        finally:
            for runner in runners.values():
                runner.engine.close()
    others = runners["off"].samples
    rows = []
    for mode, runner in runners.items():
        ratios = [one.seconds / other.seconds for one, other in zip(runner.samples, others, strict=True)]
        rows.append(
            {
                "rate": rate,
                "speculation": mode,
                "step_seconds": spread([sample.seconds for sample in runner.samples]),
                "over_waiting": spread(ratios),
                "mean_seconds": statistics.fmean(sample.seconds for sample in runner.samples),
                "read_bytes": statistics.fmean(sample.read_bytes for sample in runner.samples),
                "written_bytes": statistics.fmean(sample.written_bytes for sample in runner.samples),
                "num_trial_steps": runner.engine.num_trial_steps,
                "num_undone_steps": runner.engine.num_undone_steps,
                "same": are_equal,
            }
        )
    return rows


def _are_equal(one: Runner, other: Runner) -> bool:
    same = all(map(torch.equal, one.computed, other.computed))
    weights, others = one.engine.state_dict(), other.engine.state_dict()
    return same and all(torch.equal(weights[name], others[name]) for name in weights)


def _config(arguments: argparse.Namespace, shape: GPTShape, scratch: Path, mode: Literal["auto", "off"]) -> Config:
    directory = scratch / mode
    directory.mkdir()
    config = Config(
        device="cpu",
        precision=arguments.precision,
        nvme=directory,
        max_grad_norm=MAX_GRAD_NORM,
        accumulation_steps=1,
        speculation=mode,
    )
    hbm, ram = smallest_budgets(shape, config)
    wanted = int(arguments.ram_share * STATE_BYTES * num_parameters(shape))
    return config.model_copy(update={"hbm": 2 * hbm, "ram": max(wanted, 3 * ram // 2)})


def checks_of(document: dict[str, Any]) -> list[Check]:
    """The only bar is that numbers are the same; how much is gained depends on the machine."""
    same = all(row["same"] for row in document["rows"])
    return [Check("losses, norms and weights bitwise those of waiting", float(same), ">=", 1.0, "of all")]


def print_head(document: dict[str, Any]) -> None:
    """What is measured, and the head of the table."""
    print(
        f"{document['parameters'] / 1e6:.1f}M parameters, {document['precision']}, host memory for "
        f"{document['ram_share']:.0%} of the state; {document['work']} tokens; {document['rounds']} rounds of "
        f"{document['steps_per_round']} steps; medians (least-largest) of steps, and of steps over those of waiting"
    )
    columns = f"{'step s':>20}{'mean':>7}{'x waiting':>20}{'read':>8}{'written':>8} GB{'tried':>8}{'undone':>8}"
    print(f"{'clipped':>8}  {'speculation':12}{columns}", flush=True)


def print_row(row: dict[str, Any]) -> None:
    """One rate and mode."""
    step, ratio = row["step_seconds"], row["over_waiting"]
    print(
        f"{row['rate']:>8.0%}  {row['speculation']:12}"
        f"{step['median']:8.2f} ({step['min']:.2f}-{step['max']:.2f}){row['mean_seconds']:7.2f}"
        f"{ratio['median']:8.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"
        f"{row['read_bytes'] / GB:8.3f}{row['written_bytes'] / GB:8.3f}   "
        f"{row['num_trial_steps']:>8}{row['num_undone_steps']:>8}",
        flush=True,
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory on the disk to measure")
    add_model_flags(parser, SHAPE)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--work", type=parse_work, default=Work(4, 128), help="BATCHxSEQ of a step")
    parser.add_argument("--ram-share", type=float, default=0.5, help="host memory, as a share of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9, help="counted steps of each turn")
    parser.add_argument("--json", type=Path, help="write the document here")
    return parse_flags(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print; 0 where the numbers are the same, else 1."""
    arguments = parse(argv)
    end_on_sigterm()
    with tempfile.TemporaryDirectory(dir=arguments.nvme, prefix="infinity-clipping-") as scratch:
        document, checks = measure(arguments, Path(scratch))
    return report(document, checks, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
