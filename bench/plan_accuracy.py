"""Is a step as long as `infinity plan` says, and are the bytes those of the engine?

Two GPTs are trained with host memory for as little as can be, a quarter of the state and all of it, on few and on many
tokens, in fp32 and bf16. Each combination is planned first, from

* the disk, measured through the engine's own tier;
* forward and backward of plain PyTorch, for each model, dtype and number of tokens;
* what an engine with another, smaller model takes beside: the optimizer's arithmetic on masters and on planes, a
  gather, the processor's time for a byte that moves, and how long who waits for a shard learns nothing. This is
  measured once, and then predicts all of them.

The exit code is 1 if a predicted step is off by more than 15%, or a byte of what a tier holds is another than the
engine's, or anything moves where everything fits.

    python bench/plan_accuracy.py --nvme DIR [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lib_disk import measure_bandwidth, median_bandwidth

import infinity
from infinity.config import Config
from infinity.engine.engine import Engine
from infinity.plan.estimate import make_plan
from infinity.plan.machine import GB, Machine
from infinity.plan.result import Plan
from infinity.plan.settings import PlanSettings
from infinity.plan.sources import Source
from infinity.train.model import GPT, GPTShape

BAR = 0.15
SEQ = 128
SHAPES = {
    "11M": GPTShape(num_layers=6, hidden_size=384, num_heads=6, seq_length=SEQ, vocab_size=256),
    "25M": GPTShape(num_layers=8, hidden_size=512, num_heads=8, seq_length=SEQ, vocab_size=256),
}
CALIBRATION = GPTShape(num_layers=6, hidden_size=448, num_heads=7, seq_length=SEQ, vocab_size=256)
QUICK = GPTShape(num_layers=4, hidden_size=256, num_heads=4, seq_length=SEQ, vocab_size=256)
SHARES = {"least": 0.0, "25%": 0.25, "100%": 1.2}
BATCHES = {"few": 1, "many": 8}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HBM = 32 << 20
NUM_SETTLING = 4


@dataclasses.dataclass(frozen=True)
class Run:
    """What an engine did: medians of its steps."""

    seconds: float
    read: float
    written: float
    optimizer_seconds: float
    compute_seconds: float
    num_gathers: float
    summary: Any


def batch_of(shape: GPTShape, batch: int) -> torch.Tensor:
    """Tokens at random."""
    return torch.randint(0, shape.vocab_size, (batch, shape.seq_length))


def plain_seconds(shape: GPTShape, precision: str, batch: int, num_rounds: int) -> float:
    """Forward and backward in plain PyTorch: median."""
    model = GPT(shape).to(DTYPES[precision])
    seconds = []
    for _ in range(num_rounds + 1):
        tokens = batch_of(shape, batch)
        begun = time.perf_counter()
        model(tokens, tokens).backward()
        seconds.append(time.perf_counter() - begun)
        model.zero_grad(set_to_none=True)
    return statistics.median(seconds[1:])


def config_for(shape: GPTShape, precision: str, share: float, directory: Path) -> Config:
    """Budgets for a share of the state, or the least."""
    source, fields = source_for(shape), {"device": "cpu", "precision": precision, "nvme": str(directory)}
    wide = Config(**fields, hbm=HBM, ram="64GiB", accumulation_steps=1)
    plan = make_plan(source, wide, PlanSettings(compute_seconds=1.0), Machine())
    state = sum(plan.summary.kept.values())
    return Config(**fields, hbm=HBM, ram=max(plan.smallest["ram"], int(share * state)), accumulation_steps=1)


def source_for(shape: GPTShape) -> Source:
    """The model without memory."""
    with torch.device("meta"):
        return Source(GPT(shape), "GPT")


def run_engine(shape: GPTShape, config: Config, batches: Sequence[int], num_steps: int) -> Iterator[Run]:
    """Train on each batch size in turn."""
    torch.manual_seed(0)
    with infinity.deferred_init():
        model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with infinity.initialize(model, optimizer, config) as engine:
        for batch in batches:
            steps = [take_step(engine, shape, batch) for _ in range(NUM_SETTLING + num_steps)][NUM_SETTLING:]
            names = [field.name for field in dataclasses.fields(Run)][:-1]
            medians = dict(zip(names, map(statistics.median, zip(*steps, strict=True)), strict=True))
            yield Run(**medians, summary=engine.summary())


def take_step(engine: Engine, shape: GPTShape, batch: int) -> tuple[float, ...]:
    """One step, and its figures."""
    tokens = batch_of(shape, batch)
    begun = time.perf_counter()
    engine.backward(engine(tokens, tokens))
    engine.step()
    seconds = time.perf_counter() - begun
    stats = engine.last_step
    assert stats is not None
    optimizer = sum(unit.optimizer_seconds for unit in stats.units.values())
    return (
        seconds, stats.nvme_read_bytes, stats.nvme_written_bytes, optimizer, stats.compute_seconds, stats.num_gathers,
    )  # fmt: skip


def planned(shape: GPTShape, config: Config, batch: int, compute_seconds: float, machine: Machine) -> Plan:
    """The plan of a combination."""
    settings = PlanSettings(batch=batch, seq=shape.seq_length, compute_seconds=compute_seconds)
    return make_plan(source_for(shape), config, settings, machine)


def calibrate(shape: GPTShape, precision: str, scratch: Path, disk: Machine, num_steps: int) -> Machine:
    """What the engine takes beside arithmetic and disk, from a run in memory and one on NVMe, on few tokens."""
    compute = plain_seconds(shape, precision, 1, num_steps)
    config = config_for(shape, precision, SHARES["100%"], scratch)
    [memory] = run_engine(shape, config, [1], num_steps)
    state = sum(planned(shape, config, 1, compute, disk).summary.kept.values())
    rest = max(memory.seconds - compute - memory.optimizer_seconds, 0.0)
    machine = dataclasses.replace(
        disk,
        optimizer=state / max(memory.optimizer_seconds, 1e-9),
        part_seconds=0.0,
        step_seconds=0.0,
        gather_seconds=rest / max(memory.num_gathers, 1),
    )
    config, least = (config_for(shape, precision, SHARES[share], scratch) for share in ("25%", "least"))
    [nvme], [lean] = (list(run_engine(shape, each, [1], num_steps)) for each in (config, least))
    state = sum(planned(shape, config, 1, compute, machine).summary.kept.values())
    planes = machine.optimizer if precision == "fp32" else state / max(nvme.optimizer_seconds, 1e-9)
    machine = dataclasses.replace(machine, planes=planes, latency_seconds=0.0)
    for _ in range(2):  # one is seen best where much moves at a time, the other where each waits for the one before
        machine = fitted(machine, "transfer", 2.0 / GB, (shape, config, compute), nvme.seconds)
        machine = fitted(machine, "latency_seconds", 0.02, (shape, least, compute), lean.seconds)
    return machine


def fitted(
    machine: Machine, name: str, most: float, combination: tuple[GPTShape, Config, float], measured: float
) -> Machine:
    """The machine with the value, of 0 to ``most``, at which a step on few tokens is predicted as it was measured."""
    shape, config, compute = combination
    low, high = 0.0, most
    for _ in range(10):
        middle = (low + high) / 2
        guess: Any = {name: middle}
        predicted = planned(shape, config, 1, compute, dataclasses.replace(machine, **guess)).seconds
        low, high = (middle, high) if predicted < measured else (low, middle)
    found: Any = {name: low}
    return dataclasses.replace(machine, **found)


def same_summary(plan: Plan, summary: Any) -> bool:
    """Whether a plan's bytes per tier and kind are the engine's, but for what is free on the disk by now."""

    def bare(one: Any) -> Any:
        tiers = {name: dataclasses.replace(tier, remains=0 if name == "nvme" else tier.remains)
                 for name, tier in one.tiers.items()}  # fmt: skip
        return dataclasses.replace(one, tiers=tiers)

    return bool(bare(plan.summary) == bare(summary))


def off(predicted: float, measured: float) -> float:
    """By what part a prediction is off."""
    return predicted / measured - 1 if measured else float(predicted != measured)


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All combinations."""
    num_steps = 3 if arguments.quick else 7
    shapes = {"3M": QUICK} if arguments.quick else SHAPES
    probe = Config(device="cpu", nvme=[str(scratch)])
    bandwidth = median_bandwidth([measure_bandwidth(scratch, probe) for _ in range(3)])
    disk = Machine(read=bandwidth.read * GB, write=bandwidth.write * GB, mixed=bandwidth.both * GB, source="measured")
    print(f"disk: {bandwidth.read:.2f} GB/s read, {bandwidth.write:.2f} write, {bandwidth.both:.2f} both", flush=True)
    rows = []
    for precision in DTYPES:
        machine = calibrate(QUICK if arguments.quick else CALIBRATION, precision, scratch, disk, num_steps)
        print(
            f"{precision}: optimizer {machine.optimizer / GB:.2f} GB/s, in planes {machine.planes / GB:.2f}, "
            f"{machine.transfer * GB:.3f} s/GB moved, {machine.latency_seconds * 1e3:.2f} ms until it is known, "
            f"{machine.gather_seconds * 1e3:.2f} ms per gather", flush=True,
        )  # fmt: skip
        for name, shape in shapes.items():
            for budget, share in SHARES.items():
                compute = {batch: plain_seconds(shape, precision, batch, num_steps) for batch in BATCHES.values()}
                config = config_for(shape, precision, share, scratch)
                runs = run_engine(shape, config, list(BATCHES.values()), num_steps)
                for (tokens, batch), run in zip(BATCHES.items(), runs, strict=True):
                    plan = planned(shape, config, batch, compute[batch], machine)
                    rows.append(row_of((name, precision, budget, tokens), plan, run, compute[batch]))
                    print(line_of(rows[-1]), flush=True)
    return {"machine": dataclasses.asdict(disk), "bar": BAR, "rows": rows}


