"""When units are gathered and let go, reads from outside, and borrowed memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from accidents import good_step, momentum, two_groups
from infinity import BudgetError, Config, Engine, EngineStateError, ModelError
from infinity.engine import hookstack, saved
from infinity.engine.unit import UnitState
from parity import Parity, Trainer, assert_same, same_bits
from parity_models import GPT, WIDTH


@pytest.fixture(autouse=True)
def _scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is tiny here: only vectors are small weights."""
    monkeypatch.setattr(saved, "_SMALL_BYTES", 128)


def start(model: nn.Module, directory: Path | None = None, **fields: Any) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nvme = () if directory is None else directory
    return infinity.initialize(
        model, optimizer, Config(**{"device": "cpu", "hbm": "1MiB", "ram": "8MiB", "nvme": nvme, **fields})
    )


def gathered(engine: Engine) -> list[str]:
    return [unit.name for unit in engine._units if unit.state is UnitState.GATHERED]


def test_nothing_stays_on_the_model_once_it_has_values_after_close(tmp_path: Path) -> None:
    model = GPT()
    before = [(name, vars(module).copy()) for name, module in model.named_modules()]
    with start(model, tmp_path) as engine:
        engine.backward(engine(*models.tokens(0)))
        engine.step()
        state = dict(engine.state_dict())
    model.load_state_dict(state)
    model(*models.tokens(0))
    for name, attributes in before:
        module = model.get_submodule(name)
        assert vars(module).keys() == attributes.keys(), name
        for attribute, value in vars(module).items():
            assert type(value) is type(attributes[attribute]), f"{name}.{attribute}"
            if "hooks" in attribute:
                assert not value, f"{name}.{attribute}"
    for name, param in model.named_parameters():
        assert not param._backward_hooks, name
        assert not param._post_accumulate_grad_hooks, name
        assert param.grad is None, name
    assert hookstack.innermost_hooks is None or hookstack.innermost_hooks(False) is None


