"""What the user's code sees and does on ``param.grad`` while gradients are away."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity import Config, Engine, ModelError


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with infinity.initialize(model, optimizer, Config(device="cpu", hbm="1MiB", ram="1MiB", nvme=tmp_path)) as engine:
        yield engine


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], seed: int) -> torch.Tensor:
    return model(torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))).square().mean()


def plain_after(change: Callable[[nn.Sequential], None]) -> dict[str, torch.Tensor]:
    """Backward, a change of the gradients, backward again, step: in plain PyTorch."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, 1).backward()
    change(model)
    loss_of(model, 2).backward()
    optimizer.step()
    return model.state_dict()


def drop_all(model: nn.Sequential) -> None:
    model.zero_grad()


def drop_one(model: nn.Sequential) -> None:
    model[0].weight.grad = None


def set_one(model: nn.Sequential) -> None:
    model[2].bias.grad = torch.ones(4)


def nothing(model: nn.Sequential) -> None:
    pass


@pytest.mark.parametrize("change", [nothing, drop_all, drop_one, set_one])
def test_dropping_and_setting_gradients_means_what_it_means_in_pytorch(
    engine: Engine, change: Callable[[nn.Sequential], None]
) -> None:
    loss_of(engine, 1).backward()
    change(engine.module)  # type: ignore[arg-type]
    loss_of(engine, 2).backward()
    engine.step()
    expected = plain_after(change)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("change", [drop_all, drop_one, set_one])
def test_the_same_right_before_the_step(engine: Engine, change: Callable[[nn.Sequential], None]) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, 1).backward()
    change(model)
    optimizer.step()
    loss_of(engine, 1).backward()
    change(engine.module)  # type: ignore[arg-type]
    engine.step()
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_a_gradient_that_is_away_has_its_shape_and_reads_as_nan(engine: Engine) -> None:
    loss_of(engine, 1).backward()
    gradients = [param.grad for param in engine.module.parameters()]
    assert [g.shape for g in gradients if g is not None] == [p.shape for p in make_model().parameters()]
    assert all(g is not None and g.isnan().all() for g in gradients)
    engine.step()
    assert [param.grad for param in engine.module.parameters()] == [None] * 4


def gradient_of(model: nn.Module) -> torch.Tensor:
    gradient = model.get_parameter("0.weight").grad
    assert gradient is not None
    return gradient


CLIPPING: dict[str, Callable[[nn.Module], object]] = {
    "norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "norm foreach": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=True),
    "value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "by hand": lambda model: gradient_of(model).mul_(0.5),
    "in a part": lambda model: gradient_of(model)[0].mul_(0.5),
    "data": lambda model: gradient_of(model).data.clamp_(-1, 1),
    "detached": lambda model: gradient_of(model).detach().div_(2),
    "index": lambda model: gradient_of(model).__setitem__(0, torch.ones(8)),
    "zero": lambda model: gradient_of(model).zero_(),
    "zero_grad": lambda model: model.zero_grad(set_to_none=False),
    "zero of data": lambda model: gradient_of(model).data.zero_(),
    "one element": lambda model: gradient_of(model).data[0, 0].mul_(0.5),
    "several": lambda model: torch._foreach_zero_([gradient_of(model).data]),
    "new data": lambda model: setattr(gradient_of(model), "data", torch.zeros(16, 8)),
}


@pytest.mark.parametrize("name", CLIPPING)
def test_clipping_gradients_that_are_away_says_what_to_do_instead(engine: Engine, name: str) -> None:
    loss_of(engine, 1).backward()
    with pytest.raises(ModelError, match=r"gradient in place that is away: .*engine\.clip_grad_norm_\(\) or max"):
        CLIPPING[name](engine.module)
    engine.zero_grad()
    loss_of(engine, 2).backward()
    engine.step()
    assert all(value.isfinite().all() for value in engine.module.state_dict().values())


