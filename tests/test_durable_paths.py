"""Paths and places that users get wrong around durable state: one typed error each, and nothing is changed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import infinity
from durable_runs import Run, assert_same_end, files_in, trained
from infinity import Config, ConfigError, DirectoryError, DirectoryInUseError, EngineStateError
from infinity.store.directory import open_directories, open_state_directories
from infinity.store.pruning import Pruning


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.save_checkpoint(None), "save_checkpoint: expected a path.*got None"),
        (lambda engine: engine.save_checkpoint(b"saved"), "save_checkpoint: expected a path.*got b'saved'"),
        (lambda engine: engine.save_checkpoint("sav\0ed"), "save_checkpoint: expected a path"),
        (lambda engine: engine.export_safetensors(None), "export_safetensors: expected a path"),
        (lambda engine: engine.load_checkpoint(None), "a checkpoint, or the NVMe.*expected a path.*got None"),
        (
            lambda engine: infinity.open_checkpoint(cast(Any, None)),
            "a checkpoint, or the NVMe.*expected a path.*got None",
        ),
        (lambda engine: infinity.open_checkpoint(cast(Any, ["a", 3])), "expected a path.*got 3"),
        (lambda engine: infinity.open_weights(cast(Any, None)), "open_weights: expected a path.*got None"),
        (lambda engine: engine.rollback("a"), "expected a number of steps.*got 'a'"),
        (lambda engine: engine.rollback(True), "expected a number of steps.*got True"),
        (lambda engine: engine.rollback(1.0), "expected a number of steps.*got 1.0"),
        (lambda engine: engine.rollback(-1), "expected a number of steps.*got -1"),
    ],
)
def test_arguments_that_are_none(tmp_path: Path, call: Callable[[Any], object], message: str) -> None:
    run = Run(tmp_path, durability=1)
    run.until(1)
    with pytest.raises(ConfigError, match=message):
        call(run.engine)
    run.until(2)
    run.end()


def test_a_place_that_is_refused_costs_no_commit(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "stranger").write_text("mine")
    run = Run(tmp_path / "nvme", durability="checkpoint")
    run.engine.commit()
    run.until(2)
    before = files_in(tmp_path)
    for path in (
        "/",
        tmp_path / "stranger",
        tmp_path / "missing" / "saved",
        tmp_path / "nvme" / "infinity-state-rank0" / "saved",
        tmp_path / "nvme" / "infinity-state-rank0",
    ):
        with pytest.raises(DirectoryError):
            run.engine.save_checkpoint(path)
    assert run.engine.last_commit is not None
    assert (run.engine.last_commit.number, run.engine.last_commit.step) == (1, 0)
    assert files_in(tmp_path) == before
    run.end()


def test_home_is_expanded_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "nvme").mkdir()
    config = Config(nvme=["~/nvme", Path("~")])
    assert config.nvme == (tmp_path / "nvme", tmp_path)
    with pytest.raises(ConfigError, match=r"nvme.*names no user's home"):
        Config(nvme="~no such user/nvme")
    run = Run(None)
    run.engine.save_checkpoint("~/saved")
    assert run.engine.load_checkpoint("~/saved") == 0
    run.engine.export_safetensors("~/exported")
    assert infinity.open_weights("~/exported").keys() == run.engine.state_dict().keys()
    with infinity.open_checkpoint("~/saved") as state:
        assert state.step == 0
    run.end()
    assert {path.name for path in tmp_path.iterdir()} == {"nvme", "saved", "exported"}


def test_a_run_does_not_begin_anew_inside_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    run = Run(tmp_path / "nvme", durability=1)
    run.engine.save_checkpoint(tmp_path / "saved")
    run.end()
    shutil.copytree(tmp_path / "saved", tmp_path / "copied" / "infinity-state-rank0")
    before = files_in(tmp_path)
    settings: dict[str, Any] = {"durability": 1, "resume": "auto"}
    for path, more in ((tmp_path / "saved", settings), (tmp_path / "saved", {}), (tmp_path / "copied", settings)):
        with pytest.raises(DirectoryError, match=r"this is a saved checkpoint.*engine\.load_checkpoint"):
            Run(path, **more)
    with pytest.raises(DirectoryError, match=f"made for a run: give the one that holds it, {tmp_path}/nvme "):
        Run(tmp_path / "nvme" / "infinity-state-rank0", **settings)
    assert files_in(tmp_path) == before


def test_who_reads_is_not_taken_for_a_job(tmp_path: Path) -> None:
    expected = trained(tmp_path, 2, durability=1)
    with infinity.open_checkpoint(tmp_path), pytest.raises(DirectoryInUseError, match=r"is being read.*checkpoint"):
        Run(tmp_path, durability=1, resume="must")
    run = Run(tmp_path, durability=1, resume="must")
    with pytest.raises(DirectoryInUseError, match="in use by process"):
        open_state_directories([tmp_path])
    with pytest.raises(DirectoryInUseError, match="belongs to process"):
        infinity.open_checkpoint(tmp_path)
    assert_same_end(run.end(), expected)
    owner = tmp_path / "infinity-state-rank0" / "owner.json"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "pid": 0}))  # the last job's, which has ended
    with Pruning([tmp_path]), pytest.raises(DirectoryInUseError, match=f"belongs to process {os.getpid()} "):
        infinity.open_checkpoint(tmp_path)
    with (tmp_path / "infinity-state-rank0" / "lock").open() as lock:  # a start that looks leaves no lock
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_whose_directory_was_moved(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    run = Run(tmp_path / "nvme", durability="checkpoint")
    run.until(1)
    (tmp_path / "nvme").rename(tmp_path / "moved")
    with pytest.raises(DirectoryError, match="moved or removed while it runs: move it back"):
        run.engine.save_checkpoint(tmp_path / "saved")
    (tmp_path / "moved").rename(tmp_path / "nvme")
    run.engine.save_checkpoint(tmp_path / "saved")
    run.end()
    assert {path.name for path in tmp_path.iterdir()} == {"nvme", "saved"}


def test_what_is_closed_is_read_no_more(tmp_path: Path) -> None:
    run = Run(None)
    run.engine.save_checkpoint(tmp_path / "saved")
    run.end()
    state = infinity.open_checkpoint(tmp_path / "saved")
    assert repr(state) == f"<StoredState of step 0, 13 weights: <StoredCommit 0 of {tmp_path}/saved>>"
    weight, optimizer = state.weights["0.0.weight"], state.optimizer_state_dict
    assert isinstance(weight, torch.Tensor)
    state.close()
    assert repr(state.commit) == f"<StoredCommit 0 of {tmp_path}/saved, closed>"
    for read in (
        lambda: state.weights["0.0.weight"],
        lambda: state.compute_weights["4.bias"],
        lambda: state.weights["3.running_mean"],
        lambda: dict(state.weights),
        lambda: state.commit.tensors(),
    ):
        with pytest.raises(EngineStateError, match=r"saved, closed>: read what you need before"):
            read()
    assert optimizer["param_groups"]


def test_directories_of_ranks_share_a_path_still(tmp_path: Path) -> None:
    first, second = open_directories([tmp_path]), open_directories([tmp_path], rank=1)
    for directory in (*first, *second):
        directory.close()
    assert files_in(tmp_path) == []
