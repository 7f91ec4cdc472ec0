"""An ordinary PyTorch loop trains under the engine: whatever habit, accident or change of order, the same numbers."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import infinity
import parity_models as models
from accidents import ACCIDENTS, Accident, between_good_steps, good_step, momentum, two_groups
from parity import Parity, Tiered, TieredByUsersOptimizer, Trainer, assert_same, build
from parity import tiny_scale as tiny_scale
from parity_models import GPT, Irregular

Scheduler = Callable[[torch.optim.Optimizer], Any]


@pytest.mark.parametrize("make_trainer", [Tiered, TieredByUsersOptimizer])
@pytest.mark.parametrize("accident", ACCIDENTS)
def test_what_happens_between_steps(accident: Accident, make_trainer: type[Tiered], tmp_path: Path) -> None:
    case = Parity(GPT, two_groups, between_good_steps(accident))
    case.check(case.blockwise(tmp_path), make_trainer)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_sequence_of_accidents_with_any_budgets(data: st.DataObject) -> None:
    sequence = data.draw(st.lists(st.sampled_from(ACCIDENTS), min_size=2, max_size=5))
    prefetch = data.draw(st.sampled_from([0, 1, 4]))
    budgets = data.draw(st.sampled_from(["smallest", "blockwise", "half"]))
    debug = data.draw(st.booleans())
    case = Parity(GPT, two_groups, between_good_steps(lambda trainer: [accident(trainer) for accident in sequence]))
    with tempfile.TemporaryDirectory() as directory:
        case.check(getattr(case, budgets)(Path(directory), prefetch=prefetch, debug=debug))


def lambda_lr(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)  # cycles the momentum too


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)


@pytest.mark.parametrize("make_optimizer", [two_groups, momentum])
@pytest.mark.parametrize("make_trainer", [Tiered, TieredByUsersOptimizer])
@pytest.mark.parametrize("make_scheduler", [lambda_lr, one_cycle, plateau])
def test_learning_rate_schedulers(
    make_scheduler: Scheduler,
    make_trainer: type[Tiered],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    tmp_path: Path,
) -> None:
    def script(trainer: Trainer) -> list[Any]:
        scheduler = make_scheduler(trainer.optimizer)
        seen: list[Any] = []
        for seed in range(4):
            loss = good_step(trainer, seed)
            scheduler.step(*([loss] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            seen += [loss, [group["lr"] for group in trainer.optimizer.param_groups]]
        return seen

    case = Parity(GPT, make_optimizer, script)
    case.check(case.blockwise(tmp_path), make_trainer)


@pytest.mark.parametrize("make_trainer", [Tiered, TieredByUsersOptimizer])
def test_a_scheduler_made_before_the_engine(make_trainer: type[Tiered]) -> None:
    schedulers: list[lr_scheduler.LambdaLR] = []

    def scheduled(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = two_groups(model)
        schedulers.append(lambda_lr(optimizer))
        return optimizer

    def script(trainer: Trainer) -> list[torch.Tensor]:
        scheduler, losses = schedulers[-1], []
        for seed in range(4):
            losses.append(good_step(trainer, seed))
            scheduler.step()
        return losses

    case = Parity(GPT, scheduled, script)
    case.check(case.resident(), make_trainer)


def steps(batches: Callable[[int], tuple[torch.Tensor, ...]], loss_of: Callable[[Any], torch.Tensor]) -> Any:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for seed in range(4):
            loss = loss_of(trainer.model(*batches(seed)))
            loss.backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return script


def test_units_that_are_skipped_at_random(tmp_path: Path) -> None:
    case = Parity(Irregular, momentum, steps(models.sequences, lambda loss: loss))
    case.check(case.smallest(tmp_path))
    case.check(case.half(tmp_path))


class TwoHeads(GPT):
    """Two outputs, of which the loop uses one."""

    def forward(self, batch: torch.Tensor) -> Any:
        return {"loss": super().forward(batch), "unused": self.blocks[0](self.tokens(batch)).sum()}


def test_an_output_that_is_not_used(tmp_path: Path) -> None:
    case = Parity(TwoHeads, two_groups, steps(models.tokens, lambda outputs: outputs["loss"]))
    case.check(case.smallest(tmp_path))


class Forces(nn.Module):
    """Differentiates its own energy in forward, and its loss differentiates that again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(models.WIDTH, models.WIDTH), nn.Tanh(), nn.Linear(models.WIDTH, models.WIDTH))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        energy = x
        for layer in self.layers:
            energy = energy + layer(energy)
        (force,) = torch.autograd.grad(energy.square().sum(), x, create_graph=True)
        return force


def test_a_derivative_inside_forward(tmp_path: Path) -> None:
    case = Parity(Forces, momentum, steps(models.vectors, lambda force: force.square().mean()))
    case.check(case.smallest(tmp_path))
    case.check(case.resident())


class Careless(GPT):
    """Changes a tensor in place that backward needs."""

    def logits(self, batch: torch.Tensor) -> torch.Tensor:
        logits = super().logits(batch).exp()
        logits.detach().mul_(2)
        return logits


def test_a_tensor_changed_in_place_before_backward_is_the_error_that_it_is_in_pytorch(tmp_path: Path) -> None:
    def script(trainer: Trainer) -> None:
        loss = trainer.model(*models.tokens(0))
        with pytest.raises(RuntimeError, match=r"in.?place.*version 1.*expected.*0|in.?place.*version 1; expected"):
            loss.backward()
        trainer.optimizer.zero_grad()

    case = Parity(Careless, two_groups, script)
    case.check(case.resident())


def test_a_loop_that_keeps_only_the_model_and_the_optimizer(tmp_path: Path) -> None:
    """The optimizer keeps the engine alive."""
    case = Parity(GPT, two_groups, lambda trainer: [good_step(trainer, seed) for seed in range(3)])
    model, optimizer = build(GPT, two_groups)
    infinity.initialize(model, optimizer, case.blockwise(tmp_path))
    gc.collect()
    losses = []
    for seed in range(3):
        loss = model(*models.tokens(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert_same(losses, case.expected.returned, "losses")
    assert_same(dict(model.state_dict()), case.expected.computing, "weights")
    assert_same(optimizer.state_dict(), case.expected.optimizer, "optimizer")
    del model, optimizer, loss
    gc.collect()
    assert list(tmp_path.iterdir()) == []
