"""No crash loses a commit: every state of the disk that a crash may leave, tried.

Short runs of training (``lib_crash_runs.py``) are recorded call by call (``lib_crash_log.py``): every write to a data
file, every change of a directory, every sync, and when they begin and end. A crash may come after any of these events,
and of what no sync had covered by then any part may be on the disk: each change or not, in any order that one entry or
block allows, each write torn at any 4 KiB. Such a state is made of real directories (``lib_crash_states.py``), and
opened as a run opens its own. It must be, in every byte, a commit that was made, and none older than the last one whose
making had returned; before the first, no commit and no error; and nothing else may be left in the directories. Where
few things may or may not be there, all combinations are tried; where there are more, those with one thing there and
those with one thing missing; beside these, states drawn at random, from a seed.

A part of the states is gone on with by a new engine: weights, optimizer states, the scheduler and random generators
must be those that the run had, bit for bit, and so must the next step. Some of these are recorded again, and crash
again.

    python bench/crash_states.py [--states 6000] [--exhaustive 64] [--resume-every 20] [--directory DIR] [--json FILE]

States are made in ``/dev/shm`` where there is one, since thousands of syncs take long on a disk and prove nothing more.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from lib_crash_log import Log, Truth, recording
from lib_crash_runs import RUNS, Run, State, play, resume
from lib_crash_states import Choice, Crashes, Drawn, Tally, check, discard


@contextmanager
def workplace(parent: Path | None) -> Iterator[Path]:
    """A directory to make states in, removed at the end."""
    shared = Path("/dev/shm")
    if parent is None and shared.is_dir() and shutil.disk_usage(shared).free > 1 << 28:
        parent = shared
    root = Path(tempfile.mkdtemp(prefix="infinity-crash-states-", dir=parent))
    try:
        yield root
    finally:
        shutil.rmtree(root)


def record(run: Run, root: Path) -> tuple[Log, dict[int, State]]:
    """Play a run twice: to see what there is after each step, and to record what it does to the disk."""
    states: dict[int, State] = {}
    longer = replace(run, words=(*run.words, "step", "step"))  # what is resumed may go beyond the end
    play(longer, _make_paths(root / "plain", run.num_directories), states)
    paths = _make_paths(root / "recorded", run.num_directories)
    with recording(paths) as log:
        play(run, paths)
    return log, states


class Trial:
    """Crashes of one recorded run, tried.

    Args:
        run: which.
        log: of it.
        states: what there was after each number of steps.
        root: where to make states.
        tally: gets what comes of them.
    """

    def __init__(self, run: Run, log: Log, states: dict[int, State], root: Path, tally: Tally) -> None:
        self._run = run
        self._log = log
        self._states = states
        self._root = root
        self._crashes = Crashes(log)
        self._tally = tally

    def exhaust(self, limit: int, *, stride: int = 1) -> None:
        """All choices after each event where there are no more than ``limit``, else those with one thing different."""
        for point in range(self._log.num_begun, self._log.num_events + 1, stride):
            for choice in self._crashes.exhaustive(point, limit):
                self._try(point, choice)

    def draw(self, num_states: int, *, seed: int, resume_every: int = 0, crash_every: int = 0) -> None:
        """States at random.

        Args:
            num_states: how many.
            seed: of the randomness.
            resume_every: one of so many is gone on with; 0: none.
            crash_every: one of so many of these crashes again; 0: none.
        """
        draw = random.Random(seed)
        points = sorted(draw.randint(self._log.num_begun, self._log.num_events) for _ in range(num_states))
        for index, point in enumerate(points):
            then: Callable[[list[Path], int | None, int], None] | None = None
            if resume_every and index % resume_every == resume_every - 1:
                again = crash_every and index // resume_every % crash_every == crash_every - 1
                then = self._crash_again if again else self._resume
            self._try(point, Drawn(draw.getrandbits(32)), then)

    def _try(
        self, point: int, choice: Choice, then: Callable[[list[Path], int | None, int], None] | None = None
    ) -> None:
        num_lost = len(self._tally.lost)
        root = self._root / "state"
        paths, number = check(self._crashes, point, choice, root, self._tally)
        try:
            if then is not None and len(self._tally.lost) == num_lost:
                then(paths, number, point)
        finally:
            discard(root)

    def _resume(self, paths: list[Path], number: int | None, point: int) -> None:
        step = None if number is None else int(self._crashes.truth(number, point).engine["step"])
        self._tally.num_resumed += 1
        try:
            wrong = resume(self._run, paths, self._states, step)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            self._tally.lost.append(f"after {point} events, resumed: {wrong}")

    def _crash_again(self, paths: list[Path], number: int | None, point: int) -> None:
        """Go on and record it, and have that crash."""
        commits: dict[int, Truth] = {}
        if number is not None:
            retained = int(self._run.settings.get("retained_commits", 1)) + 1  # one may be about to be removed
            commits = {each: self._crashes.truth(each, point) for each in range(max(1, number - retained), number + 1)}
        with recording(paths, commits) as log:
            self._resume(paths, number, point)
        inner = self._root / "again"
        inner.mkdir()
        Trial(self._run, log, self._states, inner, self._tally).draw(24, seed=point, resume_every=12)
        inner.rmdir()


def measure(num_states: int, exhaustive: int, resume_every: int, root: Path, *, seed: int) -> dict[str, Tally]:
    """Try all runs; what came of each."""
    tallies: dict[str, Tally] = {}
    for index, run in enumerate(RUNS):
        begun = time.perf_counter()
        base = root / str(index)
        base.mkdir()
        tally = tallies[run.name] = Tally()
        log, states = record(run, base)
        trial = Trial(run, log, states, base, tally)
        trial.exhaust(exhaustive)
        num_exhaustive = tally.num_states
        trial.draw(-(-num_states // len(RUNS)), seed=seed + index, resume_every=resume_every, crash_every=4)
        print(
            f"{run.name}: {log.num_events} events; {num_exhaustive} states by enumeration, "
            f"{tally.num_states - num_exhaustive} at random, {tally.num_commits} of all with a commit, "
            f"{tally.num_resumed} resumed; lost: {len(tally.lost)} ({time.perf_counter() - begun:.0f} s)",
            flush=True,
        )
        for wrong in tally.lost[:5]:
            print(f"    {wrong}")
        shutil.rmtree(base)
    return tallies


def _make_paths(parent: Path, num_directories: int) -> list[Path]:
    paths = [parent / f"nvme{index}" for index in range(num_directories)]
    for path in paths:
        path.mkdir(parents=True)
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description="Every state of the disk that a crash may leave, tried.")
    parser.add_argument("--states", type=int, default=6000, help="states at random, over all runs")
    parser.add_argument("--exhaustive", type=int, default=64, help="combinations up to which all are tried")
    parser.add_argument("--resume-every", type=int, default=20, help="one of so many is resumed by an engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where to make the states")
    parser.add_argument("--json", type=Path, help="write the result there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with workplace(arguments.directory) as root:
        tallies = measure(arguments.states, arguments.exhaustive, arguments.resume_every, root, seed=arguments.seed)
    num_states, num_lost = sum(each.num_states for each in tallies.values()), sum(len(t.lost) for t in tallies.values())
    num_resumed = sum(each.num_resumed for each in tallies.values())
    print(f"all: {num_states} states tried, {num_resumed} resumed by an engine, lost: {num_lost}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({name: asdict(each) for name, each in tallies.items()}, indent=2) + "\n")
    return 1 if num_lost else 0


if __name__ == "__main__":
    sys.exit(main())
