"""What tiling costs: a model whose largest layer exceeds ``hbm`` trains in tiles; the same model untiled, with enough.

The embedding, tied to the head, is much larger than a block. Untiled, device memory has to hold it whole, and host
memory the state of its step. In tiles (``tile_large_layers=True``) a quarter of ``hbm`` is the most that a layer takes.
All train on the same text in turn: each round some steps of each after one that does not count (``lib_training.py``).
Beside the time of a step stand the seconds of processors that it takes, which other work on the machine changes little.

    python bench/tiling.py --nvme DIR [--vocab 32768] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from lib_training import Runner, Sample, machine, make_engine, num_parameters, smallest_budgets
from lib_work import GB, batches, parse_work, spread

from infinity.config import Config
from infinity.engine.engine import Engine
from infinity.errors import BudgetError
from infinity.train.model import GPTShape

MIB = 1 << 20
NUM_WARMING = 2


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds and return the document."""
    shape = GPTShape(
        num_layers=arguments.layers, hidden_size=arguments.hidden, num_heads=arguments.heads,
        seq_length=arguments.work.seq_length, vocab_size=arguments.vocab,
    )  # fmt: skip
    common: dict[str, Any] = {"device": "cpu", "nvme": arguments.nvme, "precision": arguments.precision}
    in_tiles = Config(**common, hbm=arguments.hbm, ram=arguments.ram, tile_large_layers=True)
    refusal = _refusal(shape, in_tiles.model_copy(update={"tile_large_layers": False}))
    hbm, ram = smallest_budgets(shape, Config(**common))
    configs = {
        "untiled": Config(**common, hbm=2 * hbm, ram=2 * ram),
        "tiles, same ram": in_tiles.model_copy(update={"ram": 2 * ram}),
        "tiles": in_tiles,
    }
    source = batches(arguments.work, arguments.vocab)
    runners: list[Runner] = []
    rounds: dict[str, list[list[Sample]]] = {name: [] for name in configs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in configs}
    try:
        for number, (name, config) in enumerate(configs.items()):
            directory = arguments.nvme / str(number)
            directory.mkdir()
            runners.append(Runner(name, make_engine(shape, config.model_copy(update={"nvme": (directory,)}))))
        warming = [next(source) for _ in range(NUM_WARMING)]
        for runner in runners:
            runner.train(warming, num_settling=NUM_WARMING)
        for number in range(arguments.rounds):
            chosen = [next(source) for _ in range(arguments.steps + 1)]
            for runner in runners if number % 2 else runners[::-1]:
                begun = time.process_time()
                rounds[runner.name].append(runner.train(chosen))
                cpu_seconds[runner.name].append((time.process_time() - begun) / len(chosen))
        rows = [
            _row(runner, rounds[runner.name], rounds["untiled"], runners[0])
            | {"cpu_seconds": spread(cpu_seconds[runner.name])}
            for runner in runners
        ]
    finally:
        for runner in runners:
            runner.trainer.close()
    return {
        "machine": machine(),
        "parameters": num_parameters(shape),
        "largest_parameter": arguments.vocab * arguments.hidden,
        "precision": arguments.precision,
        "work": str(arguments.work),
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "refusal": refusal,
        "rows": rows,
    }


def _refusal(shape: GPTShape, config: Config) -> str:
    """What the budgets of the tiled run get without tiles."""
    try:
        make_engine(shape, config).close()
    except BudgetError as error:
        return str(error)
    raise SystemExit("the model fits --hbm and --ram without tiles; give less")


def _row(runner: Runner, own: list[list[Sample]], base: list[list[Sample]], untiled: Runner) -> dict[str, Any]:
    engine = runner.trainer
    assert isinstance(engine, Engine)
    seconds, others = ([statistics.mean(sample.seconds for sample in one) for one in each] for each in (own, base))
    samples = [sample for one in own for sample in one]
    usage = engine.usage()
    return {
        "name": runner.name,
        "hbm": int(engine.config.hbm),
        "ram": int(engine.config.ram),
        "device_peak_bytes": usage["device"].peak_bytes,
        "host_peak_bytes": usage["host"].peak_bytes,
        "units": len(engine.unit_names),
        "step_seconds": spread(seconds),
        "over_untiled": spread([one / other for one, other in zip(seconds, others, strict=True)]),
        "nvme_read_bytes": statistics.median(sample.read_bytes for sample in samples),
        "nvme_written_bytes": statistics.median(sample.written_bytes for sample in samples),
        "stall_seconds": statistics.median(sample.figures["stall_seconds"] for sample in samples),
        "largest_loss_difference": max(
            abs(one - other) / other for one, other in zip(runner.losses, untiled.losses, strict=True)
        ),
        "last_loss": runner.losses[-1],
    }


def print_table(document: dict[str, Any]) -> None:
    """The document for a person."""
    print(
        f"{document['parameters'] / 1e6:.1f}M parameters, of which {document['largest_parameter'] / 1e6:.1f}M in the "
        f"embedding that is the head, {document['precision']}, {document['work']} tokens per step; medians of "
        f"{document['rounds']} rounds of {document['steps_per_round']} steps (least-largest)"
    )
    print(
        f"{'':16}{'hbm':>9}{'peak':>9}{'ram':>9}{'units':>6}{'step s':>20}{'x untiled':>20}{'CPU s':>7}{'read':>7}"
        f"{'written':>8}{'stall s':>8}  largest difference of a loss"
    )
    for row in document["rows"]:
        step, ratio = row["step_seconds"], row["over_untiled"]
        sizes = "".join(f"{row[key] / MIB:7.1f}Mi" for key in ("hbm", "device_peak_bytes", "ram"))
        print(
            f"{row['name']:16}{sizes}{row['units']:6d}"
            f"{step['median']:8.3f} ({step['min']:.2f}-{step['max']:.2f})"
            f"{ratio['median']:8.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"
            f"{row['cpu_seconds']['median']:7.2f}"
            f"{row['nvme_read_bytes'] / GB:6.2f}G{row['nvme_written_bytes'] / GB:7.2f}G{row['stall_seconds']:8.3f}  "
            f"{row['largest_loss_difference']:.1e}"
        )
    print(f"without tiles: {document['refusal']}")


def main(arguments: list[str] | None = None) -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory")
    parser.add_argument("--hbm", default="32MiB", help="of the tiled runs")
    parser.add_argument("--ram", default="128MiB", help="of the tiled run with little")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--work", type=parse_work, default="4x128", help="BATCHxSEQ tokens in a step")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="counted steps per round")
    parser.add_argument("--json", type=Path, help="write the document here")
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=parsed.nvme) as directory:
        parsed.nvme = Path(directory)
        document = measure(parsed)
    print_table(document)
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
