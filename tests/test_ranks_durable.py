"""Durable states of real ranks: bit for bit what they were, whatever number of them and stage goes on from them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity import Config, DirectoryError
from launch import outputs, run_ranks

COMMON = """
import pathlib, warnings
import infinity
from infinity.errors import DirectoryError, NoCommitError, RankFailedError
from torch import nn

torch.distributed.init_process_group("gloo")
root = pathlib.Path(os.environ["ROOT"])

def engine_of(name, stage=3, **others):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 130), nn.Tanh(), nn.Linear(130, 65), nn.Tanh(), nn.Linear(65, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    config = dict(device="cpu", hbm="2MiB", ram="4MiB", nvme=str(root / name), stage=stage, **others)
    return infinity.initialize(model, optimizer, infinity.Config(**config))

def step(engine, number):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    loss = engine(torch.randn(8, 64, generator=generator)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()

def weights(engine):
    return {name: value.clone() for name, value in engine.state_dict().items()}

def same(engine, expected):
    got = weights(engine)
    assert got.keys() == expected.keys()
    for name in got:
        assert torch.equal(got[name], expected[name]), name

def refused(kinds, act):
    try:
        act()
    except kinds as error:
        return str(error)
    raise AssertionError("it was not refused")
"""

TWO = """
durable = {"durability": "checkpoint", "resume": "auto"}
engine = engine_of("nvme", retained_commits=2, **durable)
for number in range(3):
    step(engine, number)
assert engine.commit().number == 1
first = weights(engine)
for number in range(3, 5):
    step(engine, number)
engine.commit()
second = weights(engine)

# Back, all to the same.
step(engine, 5)
engine.rollback()
same(engine, second)
engine.rollback(steps=2)
same(engine, first)
for number in range(3, 5):
    step(engine, number)
same(engine, second)

# What one rank cannot keep fails on both, and both go on.
class Once:
    raised = False
    def state_dict(self):
        if rank == 1 and not self.raised:
            self.raised = True
            raise ValueError("not this time")
        return {"rank": rank}
    def load_state_dict(self, state):
        self.rank = state["rank"]

engine.track("once", Once())
message = refused(ValueError if rank == 1 else RankFailedError, engine.commit)
assert rank == 1 or "rank 1: ValueError: not this time" in message
message = refused(RankFailedError, engine.commit if rank == 0 else engine.rollback)
assert "rank 1: rollback" in message and "rank 0: commit" in message, message
same(engine, second)

# A checkpoint, and what comes after it.
info = engine.save_checkpoint(root / "saved")
assert info.step == 5
blocked = root / "blocked" if rank == 0 else root / "missing" / "saved"
assert refused(RankFailedError if rank == 0 else DirectoryError, lambda: engine.save_checkpoint(blocked))
assert not blocked.exists() and not list(root.glob("*.partial"))
engine.save_checkpoint(root / "saved")  # replaced
engine.close()
engine = engine_of("nvme", **{**durable, "resume": "must"})
assert engine.num_steps == 5
once = Once()
assert engine.track("once", once) and once.rank == rank
same(engine, second)
losses = [step(engine, number) for number in range(5, 8)]
third = weights(engine)
engine.close()

# Another stage, other sub-groups: pieces come from the other rank's directory.
for stage, others in ((1, {}), (3, {"sub_group_bytes": "64KiB"}), (0, {}), (2, {})):
    engine = engine_of("nvme", stage, **durable, **others)
    same(engine, second)
    assert engine.num_steps == 5
    step(engine, 6)
    engine.rollback()
    same(engine, second)
    assert step(engine, 5) == losses[0], "what was gathered before is not used"
    engine.close()
engine = engine_of("other", 2)
engine.load_checkpoint(root / "saved")
assert [step(engine, number) for number in range(5, 8)] == losses
same(engine, third)
engine.save_checkpoint(root / "later")

# One of them writes the weights, the others give it theirs; what it is refused, all are told.
engine.export_safetensors(root / "exported")
exported = infinity.open_weights(root / "exported")
assert all(torch.equal(exported[name], value) for name, value in third.items()) and len(exported) == len(third)
refused(RankFailedError if rank else DirectoryError, lambda: engine.export_safetensors(root / "exported"))
same(engine, third)
engine.close()

# Directories that are not the run's.
if rank == 1:
    (root / "nvme" / "rank-1").rename(root / "away")
torch.distributed.barrier()
assert "rank 1" in refused(DirectoryError, lambda: engine_of("nvme", **durable))
torch.distributed.barrier()
if rank == 1:
    import shutil
    assert not (root / "nvme" / "rank-1").exists()  # what a refused start has made
    (root / "away").rename(root / "nvme" / "rank-1")
torch.distributed.barrier()
engine = engine_of("nvme", **durable)
same(engine, second)
engine.close()
if rank == 0:
    torch.save((second, third, losses), root / "expected.pt")
torch.distributed.destroy_process_group()
print("fine")
"""

THREE = """
second, third, losses = torch.load(root / "expected.pt")
for stage in (3, 0):
    engine = engine_of("other", stage)
    engine.load_checkpoint(root / "saved")
    same(engine, second)
    engine.load_checkpoint(root / "nvme")
    same(engine, second)
    engine.load_checkpoint(root / "of_one")
    same(engine, third)
    engine.save_checkpoint(root / f"of_three{stage}")
    engine.close()
message = refused(DirectoryError, lambda: engine_of("nvme", durability="checkpoint", resume="auto"))
assert "load_checkpoint" in message
torch.distributed.destroy_process_group()
print("fine")
"""


def engine_alone(root: Path, **others: object) -> infinity.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 130), nn.Tanh(), nn.Linear(130, 65), nn.Tanh(), nn.Linear(65, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    config = Config.model_validate({"device": "cpu", "hbm": "2MiB", "ram": "4MiB", "nvme": str(root), **others})
    return infinity.initialize(model, optimizer, config)


def assert_same(engine: infinity.Engine, expected: dict[str, torch.Tensor]) -> None:
    assert {name: value.tolist() for name, value in engine.state_dict().items()} == {
        name: value.tolist() for name, value in expected.items()
    }


def test_ranks_go_on_bit_for_bit_and_any_number_goes_on_from_any(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "other").mkdir()
    assert outputs(run_ranks(COMMON + TWO, 2, seconds=300, ROOT=str(tmp_path))) == ["fine\n"] * 2
    second, third, _ = torch.load(tmp_path / "expected.pt")

    with engine_alone(tmp_path / "other") as engine:
        for path in ("saved", "nvme"):
            assert engine.load_checkpoint(tmp_path / path) == 5
            assert_same(engine, second)
        states = engine.optimizer.state_dict()["state"]
        with infinity.open_checkpoint(tmp_path / "saved") as stored:
            for index, state in stored.to_plain()["state"].items():
                assert {name: value.tolist() for name, value in state.items()} == {
                    name: value.tolist() for name, value in states[index].items()
                }
        engine.load_checkpoint(tmp_path / "later")
        assert_same(engine, third)
        engine.save_checkpoint(tmp_path / "of_one")
    with pytest.raises(DirectoryError, match="of several ranks"):
        engine_alone(tmp_path / "nvme", durability="checkpoint", resume="auto")

    assert outputs(run_ranks(COMMON + THREE, 3, seconds=300, ROOT=str(tmp_path))) == ["fine\n"] * 3
    with engine_alone(tmp_path / "other") as engine:
        for path in ("of_three3", "of_three0"):
            engine.load_checkpoint(tmp_path / path)
            assert_same(engine, third)
    assert not list(tmp_path.glob("*.partial"))
    shutil.rmtree(tmp_path / "nvme")
