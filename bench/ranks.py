"""Several ranks on this machine, over gloo: what they move, beside the formulas; their steps, beside those of peers.

Bytes: for each stage and some ways to accumulate, each rank counts what it gives to collectives, keeps of the state,
and moves to and from NVMe in a step. Collectives and what is kept must be what ``infinity/engine/traffic.py`` says, to
the byte; NVMe at most that, since what stays in host memory is not moved. ``hbm`` holds all units, so that each is
gathered once per step. With models so small that half of their state hardly holds a few sub-groups, more is moved than
that: what was read ahead has to leave again.

Times: the same model, weights and data in fp32 on two ranks, all state in memory: infinity's stage 3, FSDP2
(``fully_shard`` of each block), DeepSpeed's ZeRO-3 where its environment can be made. They take turns, so that a drift
of the machine hits all alike; medians, least and largest of all counted steps.

Exit code 1: some bytes are not what the formulas say.

    python bench/ranks.py --nvme DIR [--ranks 2,4] [--model LAYERSxHIDDENxHEADS] [--rounds N] [--cache DIR]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare_deepspeed import parse_size
from lib_peer_environment import REQUIREMENTS, PeerEnvironment, UnavailableError
from lib_ranks import RankGroup
from lib_training import machine, num_parameters
from lib_work import Work, end_on_sigterm, parse_work, shape_fields, spread
from lib_worker import WorkerError

from infinity.engine.traffic import State, kept, moved
from infinity.engine.traffic import Work as Traffic
from infinity.train.model import GPTShape

SECONDS = 600.0
MEMORY = "8GiB"
NUM_WARMING = 2
COMPARED_RANKS = 2
RAM_SHARE = 0.5
"""Of what a rank keeps, as its host budget where NVMe is to be used."""


@dataclass(frozen=True, slots=True)
class Case:
    """A way to train whose bytes are counted."""

    name: str
    precision: str
    num_backwards: int = 1
    in_no_sync: int = 0
    reduction_dtype: str = "same"

    @property
    def traffic(self) -> Traffic:
        """What it does in a step, for the formulas."""
        sums = self.precision != "fp32" and (self.reduction_dtype == "fp32" or self.in_no_sync > 0)
        return Traffic(num_gathers=1, num_reductions=self.num_backwards - self.in_no_sync, reduces_sums=sums)


CASES = (
    Case("fp32", "fp32"),
    Case("bf16", "bf16"),
    Case("bf16, 2 backwards", "bf16", num_backwards=2),
    Case("bf16, 2 backwards, 1 in no_sync", "bf16", num_backwards=2, in_no_sync=1),
    Case("bf16, reduced in fp32", "bf16", reduction_dtype="fp32"),
)


@dataclass
class Row:
    """What one rank's step moved, and should."""

    ranks: int
    stage: int
    case: str
    what: str
    measured: float
    formula: float
    exact: bool = True

    @property
    def agrees(self) -> bool:
        """Whether it is so; for NVMe, whether it is at most that."""
        return self.measured == self.formula if self.exact else self.measured <= self.formula

    def __str__(self) -> str:
        verdict = ("=" if self.exact else "at most") if self.agrees else "DIFFERS from"
        return (
            f"{self.ranks:5}  {self.stage:5}  {self.case:33}{self.what:24}{self.measured:14,.0f}  {verdict:>12}"
            f"{self.formula:14,.0f}"
        )


def rows_of(case: Case, stage: int, answers: Sequence[Mapping[str, Any]], *, on_nvme: bool) -> Iterator[Row]:
    """What each rank counted, beside the formulas: once where all ranks and steps agree."""
    ranks = len(answers)
    state = State(**answers[0]["state"])
    step = moved(state, stage, ranks, case.traffic)
    if on_nvme:
        for what, formula in (("nvme_read", step.nvme_read), ("nvme_written", step.nvme_written)):
            most = max(statistics.mean(answer[what]) for answer in answers)
            yield Row(ranks, stage, case.name, what.replace("_", " "), most, formula, exact=False)
        return
    for kind, formula in step.sent.items():
        for size in sorted({sent.get(kind, 0) for answer in answers for sent in answer["sent"]}):
            yield Row(ranks, stage, case.name, f"sent, {kind}", size, formula)
    if case.num_backwards > 1 or case.reduction_dtype != "same":
        return  # keeps what it keeps without
    sizes = kept(state, stage, ranks)
    for kind in dict.fromkeys([*sizes, *answers[0]["kept"]]):
        for size in sorted({answer["kept"].get(kind, 0) for answer in answers}):
            yield Row(ranks, stage, case.name, f"kept, {kind}", size, sizes.get(kind, 0))


