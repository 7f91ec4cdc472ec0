"""Peak memory and step time with and without recomputation, and with activations on NVMe.

Plain PyTorch, and the engine with the same budgets, each in a process of its own (``infinity_worker.py``), so that each
has its own peak of memory. They take turns: a round trains a few steps of each after one that does not count. Times are
medians over all counted steps, with the least and the largest; losses are compared bitwise with those of plain PyTorch.

What is measured on the CPU is the peak of resident memory (RSS): of a process that has only imported the same modules
(``base``), and of each way to train, which is the base, the budgets ``hbm`` and ``ram``, the activations that stay
where they are computed, and what PyTorch's kernels and allocator take. glibc's threshold for mappings of their own is
set to 256 KiB, since freed blocks in its heap would hide what has gone.

    python bench/activations.py --nvme DIR [--batch 8] [--seq 512] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib_training import machine
from lib_work import GB, Work, add_model_flags, end_on_sigterm, shape_fields, shape_of, spread
from lib_worker import Worker

from infinity.train.model import GPTShape

SHAPE = GPTShape(num_layers=12, hidden_size=512, num_heads=8, seq_length=512, vocab_size=256)
START_SECONDS, STEP_SECONDS = 120.0, 120.0
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10)}


@dataclass
class Way:
    """One way to train.

    Attributes:
        name: as people read it.
        recompute: blocks are recomputed: by the model in plain PyTorch, by ``Config.recompute`` under the engine.
        config: fields of ``Config``; ``None`` for plain PyTorch.
        seconds: of each counted step.
        moved_bytes: read from and written to NVMe in each.
        losses: of all steps.
        peak_bytes: of resident memory.
        pools: the most that each pool held, by name.
    """

    name: str
    recompute: bool
    config: dict[str, Any] | None
    seconds: list[float] = field(default_factory=list)
    moved_bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    pools: dict[str, int] = field(default_factory=dict)

    def settings(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """What the worker is told."""
        shape = shape_of(arguments, recompute=self.recompute and self.config is None)
        config = None if self.config is None else {**self.config, "recompute": self.recompute}
        return {
            "shape": shape_fields(shape), "work": [arguments.batch, arguments.seq], "precision": arguments.precision,
            "fused": True, "config": config,
        }  # fmt: skip

    def train(self, worker: Worker, num_steps: int) -> None:
        """A round."""
        answer = worker.ask({"steps": num_steps + 1, "settling": 1}, seconds=STEP_SECONDS * (num_steps + 1))
        self.seconds += answer["seconds"]
        self.moved_bytes += [sum(both) for both in zip(answer["read_bytes"], answer["written_bytes"], strict=True)]
        self.losses += answer["losses"]
        self.peak_bytes = max(self.peak_bytes, answer["peak_rss_bytes"])
        self.pools = answer["peak_pool_bytes"]


def ways(arguments: argparse.Namespace, scratch: Path) -> Iterator[Way]:
    """What is compared: each engine with a directory of its own."""
    yield Way("plain", False, None)
    yield Way("plain, recompute", True, None)
    for name, fields in {
        "engine": {},
        "recompute": {"recompute": True},
        "offload": {"activation_bytes": arguments.activations},
        "recompute, offload": {"recompute": True, "activation_bytes": arguments.activations},
    }.items():
        directory = scratch / name.replace(", ", "-")
        directory.mkdir()
        recompute = bool(fields.pop("recompute", False))
        budgets = {"device": "cpu", "hbm": arguments.hbm, "ram": arguments.ram, "nvme": str(directory)}
        yield Way(name, recompute, {**budgets, "accumulation_steps": 1, **fields})


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run the rounds and return the document."""
    compared = list(ways(arguments, scratch))
    script = str(Path(__file__).with_name("infinity_worker.py"))
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                Worker(
                    [sys.executable, script, json.dumps(way.settings(arguments))],
                    scratch / "log.txt",
                    seconds=START_SECONDS,
                    environment={**os.environ, **ENVIRONMENT},
                )
            )
            for way in compared
        ]
        for number in range(arguments.rounds):
            turns = list(zip(compared, workers, strict=True))
            for way, worker in turns if number % 2 else turns[::-1]:
                way.train(worker, arguments.steps)
        ready = workers[0].ready
    return {
        "machine": machine(),
        "shape": shape_fields(shape_of(arguments)),
        "work": str(Work(arguments.batch, arguments.seq)),
        "precision": arguments.precision,
        "parameters": ready["parameters"],
        "budgets": {"hbm": arguments.hbm, "ram": arguments.ram, "activation_bytes": arguments.activations},
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "base_bytes": base_bytes(),
        "rows": [
            {
                "name": way.name,
                "step_seconds": spread(way.seconds),
                "peak_bytes": way.peak_bytes,
                "pool_bytes": way.pools,
                "nvme_bytes_per_step": spread([float(each) for each in way.moved_bytes])["median"],
                "same_losses": way.losses == compared[0].losses,
            }
            for way in compared
        ],
    }


def base_bytes() -> int:
    """The peak of a process that has imported what a worker imports."""
    command = "import infinity_worker, lib_worker; print(lib_worker.peak_rss_bytes())"
    with tempfile.TemporaryFile() as output:
        process = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", command],
            {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parent)},
            file_actions=[(os.POSIX_SPAWN_DUP2, output.fileno(), 1)],
        )
        os.waitpid(process, 0)
        output.seek(0)
        return int(output.read())


def print_table(document: dict[str, Any]) -> None:
    """The document for a person."""
    budgets = document["budgets"]
    print(
        f"{document['parameters'] / 1e6:.1f}M parameters, {document['precision']}, {document['work']} tokens, "
        + ", ".join(f"{name}={value}" for name, value in budgets.items())
        + f"; {document['rounds']} rounds of {document['steps_per_round']} steps, medians (least-largest)"
    )
    print(f"a process that has only imported everything: {document['base_bytes'] / GB:.2f} GB")
    print(f"{'':20}{'step s':>22}{'peak RSS GB':>13}{'activations GB':>16}{'NVMe GB':>9}  losses")
    for row in document["rows"]:
        step = row["step_seconds"]
        print(
            f"{row['name']:20}{step['median']:8.2f} ({step['min']:.2f}-{step['max']:.2f})"
            f"{row['peak_bytes'] / GB:13.2f}{row['pool_bytes'].get('activations', 0) / GB:16.2f}"
            f"{row['nvme_bytes_per_step'] / GB:9.2f}  {'bitwise equal' if row['same_losses'] else 'DIFFER'}"
        )


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory on the disk to use")
    add_model_flags(parser, SHAPE)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--hbm", default="32MiB")
    parser.add_argument("--ram", default="128MiB")
    parser.add_argument("--activations", default="4GiB", help="activation_bytes where they go away")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="counted steps per round")
    parser.add_argument("--json", type=Path, help="write the document here")
    arguments = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(dir=arguments.nvme) as scratch:
        document = measure(arguments, Path(scratch))
    print_table(document)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if not all(row["same_losses"] for row in document["rows"]):
        raise SystemExit("losses differ")


if __name__ == "__main__":
    main()
