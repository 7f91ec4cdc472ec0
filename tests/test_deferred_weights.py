"""Weights whose values come from files, or from an engine, when they are wanted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import infinity
from infinity.engine.deferred import beside_meta, deferred_from, is_deferred, materialize
from infinity.errors import DirectoryError, ModelError, StorageError

WIDTH = 192  # a weight is large enough to be deferred


class Tied(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        loss: torch.Tensor = (self.head(hidden) * self.scale[0]).square().mean()
        return loss


def tied(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def saved(directory: Path, model: nn.Module, *, num_files: int = 3) -> Path:
    """Weights in several files with an index."""
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    names = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    file_of = {name: names[i % num_files] for i, name in enumerate(state)}
    for file in names:
        save_file({name: value for name, value in state.items() if file_of[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return directory


def loaded(path: Path, *, strict: bool = True) -> Tied:
    with infinity.deferred_init():
        model = Tied()
        model.load_state_dict(infinity.deferred_weights(path), strict=strict)
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: materialize(each) if each.is_meta else each for name, each in model.state_dict().items()}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


def config(tmp_path: Path, **fields: object) -> infinity.Config:
    (tmp_path / "nvme").mkdir(exist_ok=True)
    return infinity.Config.from_dict(
        {"device": "cpu", "hbm": "4MiB", "ram": "2MiB", "nvme": [str(tmp_path / "nvme")], **fields}
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read from a file of weights."""
    seen: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith(".safetensors"):
            seen.append(sum(map(len, buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return seen


def test_values_are_read_when_the_engine_stores_them(tmp_path: Path, reads: list[int]) -> None:
    plain = tied(0)
    directory = saved(tmp_path, plain)
    model = loaded(directory, strict=False)
    deferred = [name for name, each in model.state_dict().items() if is_deferred(each)]
    assert len(deferred) == 5
    assert sum(reads) < 4 * WIDTH * 20, "only what is small is read"
    reads.clear()
    with infinity.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config(tmp_path)) as engine:
        assert sum(reads) == 4 * WIDTH * WIDTH * 4, "each once"
        assert_equal(dict(engine.state_dict()), plain.state_dict())
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        for step in range(3):
            tokens = torch.arange(step, step + 8).view(2, 4)
            loss, expected = engine(tokens), plain(tokens)
            assert torch.equal(loss, expected)
            engine.backward(loss)
            expected.backward()
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(dict(engine.state_dict()), plain.state_dict())


def test_further_names_of_one_tensor(tmp_path: Path) -> None:
    plain = tied(1)
    save_model(plain, str(tmp_path / "model.safetensors"))
    assert len(load_file(tmp_path / "model.safetensors")) == len(plain.state_dict()) - 1
    assert_equal(values(loaded(tmp_path)), plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16])
def test_every_bit_of_a_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (40 * 8,), dtype=torch.uint8)
    tensors = {"matrix": bits.view(dtype)[: 40 // dtype.itemsize * 4].view(4, -1), "none": torch.empty(0, 3).to(dtype)}
    tensors["one"] = tensors["matrix"][0, 0].clone()
    save_file(tensors, tmp_path / "some.safetensors")
    found = infinity.deferred_weights(tmp_path / "some.safetensors")
    assert all(map(is_deferred, found.values()))
    for name, value in tensors.items():
        got = materialize(found[name])
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert torch.equal(got.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))


def test_what_is_done_to_them_is_done_later(tmp_path: Path, reads: list[int]) -> None:
    parts = {f"{i}": torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) for i in range(3)}
    save_file(parts, tmp_path / "model.safetensors")
    with beside_meta():
        found = infinity.deferred_weights(tmp_path)
        wide = found["0"].to(device="cpu", dtype=torch.float32)
        stacked = torch.stack([each.to("cpu") for each in found.values()])
        halves = torch.chunk(found["1"], 2)
        plain = torch.empty(3, device="meta")
        like = torch.empty_like(torch.empty(WIDTH, WIDTH, device="meta"), device="cpu")
        nn.init.normal_(like)
    assert not reads
    assert not is_deferred(plain), "what is asked for on the meta device is no deferred tensor"
    assert is_deferred(like), "and its like elsewhere is"
    assert materialize(like).std() > 0.9
    assert torch.equal(materialize(wide), parts["0"].float())
    assert torch.equal(materialize(stacked), torch.stack(list(parts.values())))
    assert torch.equal(materialize(halves[1]), parts["1"][WIDTH // 2 :])


def test_a_tensor_that_is_where_it_is_wanted_is_not_copied() -> None:
    with infinity.deferred_init():
        weight = nn.Linear(WIDTH, WIDTH).weight
        same = [weight.cpu(), weight.to("cpu"), weight.to(device="cpu", dtype=torch.float32), weight.to("cpu", None)]
        copies = [weight.to("cpu", copy=True), weight.to("cpu", torch.float64), weight.to(torch.float64)]
    assert all(each is weight for each in same)
    for copy in copies:
        assert copy is not weight
        assert is_deferred(copy)
        assert torch.equal(materialize(copy), materialize(weight).to(copy.dtype))


def test_a_source_is_asked_each_time() -> None:
    made: list[torch.Tensor] = []

    def read() -> torch.Tensor:
        made.append(torch.arange(6.0).view(2, 3) + len(made))
        return made[-1]

    tensor = deferred_from((2, 3), torch.float32, read)
    assert not made
    assert torch.equal(materialize(tensor), torch.arange(6.0).view(2, 3))
    assert torch.equal(materialize(tensor), torch.arange(6.0).view(2, 3) + 1)


def truncated(directory: Path) -> None:
    file = directory / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damaged(directory: Path) -> None:
    file = directory / "model-00002-of-00003.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def moved(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["embedding.weight"] = "model-00003-of-00003.safetensors"
    index.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (truncated, "not a whole safetensors file.*model-00002"),
        (damaged, "not a whole safetensors file.*model-00002"),
        (lambda directory: (directory / "model-00002-of-00003.safetensors").unlink(), "is missing.*model-00002"),
        (moved, "embedding.weight is not where model.safetensors.index.json says"),
        (lambda directory: (directory / "model.safetensors.index.json").unlink(), "no weights are here"),
        (lambda directory: (directory / "model.safetensors.index.json").write_text("[]"), "not an index"),
    ],
    ids=["truncated", "damaged", "missing", "moved", "no index", "no such index"],
)
def test_files_that_are_not_whole(tmp_path: Path, harm: Callable[[Path], object], message: str) -> None:
    saved(tmp_path, tied(0))
    harm(tmp_path)
    with pytest.raises(StorageError, match=message):
        infinity.deferred_weights(tmp_path)


