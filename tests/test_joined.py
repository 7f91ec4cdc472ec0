"""What any number of ranks have written, in any stage, is read as one: every value exact, each shard once."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.engine.persistence.exporting import Exporter
from infinity.engine.persistence.importing import open_weights
from infinity.engine.persistence.joined import JoinedState, open_stored
from infinity.engine.persistence.pieces import Pieces
from infinity.engine.persistence.snapshot import Stage
from infinity.engine.persistence.stored_state import StoredState
from infinity.errors import DirectoryError, ManifestError, MismatchError, NoCommitError
from infinity.store.manifest import manifest_name
from infinity.store.shard import ShardKey
from infinity.store.stored import StoredCommit
from ranks_on_disk import Model, expected_states, model_of, stored_parts, write_ranks
from states_on_disk import flat_bits

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS: list[tuple[int, Stage]] = [(1, 3), (2, 0), (2, 3), (3, 1), (4, 2), (5, 3)]


def assert_holds(state: StoredState, model: Model, num_ranks: int, stage: int) -> None:
    """All values are the model's, to the bit, of its shapes and strides, by every way of reading them."""
    assert set(state.weights) == {*model.params, *model.buffers}
    computing = {name: group.dtypes[0] for group in model.groups for name in group.params}
    for name, value in model.params.items():
        read = state.weights[name]
        assert (read.dtype, read.shape) == (value.dtype, value.shape)
        assert read.numel() < 2 or read.stride() == value.stride()
        assert flat_bits(read) == flat_bits(value), name
        assert flat_bits(state.compute_weights[name]) == flat_bits(value.to(computing[name])), name
    expected = expected_states(model, num_ranks, stage)
    names = [name for group in state.param_names for name in group]
    found = {names[index]: each for index, each in state.optimizer_state_dict["state"].items()}
    assert {name: set(each) for name, each in found.items()} == {name: set(each) for name, each in expected.items()}
    for name, states in expected.items():
        outline = found[name].outline()
        for each, value in states.items():
            assert outline[each].shape == found[name][each].shape == value.shape, (name, each)
            assert flat_bits(found[name][each]) == flat_bits(value), (name, each)
    assert_pieces(state, model, expected)


def assert_pieces(state: StoredState, model: Model, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    pieces = Pieces(state, block_bytes=8192)
    for part in state.parts:
        streams = {"": pieces.weights(part)}
        streams |= {name: pieces.states(part, name) for name in state.layouts[part.index].states}
        for name, stream in streams.items():
            flat = {position: torch.full((slot.num_elements,), torch.nan) for position, slot in enumerate(part.slots)}
            ends = dict.fromkeys(flat, 0)
            for position, start, values in stream:
                assert name or start == ends[position], "weights come in their order"
                ends[position] = start + values.numel()
                flat[position][start : start + values.numel()] = values
            having = range(len(part.slots)) if not name else state.layouts[part.index].states[name].slots
            for position in having:
                slot = part.slots[position]
                value = model.params[slot.name] if not name else expected[slot.name][name]
                assert flat_bits(flat[position].as_strided(slot.shape, slot.stride)) == flat_bits(value)


@pytest.mark.parametrize("seed", range(24))
def test_any_number_of_ranks_and_any_stage_is_read_exactly(tmp_path: Path, seed: int) -> None:
    num_ranks, stage = LAYOUTS[seed % len(LAYOUTS)]
    model = model_of(seed)
    write_ranks(tmp_path / "saved", model, num_ranks, stage)
    with infinity.open_checkpoint(tmp_path / "saved") as state:
        assert isinstance(state, JoinedState) == (num_ranks > 1)
        assert state.step == model.step
        assert_holds(state, model, num_ranks, stage)


def test_single_elements_that_are_no_shards_are_put_together(tmp_path: Path) -> None:
    """Of 4097 elements the second of two ranks has one, whose state is no shard there."""
    model = model_of(0, "full")
    model.groups = model.groups[:1]
    value = torch.arange(4097.0)
    model.groups[0].params = {"weight": value, "scale": torch.tensor(3.0)}
    model.states = {
        "weight": {"step": torch.tensor(2.0), "exp_avg": value + 1, "exp_avg_sq": value + 2},
        "scale": {"step": torch.tensor(2.0), "exp_avg": torch.tensor(0.5), "exp_avg_sq": torch.tensor(0.25)},
    }
    assert stored_parts(model, 1, 2, 3)[0].slots[0].num_elements == 1
    write_ranks(tmp_path / "saved", model, 2, 3)
    with infinity.open_checkpoint(tmp_path / "saved") as state:
        assert_holds(state, model, 2, 3)


def test_each_shard_is_read_once_by_who_goes_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(5, "full")
    write_ranks(tmp_path / "saved", model, 4, 3)
    original, read, kept = StoredCommit.read, [], []
    with open_stored(tmp_path / "saved", memory_bytes=0) as state:
        assert isinstance(state, JoinedState)

        def count(commit: StoredCommit, key: ShardKey) -> torch.Tensor:
            read.append((commit.manifest.rank, key))
            shard = original(commit, key)
            kept.append(shard.numel() + sum(each.numel() for _, each in state._shards._kept.values()))
            return shard

        monkeypatch.setattr(StoredCommit, "read", count)
        for name in model.params:
            state.weights[name]
        assert len(read) == len(set(read)) > 4
        of_one_rank = max(
            sum(shard.num_bytes for key, shard in commit.shards.items() if key.part == part.position)
            for commit in state.commits
            for part in state.parts
        )
        assert 0 < max(kept) <= of_one_rank, "what one rank has of a part"


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 3), (3, 2), (2, 0)])
def test_an_export_is_that_of_one_rank(tmp_path: Path, num_ranks: int, stage: Stage) -> None:
    model = model_of(3, "full")
    write_ranks(tmp_path / "saved", model, num_ranks, stage)
    with infinity.open_checkpoint(tmp_path / "saved") as state:
        Exporter(state, with_optimizer=True).write(tmp_path / "out")
    weights = open_weights(tmp_path / "out")
    assert {name: flat_bits(weights[name]) for name in weights} == {
        name: flat_bits(value) for name, value in {**model.params, **model.buffers}.items()
    }
    loaded = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    for index, name in enumerate(model.states):
        assert {each: flat_bits(value) for each, value in loaded["state"][index].items()} == {
            each: flat_bits(value) for each, value in model.states[name].items()
        }


