"""A run that goes on from a commit: the same bits as one that was never interrupted, whatever has changed around it."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from durable_runs import STATE_FILES, Run, adamw, assert_same, assert_same_end, files_in, make_model, trained
from infinity import (
    Config,
    DirectoryError,
    EngineStateError,
    ManifestError,
    MismatchError,
    ModelError,
    NoCommitError,
    StorageError,
)

BUDGETS = {
    "all on nvme": {"ram": "100KiB", "hbm": "20KiB", "sub_group_bytes": "16KiB"},
    "half": {"ram": "200KiB", "hbm": "40KiB", "sub_group_bytes": "16KiB"},
    "all in ram": {},
}


def interrupted(path: Path, *stops: int, **config: Any) -> Any:
    """The last of several runs, each of which goes on where the last commit of the one before was."""
    outcome = None
    losses: dict[int, float] = {}
    for stop in stops:
        outcome = trained(path, stop, **{"resume": "auto", **config})
        losses |= outcome.losses
    assert outcome is not None
    outcome.losses = losses
    return outcome


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("budgets", list(BUDGETS))
@pytest.mark.parametrize("overlap", [True, False])
def test_resumed_run_has_the_bits_of_one_that_never_stopped(
    tmp_path: Path, precision: str, budgets: str, overlap: bool
) -> None:
    config: dict[str, Any] = {**BUDGETS[budgets], "precision": precision, "overlap": overlap}
    plain = trained(None, 9, precision=precision)
    resumed = interrupted(tmp_path, 4, 7, 9, durability=2, **config)
    assert_same(plain, resumed, steps=range(1, 10))
    assert files_in(tmp_path) == STATE_FILES


@pytest.mark.parametrize(
    "config",
    [
        {"accumulation_steps": 1},
        {"max_grad_norm": 0.5},
        {"precision": "fp16"},
        {"optimizer_states": "bf16"},
        {"compile": False, "recompute": True},
        {"verify": "always"},
        {"verify": "off"},
        {"retained_commits": 3},
        {"io_backend": "aiofiles"},
    ],
    ids=str,
)
def test_every_setting_resumes(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "durable").mkdir()
    plain = trained(tmp_path / "plain", 6, **config)
    if config.get("precision") == "fp16":
        config["initial_loss_scale"] = 65536.0
    resumed = interrupted(tmp_path / "durable", 3, 6, durability=1, **config)
    assert_same(plain, resumed, steps=range(1, 7))


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
        lambda model: torch.optim.Adafactor(model.parameters()),
        lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), amsgrad=True),
        lambda model: torch.optim.RAdam(model.parameters(), lr=0.01, foreach=True),
    ],
    ids=["sgd", "momentum", "adagrad", "adafactor", "amsgrad", "radam"],
)
def test_every_optimizer_resumes(tmp_path: Path, make_optimizer: Any) -> None:
    plain = trained(None, 6, make_optimizer=make_optimizer)
    resumed = interrupted(tmp_path, 3, 6, durability=1, make_optimizer=make_optimizer)
    assert_same(plain, resumed, steps=range(1, 7))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"sub_group_bytes": "16KiB"}, {"sub_group_bytes": "4KiB"}),
        ({"sub_group_bytes": "4KiB"}, {}),
        ({**BUDGETS["all on nvme"], "precision": "bf16"}, {"precision": "bf16"}),
        ({"precision": "bf16"}, {**BUDGETS["all on nvme"], "precision": "bf16"}),
    ],
    ids=["finer", "coarser", "planes to masters", "masters to planes"],
)
def test_state_of_other_budgets_is_stored_anew(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    plain = trained(None, 8, precision=before.get("precision", "fp32"))
    first = trained(tmp_path, 4, durability=2, **before)
    second = trained(tmp_path, 8, durability=2, resume="must", **after)
    second.losses = first.losses | second.losses
    assert_same(plain, second, steps=range(1, 9))
    assert files_in(tmp_path) == STATE_FILES


def test_weights_go_from_fp32_to_bf16_at_full_precision(tmp_path: Path) -> None:
    before = trained(tmp_path, 4, durability=4, precision="fp32")
    after = trained(tmp_path, 4, durability=4, precision="bf16", resume="must")
    names = [name for name, _ in make_model().named_parameters()]
    assert all(torch.equal(before.weights[name], after.weights[name]) for name in names)


def test_several_directories_in_any_order(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.mkdir()
    plain = trained(None, 8)
    config: dict[str, Any] = {**BUDGETS["all on nvme"], "nvme_weights": (1, 1, 1), "durability": 2}
    first = Run(paths, **config)
    first.until(4)
    first.outcome.losses |= first.end().losses
    second = Run([paths[2], paths[0], paths[1]], resume="must", **config)
    second.until(8)
    outcome = second.end()
    outcome.losses |= first.outcome.losses
    assert_same(plain, outcome, steps=range(1, 9))


def test_run_that_never_committed_leaves_nothing(tmp_path: Path) -> None:
    trained(tmp_path, 3, durability=10)
    assert files_in(tmp_path) == []


def test_explicit_commit_is_all_there_is(tmp_path: Path) -> None:
    run = Run(tmp_path, durability="checkpoint")
    run.until(2)
    info = run.engine.commit()
    assert (info.number, info.step) == (1, 2)
    run.until(5)
    run.end()
    resumed = Run(tmp_path, durability="checkpoint", resume="must")
    assert resumed.engine.num_steps == 2
    assert resumed.engine.last_commit is not None
    assert resumed.engine.last_commit.step == 2
    resumed.until(5)
    assert_same_end(resumed.end(), trained(None, 5))


def test_state_is_never_overwritten_by_a_new_run(tmp_path: Path) -> None:
    trained(tmp_path, 2, durability=1)
    with pytest.raises(DirectoryError, match=r"holds the state of a run \(commit 2 of .*resume='auto'.*prune --all"):
        Run(tmp_path, durability=1)
    trained(tmp_path, 2)  # without durability: works beside it
    assert files_in(tmp_path) == STATE_FILES
    assert trained(tmp_path, 2, durability=1, resume="must").commit is not None


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(NoCommitError, match="expected a commit to resume from, and found none"):
        Run(tmp_path, durability=1, resume="must")
    assert files_in(tmp_path) == []
    trained(tmp_path, 2, durability=1, resume="auto")
    assert files_in(tmp_path) == STATE_FILES


def test_two_jobs_never_share_a_state(tmp_path: Path) -> None:
    run = Run(tmp_path, durability=1)
    with pytest.raises(infinity.DirectoryInUseError, match="in use by process"):
        Run(tmp_path, durability=1, resume="auto")
    run.end()


def test_commit_of_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, 2, durability=1)
    config = Config(device="cpu", hbm="1MiB", ram="1MiB", nvme=tmp_path, durability=1, resume="auto")
    model: torch.nn.Module = torch.nn.Linear(3, 3)
    with pytest.raises(ModelError, match=r"another model: parameter weight has shape none there, and \[3, 3\] here"):
        infinity.initialize(model, torch.optim.AdamW(model.parameters()), config)
    model = make_model()
    with pytest.raises(ModelError, match="of optimizer AdamW, and this run has SGD"):
        infinity.initialize(model, torch.optim.SGD(model.parameters()), config)
    with pytest.raises(ModelError, match=r"groups of \[4, 6\] parameters, and this run of \[10\]"):
        infinity.initialize(model, torch.optim.AdamW(model.parameters()), config)
    assert files_in(tmp_path) == STATE_FILES
    assert trained(tmp_path, 3, durability=1, resume="must").losses.keys() == {3}


def test_what_is_not_durable_is_said(tmp_path: Path) -> None:
    with pytest.raises(infinity.ConfigError, match="commits are kept on nvme"):
        Config(durability=1)
    with pytest.raises(infinity.ConfigError, match="'rollback' needs commits"):
        Config(nvme=tmp_path, on_nonfinite="rollback")
    run = Run(tmp_path)
    with pytest.raises(infinity.ConfigError, match="keeps no commits"):
        run.engine.commit()
    with pytest.raises(infinity.ConfigError, match="keeps no commits"):
        run.engine.rollback()
    run.end()


def test_gradients_that_wait_are_in_no_commit(tmp_path: Path) -> None:
    run = Run(tmp_path, durability="checkpoint")
    inputs, targets = next(iter(run.loader))
    run.engine.backward(torch.nn.functional.cross_entropy(run.engine(inputs), targets))
    with pytest.raises(EngineStateError, match="gradients of a backward wait for a step"):
        run.engine.commit()
    run.engine.step()
    assert run.engine.commit().step == 1
    run.end()


def test_tracked_objects(tmp_path: Path) -> None:
    run = Run(tmp_path, durability="checkpoint")
    with pytest.raises(ModelError, match=r"with state_dict\(\) and load_state_dict\(\), got a int"):
        run.engine.track("epoch", 3)
    with pytest.raises(ModelError, match="another object is tracked by that name"):
        run.engine.track("loader", adamw(make_model()))

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"lock": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    run.until(1)
    run.engine.track("odd", Odd())
    with pytest.raises(
        ModelError, match=r"the state of 'odd', which engine.track\(\) was given,\['lock'\] is a .*object"
    ):
        run.engine.commit()
    run.end()


def test_a_refused_start_removes_nothing(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    config: dict[str, Any] = {"durability": 1, **BUDGETS["all on nvme"]}
    first = Run([one, other], nvme_weights=(1, 1), **config)
    first.until(2)
    first.end()
    before = files_in(tmp_path)
    with pytest.raises(ManifestError, match="data of a run whose commits are in another directory"):
        Run(other, resume="must", **config)
    with pytest.raises(StorageError, match="give all NVMe directories that the run had"):
        Run(one, resume="auto", **config)
    with pytest.raises(DirectoryError, match="holds the state of a run"):
        Run([one, other], **config)
    assert files_in(tmp_path) == before
    second = Run([other, one], resume="must", nvme_weights=(1, 1), **config)
    second.until(4)
    assert_same(trained(None, 4), second.end(), steps=range(3, 5))


def test_states_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "other"]
    for path in paths:
        path.mkdir()
        trained(path, 2, durability=1)
    before = files_in(tmp_path)
    for resume in ("never", "auto", "must"):
        with pytest.raises(ManifestError, match="has commits too, of another run"):
            Run(paths, durability=1, resume=resume)
    assert files_in(tmp_path) == before


def test_a_damaged_commit_stops_a_start_until_it_is_removed(tmp_path: Path) -> None:
    trained(tmp_path, 3, durability=1, retained_commits=2)
    newest = sorted((tmp_path / "infinity-state-rank0").glob("commit-*.json"))[-1]
    content = newest.read_bytes()
    newest.write_bytes(content.replace(b'"number":3', b'"number":4'))
    with pytest.raises(
        ManifestError, match=r"a commit is damaged.*go on from the commit before \(2\).*prune .* --commit"
    ):
        Run(tmp_path, durability=1, resume="auto", retained_commits=2)
    newest.unlink()
    outcome = trained(tmp_path, 4, durability=1, resume="auto", retained_commits=2)
    assert_same(trained(None, 4), outcome, steps=range(3, 5))


def test_a_whole_commit_stays_until_the_newer_one_has_been_read(tmp_path: Path) -> None:
    trained(tmp_path, 3, durability=1, retained_commits=2)
    with infinity.open_checkpoint(tmp_path) as stored:
        shard = next(each for each in stored.commit.shards.values() if each.generation == 3)
        path, offset = stored.commit.file(shard, shard.extents[0]), shard.extents[0].offset
    with path.open("r+b") as file:
        file.seek(offset + 100)
        byte = file.read(1)
        file.seek(offset + 100)
        file.write(bytes([byte[0] ^ 1]))
    run = Run(tmp_path, durability="checkpoint", resume="must", retained_commits=2)
    with pytest.raises(MismatchError, match="is not what was written there"):
        run.engine.commit()
    assert run.engine.rollback(steps=1).step == 2
    run.until(4)
    assert_same(trained(None, 4), run.end(), steps=range(3, 5))


def test_resume_without_durability_is_refused(tmp_path: Path) -> None:
    with pytest.raises(infinity.ConfigError, match="'must' needs a state that is kept"):
        Config(nvme=tmp_path, resume="must")


class Fragile:
    """Takes its state back only sometimes."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise RuntimeError("not now")


