"""When units are gathered and let go: reads from outside, borrowed memory, interrupts and faults at every point."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from accidents import good_step, momentum, two_groups
from infinity import BudgetError, Config, Engine, EngineStateError, ModelError, StorageError
from infinity.engine import saved
from infinity.engine.unit import UnitState
from infinity.io.backend import Priority
from infinity.store.loop import LoopThread
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey
from parity import Parity, Tiered, Trainer, assert_same, build, same_bits
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


def test_nothing_stays_on_the_model_after_close(tmp_path: Path) -> None:
    model = GPT()
    before = [(name, vars(module).copy()) for name, module in model.named_modules()]
    with start(model, tmp_path) as engine:
        engine.backward(engine(*models.tokens(0)))
        engine.step()
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
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


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

    with start(GPT(), tmp_path) as engine:
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
def test_gradients_that_never_come_do_not_fill_host_memory(precision: str, tmp_path: Path) -> None:
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

    case = Parity(PartlyUsed, sgd, script, precision)
    case.check(case.smallest(tmp_path))
    case.check(case.smallest(tmp_path, hbm=1 << 20))


# Interrupts and faults at every point of a forward and backward.


def good_steps(trainer: Trainer) -> list[torch.Tensor]:
    trainer.model.eval()  # no dropout: what is interrupted must not draw random numbers
    losses = []
    for seed in range(2):
        loss = trainer.model(*models.tokens(seed))
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.detach())
    return losses


def four_good_steps(trainer: Trainer) -> list[torch.Tensor]:
    return good_steps(trainer) + good_steps(trainer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_interrupt_at_any_wait(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches a wait for the store when its operation has ended; the next steps are as if it had never been."""
    case = Parity(GPT, momentum, four_good_steps, precision)
    waits = itertools.count()
    interrupted_at = -1
    real_wait = LoopThread.wait

    def wait(loop: LoopThread, future: concurrent.futures.Future[Any]) -> Any:
        result = real_wait(loop, future)
        if next(waits) == interrupted_at:
            raise KeyboardInterrupt
        return result

    model, optimizer = build(GPT, momentum)
    with infinity.initialize(model, optimizer, case.blockwise(tmp_path)) as engine:
        trainer = Tiered(engine, optimizer)
        losses = good_steps(trainer)
        with monkeypatch.context() as patch:
            patch.setattr(LoopThread, "wait", wait)
            complete = False
            while not complete:
                interrupted_at, waits = interrupted_at + 3, itertools.count()
                try:
                    for seed in (7, 8):
                        trainer.backward(trainer.model(*models.tokens(seed)))
                    complete = True
                except KeyboardInterrupt:
                    interrupted_at, waits = interrupted_at, itertools.count(interrupted_at + 1)
                trainer.zero_grad()
        assert interrupted_at > 20
        losses += good_steps(trainer)
        assert_same(losses, case.expected.returned, "losses")
        assert_same(dict(engine.state_dict()), case.expected.weights, "weights")


class FaultyReads:
    """Fails reads of NVMe from some point on, prefetches too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_reads = 0
        self.fail_from: float = math.inf
        real_read = NvmeTier.read

        async def read(
            tier: NvmeTier, key: ShardKey, target: memoryview, *, priority: Priority = Priority.DEMAND
        ) -> None:
            self.num_reads += 1
            if self.num_reads >= self.fail_from:
                raise StorageError(f"read of {key} failed on purpose", path="nowhere")
            await real_read(tier, key, target, priority=priority)

        monkeypatch.setattr(NvmeTier, "read", read)

    def fail_after(self, num_reads: int) -> None:
        self.fail_from = self.num_reads + num_reads + 1


def test_a_failed_read_at_any_point_of_forward_and_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Parity(GPT, momentum, four_good_steps)
    faults = FaultyReads(monkeypatch)
    model, optimizer = build(GPT, momentum)
    failures = []
    with infinity.initialize(model, optimizer, case.smallest(tmp_path)) as engine:
        trainer = Tiered(engine, optimizer)
        losses = good_steps(trainer)
        for num_good in range(0, 24, 2):
            faults.fail_after(num_good)
            try:
                trainer.backward(trainer.model(*models.tokens(7)))
            except StorageError as error:
                failures.append(str(error))
            faults.fail_from = math.inf
            trainer.zero_grad()
        losses += good_steps(trainer)
        weights = dict(engine.state_dict())
    assert len(failures) > 5
    assert all("failed on purpose" in failure for failure in failures)
    assert_same(losses, case.expected.returned, "losses")
    assert_same(weights, case.expected.weights, "weights")


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
