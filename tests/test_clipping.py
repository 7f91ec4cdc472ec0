"""Clipping: the norm and the clipped gradients of ``torch.nn.utils.clip_grad_norm_``, to the last bit, while they are
away."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import infinity
import parity_models as models
from infinity import Config, ConfigError, Engine, EngineStateError, ModelError, NonFiniteError
from infinity.engine.norms import norm_of, total_norm
from infinity.engine.steps import OptimizerSteps
from infinity.engine.weights import PartShelf
from parity import Parity, Plain, Trainer, assert_same, build, same_bits, tiny_scale
from parity_models import GPT

__all__ = ["tiny_scale"]

INF = math.inf


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def clipped(
    *max_norms: float, norm_type: float = 2.0, num_backwards: int = 1, batches: Any = models.tokens
) -> Callable[[Trainer], list[torch.Tensor]]:
    """Four steps, in each of which gradients are clipped once for each of ``max_norms``."""

    def script(trainer: Trainer) -> list[torch.Tensor]:
        seen = []
        for step in range(4):
            for micro in range(num_backwards):
                loss = trainer.model(*batches(10 * step + micro))
                trainer.backward(loss)
                seen.append(loss.detach())
            seen += [trainer.clip(max_norm, norm_type) for max_norm in max_norms]
            trainer.step()
        return seen

    return script


@pytest.mark.parametrize("budgets", ["smallest", "blockwise", "half", "resident"])
@pytest.mark.parametrize(("precision", "num_backwards"), [("fp32", 1), ("bf16", 1), ("fp32", 2), ("bf16", 3)])
def test_norm_and_training_are_those_of_plain_pytorch(
    precision: str, num_backwards: int, budgets: str, tmp_path: Path
) -> None:
    case = Parity(GPT, adamw, clipped(0.5, num_backwards=num_backwards), precision)
    for overlap in (True, False):
        case.check(getattr(case, budgets)(tmp_path, overlap=overlap))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, INF, 0.5, 0.0, -INF])
@pytest.mark.parametrize("max_norm", [1e-3, 1e6])
def test_every_norm(norm_type: float, max_norm: float, tmp_path: Path) -> None:
    case = Parity(GPT, adamw, clipped(max_norm, norm_type=norm_type, num_backwards=2), "bf16")
    case.check(case.blockwise(tmp_path))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_clipping_twice_clips_what_is_clipped(precision: str, tmp_path: Path) -> None:
    case = Parity(GPT, adamw, clipped(0.5, 0.1, 1e9, precision == "fp32"), precision)
    case.check(case.half(tmp_path))
    case.check(case.smallest(tmp_path))


class Mixed(nn.Module):
    """Parameters of three dtypes, which PyTorch groups before it joins their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.WIDTH, 9)
        self.second = nn.Linear(9, 7, dtype=torch.float64)
        self.third = nn.Linear(7, 5)
        self.fourth = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.fifth = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            assert isinstance(layer, nn.Linear)
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.square().sum()


@pytest.mark.parametrize(
    ("make_model", "batches"),
    [
        (models.CNN, models.images), (models.Recurrent, models.tokens), (models.Irregular, models.sequences),
        (models.Complex, models.vectors), (Mixed, models.vectors),
    ],
    ids=["cnn", "lstm", "irregular", "complex", "mixed"],
)  # fmt: skip
def test_every_kind_of_gradient(make_model: Any, batches: Any, tmp_path: Path) -> None:
    case = Parity(make_model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), clipped(0.05, batches=batches))
    case.check(case.blockwise(tmp_path))


def test_parameters_that_nobody_steps_count_and_are_clipped_in_place(tmp_path: Path) -> None:
    def first_half(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(model.parameters())[::2], lr=0.01)

    def script(trainer: Trainer) -> list[torch.Tensor]:
        seen = []
        for step in range(3):
            trainer.backward(trainer.model(*models.tokens(step)))
            seen.append(trainer.clip(0.5))
            seen += [param.grad.clone() for param in list(trainer.model.parameters())[1::2] if param.grad is not None]
            trainer.step()
            trainer.model.zero_grad()
        return seen

    case = Parity(GPT, first_half, script)
    assert len(case.expected.returned) > 10
    case.check(case.half(tmp_path))