def test_a_rollback_that_fails_leaves_all_commits_and_no_state_to_train(tmp_path: Path) -> None:
    run = Run(tmp_path, durability=1, retained_commits=3)
    run.until(4)
    fragile = Fragile()
    run.engine.track("fragile", fragile)
    run.engine.commit()
    fragile.fails = True
    with pytest.raises(RuntimeError, match="not now"):
        run.engine.rollback()
    with pytest.raises(EngineStateError, match="no longer whole"):
        run.engine(torch.randn(8, 24))
    fragile.fails = False
    assert run.engine.rollback().step == 4
    run.until(6)
    assert_same(trained(None, 6), run.end(), steps=range(5, 7))


def test_another_buffer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run = Run(tmp_path, durability=1, retained_commits=3)
    run.until(2)
    run.engine.module.register_buffer("late", torch.ones(3))
    run.until(3)
    with pytest.raises(ModelError, match=r"buffer late has shape none there, and \[3\] here"):
        run.engine.rollback(steps=1)
    run.until(4)
    run.engine.close()
    model = make_model()
    weights = [param.detach().clone() for param in model.parameters()]
    config = Config(device="cpu", hbm="1MiB", ram="1MiB", nvme=tmp_path, durability=1, resume="auto")
    with pytest.raises(ModelError, match=r"buffer late has shape \[3\] there, and none here"):
        infinity.initialize(model, adamw(model), config)
    assert all(torch.equal(param, before) for param, before in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-1, cycle_momentum=False),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    ],
    ids=["one cycle", "linear", "warm restarts", "cyclic", "lambda"],
)
def test_schedulers_made_after_a_resume(tmp_path: Path, make: Any) -> None:
    def train(num_steps: int, **config: Any) -> Any:
        run = Run(tmp_path, **config)
        run.scheduler = make(run.engine.optimizer)
        run.engine.track("schedule", run.scheduler)
        run.until(num_steps)
        return run.end()

    plain = train(7)
    train(4, durability=1)
    assert_same(plain, train(7, durability=1, resume="must"), steps=range(5, 8))