def test_what_is_not_divided_is_a_ranks_own(tmp_path: Path) -> None:
    write_ranks(tmp_path / "saved", model_of(1), 3, 2)
    with infinity.open_checkpoint(tmp_path / "saved") as state:
        assert [state.of_rank(rank).tracked["loader"]["position"] for rank in range(4)] == [100, 101, 102, 100]
        assert state.tracked["loader"]["position"] == 100


# --- which directories


def test_directories_may_be_given_one_by_one_and_in_any_order(tmp_path: Path) -> None:
    model = model_of(2)
    directories = write_ranks(tmp_path / "saved", model, 3, 3)
    with infinity.open_checkpoint(directories[::-1]) as state:
        assert_holds(state, model, 3, 3)
    nvme = tmp_path / "nvme"
    for rank, directory in enumerate(directories):
        shutil.copytree(directory, nvme / f"rank-{rank}" / f"infinity-state-rank{rank}")
    with infinity.open_checkpoint(nvme) as state:
        assert_holds(state, model, 3, 3)


def test_slices_that_several_ranks_have_are_read_once(tmp_path: Path) -> None:
    """As where ranks share the state only with those of their group; then one group's directories will do."""
    model = model_of(8)
    directories = write_ranks(tmp_path / "saved", model, 4, 3, num_slices=2)
    for given in (tmp_path / "saved", directories[:2], directories[2:]):
        with infinity.open_checkpoint(given) as state:
            assert_holds(state, model, 2, 3)
            assert all(len(state.sources(part)) <= 2 for part in state.parts)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    model = model_of(4)
    directories = write_ranks(tmp_path / "saved", model, 3, 3)
    for given in (directories[1:], directories[:1]):
        with pytest.raises(ManifestError, match=r"of rank [012, ]+ of 3: give the directories of all ranks"):
            infinity.open_checkpoint(given)
    write_ranks(tmp_path / "whole", model, 3, 0)
    with infinity.open_checkpoint(tmp_path / "whole" / "rank-00001-of-00003") as state:
        assert_holds(state, model, 3, 0)


