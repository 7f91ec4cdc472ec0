"""``infinity checkpoint``: what it shows, finds, compares and removes, and with which exit code."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import infinity
import infinity.__main__ as command_line
from checkpoint_calls import answer, call
from infinity.engine.persistence.stored_state import StoredState
from infinity.store import pruning
from infinity.store.manifest import manifest_name, tensors_name
from infinity.store.shard import ShardKey
from infinity.store.stored import StoredCommit
from parity_models import GPT, tokens
from states_on_disk import CHANNELS_LAST, TIED, StateWriter, flat_bits

REPOSITORY = Path(command_line.__file__).parents[1]


@pytest.fixture
def writer(tmp_path: Path) -> StateWriter:
    made = StateWriter([tmp_path / "a" / "infinity-state-rank0", tmp_path / "b" / "infinity-state-rank0"])
    made.write(1)
    made.write(2, changed=[0, 2])
    made.write(3, changed=[0])
    return made


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        [value] = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([value ^ 1]), offset)


# Inspect


def test_what_is_in_a_state(writer: StateWriter, capsys: pytest.CaptureFixture[str]) -> None:
    document = answer(capsys, "inspect", *writer.directories)
    assert [(each["number"], each["step"]) for each in document["commits"]] == [(3, 3), (2, 2), (1, 1)]
    commit = document["commit"]
    assert commit["number"] == 3
    assert [unit["name"] for unit in commit["units"]] == ["embedding", "blocks.0", "(rest)"]
    conv = next(each for unit in commit["units"] for each in unit["parameters"] if each["name"] == CHANNELS_LAST)
    assert conv == {
        "name": CHANNELS_LAST,
        "shape": [8, 6, 10, 12],
        "dtype": "float32",
        "compute_dtype": "float16",
        "stored": "master",
        "stepped": True,
        "states": {name: {"dtype": "float32", "stored": "bf16"} for name in ("exp_avg", "exp_avg_sq")},
    }
    with StoredCommit.open(writer.directories) as opened:
        assert sum(commit["num_bytes"].values()) == opened.manifest.num_bytes
    assert commit["tied"] == TIED
    assert commit["optimizer"]["groups"][1] == {"lr": "inf", "betas": [0.9, 0.95], "num_params": 3}
    assert all(Path(file["found"]).is_file() for file in commit["files"])
    assert answer(capsys, "inspect", *writer.directories, "--commit", 1)["commit"]["step"] == 1


def test_what_a_person_sees(writer: StateWriter, capsys: pytest.CaptureFixture[str]) -> None:
    flip(writer.directories[0] / manifest_name(3), 90)
    assert call("inspect", writer.directories[0].parent) == 0
    printed = capsys.readouterr().out
    assert "warning: passed over: commit cannot be used: " in printed
    assert "commit 2: step 2" in printed
    assert f"{CHANNELS_LAST}  8x6x10x12  float32, computes in float16 (master); exp_avg, exp_avg_sq (bf16)" in printed
    assert "tied: head.weight is embedding.weight" in printed
    assert "MISSING (was in" in printed


def test_a_live_job_is_looked_at_but_not_read(writer: StateWriter, capsys: pytest.CaptureFixture[str]) -> None:
    lock = writer.directories[0] / "lock"
    lock.touch()
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert call("inspect", *writer.directories) == 0
        for command in (["verify"], ["export"], ["diff"], ["prune", "--all", "--yes"]):
            more = [lock.parent.parent / "out"] if command[0] in ("export", "diff") else []
            assert call(*command, writer.directories[0], *more) == 2
            assert "error: " in capsys.readouterr().err
    assert (writer.directories[0] / manifest_name(3)).exists()


# Verify


def test_what_is_whole_is_good(writer: StateWriter, capsys: pytest.CaptureFixture[str]) -> None:
    document = answer(capsys, "verify", *writer.directories)
    assert (document["good"], document["commits"], document["faults"]) == (True, [3, 2, 1], [])
    with StoredCommit.open(writer.directories, 1) as first:
        assert document["num_bytes"] > first.manifest.num_bytes, "what commits share is read once"
        one = answer(capsys, "verify", *writer.directories, "--commit", 1)
        assert one["num_bytes"] == first.manifest.num_bytes < document["num_bytes"]
    assert call("verify", *writer.directories) == 0
    assert "commit 3, 2, 1: good; read" in capsys.readouterr().out


def test_every_fault_is_found(writer: StateWriter, capsys: pytest.CaptureFixture[str]) -> None:
    with StoredCommit.open(writer.directories, 1) as commit:
        shared, own = (commit.shard(ShardKey(2, 0, "param")), commit.shard(ShardKey(0, 0, "residual")))
        paths = [(commit.file(shard, shard.extents[0]), shard.extents[0]) for shard in (shared, own)]
    for path, extent in paths:
        flip(path, extent.offset + 100)
    document = answer(capsys, "verify", *writer.directories, code=1)
    found = {(fault["shard"], fault["file"], fault["offset"]): fault for fault in document["faults"]}
    assert len(document["faults"]) == len(found) == 2
    first = found[str(shared.key), str(paths[0][0]), paths[0][1].offset]
    assert (first["commits"], first["expected"]) == ([3, 2, 1], paths[0][1].checksum)
    assert first["got"] != first["expected"]
    assert found[str(own.key), str(paths[1][0]), paths[1][1].offset]["commits"] == [1]
    assert call("verify", *writer.directories) == 1
    assert f"damaged: commit 1: {own.key}: {paths[1][0]} at offset" in capsys.readouterr().out


def test_files_that_are_short_missing_or_damaged(writer: StateWriter, capsys: pytest.CaptureFixture[str]) -> None:
    flip(writer.directories[0] / manifest_name(3), 90)
    (writer.directories[0] / tensors_name(2)).unlink()
    os.truncate(writer.directories[0] / writer.names[0], 8192)
    (writer.directories[1] / writer.names[1]).unlink()
    document = answer(capsys, "verify", *writer.directories, code=1)
    by_shard: dict[Any, list[str]] = {}
    for fault in document["faults"]:
        by_shard.setdefault(fault["shard"], []).append(fault["got"])
    assert len(by_shard[None]) == 2
    assert any("the file ends early" in got for gots in by_shard.values() for got in gots)
    assert any("is missing; searched" in got for gots in by_shard.values() for got in gots)


def test_what_cannot_be_verified(tmp_path: Path) -> None:
    assert call("verify", tmp_path) == call("verify", tmp_path / "none") == call("verify") == 2


# Export


def test_export_writes_the_chosen_commit(
    writer: StateWriter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["export", f"{writer.directories[0]}@1", out, "--also", writer.directories[1], "--dtype", "bf16"]
    document = answer(capsys, *arguments, "--max-shard-size", "20kB", "--optimizer")
    assert (document["commit"], document["step"]) == (1, 1)
    assert sorted(each.name for each in out.iterdir()) == document["files"]
    assert {"optimizer.pt", "model.safetensors.index.json"} < set(document["files"])
    values = infinity.open_weights(out)
    wanted = writer.expected[1].weights["norm.weight"].bfloat16()
    assert flat_bits(values["norm.weight"]) == flat_bits(wanted)
    capsys.readouterr()
    assert call(*arguments) == 2
    printed = capsys.readouterr()
    assert "not empty" in printed.err
    assert "into" not in printed.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dtype", "int8"], "--dtype: expected one of keep, fp32, bf16, fp16, got 'int8'"),
        (["--ram", "much"], "--ram: expected a size such as 512MiB"),
        (["--ram", "1MiB"], "this export needs"),
        (["--ram", "1KB"], "got 1000 bytes"),
        (["--max-shard-size", "0"], "--max-shard-size: expected a size"),
    ],
)
def test_export_refuses(
    writer: StateWriter, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: Sequence[str], message: str
) -> None:
    also = ["--also", writer.directories[1]]
    assert call("export", writer.directories[0], tmp_path / "out", *also, *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


SLOW_EXPORT = """
import os, sys, time
import infinity.__main__ as command_line
from infinity.engine.persistence import exporting
wrote = exporting.TensorFiles.write
def write(*arguments):
    wrote(*arguments)
    print("wrote", flush=True)
    time.sleep(60)
