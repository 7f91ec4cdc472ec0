"""``kill -9`` at any moment: training goes on as if it had never been interrupted, bit for bit, and nothing is left.

A process that has imported everything, and has no threads, forks one training run after the other and kills each at a
moment drawn from a seed: some time after its start, from before the engine is made on, or some time after it has come
to a certain step. The next one resumes. When a run has come to its end, each loss that any life wrote down must be
that of a run which was not interrupted, and so must all weights, buffers and optimizer states in the end; and in the
state directories there must be the lock, the owner's file, one data file each, and the commits that are kept.

Runs differ in precision, steps between commits, accumulation, directories and commits kept
(``lib_kill_child.SCENARIOS``); all have a scheduler, a stateful loader, dropout and batch norm, and less host memory
than state.

    python bench/kill_loop.py [--kills 200] [--steps 40] [--seed 0] [--nvme DIR] [--json FILE]
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: whoever forks has no threads

import argparse
import json
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lib_forks import import_all, num_threads
from lib_kill_child import SCENARIOS, Scenario, entries, live, summary

_LIFE_SECONDS = 120.0
"""After that a run that is not killed counts as stuck."""


@dataclass(slots=True)
class Outcome:
    """What became of the kills.

    Attributes:
        num_kills: how many.
        num_runs: runs that came to their end.
        num_lives: processes, the last ones included.
        kills_before_engine: kills before training had begun or gone on.
        kills_before_commit: of those, and later ones, after which the next life began anew.
        steps_again: steps that were taken again, for each kill.
        wrong: what was not as it must be, in words.
    """

    num_kills: int = 0
    num_runs: int = 0
    num_lives: int = 0
    kills_before_engine: int = 0
    kills_before_commit: int = 0
    steps_again: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def fork(scenario: Scenario, paths: list[Path], num_steps: int, diary: Path, *, durable: bool = True) -> int:
    """Begin a life; its process id."""
    assert num_threads() == 1, "a process with threads may not be forked"
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        live(scenario, paths, num_steps, diary, durable=durable)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def warm(parent: Path | None) -> None:
    """Import what training imports on its way, which is found out by one that is not killed."""
    root = Path(tempfile.mkdtemp(prefix="infinity-kill-loop-", dir=parent))
    try:
        names = root / "modules"
        (root / "nvme").mkdir()
        pid = os.fork()
        if not pid:
            live(SCENARIOS[0], [root / "nvme"], 2, root / "diary")
            names.write_text("\n".join(sys.modules), encoding="utf-8")
            os._exit(0)
        assert ended(pid, 600.0) == 0
        import_all(names.read_text(encoding="utf-8").split("\n"))
    finally:
        shutil.rmtree(root)


def ended(pid: int, seconds: float) -> int | None:
    """Wait so long for a process; how it has ended."""
    until = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        time.sleep(0.001)


class KillLoop:
    """Kills of one scenario's runs.

    Args:
        scenario: how they train.
        num_steps: of each run.
        root: for their directories.
        draw: when to kill.
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
        paths, diary = self._directories("killed"), self._root / "killed.jsonl"
        before = self._outcome.num_kills
        while True:
            num_lines = len(entries(diary))
            pid = fork(self._scenario, paths, self._num_steps, diary)
            self._outcome.num_lives += 1
            kills = self._outcome.num_kills - before < max_kills
            code = self._wait(pid, diary, num_lines) if kills else ended(pid, _LIFE_SECONDS)
            if code is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                if not kills:
                    self._outcome.wrong.append(f"{self._scenario}: stuck")
                    break
                self._outcome.num_kills += 1
                self._outcome.kills_before_engine += len(entries(diary)) == num_lines
                continue
            if code:
                self._outcome.wrong.append(f"{self._scenario}: a life ended with {code}")
            break
        self._outcome.num_runs += 1
        self._compare(entries(diary))
        self._look(paths, ended_before=[e["began"] for e in entries(diary) if "began" in e][-1] == self._num_steps)
        shutil.rmtree(self._root)

    def _wait(self, pid: int, diary: Path, num_lines: int) -> int | None:
        """Until the moment to kill: after some time, or some time after some step."""
        if self._draw.random() < 0.5:
            return ended(pid, self._draw.uniform(0, 0.6 * self._seconds))
        lines = num_lines + 1 + self._draw.randint(0, self._num_steps // 3)
        until = time.monotonic() + _LIFE_SECONDS
        while len(entries(diary)) < lines:
            code = ended(pid, 0.002)
            if code is not None:
                return code
            if time.monotonic() > until:
                self._outcome.wrong.append(f"{self._scenario}: stuck")
                return None
        return ended(pid, self._draw.uniform(0, 2 * self._seconds / self._num_steps))

    def _uninterrupted(self) -> dict[str, Any]:
        """Losses by step, and the state in the end, of a run without commits."""
        diary = self._root / "uninterrupted.jsonl"
        code = ended(fork(self._scenario, self._directories("plain"), self._num_steps, diary, durable=False), 600.0)
        assert code == 0, f"a run without commits ended with {code}"
        return summary(entries(diary))

    def _compare(self, found: list[dict[str, Any]]) -> None:
        for entry in found:
            if "step" in entry and entry["losses"] != self._reference[entry["step"]]:
                self._outcome.wrong.append(f"{self._scenario}: another loss in step {entry['step']}")
        if summary(found) != self._reference:
            self._outcome.wrong.append(f"{self._scenario}: the end is another")
        last = 0
        for index, entry in enumerate(found):
            if "step" in entry:
                last = entry["step"] + 1
            elif "began" in entry and index:
                self._outcome.steps_again.append(last - entry["began"])
                self._outcome.kills_before_commit += entry["began"] == 0
                if last - entry["began"] > self._scenario.durability + 1:
                    self._outcome.wrong.append(f"{self._scenario}: {last} steps begun, went on from {entry['began']}")

    def _look(self, paths: list[Path], *, ended_before: bool) -> None:
        """What there is in the end; one commit more may be kept where the last life had nothing to do."""
        for index, path in enumerate(paths):
            assert [each.name for each in path.iterdir()] == ["infinity-state-rank0"]
            names = sorted(each.name for each in (path / "infinity-state-rank0").iterdir())
            rest = [re.sub("[0-9a-f]{16,32}", "X", name) for name in names if not name.startswith("commit-")]
            records = [name for name in names if name.startswith("commit-")]
            kept = min(self._scenario.retained, self._num_steps // self._scenario.durability) if index == 0 else 0
            allowed = {2 * kept, 2 * (kept + 1)} if kept and ended_before else {2 * kept}
            marks = ["state-X.json"] if index else []  # of the state that the first directory has
            if rest != ["lock", "owner.json", "shards-X.bin", *marks] or len(records) not in allowed:
                self._outcome.wrong.append(f"{self._scenario}: left in {path.name}: {names}")

    def _directories(self, name: str) -> list[Path]:
        paths = [self._root / name / f"nvme{index}" for index in range(self._scenario.num_directories)]
        for path in paths:
            path.mkdir(parents=True)
        return paths


def measure(num_kills: int, num_steps: int, parent: Path | None, *, seed: int) -> Outcome:
    """Kill until there were so many kills, scenario after scenario."""
    warm(parent)
    outcome, draw = Outcome(), random.Random(seed)
    while outcome.num_kills < num_kills and not outcome.wrong:
        scenario = SCENARIOS[outcome.num_runs % len(SCENARIOS)]
        root = Path(tempfile.mkdtemp(prefix="infinity-kill-loop-", dir=parent))
        before, begun = outcome.num_kills, time.monotonic()
        try:
            KillLoop(scenario, num_steps, root, draw, outcome).run(min(40, num_kills - outcome.num_kills))
        finally:
            shutil.rmtree(root, ignore_errors=True)
        print(f"{outcome.num_kills - before:3d} kills in {time.monotonic() - begun:5.1f} s: {scenario}", flush=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 at any moment; training goes on bit for bit.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nvme", type=Path, help="an existing directory")
    parser.add_argument("--json", type=Path, help="write the result there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcome = measure(arguments.kills, arguments.steps, arguments.nvme, seed=arguments.seed)
    again = outcome.steps_again or [0]
    print(
        f"{outcome.num_kills} kills in {outcome.num_runs} runs: {outcome.kills_before_engine} before training went on, "
        f"{outcome.kills_before_commit} after which it began anew; steps taken again: {statistics.mean(again):.2f} on "
        f"average, {max(again)} at most; wrong: {len(outcome.wrong)}"
    )
    for wrong in outcome.wrong:
        print(f"    {wrong}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
