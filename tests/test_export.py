"""A commit as files that everybody reads: the same values, within a budget of memory, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

import infinity
from infinity.engine.persistence.exporting import DtypeName, Exporter
from infinity.engine.persistence.optimizer_file import OPTIMIZER_NAME
from infinity.engine.persistence.pieces import Pieces
from infinity.engine.persistence.stored_state import StoredState
from infinity.engine.persistence.tensor_files import INDEX_NAME, Entry, plan_files
from infinity.errors import (
    BudgetError,
    DirectoryError,
    DiskFullError,
    InfinityError,
    MismatchError,
    ModelError,
    StorageError,
)
from infinity.store.shard import ShardKey
from infinity.store.stored import StoredCommit
from states_on_disk import CHANNELS_LAST, ODDITIES, PAGE, TIED, Sketch, StateWriter, flat_bits

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def writer(tmp_path: Path) -> StateWriter:
    made = StateWriter([tmp_path / "a", tmp_path / "b"])
    made.write(1)
    return made


@pytest.fixture
def big(tmp_path: Path) -> StateWriter:
    """Parameters of several blocks, and of many codes."""
    held = {"large": (300, 401), "small": (7,), "other": (90, 100)}
    sketches = [
        Sketch(0, 0, torch.bfloat16, torch.float32, "planes", "int8", held),
        Sketch(1, 0, torch.bfloat16, torch.float32, "master", "bf16", {f"m.{k}": v for k, v in held.items()}),
    ]
    params = [name for sketch in sketches for name in sketch.shapes]
    made = StateWriter([tmp_path / "a", tmp_path / "b"], sketches, [{"lr": 0.1, "params": params}])
    made.write(1)
    return made


# Pieces


@pytest.mark.parametrize("whole_bytes", [0, 1 << 30])
@pytest.mark.parametrize("block_bytes", [PAGE, 5 * PAGE, 1 << 22])
@pytest.mark.parametrize("which", ["writer", "big"])
def test_pieces_are_the_values(which: str, block_bytes: int, whole_bytes: int, request: pytest.FixtureRequest) -> None:
    made: StateWriter = request.getfixturevalue(which)
    expected = made.expected[1]
    with StoredCommit.open(made.directories) as commit:
        state = StoredState(commit)
        pieces = Pieces(state, block_bytes=block_bytes, whole_bytes=whole_bytes)
        for part in state.parts:
            streams = {"weights": pieces.weights(part), "computing": pieces.computing(part)}
            streams |= {name: pieces.states(part, name) for name in state.layouts[part.index].states}
            for what, stream in streams.items():
                found: dict[int, list[torch.Tensor]] = {}
                for position, start, values in stream:
                    assert start == sum(each.numel() for each in found.get(position, []))
                    assert values.numel() * values.element_size() <= 4 * max(block_bytes, 1 << 14)
                    found.setdefault(position, []).append(values.clone())
                for position, slot in enumerate(part.slots):
                    whole = (
                        expected.states.get(slot.name, {})
                        if what in ("exp_avg", "exp_avg_sq")
                        else {"weights": expected.weights[slot.name], "computing": expected.computing[slot.name]}
                    )
                    if what not in whole or not slot.num_elements or position not in found:
                        assert position not in found
                        continue
                    value = torch.cat(found[position]).as_strided(slot.shape, slot.stride)
                    assert flat_bits(value) == flat_bits(whole[what])


# Weights


@pytest.mark.parametrize("max_file_bytes", [1, 20_000, 10**9])
@pytest.mark.parametrize("computing", [False, True])
@pytest.mark.parametrize("dtype", ["keep", "fp32", "bf16", "fp16"])
def test_files_hold_what_the_commit_does(
    writer: StateWriter, tmp_path: Path, dtype: DtypeName, computing: bool, max_file_bytes: int
) -> None:
    out = tmp_path / "out"
    with StoredCommit.open(writer.directories) as commit:
        Exporter(StoredState(commit), dtype=dtype, computing=computing, max_file_bytes=max_file_bytes).write(out)
    expected = writer.expected[1].computing if computing else writer.expected[1].weights
    files = sorted(out.glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
    assert set(found) == set(expected) - set(TIED)
    for name, value in found.items():
        wanted = expected[name].to(
            DTYPES.get(dtype, expected[name].dtype) if expected[name].is_floating_point() else expected[name].dtype
        )
        assert (value.dtype, flat_bits(value)) == (wanted.dtype, flat_bits(wanted)), name
    if max_file_bytes == 10**9:
        assert sorted(each.name for each in out.iterdir()) == ["model.safetensors"]
    else:
        index = json.loads((out / INDEX_NAME).read_text())
        assert {each.name for each in files} == set(index["weight_map"].values())
        assert len(files) == (len(found) if max_file_bytes == 1 else len(files))
        assert index["metadata"]["total_size"] == sum(each.numel() * each.element_size() for each in found.values())
        assert all(
            found[name].equal(load_file(out / file)[name]) or found[name].isnan().any()
            for name, file in index["weight_map"].items()
        )
    opened = infinity.open_weights(out)
    assert set(opened) == set(found) | set(TIED)
    assert all(flat_bits(opened[alias]) == flat_bits(found[name]) for alias, name in TIED.items())
    assert all(flat_bits(opened[name]) == flat_bits(value) for name, value in found.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorchs_distributed_checkpoints_read_the_files(writer: StateWriter, tmp_path: Path) -> None:
    with StoredCommit.open(writer.directories) as commit:
        Exporter(StoredState(commit), max_file_bytes=20_000).write(tmp_path / "out")
    expected = writer.expected[1].weights
    found = {name: torch.zeros_like(value) for name, value in expected.items() if name not in TIED}
    reader = HuggingFaceStorageReader(str(tmp_path / "out"))
    load_distributed(found, storage_reader=reader, no_dist=True)
    assert all(flat_bits(value) == flat_bits(expected[name]) for name, value in found.items())


def test_files_are_cut_as_their_size_says() -> None:
    entries = [Entry(name, torch.float32, (size,)) for name, size in zip("abcde", (4, 4, 9, 1, 2), strict=True)]
    files = plan_files(entries, 4 * 8)
    assert [list(file.places) for file in files] == [["a", "b"], ["c"], ["d", "e"]]
    assert [file.name for file in files][1] == "model-00002-of-00003.safetensors"
    with pytest.raises(ModelError, match="tensor q: safetensors files cannot hold"):
        plan_files([Entry("q", torch.complex32, (1,))], 100)


# Optimizer


class Plain(torch.nn.Module):
    """Parameters of the shapes of a state on disk."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes
        self.values = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes.values()])


