"""Layers in tiles: values, gradients and state dicts of the untiled layer, each tile a unit, and what is refused."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ByteSize
from torch import nn

import infinity
import parity_models as models
from infinity import BudgetError, Config, ConfigError, ModelError, TiledEmbedding, TiledLinear, tile_large_layers
from infinity.engine.deferred import is_deferred
from infinity.engine.tape import Bench, Op
from infinity.engine.unit import PART_ALIGNMENT
from infinity.engine.wrap import plan_units
from infinity.nn.tiles import ROW_ALIGNMENT, Tile, tile_bounds
from parity import CPU, Parity, Tiered, Trainer, assert_same, build, plan_of, tiny_scale
from parity_models import GPT, VOCAB, WIDTH
from test_parity import adamw, train

__all__ = ["tiny_scale"]

LIMIT = 1500
"""Bytes of a tile. In the tiny GPT the embedding, the head, and three layers of each block are larger."""

IN_TILES = ("qkv", "mlp.1", "mlp.3")
"""These layers."""

SHAPES = [(16, 24, 3), (17, 100, 7), (64, 5000, 5), (33, 1000, 3), (3, 5, 5), (8, 9, 1)]
"""Features or size of a vector, rows, tiles."""

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def tiled_gpt(**options: Any) -> GPT:
    model = GPT(**options)
    tile_large_layers(model, LIMIT)
    return model


def biased_gpt() -> GPT:
    model = GPT()
    model.head = nn.Linear(WIDTH, VOCAB)
    model.head.weight = model.tokens.weight
    return model


# Values


@settings(max_examples=200, deadline=None)
@given(num_rows=st.integers(1, 1000), data=st.data())
def test_tiles_are_about_equal_and_cover_all_rows(num_rows: int, data: st.DataObject) -> None:
    num_tiles = data.draw(st.integers(1, num_rows))
    bounds = tile_bounds(num_rows, num_tiles)
    assert len(bounds) == num_tiles
    assert [0, *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), num_rows]
    sizes = [stop - start for start, stop in bounds]
    is_aligned = all(start % ROW_ALIGNMENT == 0 for start, _ in bounds)
    assert is_aligned or max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert max(sizes) < num_rows / num_tiles + ROW_ALIGNMENT


@pytest.mark.parametrize("num_tiles", [0, -1, 9, 2.0, True, None])
def test_numbers_of_tiles_that_cannot_be(num_tiles: Any) -> None:
    with pytest.raises(ModelError, match=r"num_tiles: expected 1 to 8, as many as there are rows, got"):
        TiledLinear(4, 8, num_tiles=num_tiles)
    with pytest.raises(ModelError, match=r"num_tiles: expected 1 to 8"):
        TiledEmbedding(8, 4, num_tiles)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num_rows", "num_tiles"), SHAPES)
def test_initial_values_are_the_untiled_layers(size: int, num_rows: int, num_tiles: int, dtype: torch.dtype) -> None:
    pairs: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = [
        (
            lambda: nn.Linear(size, num_rows, dtype=dtype),
            lambda: TiledLinear(size, num_rows, num_tiles=num_tiles, dtype=dtype),
        ),
        (
            lambda: nn.Embedding(num_rows, size, padding_idx=-2, dtype=dtype),
            lambda: TiledEmbedding(num_rows, size, num_tiles, -2, dtype=dtype),
        ),
    ]
    for make_plain, make_tiled in pairs:
        torch.manual_seed(3)
        plain = make_plain().state_dict(), torch.get_rng_state()
        torch.manual_seed(3)
        assert_same((make_tiled().state_dict(), torch.get_rng_state()), plain, "values")


def test_bias_is_optional_and_settings_are_told() -> None:
    layer = TiledLinear(4, 8, bias=False, num_tiles=2, dtype=torch.float64)
    assert list(layer.state_dict()) == ["weight"]
    assert layer.bias is None
    assert repr(layer).startswith("TiledLinear(\n  in_features=4, out_features=8, bias=False")
    embedding = TiledEmbedding(8, 4, 2, padding_idx=5)
    assert (embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx) == (8, 4, 5)
    assert "8, 4, padding_idx=5" in repr(embedding)
    with pytest.raises(ModelError, match="padding_idx: expected the number of one of 8 vectors, got 8"):
        TiledEmbedding(8, 4, 2, padding_idx=8)


def compare(size: int, num_rows: int, num_tiles: int, dtype: torch.dtype) -> dict[str, float]:
    """Largest differences between a linear layer and itself in tiles, over the largest value."""
    torch.manual_seed(0)
    plain = nn.Linear(size, num_rows, dtype=dtype)
    tiled = TiledLinear.from_linear(plain, num_tiles)
    x = torch.randn(3, 20, size, dtype=dtype, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    outputs = plain(x), tiled(other)
    gradient = torch.randn_like(outputs[0])
    torch.autograd.backward(outputs, (gradient, gradient))
    pairs = {"output": outputs, "input": (x.grad, other.grad)}
    for name in ("weight", "bias"):
        pairs[name] = plain.get_parameter(name).grad, torch.cat([param.grad for param in tiled.parameters_of(name)])  # type: ignore[misc]
    differences = {}
    for name, (expected, got) in pairs.items():
        assert expected is not None
        assert got is not None
        assert got.shape == expected.shape
        differences[name] = float((got - expected).detach().abs().max() / expected.detach().abs().max())
    return differences


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num_rows", "num_tiles"), [shape for shape in SHAPES if shape[2] > 1])
def test_a_linear_layer_in_tiles_computes_the_same(
    size: int, num_rows: int, num_tiles: int, dtype: torch.dtype
) -> None:
    """Outputs and gradients of parameters may be summed in another order; that of the input is a sum over tiles."""
    differences = compare(size, num_rows, num_tiles, dtype)
    eps = torch.finfo(dtype).eps
    assert differences.pop("input") <= 2 * (num_tiles + math.sqrt(num_rows)) * eps  # a sum over rows, cut otherwise
    assert max(differences.values()) <= 8 * eps, differences


def test_outputs_and_gradients_of_parameters_can_be_bitwise_the_same() -> None:
    """Which kernel takes which shape is for PyTorch and the processor to say: here some of them do not care."""
    shapes = [(64, 5000, 5), (256, 512, 4), (128, 192, 3)]
    same = [compare(*shape, dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16)]
    assert any(not (each["output"] or each["weight"] or each["bias"]) for each in same), same


@pytest.mark.parametrize("options", [{}, {"padding_idx": 7}, {"scale_grad_by_freq": True}])
@pytest.mark.parametrize("shape", [(3, 40), (), (5,), (0,), (2, 0, 3)])
def test_an_embedding_in_tiles_is_bitwise_the_same(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    plain = nn.Embedding(50, 6, **options)
    tiled = TiledEmbedding.from_embedding(plain, 4)
    assert tiled.padding_idx == plain.padding_idx
    for dtype in (torch.int64, torch.int32):
        numbers = torch.randint(0, 50, shape).to(dtype)
        expected, got = plain(numbers), tiled(numbers)
        assert_same(got.detach(), expected.detach(), "output")
        gradient = torch.randn_like(expected)
        torch.autograd.backward((expected, got), (gradient, gradient))
        joined = torch.cat([param.grad for param in tiled.parameters() if param.grad is not None])
        assert_same(joined, plain.weight.grad, "gradient, of tiles without a number too")
        plain.zero_grad()
        tiled.zero_grad()


@pytest.mark.parametrize("number", [-1, 50])
def test_numbers_that_no_tile_has_are_refused_as_by_pytorch(number: int) -> None:
    with pytest.raises(IndexError):
        TiledEmbedding(50, 6, 4)(torch.tensor([3, number]))


def test_the_gradient_of_an_input_is_complete_tile_by_tile() -> None:
    """So that a tile's unit may go as soon as its own backward is over."""
    layer = TiledLinear(4, 8, num_tiles=2)
    order: list[int] = []

    def watch(index: int, tensor: torch.Tensor) -> None:
        tensor.register_hook(lambda gradient: order.append(index))

    for index, (tile, weight) in enumerate(zip(layer.tiles, layer.parameters_of("weight"), strict=True)):
        tile.register_forward_pre_hook(lambda _, args, index=index: watch(index, args[0]))
        watch(index, weight)
    layer(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert order == [1, 1, 0, 0]


# State dicts


def test_state_dicts_are_exchanged_with_untiled_layers() -> None:
    for plain, tiled in (
        (nn.Linear(6, 9), TiledLinear(6, 9, num_tiles=2)),
        (nn.Embedding(9, 6), TiledEmbedding(9, 6, 4)),
    ):
        around, other = nn.ModuleDict({"a": nn.Sequential(tiled)}), nn.ModuleDict({"a": nn.Sequential(plain)})
        assert str(around.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
        assert_same(dict(around.state_dict()), dict(other.state_dict()), "tiled")
        other.load_state_dict({name: value * 2 for name, value in around.state_dict().items()})
        assert str(around.load_state_dict(other.state_dict(), assign=True)) == "<All keys matched successfully>"
        assert_same(dict(around.state_dict()), dict(other.state_dict()), "assigned")
        assert all(param.requires_grad for param in around.parameters())


def test_what_a_state_dict_lacks_is_told_by_the_layers_names() -> None:
    model = nn.Sequential(TiledLinear(6, 9, num_tiles=2))
    before = model.state_dict()
    result = model.load_state_dict({"0.bias": torch.zeros(9), "more": torch.zeros(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.weight"], ["more"])
    assert_same(model.state_dict()["0.weight"], before["0.weight"], "weight")
    assert not model.state_dict()["0.bias"].any()
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({"0.weight": torch.zeros(9, 5)})
    message = str(caught.value)
    assert 'Missing key(s) in state_dict: "0.bias".' in message
    assert "size mismatch for 0.weight: copying a param with shape (9, 5) from checkpoint" in message
    assert "tiles" not in message


def test_state_dicts_are_copies_that_can_be_saved() -> None:
    layer = TiledLinear(6, 9, num_tiles=2)
    state = layer.state_dict()
    state["weight"].zero_()
    assert layer.state_dict()["weight"].any()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert_same(dict(torch.load(file, weights_only=True)), dict(layer.state_dict()), "saved")


def test_kept_variables_are_joined_with_their_gradients() -> None:
    layer = TiledLinear(6, 9, num_tiles=2)
    state = layer.state_dict(keep_vars=True)
    assert_same(state["weight"].detach(), layer.state_dict()["weight"], "joined")
    state["weight"][-1].sum().backward()
    first, second = layer.parameters_of("weight")
    assert first.grad is not None
    assert second.grad is not None
    assert not first.grad.any()
    assert second.grad.sum() == 6


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_layers_of_their_own(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    layer = TiledLinear(6, 9, num_tiles=2)
    other, state = duplicate(layer), layer.state_dict()
    assert_same(dict(other.state_dict()), dict(state), "copy")
    other.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert not any(value.any() for value in other.state_dict().values())
    assert_same(dict(layer.state_dict()), dict(state), "the first")


def test_a_weight_that_is_in_tiles_is_no_attribute() -> None:
    layer, embedding = TiledLinear(6, 9, num_tiles=3), TiledEmbedding(9, 6, 3)
    with pytest.raises(
        AttributeError, match=r"TiledLinear has no attribute 'weight': its rows lie in 3 tiles.*nn\.Lin"
    ):
        _ = layer.weight
    with pytest.raises(AttributeError, match=r"TiledLinear has no attribute 'bias'"):
        _ = layer.bias
    with pytest.raises(AttributeError, match=r"'weight' of a TiledLinear cannot be set: .* call tie_weight\(\)"):
        layer.weight = nn.Parameter(torch.zeros(9, 6))
    with pytest.raises(AttributeError, match="'TiledEmbedding' object has no attribute 'bias'"):
        _ = embedding.bias
    layer.tie_weight(embedding)
    assert_same(layer.state_dict()["weight"], embedding.state_dict()["weight"], "tied")
    assert {*layer.parameters()} >= {*embedding.parameters()}
    with pytest.raises(ModelError, match=r"tie_weight\(\): expected a layer whose tiles have shapes \[\(3, 6\)"):
        layer.tie_weight(TiledEmbedding(9, 6, 2))


# Under the engine


def test_tiles_are_units_of_their_own_in_blocks_too() -> None:
    plain, tiled = GPT(), tiled_gpt()
    units = {plan.name: plan for plan in plan_units(tiled, "auto", max_unit_bytes=1 << 20)}
    tiles = {name for name, module in tiled.named_modules() if isinstance(module, Tile)}
    tied = {f"{layer}.tiles.{i}" for layer in ("tokens", "head") for i in range(2)}
    assert tied < tiles
    assert tiles - units.keys() == tied
    assert [name for name, _ in units["(tied) tokens.tiles.1"].triggers] == ["tokens.tiles.1", "head.tiles.1"]
    assert [name for name, _ in units["blocks.0.qkv.tiles.0"].triggers] == ["blocks.0.qkv.tiles.0"]
    assert [name for name, _ in units["blocks.0"].params] == [
        name
        for name, _ in plain.named_parameters()
        if name.startswith("blocks.0") and not any(layer in name for layer in IN_TILES)
    ]
    by_class = {plan.name for plan in plan_units(tiled, ("Block",), max_unit_bytes=1 << 20)}
    assert by_class == units.keys()


def test_a_blocks_size_is_its_size_without_tiles() -> None:
    model = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(64), TiledLinear(64, 256, num_tiles=4), nn.Linear(64, 64)) for _ in range(2)
    )
    rest = 4 * (2 * 64 + 64 * 64 + 64)
    assert "0" in {plan.name for plan in plan_units(model, "auto", max_unit_bytes=rest)}
    assert "0" not in {plan.name for plan in plan_units(model, "auto", max_unit_bytes=rest - 1)}
    of_tiles = nn.ModuleList(nn.Sequential(TiledLinear(8, 8, num_tiles=2)) for _ in range(2))
    names = [plan.name for plan in plan_units(of_tiles, "auto", max_unit_bytes=1 << 20)]
    assert names == [f"{block}.0.tiles.{tile}" for block in range(2) for tile in range(2)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"outer": models.non_reentrant}], ids=["plainly", "recomputed"])
def test_training_is_that_of_plain_pytorch(options: dict[str, Any], precision: str, tmp_path: Path) -> None:
    case = Parity(lambda: tiled_gpt(**options), adamw, train(models.tokens, num_steps=2, accumulate=2), precision)
    case.check(case.smallest(tmp_path))
    case.check(case.resident())


def test_only_a_tile_beside_its_block_has_to_be_in_device_memory(tmp_path: Path) -> None:
    def wide() -> nn.Module:
        return _Mean(nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64)))

    def tiled() -> nn.Module:
        model = wide()
        assert tile_large_layers(model, "64KiB") == ["inner.0", "inner.2"]
        return model

    model, optimizer = build(tiled, adamw)
    plan = plan_of(model, optimizer, Config(device="cpu", hbm="256KiB", nvme=tmp_path))
    tile_bytes = max(unit.num_bytes for unit in plan.units)
    assert plan.smallest_hbm(model)[0] == tile_bytes
    assert tile_bytes <= 64 << 10
    script = train(lambda seed: (torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)),))
    case = Parity(tiled, adamw, script)
    config = case.smallest(tmp_path)
    assert config.hbm <= tile_bytes + 4 * PART_ALIGNMENT, "the bias may be a part of its own"
    assert config.ram < 5 * tile_bytes
    case.check(config)
    untiled = Parity(wide, adamw, script)
    assert untiled.smallest(tmp_path).hbm > 6 * config.hbm
    assert_close(case.expected.returned, untiled.expected.returned)


