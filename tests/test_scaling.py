"""fp16: losses, scales, skipped steps and weights are those of ``GradScaler`` around plain PyTorch, to the last bit."""

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
from infinity.engine.scaling import LossScaling
from infinity.engine.weights import PartShelf
from parity import Parity, Tiered, Trainer, build, tiny_scale
from parity_models import GPT, non_reentrant, reentrant

__all__ = ["tiny_scale"]

SCALER = {"init_scale": 2.0**13, "growth_interval": 2}
CONFIG: dict[str, Any] = {"initial_loss_scale": 2.0**13, "loss_scale_window": 2}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def overflowing(
    *steps: int, num_steps: int = 8, num_backwards: int = 1, max_norm: float | None = None, batches: Any = models.tokens
) -> Callable[[Trainer], list[Any]]:
    """Training in which, in some of the steps, the last loss is so large that gradients overflow."""

    def script(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for step in range(num_steps):
            for micro in range(num_backwards):
                loss = trainer.model(*batches(10 * step + micro))
                trainer.backward(loss * 1e5 if step in steps and micro == num_backwards - 1 else loss)
                seen.append(loss.detach())
            if max_norm is not None:
                seen.append(trainer.clip(max_norm))
            trainer.step()
            seen.append(trainer.loss_scale)
        return seen

    return script


def check(case: Parity, config: Config) -> Engine:
    return case.check(config.model_copy(update=CONFIG))


@pytest.mark.parametrize("budgets", ["smallest", "blockwise", "half", "resident"])
@pytest.mark.parametrize("num_backwards", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_forced_overflows_skip_what_gradscaler_skips(
    max_norm: float | None, num_backwards: int, budgets: str, tmp_path: Path
) -> None:
    script = overflowing(2, 3, 6, num_backwards=num_backwards, max_norm=max_norm)
    case = Parity(GPT, adamw, script, "fp16", SCALER)
    scales = [value for value in case.expected.returned if isinstance(value, float)]
    assert max(scales) > 2.0**13 > min(scales), "it grew and shrank"
    for overlap in (True, False):
        engine = check(case, getattr(case, budgets)(tmp_path, overlap=overlap))
        assert engine.num_skipped_steps == sum(b < a for a, b in zip([2.0**13, *scales], scales, strict=False)) > 2


@pytest.mark.parametrize(
    ("make_model", "batches"),
    [
        (lambda: GPT(non_reentrant), models.tokens), (lambda: GPT(reentrant), models.tokens),
        (models.CNN, models.images), (models.ViT, models.images), (models.MLP, models.vectors),
        (models.Irregular, models.sequences), (models.EncoderDecoder, models.tokens),
    ],
    ids=["non_reentrant", "reentrant", "cnn", "vit", "mlp", "irregular", "encoder-decoder"],
)  # fmt: skip
def test_models(make_model: Any, batches: Any, tmp_path: Path) -> None:
    case = Parity(make_model, adamw, overflowing(1, num_steps=4, batches=batches), "fp16", SCALER)
    check(case, case.half(tmp_path))
    check(case, case.blockwise(tmp_path))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_the_finite_check_reads_nothing_back(
    max_grad_norm: float | None, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PartShelf, "look", lambda *args: pytest.fail("gradients were read back"))
    model, user = build(GPT, adamw)
    config = Parity(GPT, adamw, lambda trainer: None, "fp16").blockwise(tmp_path)
    update = {**CONFIG, "max_grad_norm": max_grad_norm, "accumulation_steps": 2 if known else None}
    with infinity.initialize(model, user, config.model_copy(update=update)) as engine:
        overflowing(1, num_steps=3, num_backwards=2)(Tiered(engine, user))
        assert engine.num_skipped_steps == 1
        if max_grad_norm is not None:
            assert engine.grad_norm is not None
            assert 0 < engine.grad_norm < math.inf


@pytest.mark.parametrize("norm_type", [1.0, 3.0, 8.0, math.inf, 0.0])
def test_every_norm_sees_overflows_of_elements_only(norm_type: float, tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for step in range(4):
            loss = trainer.model(*models.tokens(step))
            trainer.backward(loss * 1e5 if step == 1 else loss)
            seen.append(trainer.clip(0.5, norm_type))
            trainer.step()
            seen.append(trainer.loss_scale)
        return seen

    case = Parity(GPT, adamw, script, "fp16", SCALER)
    check(case, case.half(tmp_path))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with start(tmp_path) as engine:
        yield engine


def start(tmp_path: Path, **fields: Any) -> Engine:
    model, user = build(GPT, adamw)
    config = Parity(GPT, adamw, lambda trainer: None, "fp16").blockwise(tmp_path)
    return infinity.initialize(model, user, config.model_copy(update={**CONFIG, **fields}))


def loss_of(engine: Engine, seed: int = 0) -> torch.Tensor:
    loss: torch.Tensor = engine(*models.tokens(seed))
    return loss


def test_a_skipped_step_touches_no_state(engine: Engine) -> None:
    for seed in range(2):
        engine.backward(loss_of(engine, seed))
        engine.step()
    weights, states = dict(engine.state_dict()), engine.optimizer.state_dict()
    written = engine._store.statistics().written_bytes
    engine.backward(loss_of(engine) * 1e5)
    engine.step()
    assert engine.num_skipped_steps == 1
    assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())
    after = engine.optimizer.state_dict()
    assert all(
        torch.equal(value, states["state"][index][name])
        for index, state in after["state"].items()
        for name, value in state.items()
    )
    assert engine._store.statistics().written_bytes >= written
    assert all(param.grad is None for param in engine.module.parameters())


def test_a_fixed_scale_stays_and_still_skips(tmp_path: Path) -> None:
    with start(tmp_path, loss_scale=64.0) as engine:
        for step in range(6):
            engine.backward(loss_of(engine, step) * (1e6 if step == 2 else 1))
            engine.step()
            assert engine.loss_scale == 64.0
        assert engine.num_skipped_steps == 1


def test_backward_without_the_scale_is_refused_and_training_goes_on(engine: Engine) -> None:
    with pytest.raises(EngineStateError, match=r"did not scale the loss; .*engine\.backward\(loss\)"):
        loss_of(engine).backward()
    engine.zero_grad()
    engine.backward(loss_of(engine))
    engine.step()
    assert engine.num_skipped_steps == 0


def test_backward_after_the_scale_was_taken_off_is_refused(engine: Engine) -> None:
    engine.backward(loss_of(engine))
    engine.clip_grad_norm_(1.0)
    with pytest.raises(EngineStateError, match=r"after clip_grad_norm_\(\) had taken the scale off"):
        engine.backward(loss_of(engine))
    engine.zero_grad()
    engine.backward(loss_of(engine))
    engine.step()


def test_a_scale_that_cannot_shrink_any_more_says_so_and_loses_nothing(tmp_path: Path) -> None:
    with start(tmp_path, min_loss_scale=2.0**12) as engine:
        before = dict(engine.state_dict())
        engine.backward(loss_of(engine) * 1e5)
        engine.step()
        assert engine.loss_scale == 2.0**12
        engine.backward(loss_of(engine) * 1e5)
        with pytest.raises(NonFiniteError, match=r"loss scale of 4096, .*\(min_loss_scale=4096\)"):
            engine.step()
        assert engine.num_skipped_steps == 2
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        engine.backward(loss_of(engine))
        engine.step()


def test_a_second_backward_through_the_same_graph(engine: Engine) -> None:
    loss = loss_of(engine)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.step()
    assert engine.num_skipped_steps == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_scale": 0}, {"loss_scale": "static"}, {"loss_scale": True}, {"initial_loss_scale": -1},
        {"loss_scale_window": 0}, {"loss_scale_hysteresis": 0}, {"min_loss_scale": -1}, {"loss_scale": math.inf},
        {"initial_loss_scale": 1e39}, {"loss_scale": 1e-40},
    ],
    ids=str,
)  # fmt: skip
def test_scales_that_scale_nothing_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Config(precision="fp16", **fields)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.sampled_from([65536.0, 1000.0, 2.0**126, 3e-38]))
def test_the_scale_is_gradscalers(finite: list[bool], window: int, first: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=window)
    ours = LossScaling(first, window=window, hysteresis=1, minimum=0.0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.0)
    param = optimizer.param_groups[0]["params"][0]
    for is_finite in finite:
        scaler.scale(torch.ones(1))
        param.grad = torch.tensor([1.0 if is_finite else math.inf])
        expected = param.grad * ours.inverses[0]
        scaler.unscale_(optimizer)
        assert torch.equal(param.grad, expected)
        scaler.step(optimizer)
        scaler.update()
        ours.note_check(is_finite)
        try:
            ours.end_step()
        except NonFiniteError:
            assert math.isinf(1 / scaler.get_scale() if scaler.get_scale() else math.inf) or scaler.get_scale() < 3e-39
            return
        assert ours.scale == scaler.get_scale()