@pytest.mark.parametrize("through_engine", [True, False])
def test_evaluation_belongs_to_the_step_before(tmp_path: Path, through_engine: bool) -> None:
    def train(num_steps: int, **config: Any) -> Any:
        run = Run(tmp_path, **config)
        if not through_engine:
            run.engine.module.eval()  # so that nothing draws
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.engine.optimizer, patience=0, factor=0.5)
        run.engine.track("plateau", plateau)
        loop = run.engine.batches(run.loader)
        batches = loop if through_engine else iter(run.loader)
        while run.engine.num_steps < num_steps:
            run.step(next(batches))
            if run.engine.num_steps % 2 == 0:
                with torch.no_grad():
                    noise = torch.rand(1) if through_engine else torch.zeros(1)  # as an evaluation's loader draws
                    plateau.step(float(run.engine(torch.ones(8, 24)).square().mean() + noise))
        loop.close()
        return run.end()

    plain = train(8)
    train(4, durability=2)
    assert_same(plain, train(8, durability=2, resume="must"), steps=range(5, 9))


def test_load_checkpoint_is_a_new_beginning(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    run = Run(tmp_path / "nvme", durability=1, retained_commits=4)
    run.until(2)
    run.engine.save_checkpoint(tmp_path / "saved")
    run.until(4)
    assert run.engine.load_checkpoint(tmp_path / "saved") == 2
    assert run.engine.rollback(steps=0).step == 2
    run.until(3)
    with pytest.raises(NoCommitError, match=r"there are: rollback\(steps=1\)|there are: rollback\(steps=0\)"):
        run.engine.rollback(steps=2)
    run.until(5)
    run.end()
    again = Run(tmp_path / "nvme", durability=1, retained_commits=4, resume="must")
    assert again.engine.num_steps == 5
    again.end()


def test_step_says_whether_it_was_taken(tmp_path: Path) -> None:
    run = Run(tmp_path, durability=1, on_nonfinite="rollback")
    run.until(2)
    inputs, targets = next(iter(run.loader))

    def bad() -> None:
        loss = torch.nn.functional.cross_entropy(run.engine(inputs), targets)
        run.engine.backward(loss * float("nan"))

    bad()
    with pytest.warns(infinity.NonFiniteWarning, match="went back to commit 2, of step 2"):
        assert run.engine.step() is False
    bad()
    with pytest.raises(infinity.NonFiniteError, match="again after going back to commit 2"):
        run.engine.step()
    run.engine.zero_grad()
    run.engine.backward(torch.nn.functional.cross_entropy(run.engine(inputs), targets))
    assert run.engine.step() is True
    run.end()


def test_script_that_ends_without_close_keeps_its_last_commit(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from durable_runs import Run
run = Run(Path({str(tmp_path)!r}), durability=1)
run.until(3)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with infinity.open_checkpoint(tmp_path) as stored:
        assert stored.step == 3


def test_engine_that_is_forgotten_gives_its_directory_back(tmp_path: Path) -> None:
    run = Run(tmp_path, durability=1)
    run.until(2)
    run.engine.commit()
    del run
    gc.collect()
    again = Run(tmp_path, durability=1, resume="must")
    assert again.engine.num_steps == 2
    again.end()