def count(shape: GPTShape, num_ranks: int, directory: Path, log: Path, *, on_nvme: bool = True) -> list[Row]:
    """All cases in all stages, in the same processes; ``on_nvme``: one with less memory than state, too."""
    settings = {"shape": shape_fields(shape), "work": [1, 32], "kind": "none"}
    command = [sys.executable, str(Path(__file__).with_name("ranks_worker.py"))]
    rows: list[Row] = []
    with RankGroup(command, settings, log, num_ranks=num_ranks, seconds=SECONDS) as group:
        for stage in range(4):
            for case in CASES:
                config: dict[str, Any] = {
                    "device": "cpu", "precision": case.precision, "stage": stage, "hbm": MEMORY, "ram": MEMORY,
                    "reduction_dtype": case.reduction_dtype, "sub_group_bytes": "4MiB",
                }  # fmt: skip
                request = {"num_backwards": case.num_backwards, "in_no_sync": case.in_no_sync}
                rows += rows_of(case, stage, group.ask({"bytes": request, "config": config}), on_nvme=False)
                show(rows)
            if not on_nvme:
                continue
            kept_bytes = sum(row.formula for row in rows if row.stage == stage and is_kept(row, "bf16"))
            config |= {"nvme": str(directory), "ram": int(RAM_SHARE * kept_bytes), "reduction_dtype": "same"}
            request = {"num_backwards": 1, "in_no_sync": 0}
            case = dataclasses.replace(CASES[1], name="bf16, memory for half of it")
            rows += rows_of(case, stage, group.ask({"bytes": request, "config": config}), on_nvme=True)
            show(rows)
    return rows


def is_kept(row: Row, case: str) -> bool:
    """Whether a row says what is kept of some state in a case."""
    return row.case == case and row.what.startswith("kept, ")


_SHOWN: set[int] = set()


def show(rows: Sequence[Row]) -> None:
    """Print the rows that have come."""
    if not _SHOWN:
        print(f"ranks  stage  {'case':33}{'bytes of a rank':24}{'measured':>14}{'':14}{'formula':>14}")
    for row in rows:
        if id(row) not in _SHOWN:
            _SHOWN.add(id(row))
            print(row, flush=True)


