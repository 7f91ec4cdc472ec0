"""Does a model of 3B parameters train on this machine in 4 GiB of memory? Two real steps, and what they took.

The model is made under ``deferred_init``, so no more than one parameter of it is ever whole in memory; parameters,
gradients and optimizer states live on NVMe, and activations inside blocks are computed again in backward. Memory is the
peak of this process from its first to its last moment, as the kernel counts it.

    python bench/large_model.py --nvme DIR [--log FILE]

The exit code is 1 where the peak is above the bar, or a loss is not a number.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

from lib_checks import Check, print_checks, require_room
from lib_training import machine, make_engine, num_parameters
from lib_work import Work, add_model_flags, batches, end_on_sigterm, shape_of
from lib_worker import peak_rss_bytes

from infinity.config import Config
from infinity.console.formats import format_bytes
from infinity.engine.engine import Engine
from infinity.train.model import GPTShape

SHAPE = GPTShape(num_layers=38, hidden_size=2560, num_heads=20, seq_length=64, vocab_size=256, recompute=True)
BAR_BYTES = 4 << 30
FILE_BYTES = 20
"""Of files for each parameter, in bf16."""


class Log:
    """Lines with the time since the start, printed and written to a file; a context manager that closes it."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._begun = time.perf_counter()

    def line(self, text: str) -> None:
        """One line, visible at once."""
        stamped = f"[{time.perf_counter() - self._begun:7.1f} s] {text}"
        print(stamped, flush=True)
        self._file.write(stamped + "\n")
        self._file.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.line(f"ended by {type(error).__name__}: {error}")
        self._file.close()


def train(engine: Engine, work: Work, vocab_size: int, num_steps: int, log: Log) -> list[float]:
    """Train so many steps with a line for each phase of each; the losses."""
    losses = []
    for number, (tokens, targets) in enumerate(itertools.islice(batches(work, vocab_size), num_steps), start=1):
        marks = [time.perf_counter()]
        loss = engine(tokens, targets)
        marks.append(time.perf_counter())
        log.line(f"step {number}: forward {marks[1] - marks[0]:.1f} s, loss {loss.item():.4f}; {memory()}")
        engine.backward(loss)
        marks.append(time.perf_counter())
        log.line(f"step {number}: backward {marks[2] - marks[1]:.1f} s; {memory()}")
        engine.step()
        engine.synchronize()
        marks.append(time.perf_counter())
        losses.append(loss.item())
        step = engine.last_step
        assert step is not None
        log.line(
            f"step {number}: rest of the optimizer {marks[3] - marks[2]:.1f} s, {marks[3] - marks[0]:.1f} s in all; "
            f"read {format_bytes(step.nvme_read_bytes)}, wrote {format_bytes(step.nvme_written_bytes)}; {memory()}"
        )
    return losses


def memory() -> str:
    """The peak so far, for a line."""
    return f"peak RSS {peak_rss_bytes() / (1 << 30):.2f} GiB"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory with room for the state")
    add_model_flags(parser, SHAPE)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--hbm", default="640MiB", help="device budget: gathered parameters")
    parser.add_argument("--ram", default="1536MiB", help="host budget: shards")
    parser.add_argument("--log", type=Path, default=Path("large_model.txt"), help="write the lines here too")
    arguments = parser.parse_args(argv)
    if not arguments.nvme.is_dir():
        parser.error(f"--nvme: {arguments.nvme} is not a directory; give an existing one")
    if arguments.hidden % arguments.heads:
        parser.error(f"--hidden: expected a multiple of --heads {arguments.heads}, got {arguments.hidden}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and hold the peak against the bar."""
    arguments = parse(argv)
    end_on_sigterm()
    shape = shape_of(arguments, recompute=True)
    parameters = num_parameters(shape)
    work = Work(arguments.batch, shape.seq_length)
    require_room(arguments.nvme, disk_bytes=FILE_BYTES * parameters + 1e9, memory_bytes=BAR_BYTES)
    with (
        Log(arguments.log) as log,
        tempfile.TemporaryDirectory(dir=arguments.nvme, prefix="infinity-large-") as scratch,
    ):
        log.line(f"{parameters / 1e9:.3f}B parameters: {shape}; {work.num_tokens} tokens per step; {machine()}")
        config = Config(
            device="cpu",
            hbm=arguments.hbm,
            ram=arguments.ram,
            nvme=scratch,
            precision="bf16",
            accumulation_steps=1,
        )
        log.line(f"budgets: hbm {format_bytes(config.hbm)}, ram {format_bytes(config.ram)}; {memory()}")
        with make_engine(shape, config) as engine:
            log.line(f"initialized: {format_bytes(engine.state_bytes)} of state on NVMe; {memory()}")
            losses = train(engine, work, shape.vocab_size, arguments.steps, log)
            for name, usage in engine.usage().items():
                log.line(f"{name}: peak {format_bytes(usage.peak_bytes)} of {format_bytes(usage.budget_bytes)}")
        finite = sum(math.isfinite(loss) for loss in losses) / len(losses)
        checks = [
            Check("peak RSS", peak_rss_bytes() / (1 << 30), "<=", BAR_BYTES / (1 << 30), "GiB"),
            Check("losses that are numbers", finite, ">=", 1.0, "of all"),
        ]
        log.line(f"peak RSS {checks[0].value:.2f} GiB, the bar is {checks[0].bar:.0f} GiB; losses {losses}")
    print_checks(checks)
    return 0 if all(check.met for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