class _Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).float().square().mean()  # type: ignore[no-any-return]


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_engines_state_dicts_are_exchanged_with_untiled_models(precision: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = biased_gpt().state_dict()
    model, optimizer = build(_tiled_biased, adamw)
    config = Parity(_tiled_biased, adamw, lambda trainer: None, precision).half(tmp_path)
    with infinity.initialize(model, optimizer, config) as engine:
        before = dict(engine.state_dict())
        assert list(before) == list(other)
        with pytest.raises(ModelError, match=r"missing: tokens\.weight"):
            engine.load_state_dict({name: value for name, value in other.items() if name != "tokens.weight"})
        with pytest.raises(ModelError, match=r"size mismatch for head\.weight: .* \(16, 24\) from"):
            engine.load_state_dict({**other, "head.weight": torch.zeros(16, 24)})
        assert_same(dict(engine.state_dict()), before, "after a refusal")
        engine.load_state_dict(other)
        assert_same(dict(engine.state_dict()), dict(other), "loaded")
        compute = torch.bfloat16 if precision == "bf16" else torch.float32
        rounded = {name: value.to(compute) for name, value in other.items()}
        assert_same(dict(model.state_dict()), rounded, "computing")
        engine.load_state_dict(before)
        values = dict(engine.state_dict())
    model.load_state_dict(values)
    assert_same(dict(model.state_dict()), {name: value.to(compute) for name, value in before.items()}, "given back")
    assert model.to(torch.float32)(*models.tokens(0)).isfinite()


def _tiled_biased() -> GPT:
    model = biased_gpt()
    tile_large_layers(model, LIMIT)
    return model


def _deferred_then_tiled() -> GPT:
    with infinity.deferred_init(threshold_bytes=512):
        model = biased_gpt()
    tile_large_layers(model, LIMIT)
    return model


def _tiled_while_deferred() -> GPT:
    with infinity.deferred_init(threshold_bytes=512):
        return _tiled_biased()


@pytest.mark.parametrize("make_model", [_deferred_then_tiled, _tiled_while_deferred])
def test_deferred_models_can_be_in_tiles(make_model: Callable[[], nn.Module], tmp_path: Path) -> None:
    case = Parity(_tiled_biased, adamw, train(models.tokens))
    case.make_model = make_model
    assert any(is_deferred(param) for param in make_model().parameters())
    case.check(case.half(tmp_path))


def test_layers_built_while_deferred_have_the_untiled_layers_values() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(64, 500).state_dict(), nn.Embedding(500, 64).state_dict(), torch.get_rng_state()
    torch.manual_seed(0)
    with infinity.deferred_init(threshold_bytes=512):
        layers = TiledLinear(64, 500, num_tiles=3), TiledEmbedding(500, 64, 3)
    state = torch.get_rng_state()
    got = [
        torch.cat([infinity_value(param) for param in layer.parameters_of(name)])
        for layer, name in ((layers[0], "weight"), (layers[0], "bias"), (layers[1], "weight"))
    ]
    assert_same([*got, state], [*expected[0].values(), *expected[1].values(), expected[2]], "values")


def infinity_value(param: nn.Parameter) -> torch.Tensor:
    from infinity.engine.deferred import materialize

    return materialize(param) if param.is_meta else param.detach()


# Replacing


def test_tied_layers_share_their_tiles_and_numbers_stay(tmp_path: Path) -> None:
    model = biased_gpt()
    expected = model.state_dict()
    batch = models.tokens(0)
    loss = model.eval()(*batch)
    names = tile_large_layers(model, LIMIT)
    assert names == [
        "tokens",
        "head",
        *(f"blocks.{i}.{layer}" for i in range(2) for layer in IN_TILES),
    ]
    head, tokens = model.head, model.tokens
    assert isinstance(head, TiledLinear)
    assert isinstance(tokens, TiledEmbedding)
    assert head.parameters_of("weight") == tokens.parameters_of("weight")
    assert head.num_tiles == 2
    assert not head.training
    for module in model.modules():
        if isinstance(module, Tile):
            assert sum(param.numel() * 4 for param in module.parameters()) <= LIMIT
    assert_same(dict(model.state_dict()), dict(expected), "state dict")
    assert_same(model(*batch).detach(), loss.detach(), "loss")
    assert tile_large_layers(model, LIMIT) == [], "tiles are not tiled again"


def test_a_layer_in_two_places_is_replaced_by_one() -> None:
    layer = nn.Linear(16, 64)
    layer.weight.requires_grad_(False)
    layer.weight.rate = 0.5  # type: ignore[attr-defined]
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer, nn.Linear(2, 2))})
    assert tile_large_layers(model, "1KiB") == ["a", "b.0"]
    assert model["a"] is model.get_submodule("b.0")
    for tile in model["a"].tiles:  # type: ignore[union-attr]
        assert not tile.weight.requires_grad
        assert tile.weight.rate == 0.5
        assert tile.bias.requires_grad
        assert tile.weight.untyped_storage().nbytes() == tile.weight.nbytes