class DeepSpeedScale:
    """DeepSpeed's rule in words of its own: overflows use hysteresis up, then the scale halves."""

    def __init__(self, scale: float, window: int, hysteresis: int, minimum: float) -> None:
        self.scale, self.window, self.hysteresis, self.minimum = scale, window, hysteresis, minimum
        self.left, self.step, self.last_overflow = hysteresis, 0, -1

    def update(self, is_finite: bool) -> None:
        if not is_finite:
            if self.left == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.left -= 1
            self.last_overflow = self.step
        elif (self.step - self.last_overflow) % self.window == 0:
            self.left = self.hysteresis
            self.scale *= 2
        self.step += 1


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(1, 4))
def test_with_hysteresis_and_a_minimum_it_is_deepspeeds(finite: list[bool], window: int, hysteresis: int) -> None:
    theirs = DeepSpeedScale(2.0**16, window, hysteresis, 2.0**14)
    ours = LossScaling(2.0**16, window=window, hysteresis=hysteresis, minimum=2.0**14)
    for is_finite in finite:
        theirs.update(is_finite)
        ours.note_check(is_finite)
        if not is_finite and ours.scale == 2.0**14 and theirs.left == 1 and ours._num_left == 1:
            with pytest.raises(NonFiniteError):
                ours.end_step()
        else:
            ours.end_step()
        assert ours.scale == theirs.scale


