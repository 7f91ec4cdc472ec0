"""Reading and changing weights, gradients and optimizer states between steps, wherever they are."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import infinity
import parity_models as models
from infinity import Engine, EngineStateError, ModelError, StorageError
from infinity.engine import writer
from infinity.store.store import TieredStore
from parity import Parity, Plain, Tiered, Trainer, assert_same, build, same_bits, tiny_scale
from parity_models import GPT
from test_parity import OPTIMIZERS

__all__ = ["tiny_scale"]

BUDGETS = ["smallest", "half", "resident"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train_step(trainer: Trainer, seed: int) -> torch.Tensor:
    loss: torch.Tensor = trainer.model(*models.tokens(seed))
    trainer.backward(loss)
    trainer.step()
    return loss.detach()


def engine_of(trainer: Trainer) -> Engine:
    assert isinstance(trainer, Tiered)
    return trainer.engine


def start(tmp_path: Path, precision: str = "fp32", budgets: str = "half", **fields: Any) -> tuple[Engine, Tiered]:
    case = Parity(GPT, adamw, lambda trainer: None, precision)
    model, user = build(GPT, adamw)
    engine = infinity.initialize(model, user, getattr(case, budgets)(tmp_path, **fields))
    return engine, Tiered(engine, user)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine, _ = start(tmp_path)
    with engine:
        yield engine


# Weights


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_set_at_full_precision_are_those_that_train(precision: str, budgets: str, tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        seen = [train_step(trainer, 0)]
        params = list(trainer.model.parameters())
        for index in (0, 3, len(params) - 1):
            param = params[index]
            value = torch.randn(param.shape, generator=torch.Generator().manual_seed(index)) * 0.1
            if isinstance(trainer, Plain):
                with torch.no_grad():
                    trainer.masters.get(param, param).copy_(value)
                    param.copy_(value)
            else:
                values = engine_of(trainer).values
                values.set_weight(param, value)
                assert same_bits(values.weight(param), value)
        return [*seen, train_step(trainer, 1), train_step(trainer, 2)]

    case = Parity(GPT, adamw, script, precision)
    case.check(getattr(case, budgets)(tmp_path))


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_is_changed_while_gathered_is_the_weight_and_the_rest_keeps_its_bits(
    precision: str, budgets: str, tmp_path: Path
) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        seen = [train_step(trainer, 0)]
        params = list(trainer.model.parameters())[:3]
        if isinstance(trainer, Plain):
            change(params)
            with torch.no_grad():
                for param in params:
                    master = trainer.masters.get(param, param)
                    master[0] = param[0].to(master.dtype)
        else:
            with engine_of(trainer).gathered(params, modify=True):
                change(params)
        return [*seen, train_step(trainer, 1), train_step(trainer, 2)]

    def change(params: list[nn.Parameter]) -> None:
        with torch.no_grad():
            for param in params:
                param[0] = 0.25

    case = Parity(GPT, adamw, script, precision)
    case.check(getattr(case, budgets)(tmp_path))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gathered_parameters_hold_their_values_and_then_placeholders_again(precision: str, tmp_path: Path) -> None:
    engine, trainer = start(tmp_path, precision)
    with engine:
        train_step(trainer, 0)
        expected = engine.module.state_dict()
        with engine.gathered(engine.module.parameters()):
            for name, param in engine.module.named_parameters():
                assert same_bits(param, expected[name]), name
                assert param.stride() == expected[name].stride()
        assert all(param.isnan().all() for param in engine.module.parameters())
        with engine.gathered(next(engine.module.parameters())), pytest.raises(EngineStateError, match="inside engine"):
            engine(*models.tokens(0))
        train_step(trainer, 1)


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_is_computed_while_gathered_may_be_differentiated_after(
    precision: str, budgets: str, tmp_path: Path
) -> None:
    """A weight penalty, added to the loss."""

    def penalty(trainer: Trainer) -> torch.Tensor:
        return sum((param * param.float()).sum() for param in list(trainer.model.parameters())[::2]) * 0.01  # type: ignore[return-value]

    def script(trainer: Trainer) -> list[torch.Tensor]:
        seen = []
        for seed in range(3):
            loss = trainer.model(*models.tokens(seed))
            if isinstance(trainer, Plain):
                loss = loss + penalty(trainer)
            else:
                with engine_of(trainer).gathered(trainer.model.parameters()):
                    loss = loss + penalty(trainer)
            trainer.backward(loss)
            trainer.step()
            seen.append(loss.detach())
        return seen

    case = Parity(GPT, adamw, script, precision)
    case.check(getattr(case, budgets)(tmp_path))


def test_what_is_changed_after_it_was_used_while_gathered_is_an_error(engine: Engine) -> None:
    param = engine.module.get_parameter("tokens.weight")
    with engine.gathered(param, modify=True):
        penalty = (param * param).sum()
        with torch.no_grad():
            param.zero_()
    with pytest.raises(EngineStateError, match="was changed in place"):
        engine.backward(penalty)


@pytest.mark.parametrize(
    "change",
    [
        lambda param: param.mul_(2), lambda param: setattr(param, "data", param.data * 2),
        lambda param: nn.init.normal_(param),
    ],
    ids=["in place", "data", "init"],
)  # fmt: skip
def test_a_change_while_gathered_to_read_is_an_error_and_changes_nothing(
    engine: Engine, change: Callable[[nn.Parameter], object]
) -> None:
    before = dict(engine.state_dict())
    param = engine.module.get_parameter("tokens.weight")
    message = r"tokens\.weight was changed inside .*gathered\(params, modify=True\)"
    with pytest.raises(ModelError, match=message), engine.gathered([param]), torch.no_grad():
        change(param)
    assert_same(dict(engine.state_dict()), before, "weights")
    engine.backward(engine(*models.tokens(0)))
    engine.step()


def test_an_exception_while_gathered_drops_changes_and_passes(engine: Engine) -> None:
    before = dict(engine.state_dict())
    param = engine.module.get_parameter("tokens.weight")

    def zero() -> None:
        with engine.gathered(param, modify=True), torch.no_grad():
            param.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        zero()
    assert_same(dict(engine.state_dict()), before, "weights")
    engine.backward(engine(*models.tokens(0)))
    engine.step()


USES: dict[str, Callable[[Engine], object]] = {
    "forward": lambda engine: engine(*models.tokens(0)),
    "model": lambda engine: engine.module(*models.tokens(0)),
    "block": lambda engine: engine.module.get_submodule("blocks.0")(torch.ones(1, 2, models.WIDTH)),
    "step": lambda engine: engine.step(),
    "zero_grad": lambda engine: engine.zero_grad(),
    "clip": lambda engine: engine.clip_grad_norm_(1.0),
    "gathered": lambda engine: engine.gathered(list(engine.module.parameters())[1]).__enter__(),
    "set": lambda engine: engine.values.set_weight(next(engine.module.parameters()), torch.ones(1)),
}


@pytest.mark.parametrize("use", USES)
def test_inside_gathered_all_else_is_refused(engine: Engine, use: str) -> None:
    engine.backward(engine(*models.tokens(0)))
    inside = r"inside engine\.gathered\(\), where parameter \S+ holds its value"
    with engine.gathered(next(engine.module.parameters())), pytest.raises(EngineStateError, match=inside):
        USES[use](engine)
    engine.step()


@pytest.mark.parametrize(
    ("given", "message"),
    [(nn.Linear(2, 2), r"a Linear; give module\.parameters"), ("tokens", "a str"), ([1], "an? int")],
)
def test_what_is_no_parameter_is_not_gathered(engine: Engine, given: Any, message: str) -> None:
    with pytest.raises(ModelError, match=rf"gathered\(\): expected parameters, got {message}"), engine.gathered(given):
        pass


def test_changes_make_old_graphs_stale(engine: Engine) -> None:
    loss = engine(*models.tokens(0))
    for param in engine.module.parameters():
        engine.values.set_weight(param, torch.ones(param.shape))
    with pytest.raises(EngineStateError):
        engine.backward(loss)


def test_wrong_shapes_and_foreign_parameters_are_refused_by_name(engine: Engine) -> None:
    param = engine.module.get_parameter("tokens.weight")
    with pytest.raises(ModelError, match=r"tokens\.weight: expected a tensor of shape \(.*\), got one of shape \(3,\)"):
        engine.values.set_weight(param, torch.ones(3))
    with pytest.raises(ModelError, match=r"tokens\.weight: expected a tensor of shape .*, got float"):
        engine.values.set_weight(param, 1.0)  # type: ignore[arg-type]
    foreign = nn.Parameter(torch.ones(2))
    for read in (engine.values.weight, engine.values.grad, lambda p: engine.values.state(p, "exp_avg")):
        with pytest.raises(ModelError, match="expected a parameter of the engine's model"):
            read(foreign)
    with engine.gathered([foreign], modify=True):
        foreign.data.fill_(3)
    assert foreign.tolist() == [3, 3]


NO_VALUES: dict[str, Callable[[torch.Size], torch.Tensor]] = {
    "meta": lambda shape: torch.ones(shape, device="meta"),
    "sparse": lambda shape: torch.ones(shape).to_sparse(),
    "wrapper": lambda shape: TwoTensor(torch.ones(shape), torch.ones(shape)),
}


@pytest.mark.parametrize("kind", NO_VALUES)
def test_what_is_no_dense_tensor_of_values_is_refused_and_changes_nothing(engine: Engine, kind: str) -> None:
    engine.backward(engine(*models.tokens(0)))
    engine.step()
    param = engine.module.get_parameter("tokens.weight")
    before, states = dict(engine.state_dict()), engine.optimizer.state_dict()
    wrong = NO_VALUES[kind](param.shape)
    with pytest.raises(ModelError, match=r"parameter tokens\.weight: expected a tensor of shape"):
        engine.values.set_weight(param, wrong)
    with pytest.raises(ModelError, match=r"state 'exp_avg' of parameter tokens\.weight: expected"):
        engine.values.set_state(param, "exp_avg", wrong)
    with pytest.raises(ModelError, match=r"state 'step' of parameter tokens\.weight: expected"):
        engine.values.set_state(param, "step", NO_VALUES[kind](torch.Size([])))
    if kind != "wrapper":  # PyTorch itself copies from it
        with pytest.raises(ModelError, match=r"load_state_dict\(\) of a GPT: .*tokens\.weight"):
            engine.load_state_dict({**before, "tokens.weight": wrong})
    bad = copy.deepcopy(states)
    next(iter(bad["state"].values()))["exp_avg"] = wrong
    with pytest.raises(ModelError, match=r"state 'exp_avg' of parameter .*: expected"):
        engine.optimizer.load_state_dict(bad)
    assert_same(dict(engine.state_dict()), before, "weights")
    assert_same(engine.optimizer.state_dict(), states, "states")


def test_values_set_under_inference_mode_may_be_trained_with(engine: Engine) -> None:
    engine.backward(engine(*models.tokens(0)))
    engine.step()
    param = engine.module.get_parameter("tokens.weight")
    with torch.inference_mode():
        state = engine.optimizer.state_dict()
        engine.load_state_dict({name: value + 1 for name, value in engine.state_dict().items()})
        engine.optimizer.load_state_dict(state)
        engine.values.set_state(param, "step", torch.tensor(7.0))
        engine.values.set_state(param, "exp_avg", torch.ones(param.shape))
        read = engine.values.weight(param)
    read.requires_grad_().sum().backward()
    engine.backward(engine(*models.tokens(0)))
    engine.step()
    assert engine.values.state(param, "step") == 8


def test_access_inside_backward_is_refused(engine: Engine) -> None:
    param = engine.module.get_parameter("tokens.weight")
    refused: list[str] = []

    def look(gradient: torch.Tensor) -> None:
        with pytest.raises(EngineStateError, match=r"weight\(\) was called inside a forward or backward") as error:
            engine.values.weight(param)
        refused.append(str(error.value))

    handle = param.register_hook(look)
    engine.backward(engine(*models.tokens(0)))
    handle.remove()
    assert refused
    engine.step()


def test_an_engine_that_is_forgotten_goes_although_its_model_stays(tmp_path: Path) -> None:
    engine, trainer = start(tmp_path)
    gone, model = weakref.ref(engine), engine.module
    del engine, trainer
    gc.collect()
    assert gone() is None
    assert list(tmp_path.iterdir()) == []
    assert list(model.parameters())


# Gradients


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize(("precision", "num_backwards"), [("fp32", 1), ("bf16", 1), ("bf16", 2), ("fp16", 2)])
def test_gradients_are_those_that_the_step_takes(
    precision: str, num_backwards: int, budgets: str, tmp_path: Path
) -> None:
    def script(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for step in range(2):
            for micro in range(num_backwards):
                trainer.backward(trainer.model(*models.tokens(10 * step + micro)))
            for clips in (False, True):
                if clips:
                    trainer.clip(0.3)
                elif isinstance(trainer, Plain):
                    trainer._unscale()
                for param in list(trainer.model.parameters())[::3]:
                    if isinstance(trainer, Plain):
                        gradient = trainer.masters.get(param, param).grad
                        seen.append(None if gradient is None else gradient.clone())
                    else:
                        seen.append(engine_of(trainer).values.grad(param))
            trainer.step()
        return seen

    case = Parity(GPT, adamw, script, precision)
    case.check(getattr(case, budgets)(tmp_path))


def test_without_a_gradient_there_is_none(engine: Engine) -> None:
    assert [engine.values.grad(param) for param in engine.module.parameters()] == [None] * len(
        list(engine.module.parameters())
    )


def test_a_gradient_that_the_user_sets_and_reads_is_no_backward(tmp_path: Path) -> None:
    engine, _ = start(tmp_path, accumulation_steps=1)
    with engine:
        param = engine.module.get_parameter("tokens.weight")
        param.grad = torch.ones_like(param)
        gradient = engine.values.grad(param)
        assert gradient is not None
        assert gradient.eq(1).all()
        engine.backward(engine(*models.tokens(0)))
        engine.step()


# Optimizer states


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_that_are_set_are_those_that_train(precision: str, budgets: str, tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[Any]:
        seen: list[Any] = [train_step(trainer, 0)]
        for param in list(trainer.model.parameters())[::4]:
            value = torch.rand(param.shape, generator=torch.Generator().manual_seed(1))
            if isinstance(trainer, Plain):
                state = trainer.optimizer.state[trainer.masters.get(param, param)]
                state["exp_avg_sq"].copy_(value)
                state["step"] += 5
                seen += [state["exp_avg"].clone(), state["step"].clone()]
            else:
                values = engine_of(trainer).values
                values.set_state(param, "exp_avg_sq", value)
                values.set_state(param, "step", values.state(param, "step") + 5)
                assert same_bits(values.state(param, "exp_avg_sq"), value)
                seen += [values.state(param, "exp_avg"), values.state(param, "step")]
        return [*seen, train_step(trainer, 1)]

    case = Parity(GPT, adamw, script, precision)
    case.check(getattr(case, budgets)(tmp_path))


def test_states_that_are_not_there_are_refused_by_name(engine: Engine) -> None:
    param = engine.module.get_parameter("tokens.weight")
    for access in (lambda: engine.values.state(param, "exp_avg"), lambda: engine.values.set_state(param, "exp_avg", 0)):
        with pytest.raises(ModelError, match=r"tokens\.weight has no optimizer state 'exp_avg'; it has: none before"):
            access()
    engine.backward(engine(*models.tokens(0)))
    engine.step()
    with pytest.raises(ModelError, match="has no optimizer state 'moment'; it has: step, exp_avg, exp_avg_sq"):
        engine.values.set_state(param, "moment", torch.ones(1))
    with pytest.raises(ModelError, match="expected a tensor of shape"):
        engine.values.set_state(param, "exp_avg", torch.ones(1))


# State dicts


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_dicts_go_both_ways_between_the_engine_and_plain_pytorch(
    optimizer: str, precision: str, tmp_path: Path
) -> None:
    """Two steps in one, two in the other: as four in either. The state that is loaded replaces that of other steps."""
    make = OPTIMIZERS[optimizer]

    def four(trainer: Trainer) -> list[torch.Tensor]:
        return [train_step(trainer, seed) for seed in range(4)]

    case = Parity(GPT, make, four, precision)
    plain = Plain(*build(GPT, make), precision)
    first = [train_step(plain, seed) for seed in range(2)]
    random_state = torch.get_rng_state()
    saved, states = plain.outcome(None).weights, copy.deepcopy(plain.optimizer.state_dict())
    saved = {name: value.clone() for name, value in saved.items()}

    model, user = build(GPT, make)
    with infinity.initialize(model, user, case.half(tmp_path)) as engine:
        trainer = Tiered(engine, user)
        if optimizer != "users":  # it counts its steps on itself, which no state dict holds
            train_step(trainer, 17)
            engine.load_state_dict(saved)
            engine.optimizer.load_state_dict(states)
            torch.set_rng_state(random_state)
            losses = [*first, *(train_step(trainer, seed) for seed in range(2, 4))]
            assert_same(losses, case.expected.returned, "losses")
            assert_same(dict(engine.state_dict()), case.expected.weights, "weights")
            assert_same(engine.optimizer.state_dict()["state"], case.expected.optimizer["state"], "states")
        weights, states = dict(engine.state_dict()), engine.optimizer.state_dict()

    back = Plain(*build(GPT, make), precision)
    back.model.load_state_dict(weights)
    for param, master in back.masters.items():
        name = next(name for name, each in back.model.named_parameters() if each is param)
        master.data.copy_(weights[name])
    back.optimizer.load_state_dict(states)
    assert_same(back.optimizer.state_dict()["state"], states["state"], "states")
    train_step(back, 5)


def test_a_state_dict_of_an_optimizer_that_has_not_stepped_clears_states(engine: Engine) -> None:
    fresh = engine.optimizer.state_dict()
    engine.backward(engine(*models.tokens(0)))
    engine.step()
    engine.optimizer.load_state_dict(fresh)
    assert engine.optimizer.state_dict()["state"] == {}
    engine.backward(engine(*models.tokens(0)))
    engine.step()


def test_hyperparameters_come_with_the_state_and_schedulers_go_on(engine: Engine) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
    state = copy.deepcopy(engine.optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.125
    engine.optimizer.load_state_dict(state)
    assert engine.optimizer.param_groups[0]["lr"] == 0.125
    engine.backward(engine(*models.tokens(0)))
    engine.step()
    scheduler.step()
    assert engine.optimizer.param_groups[0]["lr"] == 0.0625
    assert engine.optimizer._user.param_groups is engine.optimizer.param_groups


def test_other_groups_are_refused_and_change_nothing(engine: Engine) -> None:
    engine.backward(engine(*models.tokens(0)))
    engine.step()
    before = engine.optimizer.state_dict()
    state = copy.deepcopy(before)
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ModelError, match="expected parameter groups of"):
        engine.optimizer.load_state_dict(state)
    assert_same(engine.optimizer.state_dict(), before, "state")


class WithBuffers(nn.Module):
    """Buffers, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.note = "first"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.linear(x))
        return y


