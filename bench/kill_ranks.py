"""``kill -9`` of any rank at any moment: all ranks go on from one commit, bit for bit as if never interrupted.

What ``torchrun --max-restarts`` does, without importing torch each time: a process that has no threads forks all ranks
of a job, kills one at a moment drawn from a seed, and, when the others have ended too, forks them all again. In
half of the lives they must end by themselves, within seconds; in the others they are killed soon after, in the middle
of whatever the death of the first has begun. In the end each loss that any life of a rank wrote down must be
that of ranks which were not interrupted, and so must be all weights, buffers and optimizer states; and the ranks of
each life must have gone on from one step.

Runs differ in ranks, stage, precision, steps between commits, accumulation, clipping, directories and commits kept; all
have a scheduler, a stateful loader, dropout and batch norm, and each rank has batches and random numbers of its own.
``--torchrun`` does the same, with fewer kills, to ranks that torchrun itself starts again.

    python bench/kill_ranks.py [--kills 200] [--steps 24] [--seed 0] [--nvme DIR] [--torchrun] [--json FILE]
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: whoever forks has no threads

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lib_forks import Ranks, free_port, import_all
from lib_kill_child import Scenario, entries, live, summary

_LIFE_SECONDS = 120.0
"""After that a rank that is not killed counts as stuck."""
_ENDING_SECONDS = 30.0
"""So long the others may take to see that a rank has ended."""

SCENARIOS = (
    Scenario("fp32", 1, 1, 1, num_ranks=2, stage=3),
    Scenario("bf16", 2, 2, 2, num_ranks=3, stage=2, max_grad_norm=0.5),
    Scenario("fp32", 1, 2, 1, retained=2, num_ranks=2, stage=0),
    Scenario("bf16", 1, 1, 1, num_ranks=4, stage=3, max_grad_norm=0.5),
    Scenario("fp32", 3, 1, 2, retained=3, num_ranks=3, stage=1),
    Scenario("bf16", 1, 1, 1, num_ranks=1, stage=3),
)


@dataclass(slots=True)
class Outcome:
    """What became of the kills.

    Attributes:
        num_kills: how many, of one rank each.
        num_runs: runs that came to their end.
        num_lives: of all ranks together.
        kills_before_engine: kills before training had begun or gone on.
        kills_before_commit: kills after which the next life began anew.
        steps_again: steps that were taken again, for each kill.
        ending_seconds: how long after the kill the last of the other ranks had ended by itself.
        wrong: what was not as it must be, in words.
    """

    num_kills: int = 0
    num_runs: int = 0
    num_lives: int = 0
    kills_before_engine: int = 0
    kills_before_commit: int = 0
    steps_again: list[int] = field(default_factory=list)
    ending_seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class KillRanks:
    """Kills of one scenario's ranks.

    Args:
        scenario: how they train.
        num_steps: of the run.
        root: for their directories, an existing one.
        draw: whom to kill, and when.
        outcome: gets what becomes of them.
    """

    def __init__(self, scenario: Scenario, num_steps: int, root: Path, draw: random.Random, outcome: Outcome) -> None:
        self._scenario = scenario
        self._num_steps = num_steps
        self._root = root
        self._draw = draw
        self._outcome = outcome
        begun = time.monotonic()
        self._reference = self._uninterrupted()
        self._seconds = time.monotonic() - begun

    def run(self, max_kills: int) -> None:
        """One run from its start to its end, killed again and again."""
        before, outcome = self._outcome.num_kills, self._outcome
        while not outcome.wrong:
            num_lines = self._num_lines()
            ranks = self._fork("killed", durable=True)
            outcome.num_lives += 1
            if outcome.num_kills - before >= max_kills:
                if not ranks.wait(_LIFE_SECONDS):
                    self._complain("stuck", ranks)
                break
            if self._wait(ranks, num_lines):
                break
            has_begun = self._num_lines() > num_lines
            self._kill_one(ranks, has_begun=has_begun)
            outcome.num_kills += 1
            outcome.kills_before_engine += not has_begun
        if not outcome.wrong and any(ranks.codes):
            self._complain(f"a life ended with {ranks.codes}", ranks)
        self._judge()

    def _judge(self) -> None:
        self._outcome.num_runs += 1
        for rank in range(self._scenario.num_ranks):
            self._compare(rank)
        self._compare_lives()

    def _kill_one(self, ranks: Ranks, *, has_begun: bool) -> None:
        """Kill one, and in the end all; ranks that have not met yet wait for each other until time is up."""
        ranks.signal(signal.SIGKILL, self._draw.randrange(self._scenario.num_ranks))
        killed = time.monotonic()
        if has_begun and self._draw.random() < 0.5:
            if not ranks.wait(_ENDING_SECONDS):
                self._complain(f"ranks go on {_ENDING_SECONDS:g} s after one was killed", ranks)
            self._outcome.ending_seconds.append(time.monotonic() - killed)
        else:
            ranks.wait(self._draw.uniform(0, 0.1))
        ranks.end()

    def _wait(self, ranks: Ranks, num_lines: int) -> bool:
        """Until the moment to kill, some time or some time after some step; whether all have ended before."""
        if self._draw.random() < 0.5:
            return ranks.wait(self._draw.uniform(0, 0.6 * self._seconds))
        lines = num_lines + 1 + self._draw.randint(0, self._num_steps // 3)
        if ranks.wait(_LIFE_SECONDS, until=lambda: self._num_lines() >= lines or any(ranks.codes)):
            return True
        if self._num_lines() < lines:
            self._complain(f"stuck, or ended with {ranks.codes}", ranks)
        return ranks.wait(self._draw.uniform(0, 2 * self._seconds / self._num_steps))

    def _uninterrupted(self) -> list[dict[Any, Any]]:
        """Of each rank losses by step, and the state in the end, of a run without commits."""
        ranks = self._fork("plain", durable=False)
        ranks.wait(600.0)
        if any(code != 0 for code in ranks.codes):
            self._complain(f"a run without commits ended with {ranks.codes}", ranks)
        return [summary(entries(self._diary("plain", rank))) for rank in range(self._scenario.num_ranks)]

    def _fork(self, name: str, *, durable: bool) -> Ranks:
        paths = self._paths(name)

        def work(rank: int) -> None:
            live(self._scenario, paths, self._num_steps, self._diary(name, rank), durable=durable, rank=rank)

        for said in self._root.glob("said-*"):
            said.unlink()
        variables = {"TORCHELASTIC_RESTART_COUNT": str(self._outcome.num_lives)}
        return Ranks(work, self._scenario.num_ranks, self._root, variables)

    def _paths(self, name: str) -> list[Path]:
        paths = [self._root / name / f"nvme{index}" for index in range(self._scenario.num_directories)]
        for path in paths:
            path.mkdir(parents=True, exist_ok=True)
        return paths

    def _diary(self, name: str, rank: int) -> Path:
        return self._root / f"{name}-{rank}.jsonl"

    def _num_lines(self) -> int:
        return len(entries(self._diary("killed", 0)))

    def _compare(self, rank: int) -> None:
        found, reference = entries(self._diary("killed", rank)), self._reference[rank]
        for entry in found:
            if "step" in entry and entry["losses"] != reference[entry["step"]]:
                self._complain(f"rank {rank}: another loss in step {entry['step']}")
        if summary(found) != reference:
            self._complain(f"rank {rank}: the end is another")
        last = 0
        for index, entry in enumerate(found):
            if "step" in entry:
                last = entry["step"] + 1
            elif "began" in entry and index and rank == 0:
                self._outcome.steps_again.append(last - entry["began"])
                self._outcome.kills_before_commit += entry["began"] == 0
                if last - entry["began"] > self._scenario.durability + 2:
                    self._complain(f"{last} steps begun, went on from {entry['began']}")

    def _compare_lives(self) -> None:
        """All ranks must have gone on from one step; of a life that was killed early not all have come so far."""
        began: dict[str, set[int]] = {}
        for rank in range(self._scenario.num_ranks):
            for entry in entries(self._diary("killed", rank)):
                if "began" in entry:
                    began.setdefault(entry["life"], set()).add(entry["began"])
        for life, steps in began.items():
            if len(steps) > 1:
                self._complain(f"ranks went on from different steps {sorted(steps)} in life {life}")

    def _complain(self, what: str, ranks: Ranks | None = None) -> None:
        words = [f"{self._scenario}: {what}"]
        if ranks is not None:
            ranks.end(tell=True)
            said = sorted(self._root.glob("said-*"))
            words += [f"{each.name}: {each.read_text(errors='replace')[-4000:]}" for each in said]
        self._outcome.wrong.append("\n".join(words))


class KillTorchrun(KillRanks):
    """The same for ranks that torchrun starts again."""

    def run(self, max_kills: int) -> None:
        """One run from its start to its end."""
        life = {
            "scenario": asdict(self._scenario),
            "paths": [str(path) for path in self._paths("killed")],
            "num_steps": self._num_steps,
            "root": str(self._root),
        }
        options = ["--nproc-per-node", str(self._scenario.num_ranks), "--max-restarts", str(max_kills)]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "--monitor-interval", "0.1"]
        command += ["--master-port", str(free_port()), __file__, "--live", json.dumps(life)]
        with (self._root / "said-torchrun").open("wb") as said:
            torchrun = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            for _ in range(max_kills):
                self._kill_when_it_has_come_on(torchrun)
            code = torchrun.wait(_LIFE_SECONDS)
        finally:
            torchrun.terminate()  # and it its ranks
            torchrun.wait()
        self._outcome.num_lives += max_kills + 1
        if code != 0:
            words = (self._root / "said-torchrun").read_text(errors="replace")[-8000:]
            self._complain(f"torchrun ended with {code}: {words}")
        self._judge()

    def _kill_when_it_has_come_on(self, torchrun: subprocess.Popen[bytes]) -> None:
        """Kill a rank of this life, once it has taken a step or two."""
        victim = self._draw.randrange(self._scenario.num_ranks)
        num_lines = len(entries(self._diary("killed", victim)))
        deadline = time.monotonic() + _LIFE_SECONDS
        while True:
            found = entries(self._diary("killed", victim))
            if len(found) >= num_lines + 3 and any("began" in entry for entry in found[num_lines:]):
                break
            if torchrun.poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(0.002)
        time.sleep(self._draw.uniform(0, 2 * self._seconds / self._num_steps))
        if torchrun.poll() is None:
            os.kill([entry["pid"] for entry in found if "began" in entry][-1], signal.SIGKILL)
            self._outcome.num_kills += 1


def live_under_torchrun(document: str) -> None:
    """A rank's life, as ``KillTorchrun`` says."""
    life, rank = json.loads(document), int(os.environ["RANK"])
    paths, diary = [Path(path) for path in life["paths"]], Path(life["root"]) / f"killed-{rank}.jsonl"
    live(Scenario(**life["scenario"]), paths, life["num_steps"], diary, rank=rank)