def test_a_step_that_is_skipped_runs_no_hooks(engine: Engine) -> None:
    ran: list[str] = []
    engine.optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    engine.optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    engine.backward(engine(*models.tokens(0)) * math.inf)
    engine.step()
    assert ran == []
    assert engine.num_skipped_steps == 1
    engine.backward(engine(*models.tokens(0)))
    engine.step()
    assert ran == ["before", "after"]


def test_a_step_without_gradients_counts_for_nothing(tmp_path: Path) -> None:
    model, optimizer = build(GPT, adamw)
    config = infinity.Config(
        device="cpu", hbm="4MiB", ram="4MiB", precision="fp16", initial_loss_scale=64.0, loss_scale_window=2
    )
    with infinity.initialize(model, optimizer, config) as engine:
        for _ in range(3):
            engine.step()
        assert engine.loss_scale == 64
        engine.backward(engine(*models.tokens(0)))
        engine.step()
        assert engine.loss_scale == 64


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradscaler_of_the_users_is_told_where_scaling_is(precision: str) -> None:
    model, optimizer = build(GPT, adamw)
    config = infinity.Config(device="cpu", hbm="4MiB", ram="4MiB", precision=precision)
    with infinity.initialize(model, optimizer, config) as engine:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(engine(*models.tokens(0))).backward()
        with pytest.raises(ModelError, match=r"precision='fp16' in Config, call engine\.backward"):
            scaler.step(engine.optimizer)