def test_units_are_gathered_only_while_they_compute(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    with start(GPT(), tmp_path) as engine:
        for name in ("tokens", "blocks.0.mlp.1", "blocks.1", "head"):
            engine.module.get_submodule(name).register_forward_pre_hook(lambda *_: seen.append(gathered(engine)))
        loss = engine(*models.tokens(0))
        assert seen == [["(tied) tokens"], ["blocks.0"], ["blocks.1"], ["(tied) tokens"]]
        assert gathered(engine) == []
        engine.backward(loss)
        assert gathered(engine) == []


def test_an_evaluation_in_inference_mode_leaves_parameters_that_may_train(tmp_path: Path) -> None:
    with start(GPT(), tmp_path) as engine:
        with torch.inference_mode():
            engine(*models.tokens(0))
        assert not any(param.is_inference() for param in engine.module.parameters())


def test_a_unit_is_let_go_when_its_backward_is_over(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    with start(GPT(), tmp_path) as engine:

        def look(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda gradient: seen.append(gathered(engine)))

        for name in ("blocks.1.mlp.2", "blocks.0.mlp.2"):
            engine.module.get_submodule(name).register_forward_hook(look)
        engine.backward(engine(*models.tokens(0)))
    assert [[name for name in names if "blocks" in name] for names in seen] == [["blocks.1"], ["blocks.0"]]


def test_a_backward_after_one_that_failed_lets_everything_go(tmp_path: Path) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    with start(models.BorrowingGPT(), tmp_path, units=("Block", "Embedding", "Positions")) as engine:
        good = engine(*models.tokens(0))
        block = engine.module.get_submodule("blocks.0")
        handle = block.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        bad = engine(*models.tokens(1))
        handle.remove()
        with pytest.raises(ArithmeticError):
            bad.backward()
        assert gathered(engine)
        good.backward()
        assert gathered(engine) == []


def test_a_parameter_of_another_module_stays_until_the_forward_that_reads_it_ends(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    with start(models.BorrowingGPT(), tmp_path, units=("Block", "Embedding")) as engine:
        engine.module.register_forward_hook(lambda *_: seen.append(gathered(engine)))
        engine.module.get_submodule("blocks.0").register_forward_pre_hook(lambda *_: seen.append(gathered(engine)))
        engine(*models.tokens(0))
        assert "blocks.0" not in seen[1]
        assert gathered(engine) == []
        weight = engine.module.get_submodule("tokens").weight
        assert isinstance(weight, torch.Tensor)
        assert weight.isnan().all(), "outside any forward a parameter that is away reads as NaN"
        assert weight.shape == (models.VOCAB, WIDTH)


def test_budgets_too_small_for_borrowed_parameters_are_named_when_it_shows_and_those_named_do(tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        return [good_step(trainer, seed) for seed in range(2)]

    case = Parity(models.BorrowingGPT, two_groups, script)
    config = case.smallest(tmp_path)
    with pytest.raises(BudgetError, match=r"in use at the same time: unit \S.*; raise hbm to at least \d+$") as refusal:
        case.check(config)
    for _ in range(4):
        hbm = int(str(refusal.value).rsplit(" ", 1)[1])
        assert hbm > config.hbm
        config = case.smallest(tmp_path, hbm=hbm)
        try:
            case.check(config)
        except BudgetError as error:
            refusal = pytest.ExceptionInfo.from_exception(error)
        else:
            return
    pytest.fail("the budgets that the error names never do")


class Columns(nn.Module):
    """A linear layer whose backward unpacks the weight first, and then the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight)


class Recomputing(nn.Module):
    """Recomputes blocks in the middle of a node that has already unpacked a weight of another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.last, self.after = Columns(), Columns()

    def region(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(models.non_reentrant(self.region, x))
        return torch.mm(x, self.after.weight).square().mean()


def test_a_weight_that_a_node_is_reading_stays_although_others_need_room(tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for seed in range(2):
            (x,) = models.vectors(seed)
            losses.append(trainer.model(x.requires_grad_()))
            losses[-1].backward()
            trainer.step()
        return losses

    case = Parity(Recomputing, momentum, script)
    # Room for two units: the first block's comes from "after", which nobody needs any more, and not from "last".
    case.check(case.resident(tmp_path, hbm=2 * 16384, units=("Sequential", "Columns"), debug=True))


class Twice(nn.Module):
    """Reads every weight twice, and no bias: all units are gathered when the first gradient comes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *self.layers]:
            x = torch.tanh(x @ layer.weight)
        return x.float().square().mean()


class Table(nn.Module):
    """Returns a view of its weight, in one of several wrappings."""

    def __init__(self, wrapping: str) -> None:
        super().__init__()
        self.wrapping = wrapping
        self.weight = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self) -> Any:
        view = self.weight[:3]
        if self.wrapping == "dataclass":
            return models.Result(view, [self.weight.t()])
        return {"tensor": view, "parameter": self.weight, "tuple": (1, [view.t()])}[self.wrapping]


@pytest.mark.parametrize("wrapping", ["tensor", "parameter", "tuple", "dataclass"])
def test_what_a_module_called_on_its_own_returns_of_its_weights_is_the_users(wrapping: str, tmp_path: Path) -> None:
    def run(model: Any, step: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        first, second = model[0](), model[1]()
        leaves = [_first_tensor(first), _first_tensor(second)]
        loss = (leaves[0].sum() * 3 + (leaves[1] * leaves[1]).sum()).square()
        loss.backward()
        step()
        return [leaf.detach().clone() for leaf in leaves], loss.detach()

    torch.manual_seed(0)
    plain = nn.ModuleList([Table(wrapping), Table(wrapping)])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    leaves, loss = run(plain, lambda: None)
    optimizer.step()
    torch.manual_seed(0)
    tables = nn.ModuleList([Table(wrapping), Table(wrapping)])
    # Room for one of the two at a time: the second's memory is the first's.
    with start(tables, tmp_path, units=("Table",), hbm=16 << 10, debug=True) as engine:
        assert_same(run(tables, engine.step), (leaves, loss), "returned")
        assert_same(dict(engine.state_dict()), dict(plain.state_dict()), "weights")


def _first_tensor(tree: Any) -> torch.Tensor:
    if isinstance(tree, models.Result):
        return tree.hidden
    leaf = tree[1][0] if isinstance(tree, tuple) else tree
    assert isinstance(leaf, torch.Tensor)
    return leaf


class Clamped(nn.Module):
    """Changes its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.01, 0.01)
        return self.linear(x)  # type: ignore[no-any-return]


def test_a_parameter_changed_in_forward_is_refused_instead_of_forgotten(tmp_path: Path) -> None:
    with (
        start(Clamped(), tmp_path) as engine,
        pytest.raises(ModelError, match=r"parameter linear\.weight was changed in place.*use a buffer"),
    ):
        engine(*models.vectors(0))


def test_a_parameter_changed_while_it_is_away_is_refused_instead_of_forgotten(tmp_path: Path) -> None:
    model = GPT()
    with start(model, tmp_path) as engine:
        engine(*models.tokens(0))
        nn.init.zeros_(model.get_parameter("blocks.1.out.weight"))
        with pytest.raises(ModelError, match=r"blocks\.1\.out\.weight was changed in place.*before infinity\.init"):
            engine(*models.tokens(0))


def test_backward_after_a_step_that_changed_its_parameters(tmp_path: Path) -> None:
    with start(GPT(), tmp_path) as engine:
        late = engine(*models.tokens(0))
        engine.backward(engine(*models.tokens(1)))
        engine.step()
        with pytest.raises(EngineStateError, match=r"unit .*: backward needs the parameters as they were"):
            late.backward()
        engine.zero_grad()
        engine.backward(engine(*models.tokens(2)))
        engine.step()


def test_hooks_do_not_pile_up_on_tensors_that_live_long(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    prompt = torch.randn(2, WIDTH, requires_grad=True)
    with start(model, tmp_path) as engine:
        counts = []
        for _ in range(4):
            engine.backward(engine(prompt).sum())
            engine.step()
            counts.append(len(prompt._backward_hooks or ()))
    assert counts == [0, 0, 0, 0]


class PartlyUsed(nn.Module):
    """Each block has parameters without a gradient, so that no gradient shard is complete before backward ends."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.used(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block() for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).float().square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make_model", [PartlyUsed, Twice])
def test_gradients_that_never_come_do_not_fill_host_memory(
    make_model: Callable[[], nn.Module], precision: str, tmp_path: Path
) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for seed in range(4):
            losses.append(trainer.model(*models.vectors(seed)))
            trainer.backward(losses[-1])
            if seed % 2:
                trainer.step()
        return losses

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    case = Parity(make_model, sgd, script, precision)
    if make_model is PartlyUsed:
        case.check(case.smallest(tmp_path))
    case.check(case.smallest(tmp_path, hbm=1 << 20, units=("Linear",)))


def test_a_step_inside_backward_is_refused(tmp_path: Path) -> None:
    with start(GPT(), tmp_path) as engine:
        weight = engine.module.get_parameter("blocks.0.out.weight")
        handle = weight.register_post_accumulate_grad_hook(lambda _: engine.step())
        loss = engine(*models.tokens(0))
        with pytest.raises(EngineStateError, match=r"step\(\) was called inside a forward or backward"):
            loss.backward()
        handle.remove()
        engine.zero_grad()
        engine.backward(engine(*models.tokens(0)))
        engine.step()


def test_a_conjugate_and_a_negative_view_are_saved_as_such(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight.conj()).real.sum() + (x * self.weight.conj().imag).sum()

    def gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        model(x).backward()
        assert x.grad is not None
        return x.grad

    torch.manual_seed(0)
    model = Views()
    (x,) = models.vectors(0)
    expected = gradient(model, x)
    model.zero_grad()
    with start(model, tmp_path, debug=True):
        assert same_bits(gradient(model, x), expected)
