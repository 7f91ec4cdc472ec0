"""What a commit costs: in bytes and seconds, beside training, and against writing the same state as a checkpoint.

With host memory for a quarter and a tenth of the state, and for no more than training needs, engines that differ in
``durability`` and ``verify`` only train the same model on the same batches in turns, round by round: without commits,
with one after every step, with one when asked for, and with every read checked. What a commit costs beside training is
the ratio of step times, round by round; what one costs that is waited for, ``engine.commit()`` tells. The same state,
in memory already, is written by ``torch.save`` to the same disk and made durable; and DeepSpeed, where it can be set up
(``--peer``), writes its own checkpoint of the same model with all state on NVMe.

    python bench/commit.py --nvme DIR [--peer DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compare_deepspeed import ANSWER_SECONDS, peer_settings
from lib_checks import Check, report, require_room
from lib_peer_environment import NEEDS, PeerEnvironment, UnavailableError
from lib_training import Runner, Sample, machine, make_engine, num_parameters, smallest_budgets
from lib_work import (
    GB,
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
from lib_worker import Worker, WorkerError

from infinity.config import Config
from infinity.engine.engine import Engine
from infinity.engine.persistence.durability import CommitInfo
from infinity.train.model import GPTShape

SHAPE = GPTShape(num_layers=12, hidden_size=896, num_heads=14, seq_length=128, vocab_size=8192)
SHARES = {"25%": 0.25, "10%": 0.1, "least": 0.0}
"""Of the state, what ``ram`` holds."""

KINDS: dict[str, dict[str, Any]] = {
    "off": {"verify": "off"},
    "every step": {"durability": 1},
    "when asked for": {"durability": "checkpoint"},
    "checked reads": {"verify": "always"},
}
BESIDE, VERIFIED, EXTRA = 1.10, 1.10, 1.01
"""Bars: step time with a commit after each, and with checked reads, over that without; bytes written likewise."""

FILE_BYTES, MEMORY_BYTES = 120, 48
"""Per parameter, for the room that is asked for: the files of all engines and a checkpoint; a state in memory."""


@dataclass
class Row:
    """What one budget came to.

    Attributes:
        budget: its name.
        ram_bytes: host memory.
        samples: steps, by kind of engine and round.
        commits: those that were waited for.
    """

    budget: str
    ram_bytes: int
    samples: dict[str, list[list[Sample]]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    commits: list[CommitInfo] = field(default_factory=list)
    same_losses: bool = False

    def ratio(self, kind: str) -> list[float]:
        """Step time over that of the engine that makes no commits: one for each round."""
        return [
            statistics.median(one.seconds for one in ours) / statistics.median(one.seconds for one in others)
            for ours, others in zip(self.samples[kind], self.samples["off"], strict=True)
        ]

    def written_bytes(self, kind: str) -> float:
        """Bytes of shards per step."""
        every = [sample.written_bytes for samples in self.samples[kind] for sample in samples]
        return sum(every) / len(every)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "budget": self.budget,
            "ram_bytes": self.ram_bytes,
            "step_seconds": {
                kind: spread([each.seconds for samples in rounds for each in samples])
                for kind, rounds in self.samples.items()
            },
            "over_off": {kind: spread(self.ratio(kind)) for kind in KINDS if kind != "off"},
            "written_bytes": {kind: self.written_bytes(kind) for kind in KINDS},
            "commit_seconds": spread([each.seconds for each in self.commits]),
            "commit_written_bytes": spread([each.written_bytes for each in self.commits]),
            "commit_bytes": self.commits[-1].num_bytes,
            "same_losses": self.same_losses,
        }


def measure(arguments: argparse.Namespace, scratch: Path) -> tuple[dict[str, Any], list[Check]]:
    """Train in turns with each budget, write checkpoints; the document and the bars."""
    shape = shape_of(arguments)
    parameters = num_parameters(shape)
    require_room(scratch, disk_bytes=FILE_BYTES * parameters, memory_bytes=MEMORY_BYTES * parameters)
    rows, saves = [], []
    for budget, share in SHARES.items():
        print(f"  {budget}: training in turns ...", file=sys.stderr, flush=True)
        row, state_bytes, saved = _measure_budget(arguments, shape, scratch, budget, share)
        rows.append(row)
        saves += saved
    document: dict[str, Any] = {
        "machine": machine(),
        "model": shape_fields(shape),
        "parameters": parameters,
        "state_bytes": state_bytes,
        "precision": "bf16",
        "work": str(arguments.work),
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "rows": [row.as_dict() for row in rows],
        "torch_save": {
            "bytes": statistics.median(num_bytes for num_bytes, _ in saves),
            "seconds": spread([seconds for _, seconds in saves]),
        },
        "deepspeed": _deepspeed(arguments, shape, parameters, scratch),
    }
    return document, checks_of(document)


def _measure_budget(
    arguments: argparse.Namespace, shape: GPTShape, scratch: Path, budget: str, share: float
) -> tuple[Row, int, list[tuple[int, float]]]:
    with contextlib.ExitStack() as stack:
        runners: dict[str, Runner] = {}
        for kind, fields in KINDS.items():
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
            config = Config(device="cpu", precision="bf16", nvme=directory, **fields)
            hbm, ram = smallest_budgets(shape, config)
            state_bytes = 16 * num_parameters(shape)
            config = config.model_copy(update={"hbm": 2 * hbm, "ram": max(ram, int(share * state_bytes))})
            engine = make_engine(shape, config)
            stack.callback(engine.close)
            runners[kind] = Runner(kind, engine)
        row = Row(budget, int(config.ram))
        source = batches(arguments.work, shape.vocab_size)
        saved = []
        for number in range(arguments.rounds):
            chosen = [next(source) for _ in range(arguments.steps + 1)]
            for kind in list(KINDS) if number % 2 else list(KINDS)[::-1]:
                row.samples[kind].append(runners[kind].train(chosen))
            engine = _engine(runners["when asked for"])
            row.commits.append(engine.commit())
            saved.append(_torch_save(engine, scratch / "state.pt"))
        row.same_losses = all(runner.losses == runners["off"].losses for runner in runners.values())
        return row, engine.state_bytes, saved


def _engine(runner: Runner) -> Engine:
    assert isinstance(runner.trainer, Engine)
    return runner.trainer


def _torch_save(engine: Engine, path: Path) -> tuple[int, float]:
    """Bytes and seconds of what users write without commits: weights and optimizer state, here in memory already."""
    state = {"model": dict(engine.state_dict()), "optimizer": engine.optimizer.state_dict()}
    begun = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    num_bytes = path.stat().st_size
    path.unlink()
    return num_bytes, seconds


def _deepspeed(arguments: argparse.Namespace, shape: GPTShape, parameters: int, scratch: Path) -> dict[str, Any]:
    """What its own checkpoint takes, or why that is not known."""
    if arguments.peer is None:
        return {"skipped": f"no --peer DIR; it needs {NEEDS}"}
    environment = PeerEnvironment(arguments.peer)
    try:
        environment.prepare()
    except UnavailableError as error:
        return {"skipped": str(error)}
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        settings = {
            "shape": shape_fields(shape),
            "work": [arguments.work.batch_size, arguments.work.seq_length],
            "deepspeed": peer_settings(shape, parameters, Path(directory))["all on NVMe, tuned"],
            "rendezvous": str(Path(directory) / "rendezvous"),
        }
        worker = str(Path(__file__).with_name("deepspeed_worker.py"))
        command = [str(environment.python), worker, json.dumps(settings)]
        try:
            with Worker(command, environment.log, seconds=ANSWER_SECONDS, environment=environment.variables()) as peer:
                answers = []
                for _ in range(arguments.rounds):
                    peer.ask({"steps": 1, "settling": 0}, seconds=ANSWER_SECONDS)
                    answers.append(peer.ask({"save": str(Path(directory) / "saved")}, seconds=ANSWER_SECONDS))
        except WorkerError as error:
            return {"skipped": str(error)}
    return {
        "bytes": statistics.median(answer["bytes"] for answer in answers),
        "seconds": spread([answer["seconds"] for answer in answers]),
    }


def checks_of(document: dict[str, Any]) -> list[Check]:
    """The bars."""
    checks = []
    for row in document["rows"]:
        budget, seconds = row["budget"], row["commit_seconds"]["median"]
        beside, verified = row["over_off"]["every step"]["median"], row["over_off"]["checked reads"]["median"]
        saved = seconds / document["torch_save"]["seconds"]["median"]
        checks += [
            Check(f"{budget}: step with a commit after each / without", beside, "<=", BESIDE),
            Check(f"{budget}: step with checked reads / without", verified, "<=", VERIFIED),
            Check(f"{budget}: commit() / torch.save of the state", saved, "<=", 1.0),
        ]
        if "seconds" in document["deepspeed"]:
            peer = seconds / document["deepspeed"]["seconds"]["median"]
            checks.append(Check(f"{budget}: commit() / DeepSpeed's checkpoint", peer, "<=", 1.0))
        if not SHARES[budget]:
            written = row["written_bytes"]
            extra = written["every step"] / max(written["off"], 1)
            checks.append(
                Check(f"{budget}: shards written with a commit after each step / without", extra, "<=", EXTRA)
            )
    same = all(row["same_losses"] for row in document["rows"])
    return [*checks, Check("losses of all engines bitwise equal", float(same), ">=", 1.0, "of all")]


def print_table(document: dict[str, Any]) -> None:
    """The document for a person."""
    print(
        f"{document['parameters'] / 1e6:.1f}M parameters, bf16, state {document['state_bytes'] / GB:.2f} GB, steps of "
        f"{document['work']} tokens; medians of {document['rounds']} rounds of {document['steps_per_round']} steps "
        "(least-largest)"
    )
    for row in document["rows"]:
        print(f"\n{row['budget']}: ram {row['ram_bytes'] / GB:.3f} GB")
        for kind, step in row["step_seconds"].items():
            over = row["over_off"].get(kind)
            ratio = "" if over is None else f"{over['median']:7.2f} ({over['min']:.2f}-{over['max']:.2f}) x off"
            written = row["written_bytes"][kind] / GB
            times = f"{step['median']:8.2f} ({step['min']:.2f}-{step['max']:.2f}) s"
            print(f"  {kind:16}{times}{written:8.3f} GB written per step{ratio}")
        commit, written = row["commit_seconds"], row["commit_written_bytes"]["median"] / GB
        print(
            f"  commit()        {commit['median']:8.2f} ({commit['min']:.2f}-{commit['max']:.2f}) s{written:8.3f} GB "
            f"written of {row['commit_bytes'] / GB:.3f}"
        )
    print()
    for name, key in (("torch.save", "torch_save"), ("DeepSpeed", "deepspeed")):
        found = document[key]
        if "skipped" in found:
            print(f"{name}: skipped: {found['skipped']}")
        else:
            seconds = found["seconds"]
            times = f"{seconds['median']:.2f} ({seconds['min']:.2f}-{seconds['max']:.2f}) s"
            print(f"{name}: {times}, {found['bytes'] / GB:.3f} GB")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory on the disk to measure")
    parser.add_argument("--peer", type=Path, help=f"where DeepSpeed is, or is to be, installed: {NEEDS}")
    add_model_flags(parser, SHAPE)
    parser.add_argument("--work", type=parse_work, default=Work(4, 128), help="BATCHxSEQ of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each turn")
    parser.add_argument("--json", type=Path, help="write the document here")
    return parse_flags(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print; 0 where every target is met, else 1."""
    arguments = parse(argv)
    end_on_sigterm()
    with tempfile.TemporaryDirectory(dir=arguments.nvme, prefix="infinity-commit-") as scratch:
        document, checks = measure(arguments, Path(scratch))
    print_table(document)
    return report(document, checks, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