@dataclass
class Contender:
    """A way to train that is timed."""

    name: str
    group: RankGroup | None = None
    failure: str = ""
    seconds: list[float] = field(default_factory=list)
    rss_bytes: int = 0
    loss: float = 0.0

    def turn(self, steps: int, settling: int) -> None:
        """Train; a step has taken as long as on the slowest rank."""
        if self.group is None:
            return
        answers = self.group.ask({"steps": steps, "settling": settling})
        self.seconds += [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
        self.rss_bytes = max(answer["peak_rss_bytes"] for answer in answers)
        self.loss = statistics.mean(answer["losses"][-1] for answer in answers)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        if self.group is None:
            return {"name": self.name, "skipped": self.failure}
        figures = {"step_seconds": spread(self.seconds), "num_steps": len(self.seconds), "last_loss": self.loss}
        return {"name": self.name, **figures, "peak_rss_bytes": self.rss_bytes}


DEEPSPEED = {"zero_optimization": {"stage": 3, "overlap_comm": False}, "zero_force_ds_cpu_optimizer": False}


def compare(
    shape: GPTShape, work: Work, num_rounds: int, environment: PeerEnvironment | None, log: Path
) -> list[Contender]:
    """Time the steps of all in turns."""
    here = Path(__file__)
    common = {"shape": shape_fields(shape), "work": [work.batch_size, work.seq_length]}
    config = {"device": "cpu", "hbm": MEMORY, "ram": MEMORY, "accumulation_steps": 1}
    own = [sys.executable, str(here.with_name("ranks_worker.py"))]
    starts: dict[str, tuple[list[str], dict[str, Any], dict[str, str] | None]] = {
        "infinity, stage 3": (own, {**common, "kind": "infinity", "config": config}, None),
        "FSDP2": (own, {**common, "kind": "fsdp"}, None),
    }
    contenders = []
    if environment is not None:
        worker = [str(environment.python), str(here.with_name("deepspeed_worker.py"))]
        settings = {**common, "deepspeed": DEEPSPEED, "precision": "fp32"}
        starts["DeepSpeed ZeRO-3"] = worker, settings, environment.variables()
    with contextlib.ExitStack() as stack:
        for name, (command, settings, variables) in starts.items():
            contender = Contender(name)
            contenders.append(contender)
            try:
                group = RankGroup(
                    command, settings, log, num_ranks=COMPARED_RANKS, seconds=SECONDS, environment=variables
                )
                contender.group = stack.enter_context(group)
                contender.turn(NUM_WARMING, NUM_WARMING)
            except WorkerError as error:
                contender.group, contender.failure = None, str(error).splitlines()[-1]
        for number in range(num_rounds):
            for contender in contenders if number % 2 else reversed(contenders):
                contender.turn(2, 1)
    return contenders


def print_times(contenders: Sequence[Contender], shape: GPTShape, work: Work) -> None:
    """For a person."""
    print(f"\n{num_parameters(shape) / 1e6:.1f}M parameters, fp32, {work} tokens on each of {COMPARED_RANKS} ranks")
    print(f"  {'':22}{'step s':>24}{'RSS MB':>9}{'loss':>9}")
    for each in contenders:
        if each.group is None:
            print(f"  {each.name:22} skipped: {each.failure}")
            continue
        times = spread(each.seconds)
        step = f"{times['median']:.3f} ({times['min']:.3f}-{times['max']:.3f})"
        print(f"  {each.name:22}{step:>24}{each.rss_bytes / 1e6:9.0f}{each.loss:9.4f}")


def prepare_peer(cache: Path | None, temporary: Path) -> PeerEnvironment | str:
    """DeepSpeed's environment, or why there is none."""
    environment = PeerEnvironment(cache or temporary)
    try:
        environment.prepare()
    except UnavailableError as error:
        return str(error)
    return environment


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory on the disk to train on")
    parser.add_argument("--ranks", type=lambda text: [int(each) for each in text.split(",")], default=[2, 4])
    parser.add_argument("--model", type=parse_size, default=parse_size("8x512x8"), help="LAYERSxHIDDENxHEADS")
    parser.add_argument(
        "--work", type=parse_work, default=Work(2, 128), help="BATCHxSEQ of a rank's step that is timed"
    )
    parser.add_argument("--rounds", type=int, default=6, help="counted steps of each; 0: only bytes")
    parser.add_argument("--no-deepspeed", action="store_true", help="do not make DeepSpeed's environment")
    parser.add_argument("--cache", type=Path, help="keep DeepSpeed's environment here; default: a temporary directory")
    parser.add_argument("--json", type=Path, help="write the document here")
    arguments = parser.parse_args(argv)
    if not arguments.nvme.is_dir():
        parser.error(f"--nvme: {arguments.nvme} is not a directory; give an existing one")
    if min(arguments.ranks) < 2:
        parser.error("--ranks: expected 2 or more")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Count, compare, print; 0 where all bytes are what they should be, else 1."""
    arguments = parse(argv)
    end_on_sigterm()
    _, shape = arguments.model
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=arguments.nvme, prefix="infinity-ranks-") as scratch:
        directory, log = Path(scratch), Path(scratch) / "log.txt"
        for num_ranks in arguments.ranks:
            (directory / str(num_ranks)).mkdir()
            rows += count(shape, num_ranks, directory / str(num_ranks), log)
        contenders: list[Contender] = []
        if arguments.rounds:
            peer = "not asked for" if arguments.no_deepspeed else prepare_peer(arguments.cache, directory / "peer")
            environment = None if isinstance(peer, str) else peer
            contenders = compare(shape, arguments.work, arguments.rounds, environment, log)
            if isinstance(peer, str):
                contenders.append(Contender("DeepSpeed ZeRO-3", failure=peer))
            print_times(contenders, shape, arguments.work)
    wrong = [row for row in rows if not row.agrees]
    print(f"\n{len(rows) - len(wrong)} of {len(rows)} figures are what the formulas say")
    if arguments.json is not None:
        document = {
            "machine": machine(),
            "model": shape_fields(shape),
            "deepspeed": REQUIREMENTS[0],
            "bytes": [dataclasses.asdict(row) | {"agrees": row.agrees} for row in rows],
            "times": [contender.as_dict() for contender in contenders],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
