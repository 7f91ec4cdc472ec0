"""The loss over a large vocabulary without full logits: its numbers, its bytes, and the engine under it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import infinity
import parity_models as models
from infinity import ModelError, TiledEmbedding, TiledLinear, tile_large_layers, tiled_cross_entropy
from parity import Parity, Trainer, assert_same, build, tiny_scale
from parity_models import GPT, WIDTH
from test_parity import adamw, train
from test_vertical import accumulate, num_gathers, vertical

__all__ = ["tiny_scale"]

TOKENS, FEATURES, CLASSES, TILE = 50, 24, 130, 8
KINDS = ["weight", "layer", "tiled"]


class Head(nn.Module):
    """A head in one of the forms that the loss takes."""

    def __init__(
        self, kind: str, bias: bool = True, dtype: torch.dtype = torch.float32, classes: int = CLASSES
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear: nn.Module = nn.Linear(FEATURES, classes, bias, dtype=dtype)
        self.kind = kind
        if kind == "tiled":
            tile_large_layers(self, sum(param.nbytes for param in self.parameters()) // 2)

    def loss(self, hidden: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
        if self.kind != "weight":
            return tiled_cross_entropy(hidden, self.linear, target, **options)
        assert isinstance(self.linear, nn.Linear)
        return tiled_cross_entropy(hidden, self.linear.weight, target, bias=self.linear.bias, **options)

    def full(self, hidden: torch.Tensor, target: torch.Tensor, tile: int, **options: Any) -> torch.Tensor:
        """PyTorch's loss of logits that are computed for as many tokens at a time, and kept."""
        logits = torch.cat([self.linear(rows) for rows in hidden.flatten(0, -2).split(tile)])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(wide, target.flatten(), **options)
        return loss.view(target.shape) if options.get("reduction") == "none" else loss