exporting.TensorFiles.write = write
command_line.main(sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_export_that_is_interrupted_leaves_nothing(writer: StateWriter, tmp_path: Path, number: int) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_EXPORT, "checkpoint", "export", str(writer.directories[0]), str(out), "--also",
         str(writer.directories[1])],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        while process.stdout.readline() != "wrote\n":
            assert process.poll() is None
        assert [each for each in tmp_path.iterdir() if each.name.startswith("out.partial-")]
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("out")]


# Diff


def test_what_differs_between_commits(writer: StateWriter, capsys: pytest.CaptureFixture[str]) -> None:
    here, also = writer.directories[0], ["--also", writer.directories[1]]
    assert call("diff", f"{here}@2", f"{here}@3") == 2
    assert "give that directory too" in capsys.readouterr().err
    document = answer(capsys, "diff", f"{here}@2", f"{here}@3", *also, "--optimizer", code=1)
    assert document["settings"] == {"step": [2, 3]}
    assert [each["name"] for each in document["weights"]] == ["embedding.weight", "head.weight", "norm.count"]
    before, after = (writer.expected[number].weights["embedding.weight"] for number in (2, 3))
    assert document["weights"][0]["max_abs"] == float((before.double() - after.double()).abs().max())
    assert document["weights"][0]["num_elements"] == int((before != after).sum())
    states = [each["name"] for each in document["states"]]
    assert "optimizer state of embedding.weight: exp_avg" in states
    assert "optimizer state of norm.weight: exp_avg" not in states
    assert answer(capsys, "diff", f"{here}@3", here, *also, "--optimizer")["same"]
    assert call("diff", f"{here}@1", f"{here}@2", *also) == 1
    assert "elements differ, at most" in capsys.readouterr().out