def warm(parent: Path | None) -> None:
    """Import what training imports on its way, which is found out by ranks that are not killed."""
    with tempfile.TemporaryDirectory(prefix="infinity-kill-ranks-", dir=parent) as name:
        root = Path(name)
        (root / "nvme").mkdir()

        def work(rank: int) -> None:
            live(SCENARIOS[0], [root / "nvme"], 2, root / f"diary-{rank}", rank=rank)
            (root / f"modules-{rank}").write_text("\n".join(sorted(sys.modules)), encoding="utf-8")

        ranks = Ranks(work, SCENARIOS[0].num_ranks, root)
        ranks.wait(600.0)
        if any(ranks.codes):
            raise SystemExit((root / "said-0").read_text(errors="replace"))
        import_all((root / "modules-0").read_text(encoding="utf-8").split("\n"))


def measure(num_kills: int, num_steps: int, parent: Path | None, *, seed: int) -> Outcome:
    """Kill until there were so many kills, scenario after scenario."""
    warm(parent)
    outcome, draw = Outcome(), random.Random(seed)
    while outcome.num_kills < num_kills and not outcome.wrong:
        scenario = SCENARIOS[outcome.num_runs % len(SCENARIOS)]
        before, begun = outcome.num_kills, time.monotonic()
        with tempfile.TemporaryDirectory(prefix="infinity-kill-ranks-", dir=parent) as root:
            kills = min(-(-num_kills // len(SCENARIOS)), num_kills - outcome.num_kills)
            KillRanks(scenario, num_steps, Path(root), draw, outcome).run(kills)
        print(f"{outcome.num_kills - before:3d} kills in {time.monotonic() - begun:5.1f} s: {scenario}", flush=True)
    return outcome


def measure_torchrun(num_kills: int, num_steps: int, parent: Path | None, *, seed: int) -> Outcome:
    """One run under torchrun."""
    warm(parent)
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="infinity-kill-ranks-", dir=parent) as root:
        KillTorchrun(SCENARIOS[0], num_steps, Path(root), random.Random(seed), outcome).run(num_kills)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 of any rank at any moment; training goes on bit for bit.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nvme", type=Path, help="an existing directory")
    parser.add_argument("--torchrun", action="store_true", help="ranks that torchrun starts again")
    parser.add_argument("--json", type=Path, help="write the result there, too")
    parser.add_argument("--live", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.live is not None:
        live_under_torchrun(arguments.live)
        return 0
    run = measure_torchrun if arguments.torchrun else measure
    outcome = run(arguments.kills, arguments.steps, arguments.nvme, seed=arguments.seed)
    again, ending = outcome.steps_again or [0], outcome.ending_seconds or [0.0]
    print(
        f"{outcome.num_kills} kills of a rank in {outcome.num_runs} runs: {outcome.kills_before_engine} before "
        f"training went on, {outcome.kills_before_commit} after which it began anew; steps taken again: "
        f"{statistics.mean(again):.2f} on average, {max(again)} at most; the other ranks had ended by themselves after "
        f"{statistics.median(ending):.2f} s, {max(ending):.2f} s at most; wrong: {len(outcome.wrong)}"
    )
    for wrong in outcome.wrong:
        print(f"    {wrong}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