@pytest.mark.parametrize("mmap", [False, True])
def test_the_optimizers_file_is_what_pytorch_loads(big: StateWriter, tmp_path: Path, mmap: bool) -> None:
    out = tmp_path / "out"
    shapes = {name: shape for sketch in big.sketches for name, shape in sketch.shapes.items()}
    with StoredCommit.open(big.directories) as commit:
        state = StoredState(commit)
        Exporter(state, with_optimizer=True).write(out)
        plain = state.to_plain()
    loaded = torch.load(out / OPTIMIZER_NAME, weights_only=True, mmap=mmap)
    assert loaded["param_groups"] == plain["param_groups"] == [{"lr": 0.1, "params": list(range(len(shapes)))}]
    assert set(loaded["state"]) == set(plain["state"])
    for index, each in plain["state"].items():
        assert set(loaded["state"][index]) == set(each)
        for name, value in each.items():
            assert flat_bits(loaded["state"][index][name]) == flat_bits(value)
    optimizer = torch.optim.AdamW(Plain(shapes).values, lr=0.1)
    defaults = optimizer.state_dict()["param_groups"][0]
    optimizer.load_state_dict({**loaded, "param_groups": [{**defaults, **loaded["param_groups"][0]}]})
    names = list(shapes)
    for index, param in enumerate(optimizer.param_groups[0]["params"]):
        expected = big.expected[1].states[names[index]]
        assert flat_bits(optimizer.state[param]["exp_avg"]) == flat_bits(expected["exp_avg"])


def test_everything_an_optimizer_keeps_is_in_its_file(writer: StateWriter, tmp_path: Path) -> None:
    with StoredCommit.open(writer.directories) as commit:
        state = StoredState(commit)
        Exporter(state, with_optimizer=True).write(tmp_path / "out")
        plain = state.to_plain()
    loaded: dict[str, Any] = torch.load(tmp_path / "out" / OPTIMIZER_NAME, weights_only=True)
    assert loaded["param_groups"] == plain["param_groups"]
    for name, value in ODDITIES.items():
        got = loaded["state"][3][name]
        assert flat_bits(got) == flat_bits(value) if isinstance(value, torch.Tensor) else got == value
    assert (loaded["state"][3]["empty"].shape, type(loaded["state"][3]["best"])) == ((0, 3), float)
    assert loaded["state"][5]["exp_avg"].item() == 0.25
    conv = loaded["state"][2]["exp_avg"]
    assert conv.stride() == plain["state"][2]["exp_avg"].stride() != conv.contiguous().stride()
    assert torch.equal(conv, plain["state"][2]["exp_avg"])


