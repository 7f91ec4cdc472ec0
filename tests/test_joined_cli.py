"""``infinity checkpoint`` on what several ranks have written."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from checkpoint_calls import answer, call
from infinity.store.manifest import manifest_name
from ranks_on_disk import model_of, write_ranks
from states_on_disk import flat_bits

pytestmark = pytest.mark.usefixtures("one_thread")


def test_ranks_are_described_together_and_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(9, "full")
    directories = write_ranks(tmp_path / "saved", model, 3, 2)
    document = answer(capsys, "inspect", tmp_path / "saved")
    commit = document["commit"]
    assert (commit["ranks"], commit["world_size"], commit["stage"], commit["step"]) == ([0, 1, 2], 3, 2, model.step)
    assert commit["num_parameters"] == sum(value.numel() for value in model.params.values())
    shapes = {each["name"]: each["shape"] for unit in commit["units"] for each in unit["parameters"]}
    assert shapes == {name: list(value.shape) for name, value in model.params.items()}
    assert all(Path(file["found"]).is_file() for file in commit["files"])
    assert len(commit["files"]) == 3
    assert call("inspect", tmp_path / "saved") == 0
    assert "of 3 ranks, stage 2" in capsys.readouterr().out
    alone = answer(capsys, "inspect", directories[1])["commit"]
    assert (alone["ranks"], alone["world_size"]) == ([1], 3)
    assert alone["num_parameters"] < commit["num_parameters"]
    assert {each["name"]: each["shape"] for unit in alone["units"] for each in unit["parameters"]} == shapes
    assert document["commits"][0]["num_bytes"] == sum(commit["num_bytes"].values())
    (directories[2] / manifest_name(3)).unlink()
    write_ranks(tmp_path / "saved", model, 3, 2, number=2)
    commits = answer(capsys, "inspect", tmp_path / "saved")["commits"]
    assert [(each["number"], each["valid"]) for each in commits] == [(3, False), (2, True)]
    assert commits[0]["error"] == "only 2 of 3 ranks have it"


def test_every_ranks_bytes_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directories = write_ranks(tmp_path / "saved", model_of(9, "full"), 3, 3)
    whole = answer(capsys, "verify", tmp_path / "saved")
    assert (whole["good"], whole["commits"]) == (True, [3])
    assert whole["num_bytes"] == sum(answer(capsys, "verify", each)["num_bytes"] for each in directories)
    [data] = directories[2].glob("shards-*.bin")
    with data.open("r+b") as file:
        file.write(b"?")
    report = answer(capsys, "verify", tmp_path / "saved", code=1)
    assert [fault["file"] for fault in report["faults"]] == [str(data)]


def test_pieces_that_do_not_fit_together_are_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(9, "full")
    directories = write_ranks(tmp_path / "saved", model, 2, 3)
    model.step += 1
    later = write_ranks(tmp_path / "later", model, 2, 3)
    report = answer(capsys, "verify", directories[0], later[1], code=1)
    assert "another step, model or optimizer" in report["faults"][0]["got"]


def test_exports_and_differences_are_those_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(9, "full")
    for num_ranks in (1, 3):
        write_ranks(tmp_path / f"of{num_ranks}", model, num_ranks, 3)
        assert call("export", tmp_path / f"of{num_ranks}", tmp_path / f"out{num_ranks}", "--optimizer") == 0
    for file in (tmp_path / "out1").iterdir():
        if file.name != "optimizer.pt":
            assert file.read_bytes() == (tmp_path / "out3" / file.name).read_bytes()
    weights = load_file(tmp_path / "out3" / "model.safetensors")
    assert {name: flat_bits(weights[name]) for name in model.params} == {
        name: flat_bits(value) for name, value in model.params.items()
    }
    assert answer(capsys, "diff", tmp_path / "of1", tmp_path / "of3", "--optimizer")["same"]
    name = next(iter(model.states))
    model.states[name]["exp_avg"].view(-1)[-1:] += 1
    write_ranks(tmp_path / "other", model, 2, 1)
    found = answer(capsys, "diff", tmp_path / "other", tmp_path / "of3", "--optimizer", code=1)
    assert [each["name"] for each in found["states"]] == [f"optimizer state of {name}: exp_avg"]
    assert found["weights"] == []


def test_one_rank_alone_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directories = write_ranks(tmp_path / "saved", model_of(9, "full"), 2, 3)
    assert call("export", directories[0], tmp_path / "out") == 2
    assert "give the directories of all ranks" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