def test_groups_of_parameters_are_clipped_each_by_itself(tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        params = list(trainer.model.parameters())
        seen = []
        for step in range(3):
            trainer.backward(trainer.model(*models.tokens(step)))
            seen += [trainer.clip(0.1, 2.0, params[3::-1]), trainer.clip(0.2, INF, params[4:])]
            trainer.step()
        return seen

    case = Parity(GPT, adamw, script)
    case.check(case.half(tmp_path))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_that_come_after_clipping_are_added_to_clipped_ones(precision: str, tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        seen = []
        for step in range(3):
            trainer.backward(trainer.model(*models.tokens(step)))
            seen.append(trainer.clip(0.1))
            trainer.backward(trainer.model(*models.tokens(10 + step)))
            if step:
                seen.append(trainer.clip(0.1))
            trainer.step()
        return seen

    case = Parity(GPT, adamw, script, precision)
    case.check(case.blockwise(tmp_path))


def test_what_the_user_drops_or_sets_counts_as_in_plain_pytorch(tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        params = list(trainer.model.parameters())
        seen = []
        for step in range(3):
            trainer.backward(trainer.model(*models.tokens(step)))
            seen.append(trainer.clip(0.1))
            params[0].grad = None
            params[1].grad = torch.full_like(params[1], 0.5)
            seen.append(trainer.clip(0.05))
            trainer.step()
            trainer.backward(trainer.model(*models.tokens(step)))
            trainer.clip(0.01)
            trainer.zero_grad()
            seen.append(trainer.clip(0.1))
        return seen

    case = Parity(GPT, adamw, script)
    case.check(case.half(tmp_path))


def configured(num_backwards: int) -> Callable[[Trainer], list[Any]]:
    """Clipping by the configuration; by hand in plain PyTorch."""

    def script(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for step in range(4):
            for micro in range(num_backwards):
                trainer.backward(trainer.model(*models.tokens(10 * step + micro)))
            norm = trainer.clip(0.5) if isinstance(trainer, Plain) else None
            trainer.step()
            seen.append(trainer.engine.grad_norm if norm is None else norm)  # type: ignore[attr-defined]
        return seen

    return script


@pytest.mark.parametrize("budgets", ["smallest", "half", "resident"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("num_backwards", "known"), [(1, True), (1, False), (3, True), (3, False)])
def test_clipping_by_the_configuration(
    num_backwards: int, known: bool, precision: str, budgets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norms come as the gradients do: none is read back for it."""
    monkeypatch.setattr(PartShelf, "look", lambda *args: pytest.fail("gradients were read back for their norm"))
    monkeypatch.setattr(OptimizerSteps, "begin", begin_nothing)
    case = Parity(GPT, adamw, configured(num_backwards), precision)
    config = getattr(case, budgets)(tmp_path, accumulation_steps=num_backwards if known else None)
    model, user = build(GPT, adamw)
    with infinity.initialize(model, user, config.model_copy(update={"max_grad_norm": 0.5})) as engine:
        norms = []
        for step in range(4):
            for micro in range(num_backwards):
                engine.backward(engine(*models.tokens(10 * step + micro)))
            engine.step()
            norms.append(engine.grad_norm)
        monkeypatch.undo()
        assert_same(norms, case.expected.returned, "norms")
        assert_same(dict(engine.state_dict()), case.expected.weights, "weights")
        assert_same(engine.optimizer.state_dict(), case.expected.optimizer, "optimizer")


def begin_nothing(steps: OptimizerSteps, gradients: Any) -> None:
    assert not list(gradients), "a step began before the norm was known"


def test_norms_are_taken_as_gradients_come_from_the_second_step_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    real = PartShelf.look

    def look(shelf: PartShelf, kind: str, take: Any) -> Any:
        looked.append(kind)
        return real(shelf, kind, take)

    monkeypatch.setattr(PartShelf, "look", look)
    case = Parity(GPT, adamw, clipped(0.5))
    model, user = build(GPT, adamw)
    counts = []
    with infinity.initialize(model, user, case.blockwise(tmp_path)) as engine:
        for clips in (True, True, True, False, True, True):
            looked.clear()
            engine.backward(engine(*models.tokens(0)))
            if clips:
                engine.clip_grad_norm_(0.5)
            engine.step()
            counts.append(len(looked))
    assert counts[0] == counts[4] > 0
    assert counts[1] == counts[2] == counts[3] == counts[5] == 0


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    case = Parity(GPT, adamw, lambda trainer: None)
    model, user = build(GPT, adamw)
    with infinity.initialize(model, user, case.blockwise(tmp_path)) as engine:
        yield engine


def backward(engine: Engine, factor: float = 1.0) -> None:
    engine.backward(engine(*models.tokens(0)) * factor)


@pytest.mark.parametrize("factor", [INF, math.nan])
def test_a_norm_that_is_not_finite_is_refused_where_asked_and_changes_nothing(engine: Engine, factor: float) -> None:
    backward(engine, factor)
    with pytest.raises(NonFiniteError, match=r"norm of order 2\.0 .*; the first gradient .*that of \S+"):
        engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
    engine.zero_grad()
    backward(engine)
    engine.step()
    assert all(value.isfinite().all() for value in engine.module.state_dict().values())


@pytest.mark.parametrize("factor", [INF, math.nan])
def test_a_norm_that_is_not_finite_otherwise_does_what_it_does_in_pytorch(factor: float, tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        trainer.backward(trainer.model(*models.tokens(0)) * factor)
        norm = trainer.clip(1.0)
        trainer.step()
        return [norm]

    case = Parity(GPT, adamw, script)
    case.check(case.half(tmp_path))


def test_one_parameter_is_clipped_as_one(engine: Engine) -> None:
    backward(engine)
    param = engine.module.get_parameter("tokens.weight")
    gradient = engine.values.grad(param)
    assert gradient is not None
    holder = nn.Parameter(torch.zeros_like(gradient))
    holder.grad = gradient
    assert_same(engine.clip_grad_norm_(0.1, parameters=param), torch.nn.utils.clip_grad_norm_(holder, 0.1), "norm")
    assert_same(engine.values.grad(param), holder.grad, "gradient")


def test_without_gradients_the_norm_is_0(engine: Engine) -> None:
    assert_same(engine.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0), "norm")
    engine.step()


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_bound_that_bounds_nothing_is_refused(engine: Engine, max_norm: float) -> None:
    backward(engine)
    with pytest.raises(ConfigError, match="max_norm: expected a number from 0 on, got"):
        engine.clip_grad_norm_(max_norm)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, True, "much"])
def test_a_configured_bound_that_bounds_nothing_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_grad_norm"):
        Config(max_grad_norm=value)


def test_clipping_by_hand_where_steps_begin_under_backward_is_refused(tmp_path: Path) -> None:
    case = Parity(GPT, adamw, lambda trainer: None)
    model, user = build(GPT, adamw)
    with infinity.initialize(model, user, case.half(tmp_path, accumulation_steps=1)) as engine:
        for _ in range(2):
            backward(engine)
            with pytest.raises(EngineStateError, match=r"accumulation_steps=1: .*set max_grad_norm in Config"):
                engine.clip_grad_norm_(1.0)
            engine.step()


def test_clipping_inside_backward_and_after_the_end_is_refused(engine: Engine) -> None:
    first = next(engine.module.parameters())
    refused: list[str] = []

    def clip(gradient: torch.Tensor) -> None:
        with pytest.raises(EngineStateError, match=r"clip_grad_norm_\(\) was called inside") as error:
            engine.clip_grad_norm_(1.0)
        refused.append(str(error.value))

    handle = first.register_hook(clip)
    backward(engine)
    handle.remove()
    assert len(refused) == 1
    engine.clip_grad_norm_(1.0)
    engine.step()
    engine.close()
    with pytest.raises(EngineStateError, match="closed"):
        engine.clip_grad_norm_(1.0)


def test_a_gradient_that_was_changed_while_away_is_refused(engine: Engine) -> None:
    backward(engine)
    gradient = next(engine.module.parameters()).grad
    assert gradient is not None
    gradient.detach().numpy()[...] = 0.5
    with pytest.raises(ModelError, match="its gradient was changed in place after backward"):
        engine.clip_grad_norm_(1.0)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from(DTYPES)), min_size=1, max_size=12),
    st.sampled_from([2.0, 1.0, 3.0, INF]),
)
def test_norms_of_norms_are_joined_as_pytorch_joins_them(kinds: list[tuple[int, Any]], norm_type: float) -> None:
    generator = torch.Generator().manual_seed(len(kinds))
    gradients = [torch.randn(size, generator=generator).to(dtype) for size, dtype in kinds]
    total = total_norm([norm_of(each, norm_type) for each in gradients], [each.dtype for each in gradients], norm_type)
    expected = torch.nn.utils.get_total_norm(gradients, norm_type)
    assert total.dtype == expected.dtype
    assert same_bits(total, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_norm": None}, "max_norm: expected a number, got None"),
        ({"max_norm": 1.0, "norm_type": "two"}, "norm_type: expected a number, got 'two'"),
        ({"max_norm": 1.0, "norm_type": math.nan}, "norm_type: expected a number, got nan"),
        ({"max_norm": 1.0, "parameters": [None]}, "parameters: expected parameters of the model, got a NoneType"),
        ({"max_norm": 1.0, "parameters": [("w", 1)]}, r"give model\.parameters\(\), not named_parameters\(\)"),
        ({"max_norm": 1.0, "parameters": 3}, "parameters: expected parameters of the model, got int"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(engine: Engine, arguments: Any, message: str) -> None:
    engine.backward(engine(*models.tokens(0)))
    with pytest.raises(ConfigError, match=message):
        engine.clip_grad_norm_(**arguments)
    assert engine.clip_grad_norm_(1.0, foreach=True) > 0