def test_a_replaced_layer_that_is_held_elsewhere_refuses_to_be_called() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 64)
            self.order = [self.layer]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.order:
                x = layer(x)
            return x

    model = Holding()
    tile_large_layers(model, "1KiB")
    assert not list(model.order[0].parameters()), "its memory is free"
    with pytest.raises(
        ModelError, match=r"this Linear was replaced by tile_large_layers\(\) and is no part of the model"
    ):
        model(torch.ones(1, 16))


class _Odd(nn.Linear):
    pass


def _hooked(layer: nn.Linear) -> nn.Module:
    layer.register_forward_hook(lambda *_: None)
    return layer


def _with(layer: nn.Module, **attributes: Any) -> nn.Module:
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def _graded(layer: nn.Linear) -> nn.Module:
    layer(torch.ones(16)).sum().backward()
    return layer


def _watched(layer: nn.Linear) -> nn.Module:
    layer.weight.register_hook(lambda g: g)
    return layer


def _sharing(layer: nn.Linear, name: str) -> nn.Module:
    other = _Odd(16, 64) if name == "weight" else nn.Linear(2, 64)
    setattr(other, name, getattr(layer, name))
    return nn.Sequential(layer, other)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: _Odd(16, 64), r"layer is a _Odd, and only nn\.Linear and nn\.Embedding themselves"),
    "attention": (lambda: nn.MultiheadAttention(64, 2), r"layer\.out_proj is a NonDynamicallyQuantizableLinear"),
    "hook": (lambda: _hooked(nn.Linear(16, 64)), r"layer has hooks \(forward_hooks\), which tiles would not call"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 64)),
        "layer is a ParametrizedLinear",
    ),
    "max_norm": (lambda: nn.Embedding(64, 16, max_norm=1.0), "layer has max_norm or sparse=True"),
    "sparse": (lambda: nn.Embedding(64, 16, sparse=True), "layer has max_norm or sparse=True"),
    "method": (lambda: _with(nn.Linear(16, 64), forward=lambda x: x), r"layer has a forward\(\) of its own"),
    "parameter": (
        lambda: _with(nn.Linear(16, 64), scale=nn.Parameter(torch.ones(()))),
        "layer has other parameters, buffers or modules than a Linear: scale",
    ),
    "gradient": (lambda: _graded(nn.Linear(16, 64)), "layer has a weight that has a gradient, which would be lost"),
    "tensor hook": (lambda: _watched(nn.Linear(16, 64)), "layer has a weight that has hooks"),
    "tied weight": (
        lambda: _sharing(nn.Linear(16, 64), "weight"), r"layer\.0 shares its weight with layer\.1, which is a _Odd"
    ),
    "tied bias": (
        lambda: _sharing(nn.Linear(16, 64), "bias"), r"layer\.0 shares its bias, but not its weight, with layer\.1"
    ),
    "row": (lambda: nn.Linear(512, 4), r"layer has rows of 2052 bytes, more than max_bytes=1024"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_replaced_is_refused_and_all_stays(case: str) -> None:
    make_layer, message = REFUSED[case]
    model = nn.ModuleDict({"first": nn.Linear(16, 64), "layer": make_layer()})
    modules = dict(model.named_modules())
    with pytest.raises(
        ModelError, match=rf"tile_large_layers\(\): {message}.*Nothing has been replaced; raise max_bytes"
    ):
        tile_large_layers(model, 1024)
    assert dict(model.named_modules()) == modules


def test_what_cannot_be_replaced_at_all() -> None:
    with pytest.raises(ModelError, match="Linear is the model itself, which cannot be replaced in place"):
        tile_large_layers(nn.Linear(16, 64), 1024)
    with pytest.raises(ModelError, match=r"expected a torch\.nn\.Module, got int"):
        tile_large_layers(3, 1024)  # type: ignore[arg-type]
    for wrong in ("a lot", -1, True, None):
        with pytest.raises(ConfigError, match=r"max_bytes: .*, got"):
            tile_large_layers(GPT(), wrong)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"from_linear\(\): expected an nn\.Linear, got a _Odd"):
        TiledLinear.from_linear(_Odd(4, 4), 2)
    with pytest.raises(ModelError, match=r"from_embedding\(\): expected an nn\.Embedding, got a Linear"):
        TiledEmbedding.from_embedding(nn.Linear(4, 4), 2)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"max_norm and sparse are not supported"):
        TiledEmbedding.from_embedding(nn.Embedding(4, 4, sparse=True), 2)


