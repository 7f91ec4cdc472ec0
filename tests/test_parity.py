"""Training under the engine gives the numbers of plain PyTorch, to the last bit, wherever the state is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from parity import Parity, Tiered, Trainer, assert_same
from parity import tiny_scale as tiny_scale
from parity_models import GPT

Batches = Callable[[int], tuple[torch.Tensor, ...]]


def train(batches: Batches, *, num_steps: int = 3, accumulate: int = 1) -> Callable[[Trainer], list[torch.Tensor]]:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for step in range(num_steps):
            for micro in range(accumulate):
                loss = trainer.model(*batches(step * accumulate + micro)) / accumulate
                trainer.backward(loss)
                losses.append(loss.detach())
            trainer.step()
        return losses

    return script


class SignMomentum(torch.optim.Optimizer):
    """A user's: replaces its state, counts steps on itself and in its groups, reads tags of parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "num_steps": 0})
        self.num_steps = 0
        self.history: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        self.history.append(self.num_steps)
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.get("momentum", torch.zeros_like(p)) * group["beta"] + p.grad
                state["momentum"] = momentum
                state["row"] = momentum[0] if momentum.ndim else momentum  # not the parameter's shape, and a view
                p.sub_(momentum.sign() * group["lr"] / self.num_steps * getattr(p, "rate", 1.0))