# What is refused


def left(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if each.name.startswith("out"))


def test_a_damaged_shard_leaves_nothing(writer: StateWriter, tmp_path: Path) -> None:
    with StoredCommit.open(writer.directories) as commit:
        shard = commit.shard(ShardKey(1, 1, "master"))
        extent = shard.extents[-1]
        with commit.file(shard, extent).open("r+b") as file:
            os.pwrite(file.fileno(), b"\xff", extent.offset + extent.num_bytes - 1)
        with pytest.raises(MismatchError, match="unit 1 part 1 master"):
            Exporter(StoredState(commit)).write(tmp_path / "out")
    assert left(tmp_path) == []


def test_a_disk_that_is_too_small(writer: StateWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    with StoredCommit.open(writer.directories) as commit:
        exporter = Exporter(StoredState(commit))
        fields = [*real]
        fields[4] = exporter.plan.num_bytes // real.f_frsize
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
        with pytest.raises(DiskFullError, match="short by"):
            exporter.write(tmp_path / "out")
        monkeypatch.undo()

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(DiskFullError, match="the file system is full"):
            exporter.write(tmp_path / "out")
    assert left(tmp_path) == []


def test_what_is_there_is_not_overwritten(writer: StateWriter, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with StoredCommit.open(writer.directories) as commit:
        exporter = Exporter(StoredState(commit))
        out.mkdir()
        exporter.write(out)
        with pytest.raises(DirectoryError, match="not empty"):
            exporter.write(out)
        (tmp_path / "out.file").touch()
        with pytest.raises(DirectoryError, match="is a file"):
            exporter.write(tmp_path / "out.file")
        with pytest.raises(DirectoryError, match="parent directory"):
            exporter.write(tmp_path / "none" / "out")
    assert left(tmp_path) == ["out", "out.file"]


def test_too_little_memory_is_refused_with_what_would_do(writer: StateWriter, tmp_path: Path) -> None:
    with StoredCommit.open(writer.directories) as commit:
        state = StoredState(commit)
        with pytest.raises(BudgetError, match=r"needs \d+ MiB of memory.* got 1 MiB"):
            Exporter(state, ram_bytes=1 << 20)
        needed = Exporter(state).plan.needed_bytes
        assert Exporter(state, ram_bytes=needed).plan.block_bytes >= PAGE
        with pytest.raises(BudgetError):
            Exporter(state, ram_bytes=needed - 1)
        conv = next(slot for part in state.parts for slot in part.slots if slot.name == CHANNELS_LAST)
        assert needed > conv.num_elements * 8


# Weights from elsewhere


def test_weights_of_torch_save_are_read(tmp_path: Path) -> None:
    values = {"a": torch.randn(3, 4).t(), "b": torch.arange(5)}
    torch.save(values, tmp_path / "weights.pt")
    opened = infinity.open_weights(tmp_path / "weights.pt")
    assert {name: value.tolist() for name, value in opened.items()} == {k: v.tolist() for k, v in values.items()}
    (tmp_path / "weights.pt").rename(tmp_path / "pytorch_model.bin")
    assert set(infinity.open_weights(tmp_path)) == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", b"\x08\0\0\0\0\0\0\0{}      "[:9], "not a whole safetensors file"),
        ("a.safetensors", b"", "not a whole safetensors file"),
        ("a.pt", b"no weights", "neither a safetensors file nor one that torch.load"),
        (INDEX_NAME, b"{}", "expected an object with 'weight_map'"),
        (INDEX_NAME, b"[" * 100_000, "not an index of weights"),
        (INDEX_NAME, b'{"weight_map": {"a": "../b.safetensors"}}', "no name of a file beside it"),
        (INDEX_NAME, b'{"weight_map": {"a": "b.safetensors"}}', "names is missing"),
        (INDEX_NAME, b'{"weight_map": {"a": 1}}', "expected an object with 'weight_map'"),
    ],
)
def test_what_are_no_weights(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StorageError, match=message):
        infinity.open_weights(tmp_path / name)


def test_what_holds_no_weights(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "no weights are here"), (tmp_path / "none", "expected a file of weights")):
        with pytest.raises(InfinityError, match=message):
            infinity.open_weights(path)
    torch.save({"model": {"a": torch.ones(1)}, "step": 3}, tmp_path / "a.pt")
    with pytest.raises(StorageError, match="got a dict with model, step"):
        infinity.open_weights(tmp_path / "a.pt")
    torch.save(torch.ones(3), tmp_path / "a.pt")
    with pytest.raises(StorageError, match="got a Tensor"):
        infinity.open_weights(tmp_path / "a.pt")