def test_a_model_under_the_engine_is_refused(tmp_path: Path) -> None:
    model, optimizer = build(GPT, adamw)
    with (
        infinity.initialize(model, optimizer, Config(device="cpu", nvme=tmp_path)),
        pytest.raises(ModelError, match=r"of its own, put there by hand, by a library or by infinity\.initialize\(\)"),
    ):
        tile_large_layers(model, LIMIT)


def test_code_that_reads_the_weight_itself_is_told() -> None:
    model = models.BorrowingGPT()
    assert tile_large_layers(model, 1400) == [
        "tokens",
        *(n for n, m in GPT().named_modules() if n.endswith(("qkv", "mlp.1", "mlp.3"))),
    ]
    with pytest.raises(AttributeError, match="a TiledEmbedding has no attribute 'weight'"):
        model(*models.tokens(0))


# At start


def _wide() -> nn.Module:
    return _Mean(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 2)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_budget_that_a_layer_is_too_large_for_names_the_way_out(precision: str, tmp_path: Path) -> None:
    model, optimizer = build(_wide, adamw)
    config = Config(device="cpu", hbm="256KiB", nvme=tmp_path, precision=precision)
    max_bytes = 64 << (10 if precision == "fp32" else 11)
    with pytest.raises(
        BudgetError,
        match=rf"The largest parameter of inner\.1 is inner\.1\.weight, which could be gathered in tiles: call "
        rf"infinity\.tile_large_layers\(model, {max_bytes}\) before the optimizer is built, or set tile_large_layers",
    ):
        infinity.initialize(model, optimizer, config)
    tile_large_layers(model, max_bytes)
    with infinity.initialize(model, adamw(model), config) as engine:
        engine.backward(engine(torch.ones(3, 64)))
        engine.step()


