"""``infinity train`` with commits: killed, stopped or longer than planned, it ends as one never interrupted."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import infinity.train.run
from infinity.__main__ import main
from infinity.config import Config
from infinity.console.interrupt import StopRequest
from infinity.errors import ConfigError, DirectoryError
from infinity.train.failures import DivergedError
from infinity.train.history import _KEPT, History
from infinity.train.run import run
from infinity.train.settings import TrainSettings

FLAGS = {"layers": 1, "hidden": 32, "heads": 2, "seq": 8, "batch": 2, "warmup": 3, "eval_every": 3, "accumulate": 2}

KILLED = """
import os, signal, sys
import torch
import infinity.train.run as runs
from infinity.__main__ import main

torch.set_num_threads(1)
step, number, *arguments = sys.argv[1:]
real, taken = runs.train_step, 0

def train_step(*args):
    global taken
    taken += 1
    if taken == int(step):
        os.kill(os.getpid(), int(number))
    return real(*args)

runs.train_step = train_step
main(arguments)
"""


pytestmark = pytest.mark.usefixtures("one_thread")


class Runs:
    """Runs of the command that differ in little."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nvme = directory / "nvme"
        self.data = directory / "text"
        self.data.write_text("".join(f"{number} is {number * number % 97}. " for number in range(400)))

    def flags(self, **flags: Any) -> dict[str, Any]:
        return {**FLAGS, "data": self.data, "steps": 8, "save": self.directory / "saved", **flags}

    def run(self, config: dict[str, Any], **flags: Any) -> tuple[dict[str, Any], bytes, str]:
        """The document, the saved weights and what was shown."""
        shown, flags = io.StringIO(), self.flags(**flags)
        config = {"device": "cpu", "hbm": "1MiB", "ram": "1MiB", "nvme": self.nvme, **config}
        with StopRequest() as stop:
            report = run(TrainSettings(**flags), Config(**config), Console(file=shown, width=200), stop)
        return report.as_document(), Path(flags["save"]).read_bytes(), shown.getvalue()

    def command(
        self, step: int, number: signal.Signals, *config: str, **flags: Any
    ) -> subprocess.CompletedProcess[str]:
        """One in a process of its own that gets a signal in a step."""
        given = [f"--{name.replace('_', '-')}={value}" for name, value in self.flags(**flags).items()]
        budgets = ["--device=cpu", "--hbm=1MiB", "--ram=1MiB", f"--nvme={self.nvme}"]
        program = [sys.executable, "-c", KILLED, str(step), str(int(number)), "train", *given, *budgets, *config]
        cwd = Path(__file__).parent.parent
        return subprocess.run(program, capture_output=True, text=True, timeout=150, check=False, cwd=cwd)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def whole(runs: Runs) -> tuple[dict[str, Any], bytes]:
    """A run that nothing disturbs, and that keeps no state."""
    document, weights, _ = runs.run({})
    assert not runs.nvme.exists()
    assert document["commit"] is None
    return document, weights


def assert_same_run(got: tuple[dict[str, Any], bytes, str], whole: tuple[dict[str, Any], bytes]) -> None:
    for name in ("losses", "eval_steps", "eval_losses"):
        assert got[0][name] == whole[0][name], name
    assert got[1] == whole[1]


@pytest.mark.parametrize(("durability", "step"), [(1, 4), (3, 3)])
def test_a_run_that_is_killed_is_resumed_bit_for_bit(
    durability: int, step: int, runs: Runs, whole: tuple[dict[str, Any], bytes]
) -> None:
    killed = runs.command(6, signal.SIGKILL, f"--durability={durability}")
    assert killed.returncode == -signal.SIGKILL
    got = runs.run({"durability": durability, "resume": "auto"})
    assert_same_run(got, whole)
    assert got[0]["commit"]["resumed_step"] in (step, step + 1)  # the last commit may not have been made in time
    assert "resumed commit" in got[2]


def test_a_run_that_is_stopped_keeps_its_last_step(runs: Runs, whole: tuple[dict[str, Any], bytes]) -> None:
    stopped = runs.command(4, signal.SIGTERM, "--durability=checkpoint", "--resume")
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert f"state after step 4: commit 1 in {runs.nvme}; go on from it with --resume" in stopped.stdout
    assert runs.nvme.is_dir()
    got = runs.run({"durability": "checkpoint", "resume": "must"})
    assert_same_run(got, whole)
    assert got[0]["commit"]["resumed_step"] == 4
    assert got[0]["commit"]["step"] == 8


def test_more_steps_go_on_where_the_run_has_ended(runs: Runs, whole: tuple[dict[str, Any], bytes]) -> None:
    _, _, shown = runs.run({"durability": 4}, steps=6)
    assert "go on from it with --resume and a larger --steps" in shown
    again = runs.run({"durability": 4, "resume": "auto"}, steps=6)
    assert again[0]["losses"] == whole[0]["losses"][:6], "there is nothing left to do"
    assert_same_run(runs.run({"durability": 4, "resume": "auto"}), whole)


def test_the_cost_of_commits_is_shown(runs: Runs) -> None:
    document, _, shown = runs.run({"durability": 1})
    assert sum(step["commit_bytes"] for step in document["steps"]) > 0
    assert sum(step["commit_seconds"] for step in document["steps"]) > 0
    assert "beside training" in shown


def test_a_state_is_not_trained_over(runs: Runs) -> None:
    runs.run({"durability": 4})
    with pytest.raises(DirectoryError, match="--resume"):
        runs.run({"durability": 4})


def test_a_run_that_diverges_leaves_the_commit_before(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.run({"durability": "checkpoint"}, steps=2)
    monkeypatch.setattr(infinity.train.run, "train_step", lambda *_: float("nan"))
    with pytest.raises(DivergedError):
        runs.run({"durability": "checkpoint", "resume": "auto"})
    monkeypatch.undo()
    assert runs.run({"durability": "checkpoint", "resume": "auto"})[0]["commit"]["resumed_step"] == 2


def test_a_commit_of_another_program_is_refused(runs: Runs) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(History, "state_dict", lambda self: {name: [] for name in _KEPT})
        runs.run({"durability": "checkpoint"})
    with pytest.raises(ConfigError, match="not made by this command"):
        runs.run({"durability": "checkpoint", "resume": "auto"})


@pytest.mark.parametrize(
    ("given", "resume"),
    [(["--resume"], "auto"), (["--resume", "--durability=3"], "auto"), (["--resume", "must"], "must")],
)
def test_resume_alone_is_auto(
    given: list[str], resume: str, runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []
    monkeypatch.setattr("infinity.train.cli.run", lambda settings, config, *_: seen.append(config))
    arguments = ["train", "--nvme", str(runs.directory), "--durability", "2", *given, "--retained-commits", "3"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--verify", "always", "--on-nonfinite", "rollback"])
    assert ended.value.code == 0, capsys.readouterr().err
    [config] = seen
    assert (config.resume, config.retained_commits, config.verify) == (resume, 3, "always")
    assert config.on_nonfinite == "rollback"
    assert config.durability == (3 if "--durability=3" in given else 2)


def test_the_document_is_json(runs: Runs) -> None:
    document, _, _ = runs.run({"durability": 4})
    assert json.loads(json.dumps(document))["commit"]["step"] == 8