def row_of(combination: tuple[str, ...], plan: Plan, run: Run, compute_seconds: float) -> dict[str, Any]:
    """Predicted and measured of one combination."""
    return {
        "combination": " ".join(combination),
        "fits": combination[2] == "100%",
        "predicted_seconds": plan.seconds,
        "measured_seconds": run.seconds,
        "off": off(plan.seconds, run.seconds),
        "compute_seconds": compute_seconds,
        "bottleneck": plan.bottleneck,
        "predicted_read": plan.moved["nvme read"],
        "measured_read": run.read,
        "predicted_written": plan.moved["nvme write"],
        "measured_written": run.written,
        "bytes_of_tiers_equal": same_summary(plan, run.summary),
    }


def line_of(row: dict[str, Any]) -> str:
    """One row for a person."""
    return (
        f"{row['combination']:24} predicted {row['predicted_seconds']:.3f} s, measured {row['measured_seconds']:.3f} s "
        f"({row['off']:+.0%}), {row['bottleneck']}; "
        f"read {row['predicted_read'] / 1e6:.1f}/{row['measured_read'] / 1e6:.1f} MB, "
        f"written {row['predicted_written'] / 1e6:.1f}/{row['measured_written'] / 1e6:.1f} MB; "
        f"tiers {'equal' if row['bytes_of_tiers_equal'] else 'DIFFER'}"
    )


def misses(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is not as it is promised."""
    found = [f"{row['combination']}: step off by {row['off']:+.0%}" for row in rows if abs(row["off"]) > BAR]
    found += [f"{row['combination']}: bytes of tiers differ" for row in rows if not row["bytes_of_tiers_equal"]]
    moved = ("predicted_read", "measured_read", "predicted_written", "measured_written")
    return found + [
        f"{row['combination']}: something moves although all fits"
        for row in rows if row["fits"] and any(row[name] for name in moved)
    ]  # fmt: skip


def main() -> int:
    """Measure, show, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory on the disk to measure")
    parser.add_argument("--json", type=Path, help="write the document here")
    parser.add_argument("--quick", action="store_true", help="one small model, few steps: a look, no figures of record")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.nvme) as scratch:
        document = measure(arguments, Path(scratch))
    missed = misses(document["rows"])
    for name in ("read", "written"):
        offs = [abs(off(row[f"predicted_{name}"], row[f"measured_{name}"])) for row in document["rows"]]
        print(f"bytes {name}: off by {statistics.median(offs):.1%} (median), {max(offs):.1%} (worst)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print("\n".join(["missed:", *missed]) if missed else f"all {len(document['rows'])} within {BAR:.0%}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