def test_it_does_not_where_tiles_would_not_help(tmp_path: Path) -> None:
    config = Config(device="cpu", hbm="256KiB", nvme=tmp_path)
    for layer in (_Odd(64, 4096), nn.Conv1d(64, 1024, 3), nn.Linear(1 << 15, 4)):
        model = _Mean(nn.Sequential(layer))
        with pytest.raises(BudgetError, match=r"ram=\d+ \(bytes\)$"):
            infinity.initialize(model, adamw(model), config)


class TieredByItself(Tiered):
    """Compared with a model that was tiled by hand."""

    def __init__(self, engine: infinity.Engine, user: torch.optim.Optimizer) -> None:
        super().__init__(engine, user)
        assert any(isinstance(module, TiledLinear) for module in engine.module.modules())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tiling_at_start_is_tiling_before(precision: str, tmp_path: Path) -> None:
    hbm = 4 * 64 << 10
    itemsize = 4 if precision == "fp32" else 2

    def by_hand() -> nn.Module:
        model = _wide()
        assert tile_large_layers(model, (hbm // 4) * 4 // itemsize) == ["inner.1"]
        return model

    def script(trainer: Trainer) -> list[torch.Tensor]:
        assert len(trainer.optimizer.param_groups[0]["params"]) > 3
        return train(lambda seed: (torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)),))(trainer)

    case = Parity(by_hand, _in_groups, script, precision)
    case.make_model = _wide
    case.check(
        Config(device="cpu", hbm=hbm, nvme=tmp_path, precision=precision, tile_large_layers=True), TieredByItself
    )


