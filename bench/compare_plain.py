"""Step time of plain PyTorch, of everything in RAM and of everything on NVMe, interleaved in one run.

Each round trains a few steps of each of the three after one that does not count (see ``lib_training.py``), so that a
drift of the machine hits all alike; the figures are medians over rounds, with the least and the largest. The disk's
bandwidth is measured in every round too, through the same tier: reads alone, writes alone, and both at once. What the
two kinds of time allow is

    roofline = max(plain step, NVMe bytes of a step / NVMe bandwidth for that mix)

and the last column is step time over roofline. Losses of the three are compared bitwise.

    python bench/compare_plain.py --nvme DIR [--precision bf16] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from lib_disk import Bandwidth, measure_bandwidth, median_bandwidth
from lib_training import Runner, Sample, machine
from lib_work import GB, Work, batches, spread

from infinity.config import Config
from infinity.train.settings import VOCAB_SIZE, TrainSettings
from infinity.train.trainer import make_trainer

NUM_WARMING = 2


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
    disk: list[Bandwidth] = []
    rounds: dict[str, list[list[Sample]]] = {runner.name: [] for runner in runners}
    source = batches(Work(arguments.batch, arguments.seq), VOCAB_SIZE)
    try:
        state_bytes = runners[2].trainer.state_bytes
        warming = [next(source) for _ in range(NUM_WARMING)]
        for runner in runners:
            runner.train(warming, num_settling=NUM_WARMING)
        for number in range(arguments.rounds):
            chosen = [next(source) for _ in range(arguments.steps + 1)]
            for runner in runners if number % 2 else runners[::-1]:
                rounds[runner.name].append(runner.train(chosen))
            disk.append(measure_bandwidth(arguments.disk, nvme))
    finally:
        for runner in runners:
            runner.trainer.close()
    return report(arguments, runners, rounds, disk, state_bytes)


def report(
    arguments: argparse.Namespace,
    runners: list[Runner],
    rounds: dict[str, list[list[Sample]]],
    disk: list[Bandwidth],
    state_bytes: int,
) -> dict[str, Any]:
    """The document: medians, ratios and the roofline of each."""
    bandwidth = median_bandwidth(disk)
    seconds = {name: [statistics.mean(sample.seconds for sample in one) for one in own] for name, own in rounds.items()}
    plain_seconds = statistics.median(seconds["plain"])
    rows = []
    for runner in runners:
        samples = [sample for one in rounds[runner.name] for sample in one]
        read = statistics.median(sample.read_bytes for sample in samples)
        written = statistics.median(sample.written_bytes for sample in samples)
        disk_seconds = bandwidth.seconds(read, written)
        roofline = max(plain_seconds, disk_seconds)
        ratios = [own / base for own, base in zip(seconds[runner.name], seconds["plain"], strict=True)]
        rows.append({
            "name": runner.name,
            "step_seconds": spread(seconds[runner.name]),
            "over_plain": spread(ratios),
            "nvme_bytes_per_step": read + written,
            "disk_seconds": disk_seconds,
            "roofline_seconds": roofline,
            "over_roofline": statistics.median(seconds[runner.name]) / roofline,
            "stall_seconds": statistics.median(sample.figures.get("stall_seconds", 0.0) for sample in samples),
            "optimizer_seconds": statistics.median(sample.figures.get("optimizer_seconds", 0.0) for sample in samples),
            "same_losses": runner.losses == runners[0].losses,
        })  # fmt: skip
    return {
        "machine": machine(),
        "parameters": runners[0].trainer.num_parameters,
        "state_bytes": state_bytes,
        "precision": arguments.precision,
        "tokens_per_step": arguments.batch * arguments.seq,
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "disk_gb_s": {route: spread([getattr(one, route) for one in disk]) for route in ("read", "write", "both")},
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
    parser.add_argument("--steps", type=int, default=2, help="counted steps per round")
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
