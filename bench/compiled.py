"""Step time with compiled blocks and without, in plain PyTorch and under the engine, interleaved in one run.

Four trainers take turns (see ``lib_training.py``), so that a drift of the machine hits all alike; what they compile is
compiled before the first round. Losses of the engine are compared bitwise with plain PyTorch's, compiled with compiled.

    python bench/compiled.py --nvme DIR [--precision bf16] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from lib_training import Runner, machine
from lib_work import Work, batches, spread

from infinity.config import Config
from infinity.train.settings import VOCAB_SIZE, TrainSettings
from infinity.train.trainer import make_trainer

NUM_WARMING = 2


def make_runners(arguments: argparse.Namespace) -> list[Runner]:
    """Plain PyTorch and the engine, each without and with ``compile``."""
    common = {
        "layers": arguments.layers, "hidden": arguments.hidden, "heads": arguments.heads,
        "batch": arguments.batch, "seq": arguments.seq, "seed": 0,
    }  # fmt: skip
    runners = []
    for compiled in (False, True):
        for plain in (True, False):
            config = Config(
                device="cpu", hbm=arguments.hbm, ram=arguments.ram, nvme=arguments.nvme / f"{compiled}{plain}",
                precision=arguments.precision, compile=compiled, compile_backend=arguments.backend,
            )  # fmt: skip
            config.nvme[0].mkdir()
            trainer = make_trainer(TrainSettings(**common, plain=plain), config, torch.device("cpu"))
            runners.append(Runner(("plain" if plain else "engine") + (", compiled" if compiled else ""), trainer))
    return runners


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds and return the document."""
    runners = make_runners(arguments)
    seconds: dict[str, list[float]] = {runner.name: [] for runner in runners}
    source = batches(Work(arguments.batch, arguments.seq), VOCAB_SIZE)
    try:
        warming = [next(source) for _ in range(NUM_WARMING)]
        for runner in runners:
            runner.train(warming, num_settling=NUM_WARMING)
        for number in range(arguments.rounds):
            chosen = [next(source) for _ in range(arguments.steps + 1)]
            for runner in runners if number % 2 else runners[::-1]:
                samples = runner.train(chosen)
                seconds[runner.name].append(sum(sample.seconds for sample in samples) / len(samples))
    finally:
        for runner in runners:
            runner.trainer.close()
    plain, engine, plain_compiled, engine_compiled = runners
    rows = []
    for runner, eager in ((plain, plain), (engine, engine), (plain_compiled, plain), (engine_compiled, engine)):
        ratios = [one / other for one, other in zip(seconds[runner.name], seconds[eager.name], strict=True)]
        rows.append({"name": runner.name, "step_seconds": spread(seconds[runner.name]), "over_eager": spread(ratios)})
    return {
        "machine": machine(),
        "parameters": plain.trainer.num_parameters,
        "precision": arguments.precision,
        "backend": arguments.backend,
        "tokens_per_step": arguments.batch * arguments.seq,
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "same_losses": plain.losses == engine.losses and plain_compiled.losses == engine_compiled.losses,
        "rows": rows,
    }


def print_table(document: dict[str, Any]) -> None:
    """The document for a person."""
    print(
        f"{document['parameters'] / 1e6:.1f}M parameters, {document['precision']}, {document['backend']}, "
        f"{document['tokens_per_step']} tokens per step; medians of {document['rounds']} rounds of "
        f"{document['steps_per_round']} steps (least-largest); "
        f"losses {'bitwise equal' if document['same_losses'] else 'DIFFER'}"
    )
    print(f"{'':18}{'step s':>20}{'x not compiled':>20}")
    for row in document["rows"]:
        step, ratio = row["step_seconds"], row["over_eager"]
        print(
            f"{row['name']:18}{step['median']:8.3f} ({step['min']:.2f}-{step['max']:.2f})"
            f"{ratio['median']:8.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"
        )


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory on the disk to use")
    parser.add_argument("--json", type=Path, help="write the document here")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps per round that count")
    parser.add_argument("--hbm", default="32MiB")
    parser.add_argument("--ram", default="96MiB")
    for name, default in (("layers", 8), ("hidden", 512), ("heads", 8), ("batch", 8), ("seq", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.nvme) as directory:
        arguments.nvme = Path(directory)
        document = measure(arguments)
    print_table(document)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if not document["same_losses"]:
        raise SystemExit("losses differ")


if __name__ == "__main__":
    main()
