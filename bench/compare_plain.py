"""Step time of plain PyTorch, of everything in RAM and of everything on NVMe, interleaved in one run.

Each round trains a few steps of each of the three, so that a drift of the machine hits all alike; the figures are
medians over rounds, with the least and the largest. The disk's bandwidth is measured in every round too, through the
same tier: reads alone, writes alone, and both at once. What the two kinds of time allow is

    roofline = max(plain step, NVMe bytes of a step / NVMe bandwidth for that mix)

and the last column is step time over roofline. Losses of the three are compared bitwise.

    python bench/compare_plain.py --nvme DIR [--precision bf16] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from infinity.config import Config
from infinity.engine.engine import Engine
from infinity.io.backend import Priority
from infinity.io.memory import allocate, as_bytes
from infinity.io.tasks import gather_all
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey
from infinity.train.settings import TrainSettings
from infinity.train.trainer import Trainer, make_trainer

SHARD_BYTES = 16 << 20
NUM_SHARDS = 16
GB = 1e9


@dataclass
class Runner:
    """One of the three, with what was measured of it."""

    name: str
    trainer: Trainer
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    nvme_bytes: list[int] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    stall_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    _step: int = 0

    def round(self, batches: list[tuple[torch.Tensor, torch.Tensor]], *, warm_up: bool) -> None:
        """Train on ``batches`` and keep the mean step time, unless it is for warming up."""
        begun = time.perf_counter()
        for tokens, targets in batches:
            loss = self.trainer(tokens, targets)
            self.trainer.backward(loss)
            self.trainer.step()
            self.losses.append(loss.item())
            if (step := self.trainer.last_step) is not None and not warm_up:
                self.read_bytes.append(step.nvme_read_bytes)
                self.nvme_bytes.append(step.nvme_read_bytes + step.nvme_written_bytes)
                self.stall_seconds.append(step.stall_seconds)
                self.optimizer_seconds.append(step.optimizer_seconds)
        if isinstance(self.trainer, Engine):
            self.trainer.synchronize()  # what it still writes is its own time, not the next one's
        if not warm_up:
            self.step_seconds.append((time.perf_counter() - begun) / len(batches))


def batches(settings: TrainSettings) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random tokens, the same for all three."""
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        tokens = torch.randint(0, 256, (settings.batch_size, settings.seq_length + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


async def disk_gb_s(nvme: Path, config: Config) -> dict[str, float]:
    """GB/s of reads, of writes, and of both at once, over shards of 16 MiB with eight in flight."""
    tier = await NvmeTier.open(
        [nvme],
        capacity_bytes=2 * NUM_SHARDS * SHARD_BYTES,
        backend_name=config.io_backend,
        num_threads=config.io_num_threads,
        block_bytes=config.io_block_bytes,
        weights=config.nvme_weights,
    )
    try:
        buffers = [as_bytes(allocate(SHARD_BYTES)) for _ in range(8)]
        old = [ShardKey(0, number, "old") for number in range(NUM_SHARDS)]
        new = [ShardKey(0, number, "new") for number in range(NUM_SHARDS)]

        async def move(write: bool, keys: list[ShardKey], lane: int, lanes: int) -> None:
            for key in keys[lane::lanes]:
                if write:
                    await tier.write(key, buffers[lane], priority=Priority.DEMAND)
                else:
                    await tier.read(key, buffers[len(buffers) - 1 - lane])

        async def timed(*directions: tuple[bool, list[ShardKey]]) -> float:
            lanes = len(buffers) // len(directions)
            begun = time.perf_counter()
            await gather_all(move(write, keys, lane, lanes) for write, keys in directions for lane in range(lanes))
            return len(directions) * NUM_SHARDS * SHARD_BYTES / GB / (time.perf_counter() - begun)

        for keys in (old, new):  # initialised once: first writes into reserved space are slower
            await timed((True, keys))
        return {
            "read": await timed((False, old)),
            "write": await timed((True, new)),
            "both": await timed((False, old), (True, new)),
        }
    finally:
        await tier.aclose()


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds and return the document."""
    common = {
        "layers": arguments.layers, "hidden": arguments.hidden, "heads": arguments.heads,
        "batch": arguments.batch, "seq": arguments.seq, "seed": 0,
    }  # fmt: skip
    settings, plain = TrainSettings(**common), TrainSettings(**common, plain=True)
    nvme = Config(
        device="cpu", hbm=arguments.hbm, ram=arguments.ram, nvme=arguments.nvme, precision=arguments.precision
    )
    ram = Config(device="cpu", hbm="4GiB", ram="16GiB", precision=arguments.precision)
    device = torch.device("cpu")
    runners = [
        Runner("plain", make_trainer(plain, nvme, device)),
        Runner("ram", make_trainer(settings, ram, device)),
        Runner("nvme", make_trainer(settings, nvme, device)),
    ]
    disk: dict[str, list[float]] = {"read": [], "write": [], "both": []}
    source = batches(settings)
    try:
        state_bytes = runners[2].trainer.state_bytes
        for number in range(arguments.rounds + 1):
            chosen = [next(source) for _ in range(arguments.steps)]
            for runner in runners if number % 2 else runners[::-1]:
                runner.round(chosen, warm_up=number == 0)
            measured = asyncio.run(disk_gb_s(arguments.disk, nvme))
            for route, value in measured.items():
                disk[route].append(value)
    finally:
        for runner in runners:
            runner.trainer.close()
    return report(arguments, runners, disk, state_bytes)


def report(
    arguments: argparse.Namespace, runners: list[Runner], disk: dict[str, list[float]], state_bytes: int
) -> dict[str, Any]:
    """The document: medians, ratios and the roofline of each."""
    plain_seconds = statistics.median(runners[0].step_seconds)
    rows = []
    for runner in runners:
        moved = statistics.median(runner.nvme_bytes) if runner.nvme_bytes else 0
        disk_seconds = moved / GB / statistics.median(disk["both"])
        roofline = max(plain_seconds, disk_seconds)
        ratios = [own / base for own, base in zip(runner.step_seconds, runners[0].step_seconds, strict=True)]
        rows.append({
            "name": runner.name,
            "step_seconds": spread(runner.step_seconds),
            "over_plain": spread(ratios),
            "nvme_bytes_per_step": moved,
            "disk_seconds": disk_seconds,
            "roofline_seconds": roofline,
            "over_roofline": statistics.median(runner.step_seconds) / roofline,
            "stall_seconds": statistics.median(runner.stall_seconds) if runner.stall_seconds else 0.0,
            "optimizer_seconds": statistics.median(runner.optimizer_seconds) if runner.optimizer_seconds else 0.0,
            "same_losses": runner.losses == runners[0].losses,
        })  # fmt: skip
    return {
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "parameters": runners[0].trainer.num_parameters,
        "state_bytes": state_bytes,
        "precision": arguments.precision,
        "tokens_per_step": arguments.batch * arguments.seq,
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "disk_gb_s": {route: spread(values) for route, values in disk.items()},
        "rows": rows,
    }


def print_table(document: dict[str, Any]) -> None:
    """The document for a person."""
    both = document["disk_gb_s"]
    print(
        f"{document['parameters'] / 1e6:.1f}M parameters, {document['precision']}, "
        f"{document['tokens_per_step']} tokens per step, state {document['state_bytes'] / GB:.2f} GB; "
        f"medians of {document['rounds']} rounds of {document['steps_per_round']} steps (least-largest)"
    )
    print("disk: " + ", ".join(f"{r} {v['median']:.2f} ({v['min']:.2f}-{v['max']:.2f}) GB/s" for r, v in both.items()))
    print(f"{'':8}{'step s':>20}{'x plain':>20}{'NVMe GB':>9}{'disk s':>8}{'roofline':>9}{'x roofline':>11}  losses")
    for row in document["rows"]:
        step, ratio = row["step_seconds"], row["over_plain"]
        print(
            f"{row['name']:8}"
            f"{step['median']:8.3f} ({step['min']:.2f}-{step['max']:.2f})"
            f"{ratio['median']:8.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"
            f"{row['nvme_bytes_per_step'] / GB:9.2f}{row['disk_seconds']:8.2f}{row['roofline_seconds']:9.2f}"
            f"{row['over_roofline']:11.2f}  {'bitwise equal' if row['same_losses'] else 'DIFFER'}"
        )


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory on the disk to measure")
    parser.add_argument("--hbm", default="32MiB")
    parser.add_argument("--ram", default="96MiB")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps per round")
    parser.add_argument("--json", type=Path, help="write the document here")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=arguments.nvme) as training,
        tempfile.TemporaryDirectory(dir=arguments.nvme) as disk,
    ):
        arguments.nvme, arguments.disk = Path(training), Path(disk)
        document = measure(arguments)
    print_table(document)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if not all(row["same_losses"] for row in document["rows"]):
        raise SystemExit("losses differ")


if __name__ == "__main__":
    main()