def rewritten(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"\0\0\0\0")
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [rewritten, Path.unlink], ids=["rewritten", "removed"])
def test_a_file_that_changes_before_it_is_read(tmp_path: Path, change: Callable[[Path], object]) -> None:
    model = loaded(saved(tmp_path, tied(0)), strict=False)
    change(tmp_path / "model-00001-of-00003.safetensors")
    with pytest.raises(StorageError, match="model-00001"):
        infinity.initialize(model, torch.optim.SGD(model.parameters(), lr=1), config(tmp_path))
    assert not list((tmp_path / "nvme").iterdir())


def test_a_dtype_that_pytorch_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4, dtype=torch.uint8)}, path)
    path.write_bytes(path.read_bytes().replace(b'"U8"', b'"F8"'))
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        infinity.deferred_weights(path)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_state_of_an_engine_as_deferred_tensors(tmp_path: Path, precision: str) -> None:
    plain = tied(3)
    model = tied(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with infinity.initialize(model, optimizer, config(tmp_path, precision=precision)) as engine:
        state = engine.state_dict().deferred()
        assert state["head.weight"] is state["embedding.weight"]
        assert_equal(
            {name: materialize(each) if each.is_meta else each for name, each in state.items()},
            dict(engine.state_dict()),
        )
        assert torch.equal(materialize(state["embedding.weight"]), plain.embedding.weight)
        with infinity.deferred_init():
            halves = {f"half.{i}": half for i, half in enumerate(state["embedding.weight"].double().chunk(2))}
        with pytest.raises(ModelError, match="cannot hold"):
            engine.export_tensors(tmp_path / "out", {"a": torch.zeros(3, dtype=torch.complex128)})

        def beside(out: Path) -> None:
            (out / "more.txt").write_text("x")

        engine.export_tensors(tmp_path / "out", halves, max_file_bytes=1, beside=beside)
        with pytest.raises(DirectoryError, match="not empty"):
            engine.export_tensors(tmp_path / "out", halves)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "more.txt",
    ]
    again = {name: materialize(each) for name, each in infinity.deferred_weights(tmp_path / "out").items()}
    assert torch.equal(torch.cat([again["half.0"], again["half.1"]]), plain.embedding.weight.double())


def test_what_is_computed_from_parameters_is_deferred_inside_deferred_init_too(tmp_path: Path) -> None:
    model = tied(3)
    infinity.tile_large_layers(model, WIDTH * WIDTH)
    with infinity.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-3), config(tmp_path)) as engine:
        expected = dict(engine.state_dict())
        assert expected.keys() - dict(model.named_parameters()).keys() > {"embedding.weight"}
        with infinity.deferred_init():
            state = engine.state_dict().deferred()
        assert_equal({name: materialize(each) if each.is_meta else each for name, each in state.items()}, expected)