def test_buffers_and_extra_state_are_loaded_and_wrong_states_change_nothing(tmp_path: Path) -> None:
    source = WithBuffers()
    source.note = "second"
    source(torch.randn(8, 4))
    model = WithBuffers()
    config = infinity.Config(device="cpu", hbm="1MiB", ram="1MiB", nvme=tmp_path)
    with infinity.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config) as engine:
        before = {name: copy.deepcopy(value) for name, value in engine.state_dict().items()}
        wrong = {**source.state_dict(), "linear.weight": torch.ones(3, 3), "other": torch.ones(1)}
        del wrong["norm.bias"]
        with pytest.raises(
            ModelError, match=r"missing: norm\.bias; unexpected: other; size mismatch for linear\.weight"
        ):
            engine.load_state_dict(wrong)
        assert_same({**engine.state_dict()}, before, "state")
        missing, unexpected = engine.load_state_dict({"linear.bias": torch.ones(4), "other": 1}, strict=False)
        assert "linear.weight" in missing
        assert unexpected == ["other"]
        assert engine.state_dict()["linear.bias"].tolist() == [1, 1, 1, 1]
        engine.load_state_dict(source.state_dict())
        assert model.note == "second"
        assert_same({**engine.state_dict()}, dict(source.state_dict()), "state")


def test_a_change_that_fails_half_way_ends_training_and_one_that_cannot_begin_does_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    param = engine.module.get_parameter("tokens.weight")
    real = TieredStore.fetch

    async def fail_to_fetch(*args: Any, **kwargs: Any) -> Any:
        raise StorageError("read failed on purpose", path="shards.bin")

    monkeypatch.setattr(TieredStore, "fetch", fail_to_fetch)
    with pytest.raises(StorageError, match="on purpose"):
        engine.values.set_weight(param, torch.ones(param.shape))
    monkeypatch.setattr(TieredStore, "fetch", real)
    engine.backward(engine(*models.tokens(0)))
    engine.step()

    def fail_to_change(*args: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(writer, "_change_runs", fail_to_change)
    with pytest.raises(ZeroDivisionError):
        engine.values.set_weight(param, torch.ones(param.shape))
    with pytest.raises(EngineStateError, match="failed half-way"):
        engine(*models.tokens(0))