def test_what_is_computed_from_a_gradient_that_is_away_is_an_ordinary_tensor(engine: Engine) -> None:
    loss_of(engine, 1).backward()
    gradient = gradient_of(engine.module)
    for tensor in (gradient * 2, gradient.norm(), gradient.detach().clone(), gradient.view(-1) + 1):
        assert type(tensor) is torch.Tensor
    with pytest.raises(RuntimeError, match="shape"):
        gradient.view(7)


def write_behind_torch(model: nn.Module) -> None:
    gradient_of(model).numpy()[:] = 0


def test_writing_into_a_gradient_behind_the_back_of_torch_is_refused_at_the_step(engine: Engine) -> None:
    loss_of(engine, 1).backward()
    write_behind_torch(engine.module)
    with pytest.raises(ModelError, match=r"parameter 0\.weight: its gradient was changed in place.*set_to_none=True"):
        engine.step()
    engine.zero_grad()
    loss_of(engine, 1).backward()
    assert gradient_of(engine.module).isnan().all()
    engine.step()


def test_writing_into_a_gradient_before_another_backward_is_refused_and_not_ignored(engine: Engine) -> None:
    loss_of(engine, 1).backward()
    write_behind_torch(engine.module)
    with pytest.raises(ModelError, match=r"its gradient was changed in place.*set_to_none=True"):
        loss_of(engine, 2).backward()


def test_what_is_done_to_gradients_and_changes_none_works(engine: Engine) -> None:
    loss_of(engine, 1).backward()
    gradient = gradient_of(engine.module)
    gradient.detach_().requires_grad_(False)
    assert type(copy.deepcopy(gradient)) is torch.Tensor
    assert "nan" in repr(gradient)
    assert torch.nn.utils.get_total_norm([gradient]).isnan()
    engine.step()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, 1).backward()
    optimizer.step()
    assert torch.equal(engine.module.state_dict()["0.weight"], model.state_dict()["0.weight"])


def test_closing_leaves_no_gradient_that_is_away(engine: Engine) -> None:
    loss_of(engine, 1).backward()
    own = engine.module.get_parameter("2.bias").grad = torch.ones(4)
    engine.close()
    assert [param.grad is own for param in engine.module.parameters() if param.grad is not None] == [True]


def test_scaling_a_gradient_that_is_away_is_refused_and_not_stepped_as_nan(engine: Engine) -> None:
    loss_of(engine, 1).backward()
    weight = engine.module.get_parameter("0.weight")
    assert weight.grad is not None
    weight.grad = weight.grad * 0.5
    with pytest.raises(ModelError, match=r"parameter 0\.weight: its gradient was set to NaN.*register_hook"):
        engine.step()


@pytest.mark.parametrize(
    "write",
    [
        lambda model: model[0].weight.data.zero_(),
        lambda model: setattr(model[0].weight, "data", torch.ones(16, 8)),
    ],
    ids=["data.zero_", "data ="],
)
def test_writing_a_parameter_that_is_away_is_refused_once_and_training_goes_on(
    engine: Engine, write: Callable[[nn.Module], object]
) -> None:
    loss_of(engine, 1).backward()
    engine.zero_grad()
    write(engine.module)
    with pytest.raises(ModelError, match=r"parameter 0\.weight was written, converted or replaced while.*initialize"):
        loss_of(engine, 1)
    loss_of(engine, 2).backward()
    engine.step()
    assert all(value.isfinite().all() for value in engine.module.state_dict().values())


def test_an_optimizer_that_needs_a_closure_is_refused_at_start() -> None:
    model = make_model()
    with pytest.raises(ModelError, match=r"LBFGS\.step\(\) needs a closure"):
        infinity.initialize(model, torch.optim.LBFGS(model.parameters()), Config(device="cpu"))


@pytest.mark.parametrize("nvme", ["", [""], ["/tmp", " "]])
def test_an_empty_path_is_refused_and_is_not_the_current_directory(nvme: str | list[str]) -> None:
    with pytest.raises(infinity.ConfigError, match="one of them is empty"):
        Config(nvme=nvme)