def _in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weights before biases, with names, in groups that differ."""
    named = sorted(model.named_parameters(), key=lambda each: each[0].endswith("bias"))
    groups: list[dict[str, Any]] = [
        {"params": [each for each in named if each[0].startswith("inner.1")], "weight_decay": 0.1},
        {"params": [each for each in named if not each[0].startswith("inner.1")], "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def test_groups_keep_their_settings_and_names(tmp_path: Path) -> None:
    model, optimizer = build(_wide, _in_groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    lists = [group["params"] for group in optimizer.param_groups]
    config = Config(device="cpu", hbm="256KiB", nvme=tmp_path, tile_large_layers=True)
    with infinity.initialize(model, optimizer, config) as engine:
        names = [f"inner.inner.1.tiles.{tile}.{name}"[6:] for name in ("weight", "bias") for tile in range(17)]
        first, second = optimizer.param_groups
        named = dict(model.named_parameters())
        assert [group["params"] is each for group, each in zip(optimizer.param_groups, lists, strict=True)] == [
            True
        ] * 2
        assert first["param_names"] == [name for name in names if name in named]
        assert [named[name] for name in first["param_names"]] == first["params"]
        assert (first["weight_decay"], first["lr"], second["lr"]) == (0.1, 0.01, 0.02)
        engine.backward(engine(torch.ones(3, 64)))
        engine.step()
        scheduler.step()
        assert second["lr"] == pytest.approx(0.002)


def test_an_optimizer_with_state_of_a_large_layer_is_refused(tmp_path: Path) -> None:
    model, optimizer = build(_wide, adamw)
    model(torch.ones(3, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()
    modules, groups = dict(model.named_modules()), [list(group["params"]) for group in optimizer.param_groups]
    config = Config(device="cpu", hbm="256KiB", nvme=tmp_path, tile_large_layers=True)
    with pytest.raises(
        ModelError, match=r"optimizer already has state of inner\.1\.weight, which tiles would not have"
    ):
        infinity.initialize(model, optimizer, config)
    assert dict(model.named_modules()) == modules
    assert [group["params"] for group in optimizer.param_groups] == groups


def test_patterns_that_would_lose_what_they_name_are_refused(tmp_path: Path) -> None:
    model, optimizer = build(_wide, adamw)
    fields: dict[str, Any] = {"device": "cpu", "hbm": ByteSize(512 << 10), "nvme": tmp_path, "precision": "bf16"}
    with pytest.raises(
        ConfigError, match=r"a pattern names inner\.1\.weight, which .* cuts into inner\.1\.tiles\.0\.we"
    ):
        infinity.initialize(model, optimizer, Config(**fields, keep_fp32=("inner.1.weight",), tile_large_layers=True))
    with infinity.initialize(
        model, optimizer, Config(**fields, keep_fp32=("inner.1.*",), tile_large_layers=True)
    ) as engine:
        assert engine.module.get_parameter("inner.1.tiles.0.weight").dtype == torch.float32
        assert engine.module.get_parameter("inner.0.weight").dtype == torch.bfloat16


def test_a_large_layer_that_cannot_be_in_tiles_is_left_where_it_fits(tmp_path: Path) -> None:
    model = _Mean(nn.Sequential(_Odd(64, 300)))
    config = Config(device="cpu", hbm="256KiB", nvme=tmp_path, tile_large_layers=True)
    with infinity.initialize(model, adamw(model), config) as engine:
        assert type(engine.module.get_submodule("inner.0")) is _Odd
    assert torch.device(engine.config.torch_device()) == CPU


def test_a_layer_whose_initialisation_is_deferred_is_made_once_for_all_its_tiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[int] = []
    run = Bench.run

    def count(bench: Bench, op: Op, *, live: bool = False) -> Any:
        made.append(max((slot.nbytes for slot in op.writes), default=0))
        return run(bench, op, live=live)

    with infinity.deferred_init():
        model = _Mean(nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 64)))
    tile_large_layers(model, "32KiB")
    monkeypatch.setattr(Bench, "run", count)
    with infinity.initialize(model, adamw(model), Config(device="cpu", nvme=tmp_path)):
        assert made.count(64 * 1024 * 4) == 2, "once for each weight"