def test_values_of_different_kinds(tmp_path: Path) -> None:
    from infinity.checkpoint.compare import _compare

    nan, ones = torch.tensor([1.0, torch.nan]), torch.ones(2)
    assert _compare("a", nan, nan.clone()) is None
    assert _compare("a", torch.empty(0), torch.empty(0)) is None
    assert _compare("a", 3, 3) is None
    zero = _compare("a", torch.tensor([0.0]), torch.tensor([-0.0]))
    assert zero is not None
    assert zero.max_abs == 0
    apart = _compare("a", nan, ones)
    assert apart is not None
    assert (apart.max_abs, apart.num_elements) == (float("inf"), 1)
    for first, second, reason in (
        (ones, ones.bfloat16(), "of torch.float32 | torch.bfloat16"),
        (ones, torch.ones(3), "of shape"),
        (3, 4, r"3 | 4"),
        (ones, 4, "tensor of shape"),
    ):
        difference = _compare("a", first, second)
        assert difference is not None
        assert reason in difference.reason


# Prune


def blocks_of(writer: StateWriter) -> int:
    return sum((d / n).stat().st_blocks * 512 for d, n in zip(writer.directories, writer.names, strict=True))


def test_pruning_gives_room_back_and_keeps_the_rest(writer: StateWriter, capsys: pytest.CaptureFixture[str]) -> None:
    before = blocks_of(writer)
    document = answer(capsys, "prune", *writer.directories, "--keep", 1, "--yes")
    assert (document["commits"], document["kept_bytes"], document["notes"]) == ([1, 2], 0, [])
    assert document["freed_bytes"] > 0
    assert before - blocks_of(writer) >= document["freed_bytes"] // 2  # a block may be larger than a page
    names = {each.name for each in writer.directories[0].iterdir()}
    assert names == {manifest_name(3), tensors_name(3), writer.names[0]}
    assert answer(capsys, "verify", *writer.directories)["good"]
    with StoredCommit.open(writer.directories) as commit:
        weights = StoredState(commit).weights
        assert all(flat_bits(weights[name]) == flat_bits(value) for name, value in writer.expected[3].weights.items())
    assert call("prune", *writer.directories, "--keep", 1, "--yes") == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_a_commit_in_the_middle_can_go(writer: StateWriter, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("prune", *writer.directories, "--commit", 7, "--yes") == 2
    assert answer(capsys, "prune", *writer.directories, "--commit", 2, "--yes")["commits"] == [2]
    assert answer(capsys, "verify", *writer.directories)["commits"] == [3, 1]
    assert answer(capsys, "verify", *writer.directories)["good"]


def test_what_a_damaged_commit_uses_is_not_known(writer: StateWriter, capsys: pytest.CaptureFixture[str]) -> None:
    flip(writer.directories[0] / manifest_name(1), 90)
    before = blocks_of(writer)
    document = answer(capsys, "prune", *writer.directories, "--commit", 2, "--yes")
    assert document["freed_bytes"] == 0
    assert "commit 1 cannot be read" in document["notes"][0]
    assert blocks_of(writer) == before
    assert answer(capsys, "prune", *writer.directories, "--keep", 1, "--yes")["commits"] == [1]


def test_files_with_further_links_stay_as_they_are(writer: StateWriter, capsys: pytest.CaptureFixture[str]) -> None:
    saved = writer.directories[0].parent / "saved"
    saved.mkdir()
    for directory, name in zip(writer.directories, writer.names, strict=True):
        (saved / name).hardlink_to(directory / name)
    for name in (manifest_name(1), tensors_name(1)):
        shutil.copy(writer.directories[0] / name, saved)
    document = answer(capsys, "prune", *writer.directories, "--keep", 1, "--yes")
    assert document["freed_bytes"] == 0 < document["kept_bytes"]
    assert "has further links" in document["notes"][0]
    assert call("prune", *writer.directories, "--all", "--yes") == 0
    assert answer(capsys, "verify", saved)["good"]


def test_where_no_holes_can_be_punched(
    writer: StateWriter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "punch", lambda path, holes: False)
    document = answer(capsys, "prune", *writer.directories, "--keep", 1, "--yes")
    assert document["freed_bytes"] == 0 < document["kept_bytes"]
    assert "punches no holes" in document["notes"][0]


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_removing_everything_leaves_what_is_not_ours(
    writer: StateWriter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_checkpoint: bool
) -> None:
    stranger = writer.directories[1] / "notes.txt"
    stranger.touch()
    for directory in writer.directories:
        (directory / "owner.json").write_text('{"application": "infinity", "schema": 1}')
        if not is_checkpoint:
            (directory / "lock").touch()
    asked: list[str] = []
    monkeypatch.setattr("typer.confirm", lambda text, **_: asked.append(text))
    assert call("prune", *writer.directories, "--all") == 2
    assert "Remove the whole state in" in asked[0]
    assert answer(capsys, "verify", *writer.directories)["good"]
    document = answer(capsys, "prune", *writer.directories, "--all", "--yes")
    assert document["notes"] == [f"{stranger} is not infinity's, and stays"]
    assert not writer.directories[0].exists()
    assert stranger.exists()
    assert not list(writer.directories[1].glob("shards*"))
    assert writer.directories[0].parent.exists()


def test_what_to_prune_must_be_said_once(writer: StateWriter) -> None:
    for flags in ([], ["--all", "--keep", "1"], ["--commit", "1", "--all"]):
        assert call("prune", *writer.directories, *flags, "--yes") == 2


def test_holes_are_what_nobody_uses() -> None:
    without = pruning._without
    assert without([(0, 10)], []) == [(0, 10)]
    assert without([(0, 10), (20, 30)], [(5, 7), (9, 25)]) == [(0, 5), (7, 9), (25, 30)]
    assert without([(0, 10), (5, 12)], [(0, 1)]) == [(1, 10), (10, 12)]
    assert without([(0, 10)], [(0, 10)]) == []


# A real run


@pytest.mark.parametrize(
    ("precision", "states"), [("fp32", "full"), ("bf16", "full"), ("bf16", "int8"), ("fp16", "bf16")]
)
def test_a_runs_own_commits(precision: str, states: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def untrained() -> tuple[GPT, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = GPT()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    fields: dict[str, Any] = {"precision": precision, "optimizer_states": states, "durability": "checkpoint"}
    config = infinity.Config(device="cpu", hbm="1MiB", ram="3MiB", nvme=tmp_path, retained_commits=3, **fields)
    with infinity.initialize(*untrained(), config) as engine:
        for seed in range(2):
            engine.backward(engine(*tokens(seed)))
            engine.step()
            engine.commit()
        assert call("verify", tmp_path) == 2
        engine.save_checkpoint(tmp_path / "saved")
        weights = {name: value.clone() for name, value in engine.state_dict().items()}
        optimizer = engine.optimizer.state_dict()
    assert answer(capsys, "verify", tmp_path)["good"]
    assert answer(capsys, "inspect", tmp_path)["commit"]["step"] == 2
    assert call("diff", f"{tmp_path}@1", f"{tmp_path}@2", "--optimizer") == 1
    with StoredCommit.open(tmp_path) as commit:
        state = StoredState(commit)
        assert {name: flat_bits(value) for name, value in state.weights.items()} == {
            name: flat_bits(value) for name, value in weights.items()
        }
        plain = state.to_plain()
    assert plain["param_groups"] == optimizer["param_groups"]
    assert set(plain["state"]) == set(optimizer["state"])
    for index, each in optimizer["state"].items():
        assert {name: flat_bits(value) for name, value in plain["state"][index].items()} == {
            name: flat_bits(value) for name, value in each.items()
        }
    out = tmp_path / "out"
    assert call("export", tmp_path, out, "--optimizer") == 0
    exported = load_file(out / "model.safetensors")
    assert exported
    assert all(flat_bits(value) == flat_bits(weights[name]) for name, value in exported.items())
    loaded = torch.load(out / "optimizer.pt", weights_only=True)
    fresh = torch.optim.AdamW(GPT().parameters())
    fresh.load_state_dict(loaded)
    assert call("diff", f"{tmp_path}@2", tmp_path / "saved", "--optimizer") == 0, "a checkpoint is a commit of its own"
    assert call("prune", tmp_path, "--keep", 1, "--yes") == 0
    assert answer(capsys, "verify", tmp_path)["commits"] == [3]
    assert answer(capsys, "verify", tmp_path)["good"]
    assert answer(capsys, "verify", tmp_path / "saved")["good"]
    with infinity.initialize(*untrained(), config.model_copy(update={"resume": "must"})) as engine:
        assert all(flat_bits(value) == flat_bits(weights[name]) for name, value in engine.state_dict().items())
        engine.backward(engine(*tokens(2)))
        engine.step()
    assert call("prune", tmp_path, "--all", "--yes") == 0
    assert answer(capsys, "verify", tmp_path / "saved")["good"]
    assert call("prune", tmp_path / "saved", "--all", "--yes") == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out"]
    with infinity.initialize(*untrained(), config) as engine:
        engine.load_state_dict(infinity.open_weights(out))
        assert all(flat_bits(value) == flat_bits(weights[name]) for name, value in engine.state_dict().items())
