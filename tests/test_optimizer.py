"""Any optimizer, stepped sub-group by sub-group: what its class may do to groups and states, and how steps fail."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from infinity import Config, Engine, EngineStateError, ModelError, StorageError
from infinity.engine.shadow import Shadow, probe
from infinity.engine.substep import SubGroupStepper
from infinity.store.loop import LoopThread
from parity import Parity, Trainer, assert_same, same_bits
from parity_models import GPT, WIDTH

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Perceptron(nn.Sequential):
    """Three layers, so several sub-groups under a small budget."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3)))


def three_steps(trainer: Trainer) -> list[torch.Tensor]:
    losses = []
    for seed in range(3):
        loss = trainer.model(*models.vectors(seed)).float().square().mean()
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.detach())
    return losses


def start(optimizer_of: MakeOptimizer, tmp_path: Path, **fields: Any) -> tuple[Engine, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = optimizer_of(model)
    config = Config(**{"device": "cpu", "hbm": "1MiB", "ram": "1MiB", "nvme": tmp_path, "sub_group_bytes": 1, **fields})
    return infinity.initialize(model, optimizer, config), optimizer


def loss_of(engine: Engine) -> torch.Tensor:
    loss: torch.Tensor = engine(*models.vectors(0)).square().mean()
    return loss


def step_to_the_end(engine: Engine) -> None:
    """A step that overlaps training reports what failed to whoever comes next."""
    engine.step()
    engine.synchronize()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine, _ = start(sgd, tmp_path)
    with engine:
        yield engine


class UserOptimizer(torch.optim.Optimizer):
    """The frame of a user's optimizer: subclasses say what happens to one parameter."""

    def __init__(self, model: nn.Module, **defaults: Any) -> None:
        super().__init__(model.parameters(), {"lr": 0.1, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.begin()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, self.state[param], group)

    def begin(self) -> None:
        pass

    def update(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert param.grad is not None
        param.sub_(param.grad, alpha=group["lr"])


class Counting(UserOptimizer):
    """Counts in every way there is: new values and changes in place, on itself and in its groups."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, count=torch.zeros(()), seen=[], number=0)
        self.number, self.count, self.seen, self.table = 0, torch.zeros(()), [0], {"steps": 0}

    def begin(self) -> None:
        self.number += 1
        self.count.add_(1)
        self.seen.append(self.number)
        self.table["steps"] = self.number
        for group in self.param_groups:
            group["number"] += 1
            group["count"].add_(1)
            group["seen"].append(group["number"])

    def update(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert param.grad is not None
        state["number"] = self.number
        scale = self.number + self.count + len(self.seen) + self.table["steps"] + group["count"] + len(group["seen"])
        param.sub_(param.grad * group["lr"] / scale)


class Restless(UserOptimizer):
    """States that are replaced, change their dtype, disappear, come back, and lie in the memory of others."""

    def update(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert param.grad is not None
        step = state["step"] = state.get("step", 0) + 1
        kept = state.get("kept", torch.zeros_like(param))
        state["kept"] = kept * 0.5 + param.grad
        changing = state.get("changing", torch.zeros_like(param, dtype=torch.float64))
        state["changing"] = (changing + param).to(torch.float64 if step % 2 else torch.float32)
        flicker = state.pop("flicker", None)
        if flicker is None:
            state["flicker"] = param.grad.clone()
        row = state.get("row", torch.zeros(2))
        state["row"] = param.grad.reshape(-1)[:2]
        state["gradient"] = param.grad
        state["norms"] = [float(param.grad.norm())]
        change = state["kept"] + state["changing"].float() * 0.01 + (0 if flicker is None else flicker)
        param.sub_(change * group["lr"] + row.sum() * 0.01)


class Mixed(UserOptimizer):
    """States of one name with different dtypes."""

    def update(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        dtype = torch.float64 if param.ndim == 1 else torch.float32
        state["average"] = state.get("average", torch.zeros_like(param, dtype=dtype)) * 0.9 + param.grad
        param.sub_(state["average"] * group["lr"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [Counting, Restless, Mixed])
def test_what_a_users_class_may_do(kind: Callable[[nn.Module], UserOptimizer], precision: str, tmp_path: Path) -> None:
    made: list[UserOptimizer] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        made.append(kind(model))
        return made[-1]

    case = Parity(Perceptron, make, three_steps, precision)
    for sub_group_bytes in (1, 1 << 20):
        case.check(case.resident(sub_group_bytes=sub_group_bytes))
        plain, ours = vars(made[0]), vars(made[-1])
        for name in ("number", "count", "seen", "table"):
            assert_same(ours.get(name), plain.get(name), name)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_and_other_arithmetic_on_whole_matrices(tmp_path: Path) -> None:
    case = Parity(
        lambda: Perceptron(bias=False), lambda model: torch.optim.Muon(model.parameters(), lr=0.01), three_steps
    )
    case.check(case.smallest(tmp_path))


def test_states_differ_from_group_to_group_and_shape_to_shape(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = model.children()
        groups = [{"params": first.parameters(), "momentum": 0.0}]
        groups += [{"params": other.parameters(), "momentum": 0.9} for other in others]
        return torch.optim.SGD(groups, lr=0.1)

    model = Perceptron()
    states = probe(make(model)).states
    assert [states[param] for param in model.parameters()] == [(), (), *[("momentum_buffer",)] * 4]
    factored = probe(torch.optim.Adafactor(model.parameters())).states
    assert [factored[param] for param in model.parameters()] == [(), ("variance",)] * 3
    case = Parity(Perceptron, make, three_steps)
    case.check(case.smallest(tmp_path))


def test_a_factored_moment_may_have_the_shape_of_its_parameter(tmp_path: Path) -> None:
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 16))
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x + self.token[0])  # type: ignore[no-any-return]

    def adafactor(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.01)

    case = Parity(Token, adafactor, three_steps)
    case.check(case.smallest(tmp_path))
    model = Token()
    assert probe(adafactor(model)).states[model.token] == ("col_var",)


def test_looking_for_states_draws_no_random_numbers_and_changes_nothing() -> None:
    class Noisy(Counting):
        def update(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            state["noise"] = torch.randn_like(param)

    optimizer = Noisy(Perceptron())
    before = torch.get_rng_state()
    assert set(probe(optimizer).states.values()) == {("noise",)}
    assert same_bits(torch.get_rng_state(), before)
    assert optimizer.number == 0
    assert optimizer.seen == [0]
    assert optimizer.param_groups[0]["count"] == 0
    assert not optimizer.state


class Global(UserOptimizer):
    """Adapts its learning rate to the norm of all gradients together."""

    def begin(self) -> None:
        for group in self.param_groups:
            gradients = [param.grad for param in group["params"] if param.grad is not None]
            group["norm"] = float(torch.stack([gradient.norm() for gradient in gradients]).norm()) if gradients else 0.0


def test_deferred_parameters_may_be_in_several_groups(tmp_path: Path) -> None:
    with infinity.deferred_init(threshold_bytes=256):
        model = Perceptron()
    assert model[0].weight.is_meta
    groups = [{"params": [layer.weight for layer in model]}, {"params": [layer.bias for layer in model]}]
    with infinity.initialize(model, torch.optim.Adam(groups), Config(device="cpu", hbm="1MiB", ram="8MiB")) as engine:
        engine.backward(engine(*models.vectors(0)).square().mean())
        engine.step()
        assert all(bool(value.isfinite().all()) for value in engine.state_dict().values())


def test_an_optimizer_that_needs_all_parameters_at_once_is_refused(tmp_path: Path) -> None:
    engine, _ = start(Global, tmp_path)
    with engine:
        engine.backward(loss_of(engine))
        with pytest.raises(ModelError, match=r"computes group 0, 'norm' from all parameters together"):
            engine.step()
        with pytest.raises(EngineStateError, match="failed half-way"):
            engine.step()


def test_hooks_around_steps_run_once(tmp_path: Path) -> None:
    engine, optimizer = start(sgd, tmp_path)
    calls: list[str] = []
    with engine:
        optimizer.register_step_pre_hook(lambda *_: calls.append("before user's"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after user's"))
        engine.optimizer.register_step_post_hook(lambda *_: calls.append("after engine's"))
        engine.backward(loss_of(engine))
        engine.step()
        assert calls == ["before user's", "after user's", "after engine's"]
        engine.backward(loss_of(engine))
        optimizer.step()
        assert calls[3:] == calls[:3]


def test_a_learning_rate_that_is_a_tensor_stays_the_users(tmp_path: Path) -> None:
    rate = torch.tensor(0.1)
    engine, optimizer = start(lambda model: torch.optim.SGD(model.parameters(), lr=rate), tmp_path)
    with engine:
        before = dict(engine.state_dict())
        rate.fill_(0.0)
        engine.backward(loss_of(engine))
        engine.step()
        assert_same(dict(engine.state_dict()), before, "weights")
        assert optimizer.param_groups[0]["lr"] is rate


def test_the_users_optimizer_is_itself_again_after_close(tmp_path: Path) -> None:
    engine, optimizer = start(sgd, tmp_path)
    with engine:
        assert optimizer.step.__name__ == "user_step"
    assert not {"step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"} & vars(optimizer).keys()
    param = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [param]})
    param.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(param, torch.full((2,), 0.9))


# Steps that fail or are interrupted


def fail(*_: object) -> Any:
    raise StorageError("write failed on purpose", path="nowhere")


def test_after_a_step_that_failed_half_way_nothing_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.backward(loss_of(engine))
    real, steps = SubGroupStepper._arithmetic, iter([None, None])
    monkeypatch.setattr(SubGroupStepper, "_arithmetic", lambda *a: real(*a) if next(steps, fail) is None else fail())
    with pytest.raises(StorageError, match="on purpose"):
        step_to_the_end(engine)
    monkeypatch.undo()
    inputs = models.vectors(0)
    for use in (
        lambda: engine(*inputs), lambda: engine.module(*inputs), engine.step, engine.optimizer.step, engine.zero_grad,
        engine.state_dict, engine.usage, lambda: engine.backward(torch.ones((), requires_grad=True)),
    ):  # fmt: skip
        with pytest.raises(EngineStateError, match=r"failed half-way.*write failed on purpose.*last saved state"):
            use()


def test_an_error_in_the_users_class_is_an_error_of_the_step(tmp_path: Path) -> None:
    class Broken(UserOptimizer):
        def update(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            if param.ndim == 1 and param.numel() == WIDTH:
                raise ZeroDivisionError("the user's own")

    engine, _ = start(Broken, tmp_path)
    with engine:
        engine.backward(loss_of(engine))
        with pytest.raises(ZeroDivisionError, match="the user's own"):
            step_to_the_end(engine)
        with pytest.raises(EngineStateError, match="failed half-way"):
            loss_of(engine)


@pytest.mark.parametrize("num_interrupts", [1, 2])
def test_a_step_that_is_interrupted_is_whole(
    num_interrupts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first interrupt waits for the step to end; a second does not, but whatever comes next does."""
    case = Parity(Perceptron, sgd, three_steps)
    engine, _ = start(sgd, tmp_path, overlap=False)
    real, interrupts = LoopThread._result, 0

    def result(loop: LoopThread, future: concurrent.futures.Future[Any]) -> Any:
        nonlocal interrupts
        if interrupts < num_interrupts:
            interrupts += 1
            raise KeyboardInterrupt
        return real(loop, future)

    losses = []
    with engine:
        for seed in range(3):
            loss = engine(*models.vectors(seed)).square().mean()
            engine.backward(loss)
            losses.append(loss.detach())
            # Take the gradients before, so that the waits that are interrupted are the step's.
            engine._steps.prepare()
            gradients = engine._gradients.take()
            engine._steps.complete(gradients)
            interrupts = 0
            monkeypatch.setattr(LoopThread, "_result", result)
            with pytest.raises(KeyboardInterrupt):
                engine._steps.end()
            monkeypatch.undo()
        weights = dict(engine.state_dict())
    assert_same(losses, case.expected.returned, "losses")
    assert_same(weights, case.expected.weights, "weights")


def test_a_shadow_leaves_the_users_optimizer_alone_until_the_step_ends() -> None:
    model = Perceptron()
    optimizer = Counting(model)
    shadow = Shadow(optimizer)
    param = nn.Parameter(torch.ones(3))
    for _ in range(2):
        param.grad = torch.ones(3)
        shadow.step([(0, param, {})])
    assert (optimizer.number, optimizer.seen, float(optimizer.count)) == (0, [0], 0.0)
    count, seen = optimizer.count, optimizer.seen
    shadow.end_step()
    assert (optimizer.number, seen, float(count)) == (1, [0, 1], 1.0)
    assert optimizer.seen is seen
    assert optimizer.count is count


def test_sub_groups_overlap_reading_and_computing_within_the_budget(tmp_path: Path) -> None:
    """With room for three sub-groups the next ones are read ahead, and never beyond the budget."""
    case = Parity(GPT, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), _gpt_steps)
    config = case.blockwise(tmp_path, sub_group_bytes=1)
    engine = case.check(config)
    assert engine.last_step is not None
    assert engine.last_step.nvme_read_bytes > 0


def _gpt_steps(trainer: Trainer) -> list[torch.Tensor]:
    losses = []
    for seed in range(3):
        loss = trainer.model(*models.tokens(seed))
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.detach())
    return losses