def sign_momentum(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    params[0].rate = 0.5  # type: ignore[attr-defined]
    return SignMomentum([{"params": params[:4]}, {"params": params[4:], "beta": 0.5}], lr=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "tensor-lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "users": sign_momentum,
}

MODELS: dict[str, tuple[Callable[[], nn.Module], Batches]] = {
    "gpt": (GPT, models.tokens),
    "borrowing": (models.BorrowingGPT, models.tokens),
    "cnn": (models.CNN, models.images),
    "mlp": (models.MLP, models.vectors),
    "lstm": (models.Recurrent, models.tokens),
    "vit": (models.ViT, models.images),
    "encoder-decoder": (models.EncoderDecoder, models.tokens),
    "irregular": (models.Irregular, models.sequences),
    "outputs": (models.Outputs, models.vectors),
    "complex": (models.Complex, models.vectors),
    "parametrized": (models.Parametrized, models.vectors),
}

BORROWERS = {"borrowing", "encoder-decoder", "complex"}
"""Models that read parameters of modules whose forward does not run: start-up cannot know of that need."""

SMALL_UNITS = {
    "borrowing": ("Embedding", "Positions", "Block", "LayerNorm"),
    "encoder-decoder": ("Linear", "LayerNorm"),
}

# model.to(bfloat16) in plain PyTorch drops imaginary parts: there is nothing to compare with.
EVERY_MODEL = [(model, precision) for model in MODELS for precision in ("fp32", "bf16")]
EVERY_MODEL.remove(("complex", "bf16"))


@pytest.mark.parametrize(("model", "precision"), EVERY_MODEL)
def test_every_model_with_its_state_anywhere(model: str, precision: str, tmp_path: Path) -> None:
    make_model, batches = MODELS[model]
    case = Parity(make_model, adamw, train(batches), precision)
    if model not in BORROWERS:
        case.check(case.smallest(tmp_path))
    case.check(case.blockwise(tmp_path))
    case.check(case.half(tmp_path))
    case.check(case.resident())
    case.check(case.resident(tmp_path, units=SMALL_UNITS.get(model, "auto")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer: str, precision: str, tmp_path: Path) -> None:
    case = Parity(GPT, OPTIMIZERS[optimizer], train(models.tokens), precision)
    case.check(case.smallest(tmp_path))
    case.check(case.half(tmp_path))


def test_arithmetic_that_is_split_over_threads(tmp_path: Path) -> None:
    """How a sum is split decides its last bits: the optimizer's thread must split as the user's own would."""

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(models.WIDTH, 400), nn.Tanh(), nn.Linear(400, 400))

    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for step in range(3):
            losses.append(trainer.model(*models.vectors(step)).square().mean())
            trainer.backward(losses[-1])
            trainer.step()
        return losses

    torch.set_num_threads(2)
    case = Parity(wide, OPTIMIZERS["adafactor"], script)
    case.check(case.smallest(tmp_path))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("inner", [models.plainly, models.non_reentrant])
@pytest.mark.parametrize("outer", [models.plainly, models.reentrant, models.non_reentrant])
def test_recomputation_and_accumulation(
    outer: models.Recompute, inner: models.Recompute, accumulate: int, precision: str, tmp_path: Path
) -> None:
    script = train(models.tokens, num_steps=2, accumulate=accumulate)
    case = Parity(lambda: GPT(outer, inner), adamw, script, precision)
    case.check(case.smallest(tmp_path))
    case.check(case.blockwise(tmp_path))


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("make_model", [models.SegmentedGPT, models.Irregular])
def test_prefetch_depth(make_model: Callable[[], nn.Module], prefetch: int, tmp_path: Path) -> None:
    batches = models.sequences if make_model is models.Irregular else models.tokens
    case = Parity(make_model, adamw, train(batches, num_steps=4))
    case.check(case.blockwise(tmp_path, prefetch=prefetch))
    case.check(case.half(tmp_path, prefetch=prefetch))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulation_over_backwards_that_use_different_units(precision: str, tmp_path: Path) -> None:
    case = Parity(models.Irregular, adamw, train(models.sequences, accumulate=3), precision)
    case.check(case.smallest(tmp_path))
    case.check(case.half(tmp_path))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("outer", [models.reentrant, models.non_reentrant])
def test_recomputation_of_a_block_that_is_called_twice(outer: models.Recompute, precision: str, tmp_path: Path) -> None:
    case = Parity(lambda: models.Irregular(outer), adamw, train(models.sequences), precision)
    case.check(case.blockwise(tmp_path))
    case.check(case.resident())


@pytest.mark.parametrize("outer", [models.plainly, models.reentrant, models.non_reentrant])
def test_recomputation_of_functions_that_read_other_modules_weights(outer: models.Recompute, tmp_path: Path) -> None:
    case = Parity(lambda: models.BorrowingGPT(outer), adamw, train(models.tokens))
    case.check(case.blockwise(tmp_path))
    case.check(case.resident(tmp_path, units=SMALL_UNITS["borrowing"]))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_layers_some_of_which_thaw_later(precision: str, tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        model = GPT()
        model.tokens.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model

    def script(trainer: Trainer) -> Any:
        losses = train(models.tokens, num_steps=2, accumulate=2)(trainer)
        trainer.model.requires_grad_(True)
        return losses + train(models.tokens, num_steps=2, accumulate=2)(trainer)

    case = Parity(frozen, adamw, script, precision)
    case.check(case.smallest(tmp_path))
    case.check(case.half(tmp_path))


def test_parameters_that_the_optimizer_does_not_hold(tmp_path: Path) -> None:
    def partial(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.get_submodule("blocks").parameters(), lr=0.01)

    for precision in ("fp32", "bf16"):
        case = Parity(GPT, partial, train(models.tokens), precision)
        case.check(case.blockwise(tmp_path))


def test_an_optimizer_that_has_stepped_before(tmp_path: Path) -> None:
    def experienced(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        for seed in range(2):
            model(*models.tokens(100 + seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    case = Parity(GPT, experienced, train(models.tokens))
    case.check(case.smallest(tmp_path))


def test_a_model_whose_initialisation_is_deferred(tmp_path: Path) -> None:
    case = Parity(GPT, adamw, train(models.tokens))
    torch.manual_seed(0)
    with infinity.deferred_init(threshold_bytes=256):
        model = GPT()
    assert model.tokens.weight.is_meta
    optimizer = adamw(model)
    torch.manual_seed(1)
    with infinity.initialize(model, optimizer, case.smallest(tmp_path)) as engine:
        trainer = Tiered(engine, optimizer)
        got = trainer.outcome(case.script(trainer))
    assert_same(got.returned, case.expected.returned, "losses")
    assert_same(got.weights, case.expected.weights, "weights")
    assert_same(got.optimizer, case.expected.optimizer, "optimizer")


def test_each_kind_of_small_unit_by_class_name(tmp_path: Path) -> None:
    case = Parity(GPT, adamw, train(models.tokens))
    engine = case.check(case.resident(tmp_path, units=("Linear", "Embedding")))
    assert "blocks.0.mlp.1" in engine.unit_names


def test_several_directories_and_the_portable_backend(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    case = Parity(GPT, adamw, train(models.tokens))
    case.check(case.smallest(tmp_path).model_copy(update={"nvme": (first, second), "io_backend": "aiofiles"}))
    assert [*first.iterdir(), *second.iterdir()] == []