def batch(shape: tuple[int, ...] = (TOKENS,), dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, FEATURES, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(0, CLASSES, shape, generator=generator)
    return hidden, target.masked_fill(torch.rand(shape, generator=generator) < 0.2, -100)


def gradients(loss: torch.Tensor, hidden: torch.Tensor, head: Head) -> list[torch.Tensor]:
    """Of hidden, weight and bias."""
    weights = torch.randn(loss.shape, generator=torch.Generator().manual_seed(2)) if loss.ndim else torch.tensor(3.0)
    (loss * weights).sum().backward()
    grads = {name: param.grad for name, param in head.named_parameters()}
    found = [hidden.grad, *(
        torch.cat([grad for name, grad in grads.items() if name.endswith(last) and grad is not None])
        for last in ("weight", "bias")
    )]  # fmt: skip
    hidden.grad = None
    head.zero_grad()
    return [each for each in found if each is not None]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 3},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "reduction": "none"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_its_numbers_are_those_of_cross_entropy(kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Bitwise where the same sums are taken; the gradient of weight and bias is summed over tiles of tokens."""
    head = Head(kind, dtype=dtype)
    hidden, target = batch(dtype=dtype)
    target = torch.where(target < 0, options.get("ignore_index", target), target)
    expected, got = head.full(hidden, target, TILE, **options), head.loss(hidden, target, tile_tokens=TILE, **options)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    of_expected, of_got = gradients(expected, hidden, head), gradients(got, hidden, head)
    is_same_sum = "label_smoothing" not in options or options.get("reduction") == "none"
    if kind != "tiled" and is_same_sum:
        assert_same(got.detach(), expected.detach(), "loss")
    if kind != "tiled" and "label_smoothing" not in options:
        assert_same(of_got[0], of_expected[0], "gradient of hidden")
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=8 * torch.finfo(expected.dtype).eps, atol=0)
    for one, other in zip(of_got, of_expected, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).abs().max() / other.abs().max()) <= 2 * eps * TOKENS / TILE


def test_it_is_also_close_to_the_loss_of_one_product() -> None:
    hidden, target = batch((5, 10))
    for kind in KINDS:
        head = Head(kind)
        logits = head.linear(hidden)
        torch.testing.assert_close(
            head.loss(hidden, target, num_tiles=7), F.cross_entropy(logits.flatten(0, 1), target.flatten())
        )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    head = Head(kind, dtype=torch.float64, classes=5)
    hidden = torch.randn(6, FEATURES, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 4, -100, 1, 2, 2])
    params = list(head.parameters())

    def loss(hidden: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        return head.loss(hidden, target, tile_tokens=4, label_smoothing=0.2, reduction="none")

    torch.autograd.gradcheck(loss, (hidden, *params))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3), (2, 0, 3)])
def test_any_shape_of_tokens(kind: str, shape: tuple[int, ...]) -> None:
    head = Head(kind, bias=False)
    hidden, target = batch(shape)
    for reduction in ("none", "sum"):
        got = head.loss(hidden, target, reduction=reduction)
        torch.testing.assert_close(got, head.full(hidden, target, 100, reduction=reduction))
    assert head.loss(hidden, target.fill_(-100)).isnan(), "the mean of nothing, as in PyTorch"


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_needs_no_gradient_gets_none(kind: str, frozen: str) -> None:
    head = Head(kind)
    hidden, target = batch()
    hidden.requires_grad_(frozen != "hidden")
    for name, param in head.named_parameters():
        param.requires_grad_(not name.endswith(frozen))
    head.loss(hidden, target, tile_tokens=TILE).backward()
    tensors: dict[str, torch.Tensor] = {"hidden": hidden, **dict(head.named_parameters())}
    for name, tensor in tensors.items():
        assert (tensor.grad is None) == name.endswith(frozen), name
    with torch.no_grad():
        assert head.loss(hidden, target).isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_applies_to_the_logits(kind: str) -> None:
    head = Head(kind)
    hidden, target = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = head.full(hidden, target, TILE), head.loss(hidden, target, tile_tokens=TILE)
    assert not torch.equal(expected, head.full(hidden, target, TILE)), "autocast changes something"
    torch.testing.assert_close(got, expected)
    for one, other in zip(gradients(got, hidden, head), gradients(expected, hidden, head), strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert float((one - other).abs().max() / other.abs().max()) <= 0.05


# Bytes


def run_and_weigh(function: Callable[[], Any]) -> tuple[Any, int, int]:
    """What a function returns, the most bytes that PyTorch's allocator had lent it at a time, and what it keeps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    lent = list(itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))
    return result, max(lent), lent[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_that_of_a_tile_of_tokens(kind: str, dtype: torch.dtype) -> None:
    num_tokens, tile, classes = 512, 64, 8192
    head = Head(kind, bias=False, dtype=dtype, classes=classes)
    linear = head.linear
    num_tiles = linear.num_tiles if isinstance(linear, TiledLinear) else 1
    hidden = torch.randn(num_tokens, FEATURES, dtype=dtype, requires_grad=True)
    target = torch.randint(0, classes, (num_tokens,))
    small = 8 * hidden.nbytes + 16 * num_tokens * num_tiles
    weight_bytes = classes * FEATURES * dtype.itemsize

    loss, peak, kept = run_and_weigh(lambda: head.loss(hidden, target, tile_tokens=tile))
    of_tile = tile * classes // num_tiles
    forward = (8 if dtype == torch.float32 else 10) * of_tile
    assert forward - small < peak <= forward + small
    assert kept <= small
    _, peak, _ = run_and_weigh(loss.backward)
    backward = (20 if kind == "tiled" else 12) * of_tile
    assert peak <= backward + weight_bytes + small, peak / of_tile
    assert peak > backward - 4 * of_tile

    full, peak, kept = run_and_weigh(lambda: head.full(hidden.detach(), target, num_tokens))
    assert peak >= 8 * num_tokens * classes
    assert kept >= 4 * num_tokens * classes
    _, peak, _ = run_and_weigh(full.backward)
    assert kept + peak >= 12 * num_tokens * classes


def test_tiles_have_64_mib_of_logits_unless_told_otherwise() -> None:
    sizes: list[int] = []

    class Spy(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            sizes.append(len(rows))
            return super().forward(rows)

    layer = Spy(1, 1 << 16, bias=False)
    hidden, target = torch.zeros(600, 1), torch.zeros(600, dtype=torch.int64)
    with torch.no_grad():
        for options, expected in (
            ({}, [256, 256, 88]),
            ({"num_tiles": 4}, [150] * 4),
            ({"tile_tokens": 400}, [400, 200]),
        ):
            sizes.clear()
            tiled_cross_entropy(hidden, layer, target, **options)  # type: ignore[arg-type]
            assert sizes == expected


# Under the engine


class WithLoss(GPT):
    """A GPT that ends in the loss; the head is tied to the embedding."""

    def head_of(self) -> torch.Tensor | nn.Module:
        return self.head

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.tokens(batch) + self.positions(torch.arange(batch.shape[1]))
        for block in self.blocks:
            x = self.outer(block, x)
        return tiled_cross_entropy(self.norm(x)[:, :-1], self.head_of(), batch[:, 1:], tile_tokens=4)


class ByWeight(WithLoss):
    def head_of(self) -> torch.Tensor:
        return self.tokens.weight


def in_tiles() -> nn.Module:
    model = WithLoss()
    assert tile_large_layers(model, 1500) == ["tokens", "head", *(
        f"blocks.{i}.{layer}" for i in range(2) for layer in ("qkv", "mlp.1", "mlp.3")
    )]  # fmt: skip
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make_model", [WithLoss, ByWeight, in_tiles])
def test_training_with_it_is_that_of_plain_pytorch(
    make_model: Callable[[], nn.Module], precision: str, tmp_path: Path
) -> None:
    case = Parity(make_model, adamw, train(models.tokens, num_steps=2, accumulate=2), precision)
    case.check(case.smallest(tmp_path, debug=True))
    case.check(case.resident())


def test_micro_batches_go_through_tiles_unit_by_unit(tmp_path: Path) -> None:
    case = Parity(in_tiles, adamw, accumulate(models.tokens, num_steps=1))
    once = vertical(case, case.smallest(tmp_path))
    each = case.check(case.smallest(tmp_path, accumulation="horizontal"))
    assert num_gathers(once) < num_gathers(each) / 2


def test_a_layer_serves_outside_of_the_models_forward_too(tmp_path: Path) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(WIDTH, WIDTH), TiledLinear(WIDTH, 40, num_tiles=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.body(x))

    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for seed in range(3):
            (x,) = models.vectors(seed)
            head = trainer.model.get_submodule("head")
            loss = tiled_cross_entropy(trainer.model(x), head, torch.tensor([0, 39, 7]), tile_tokens=2)
            trainer.backward(loss)
            trainer.step()
            losses.append(loss.detach())
        return losses

    case = Parity(Parts, adamw, script)
    case.check(case.half(tmp_path, debug=True))


def test_evaluation_between_steps(tmp_path: Path) -> None:
    model, optimizer = build(in_tiles, adamw)
    expected = model.eval()(*models.tokens(0)).detach()
    config = Parity(in_tiles, adamw, lambda trainer: None).smallest(tmp_path)
    with infinity.initialize(model, optimizer, config) as engine, torch.no_grad():
        assert_same(engine(*models.tokens(0)), expected, "loss")


# Bad input


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"target": torch.zeros(3, dtype=torch.int64)}, r"expected a target of class numbers, int64 of shape \(4,\)"),
    ({"target": torch.zeros(4)}, r"expected a target of class numbers, int64 .* got torch\.float32 of shape \(4,\)"),
    ({"target": torch.tensor([0, 1, 7, 9])}, "expected targets below 7 classes or ignore_index, got 7"),
    ({"target": torch.tensor([0, 1, -1, -100])}, "expected targets below 7 classes or ignore_index, got -1"),
    ({"weight": torch.zeros(7, 3)}, r"expected a weight of shape \(classes, 2\) .* got \(7, 3\)$"),
    ({"bias": torch.zeros(6)}, r"a bias of \(classes,\), got \(7, 2\) and \(6,\)"),
    ({"hidden": torch.zeros(4, 2, dtype=torch.float64)}, "expected hidden, weight and bias of one dtype, got torch"),
    ({"weight": nn.Linear(2, 7), "bias": torch.zeros(7)}, "bias belongs to a weight; a layer has its own"),
    ({"weight": TiledLinear(2, 7, num_tiles=2), "bias": torch.zeros(7)}, "bias belongs to a weight"),
    ({"weight": TiledLinear(2, 7, num_tiles=2), "target": torch.tensor([0, 1, 2, 7])}, "below 7 classes .* got 7"),
    ({"weight": TiledEmbedding(7, 2, 2)}, r"a TiledEmbedding gives no logits; .* linear\.tie_weight\(embedding\)"),
    ({"weight": nn.Sequential(nn.Linear(2, 7))}, "expected a layer that says in out_features .* got a Sequential"),
    ({"reduction": "average"}, "reduction: expected 'mean', 'sum' or 'none', got 'average'"),
    ({"label_smoothing": 1.5}, r"label_smoothing: expected 0 to 1, got 1\.5"),
    ({"tile_tokens": 0}, "tile_tokens: expected a positive number, got 0"),
    ({"num_tiles": True}, "num_tiles: expected a positive number, got True"),
    ({"num_tiles": 2, "tile_tokens": 2}, "expected num_tiles or tile_tokens, got both"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_bad_input(change: dict[str, Any], message: str) -> None:
    good = {"hidden": torch.zeros(4, 2), "weight": torch.zeros(7, 2), "target": torch.tensor([0, 6, -100, 3])}
    assert tiled_cross_entropy(**good).isfinite()  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=rf"tiled_cross_entropy\(\): .*{message}"):
        tiled_cross_entropy(**{**good, **change})
