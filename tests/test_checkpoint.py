"""``save_checkpoint`` and ``load_checkpoint``: whole or not at all, any configuration to any, no second copy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import infinity
from durable_runs import Run, adamw, assert_same, files_in, make_model, trained
from infinity import DirectoryError, DiskFullError, EngineStateError, MismatchError, ModelError, NoCommitError
from infinity.io import holes
from infinity.store import linking

CHECKPOINT_FILES = ["commit-*.json", "commit-*.safetensors", "owner.json", "shards-*.bin"]

SETTINGS: dict[str, dict[str, Any]] = {
    "ram": {},
    "scratch": {"nvme": True, "ram": "120KiB", "hbm": "20KiB", "sub_group_bytes": "16KiB"},
    "durable": {"nvme": True, "durability": 2},
}


def config_in(path: Path, name: str, **more: Any) -> dict[str, Any]:
    settings = {**SETTINGS[name], **more}
    directory = path / f"nvme-{name}"
    directory.mkdir(parents=True)
    has_nvme = settings.pop("nvme", False)
    return {**settings, "path": directory if has_nvme else None}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("saved", list(SETTINGS))
@pytest.mark.parametrize("loaded", list(SETTINGS))
def test_any_configuration_loads_what_any_has_saved(tmp_path: Path, saved: str, loaded: str, precision: str) -> None:
    plain = trained(None, 7, precision=precision)
    first = Run(**config_in(tmp_path / "a", saved, precision=precision))
    first.until(4)
    info = first.engine.save_checkpoint(tmp_path / "saved")
    assert info.step == 4
    first.until(5)  # and what is saved stays as it was
    first.end()
    assert files_in(tmp_path / "saved") == CHECKPOINT_FILES
    second = Run(**config_in(tmp_path / "b", loaded, precision=precision))
    second.until(1)
    assert second.engine.load_checkpoint(tmp_path / "saved") == 4
    second.until(7)
    assert_same(plain, second.end(), steps=range(5, 8))


def test_checkpoint_of_a_durable_run_copies_nothing(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    plain = trained(None, 9)
    run = Run(tmp_path / "nvme", durability=1)
    for step in (2, 3, 6):
        run.until(step)
        info = run.engine.save_checkpoint(tmp_path / f"at-{step}")
        [data] = (tmp_path / f"at-{step}").glob("shards-*")
        assert info.written_bytes < info.num_bytes
        allocated = data.stat().st_blocks * 512
        assert allocated <= info.num_bytes + (64 << 10)
    run.until(9)
    assert_same(plain, run.end(), steps=range(1, 10))
    # what the run had a hard link to, it has let go
    assert len(list((tmp_path / "nvme").rglob("shards-*"))) == 1
    assert all(file.stat().st_nlink == 1 for file in tmp_path.rglob("shards-*"))
    for step in (2, 3, 6):
        other = Run(None)
        assert other.engine.load_checkpoint(tmp_path / f"at-{step}") == step
        other.until(9)
        assert_same(plain, other.end(), steps=range(step + 1, 10))


def test_run_ended_right_after_a_checkpoint_resumes_beside_it(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    run = Run(tmp_path / "nvme", durability="checkpoint")
    run.until(3)
    run.engine.save_checkpoint(tmp_path / "saved")
    run.end()
    [data] = (tmp_path / "saved").glob("shards-*")
    before = data.read_bytes()
    again = Run(tmp_path / "nvme", durability=1, resume="must")
    again.until(6)
    assert_same(trained(None, 6), again.end(), steps=range(4, 7))
    assert data.read_bytes() == before


def test_clones_where_the_file_system_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloned = []

    def clone(source: Path, target: Path) -> bool:
        cloned.append(source)
        target.write_bytes(source.read_bytes())  # as far as a reader can tell
        return True

    monkeypatch.setattr(linking, "clone", clone)
    (tmp_path / "nvme").mkdir()
    run = Run(tmp_path / "nvme", durability=1)
    run.until(3)
    run.engine.save_checkpoint(tmp_path / "saved")
    run.until(6)
    assert_same(trained(None, 6), run.end(), steps=range(1, 7))
    assert len(cloned) == 1
    other = Run(None)
    assert other.engine.load_checkpoint(tmp_path / "saved") == 3
    other.until(6)
    other.end()


def test_no_room_for_new_files_means_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "_has_room", lambda volumes: False)
    (tmp_path / "nvme").mkdir()
    run = Run(tmp_path / "nvme", durability=1)
    run.until(2)
    info = run.engine.save_checkpoint(tmp_path / "saved")
    assert info.written_bytes >= info.num_bytes
    assert all(file.stat().st_nlink == 1 for file in tmp_path.rglob("shards-*"))
    run.end()


def test_a_checkpoint_replaces_one_and_nothing_else(tmp_path: Path) -> None:
    run = Run(None)
    run.until(1)
    path = tmp_path / "saved"
    run.engine.save_checkpoint(path)
    run.until(2)
    run.engine.save_checkpoint(path)
    with infinity.open_checkpoint(path) as stored:
        assert stored.step == 2
    (path / "notes.txt").write_text("mine")
    with pytest.raises(DirectoryError, match="this is something else, and stays untouched"):
        run.engine.save_checkpoint(path)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(DirectoryError, match="this is something else"):
        run.engine.save_checkpoint(file)
    with pytest.raises(DirectoryError, match="mkdir -p"):
        run.engine.save_checkpoint(tmp_path / "missing" / "saved")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "saved"]
    run.end()


def test_a_checkpoint_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(None)
    run.until(1)
    path = tmp_path / "saved"
    run.engine.save_checkpoint(path)
    run.until(2)
    real = os.pwrite
    calls = []

    def full(descriptor: int, memory: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 3:
            raise OSError(28, os.strerror(28))
        return real(descriptor, memory, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFullError, match="the file system is full"):
        run.engine.save_checkpoint(path)
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    with infinity.open_checkpoint(path) as stored:
        assert stored.step == 1
    run.engine.save_checkpoint(path)
    run.end()
    with infinity.open_checkpoint(path) as stored:
        assert stored.step == 2


def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    small = torch.nn.Linear(2, 2)
    other = infinity.initialize(small, torch.optim.AdamW(small.parameters()), infinity.Config(device="cpu"))
    run = Run(None)
    run.until(2)
    run.engine.save_checkpoint(tmp_path / "saved")
    with pytest.raises(ModelError, match="another model"):
        other.load_checkpoint(tmp_path / "saved")
    other(torch.ones(1, 2))
    other.close()
    with pytest.raises(NoCommitError, match="neither a state directory"):
        run.engine.load_checkpoint(tmp_path)
    with pytest.raises(DirectoryError):
        run.engine.load_checkpoint(tmp_path / "nothing")
    run.until(4)
    assert_same(trained(None, 4), run.end(), steps=range(1, 5))


def test_damage_is_found_before_a_number_is_used(tmp_path: Path) -> None:
    run = Run(None)
    run.until(2)
    run.engine.save_checkpoint(tmp_path / "good")
    run.engine.save_checkpoint(tmp_path / "bad")
    [data] = (tmp_path / "bad").glob("shards-*")
    content = bytearray(data.read_bytes())
    content[5000] ^= 1
    data.write_bytes(content)
    with pytest.raises(MismatchError, match=r"unit .* expected checksum .* offset \d+"):
        run.engine.load_checkpoint(tmp_path / "bad")
    with pytest.raises(EngineStateError, match="no longer whole"):
        run.engine(torch.randn(8, 24))
    assert run.engine.load_checkpoint(tmp_path / "good") == 2
    run.until(4)
    assert_same(trained(None, 4), run.end(), steps=range(1, 5))


def test_gradients_that_wait_are_in_no_checkpoint(tmp_path: Path) -> None:
    run = Run(None)
    inputs, targets = next(iter(run.loader))
    run.engine.backward(torch.nn.functional.cross_entropy(run.engine(inputs), targets))
    with pytest.raises(EngineStateError, match="gradients of a backward wait for a step"):
        run.engine.save_checkpoint(tmp_path / "saved")
    run.end()


def test_gradients_that_are_left_out_go_on_waiting(tmp_path: Path) -> None:
    run = Run(None)
    run.until(1)

    def backward(run: Run) -> None:
        inputs, targets = next(iter(run.loader))
        run.engine.backward(torch.nn.functional.cross_entropy(run.engine(inputs), targets))

    backward(run)
    run.engine.save_checkpoint(tmp_path / "saved", leave_gradients_out=True)
    run.engine.step()
    other = Run(None)
    other.until(1)
    backward(other)
    other.engine.step()
    outcome, expected = run.end(), other.end()
    assert all(torch.equal(outcome.weights[name], value) for name, value in expected.weights.items())
    with infinity.open_checkpoint(tmp_path / "saved") as stored:
        assert stored.step == 1
        assert any(not torch.equal(stored.weights[name], value) for name, value in expected.weights.items())


def test_open_checkpoint_reads_what_the_engine_had(tmp_path: Path) -> None:
    run = Run(None, precision="bf16")
    run.until(3)
    run.engine.save_checkpoint(tmp_path / "saved")
    outcome = run.end()
    with infinity.open_checkpoint(tmp_path / "saved") as stored:
        assert stored.weights.keys() == outcome.weights.keys()
        assert all(torch.equal(stored.weights[name], value) for name, value in outcome.weights.items())
        model = make_model()
        model.load_state_dict(dict(stored.weights))
        optimizer = adamw(model)
        optimizer.load_state_dict(stored.to_plain())
        assert stored.tracked["loader"] == {"num_given": 3}
    for index, state in outcome.optimizer["state"].items():
        assert all(torch.equal(optimizer.state_dict()["state"][index][name], value) for name, value in state.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("max_file_bytes", [5 * 10**9, 3000])
def test_weights_as_files_that_others_read(tmp_path: Path, precision: str, max_file_bytes: int) -> None:
    run = Run(None, precision=precision)
    run.until(2)
    run.engine.export_safetensors(tmp_path / "out", max_file_bytes=max_file_bytes)
    outcome = run.end()
    found: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        found |= load_file(file)
    assert found.keys() == outcome.weights.keys()
    assert all(torch.equal(found[name], value) for name, value in outcome.weights.items())
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (max_file_bytes == 3000)
    other = Run(None)
    with pytest.raises(DirectoryError, match="not empty"):
        other.engine.export_safetensors(tmp_path / "out")
    other.end()


def test_holes_are_punched_and_files_cloned_or_not(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * (1 << 20))
    if holes.punch(source, [(4096, 8192), (1 << 19, 1 << 20)]):
        content = source.read_bytes()
        assert content[:4096] + content[8192 : 1 << 19] == b"x" * ((1 << 19) - 4096)
        assert not any(content[4096:8192] + content[1 << 19 :])
    assert holes.punch(source, [])
    if holes.clone(source, tmp_path / "clone"):
        assert (tmp_path / "clone").read_bytes() == source.read_bytes()
    else:
        assert not (tmp_path / "clone").exists()