def test_states_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first = write_ranks(tmp_path / "first", model_of(1), 2, 3)
    of_three = write_ranks(tmp_path / "second", model_of(1), 3, 3)
    with pytest.raises(DirectoryError, match="of different runs"):
        infinity.open_checkpoint([first[0], of_three[1]])
    with pytest.raises(DirectoryError, match="both hold commits, of rank 0"):
        infinity.open_checkpoint([first[0], *write_ranks(tmp_path / "third", model_of(1), 2, 3)])
    other = model_of(1)
    other.step += 1
    later = write_ranks(tmp_path / "later", other, 2, 3)
    with pytest.raises(ManifestError, match="another step, model or optimizer"):
        infinity.open_checkpoint([first[0], later[1]])


def test_the_newest_commit_of_all_ranks_is_read(tmp_path: Path) -> None:
    """Whichever ranks had made a later one, or one that is damaged."""
    older, newer = model_of(6), model_of(6)
    newer.step += 1
    directories = write_ranks(tmp_path / "saved", older, 2, 3, number=3)
    write_ranks(tmp_path / "saved", newer, 2, 3, number=4)
    with infinity.open_checkpoint(tmp_path / "saved") as state:
        assert state.step == newer.step
    (directories[1] / manifest_name(4)).rename(tmp_path / "away")
    with infinity.open_checkpoint(tmp_path / "saved") as state:
        assert state.step == older.step
        assert_holds(state, older, 2, 3)
    with pytest.raises(NoCommitError, match="no commit 4 of all ranks; there are: 3"):
        infinity.open_checkpoint(tmp_path / "saved", 4)
    (directories[1] / manifest_name(4)).write_bytes(b"{}")
    with infinity.open_checkpoint(tmp_path / "saved") as state:
        assert state.step == older.step
        assert len(state.commit.passed_over) == 1
    (directories[0] / manifest_name(3)).unlink()
    with pytest.raises(NoCommitError, match="no commit can be used"):
        infinity.open_checkpoint(tmp_path / "saved")


def read_all(state: StoredState) -> None:
    state.to_plain()
    for name in state.weights:
        state.weights[name]
        state.compute_weights[name]


def test_damage_of_any_rank_is_found(tmp_path: Path) -> None:
    model = model_of(7, "full")
    directories = write_ranks(tmp_path / "saved", model, 2, 3)
    for directory in directories:
        [data] = directory.glob("shards-*.bin")
        content = bytearray(data.read_bytes())
        content[100] ^= 1
        data.write_bytes(bytes(content))
        with infinity.open_checkpoint(tmp_path / "saved") as state, pytest.raises(MismatchError):
            read_all(state)
        content[100] ^= 1
        data.write_bytes(bytes(content))


# --- what somebody forges


@pytest.mark.parametrize("seed", range(8))
def test_forged_layouts_of_ranks_are_refused_or_read(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    model = model_of(seed, draw.choice(["full", "int8"]))
    write_ranks(tmp_path / "saved", model, 2, 3)
    refused = 0
    for _ in range(60):
        with open_stored(tmp_path / "saved", is_whole=False) as whole:
            commits = list(whole.commits)
            manifest = commits[draw.randrange(2)].manifest
            before = manifest.engine["parts"]
            manifest.engine["parts"] = _forged(draw, before)
            try:
                state = JoinedState(commits)
                for name in state.weights:
                    state.weights[name]
                for each in state.optimizer_state_dict["state"].values():
                    dict(each)
                for part in state.parts:
                    list(Pieces(state).weights(part))
                    for name in state.layouts[part.index].states:
                        list(Pieces(state).states(part, name))
            except infinity.InfinityError:
                refused += 1
    assert refused > 20


def _forged(draw: random.Random, parts: list[Any]) -> list[Any]:
    forged = copy.deepcopy(parts)
    for _ in range(draw.choice([1, 1, 2, 4])):
        slot = draw.choice(draw.choice(forged)["slots"])
        key = draw.choice(["start", "count", "shape", "stride", "offset"])
        numbers = [0, 1, -1, 2, 128, 4096, 1 << 40, (1 << 56) + 1, (1 << 62) - 1, None, "x", 0.5]
        way = draw.randrange(4)
        if way == 0:
            slot.pop(key, None)
        elif way == 1 and isinstance(slot.get(key), int):
            slot[key] += draw.choice([-1, 1, 128, -128, 4096])
        elif key in ("shape", "stride"):
            slot[key] = [draw.choice(numbers) for _ in range(draw.randrange(4))]
        else:
            slot[key] = draw.choice(numbers)
    return forged
