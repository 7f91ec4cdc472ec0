"""Optimizer steps beside training: under backward, under the next forward, or neither; the numbers are the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from accidents import momentum, two_groups
from infinity import Config, EngineStateError, ModelError, StorageError
from infinity.engine.engine import Engine
from infinity.engine.steps import OptimizerSteps
from infinity.engine.stream import StepStream
from infinity.engine.substep import SubGroupStepper
from infinity.engine.unit import GRAD
from parity import Parity, Trainer, build, tiny_scale
from parity_models import GPT, BorrowingGPT, SegmentedGPT, non_reentrant, reentrant

__all__ = ["tiny_scale"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def steps_of(num_backwards: int) -> Callable[[Trainer], list[torch.Tensor]]:
    """Three steps of several backwards each; the learning rate changes right after a step."""

    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for step in range(4):
            for seed in range(num_backwards):
                loss = trainer.model(*models.tokens(10 * step + seed))
                trainer.backward(loss)
                losses.append(loss.detach())
            trainer.step()
            for group in trainer.optimizer.param_groups:
                group["lr"] *= 0.5
        return losses

    return script


SCHEDULES: dict[str, dict[str, Any]] = {
    "at step()": {"overlap": False},
    "under forward": {"overlap": True},
    "under backward": {"overlap": True, "accumulation_steps": True},
}
"""``accumulation_steps`` stands for the number that is right."""


@pytest.mark.parametrize("budgets", ["smallest", "blockwise", "half", "resident"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("precision", "num_backwards"), [("fp32", 1), ("bf16", 1), ("fp32", 2), ("bf16", 3)])
def test_every_schedule_gives_the_numbers_of_plain_pytorch(
    precision: str, num_backwards: int, schedule: str, budgets: str, tmp_path: Path
) -> None:
    fields = dict(SCHEDULES[schedule])
    if "accumulation_steps" in fields:
        fields["accumulation_steps"] = num_backwards
    case = Parity(GPT, adamw, steps_of(num_backwards), precision)
    case.check(getattr(case, budgets)(tmp_path, **fields))


@pytest.mark.parametrize(
    "make_model",
    [
        lambda: GPT(non_reentrant), lambda: GPT(reentrant), lambda: GPT(models.plainly, non_reentrant), SegmentedGPT,
        BorrowingGPT, lambda: BorrowingGPT(non_reentrant),
    ],
    ids=["non_reentrant", "reentrant", "inner", "segments", "borrowed", "borrowed non_reentrant"],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", [two_groups, momentum])
def test_recomputed_and_borrowed_units_under_backward(make_model: Any, optimizer: Any, tmp_path: Path) -> None:
    case = Parity(make_model, optimizer, steps_of(1))
    case.check(case.blockwise(tmp_path, accumulation_steps=1))
    case.check(case.half(tmp_path, accumulation_steps=1))


class Watch:
    """Which parts were handed to the stream, and when a step was complete."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[int, bool]] = []
        real = OptimizerSteps._submit

        def submit(steps: OptimizerSteps, gradients: Any, shadow: Any, *, in_order_of_need: bool) -> None:
            self.events.append((len(gradients), in_order_of_need))
            real(steps, gradients, shadow, in_order_of_need=in_order_of_need)

        monkeypatch.setattr(OptimizerSteps, "_submit", submit)

    def num(self, *, complete: bool) -> int:
        return sum(num_jobs for num_jobs, completes in self.events if completes is complete)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def start(tmp_path: Path, make_model: Any = GPT, optimizer: Any = adamw, **fields: Any) -> Engine:
    model, user = build(make_model, optimizer)
    case = Parity(make_model, optimizer, lambda trainer: None)
    return infinity.initialize(model, user, case.blockwise(tmp_path, **{"accumulation_steps": 1, **fields}))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with start(tmp_path) as engine:
        yield engine


def loss_of(engine: Engine, seed: int = 0) -> torch.Tensor:
    loss: torch.Tensor = engine(*models.tokens(seed))
    return loss


def test_every_step_begins_under_backward_where_the_backwards_are_counted(engine: Engine, watch: Watch) -> None:
    engine.backward(loss_of(engine))
    assert len(watch.events) > 2, "unit by unit"
    assert watch.num(complete=False) == len(engine._parts)
    engine.step()
    assert watch.num(complete=True) == 0


def test_only_the_last_of_several_backwards_begins_the_step(tmp_path: Path, watch: Watch) -> None:
    with start(tmp_path, accumulation_steps=2) as engine:
        engine.backward(loss_of(engine))
        assert watch.events == []
        engine.backward(loss_of(engine))
        assert watch.num(complete=False) == len(engine._parts)


def test_nothing_begins_before_step_where_nothing_is_known(tmp_path: Path, watch: Watch) -> None:
    with start(tmp_path, accumulation_steps=None) as engine:
        engine.backward(loss_of(engine))
        assert watch.events == []
        engine.step()
        assert watch.events == [(len(engine._parts), True)]


def test_a_graph_that_is_kept_is_not_stepped_under(engine: Engine, watch: Watch) -> None:
    """Another backward may still read the parameters: only those of no use to it are stepped."""
    loss = loss_of(engine)
    loss.backward(retain_graph=True)
    kept = {part.unit for part in engine._parts} - {unit.index for unit in engine._units if not unit.handles}
    assert kept
    engine.step()
    assert watch.num(complete=True) > 0


def test_fewer_backwards_than_announced_step_as_well(tmp_path: Path) -> None:
    """As at the end of an epoch."""

    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for num_backwards in (2, 1, 2):
            for seed in range(num_backwards):
                losses.append(trainer.model(*models.tokens(seed)))
                trainer.backward(losses[-1])
            trainer.step()
        return [loss.detach() for loss in losses]

    case = Parity(GPT, adamw, script)
    case.check(case.blockwise(tmp_path, accumulation_steps=2))


def test_some_units_without_gradients(tmp_path: Path) -> None:
    """What has got no gradient in the last backward is stepped at step(), or not at all."""

    class Partly(GPT):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if int(batch[0, 0]) % 2:
                return self.tokens(batch).square().mean()  # type: ignore[no-any-return]
            return super().forward(batch)

    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for seed in range(8):
            losses.append(trainer.model(*models.tokens(seed)))
            trainer.backward(losses[-1])
            trainer.step()
        return [loss.detach() for loss in losses]

    case = Parity(Partly, two_groups, script)
    case.check(case.blockwise(tmp_path, accumulation_steps=1))


BETWEEN: dict[str, Callable[[Engine], object]] = {
    "zero_grad": lambda engine: engine.zero_grad(),
    "forward": lambda engine: engine(*models.tokens(0)),
    "a unit's forward": lambda engine: engine.module.blocks[0](torch.ones(1, 2, models.WIDTH)),  # type: ignore[index,operator]
    "evaluation": lambda engine: torch.no_grad()(engine.module)(*models.tokens(0)),
    "state_dict": lambda engine: engine.state_dict(),
    "module.state_dict": lambda engine: engine.module.state_dict(),
    "optimizer.state_dict": lambda engine: engine.optimizer.state_dict(),
    "synchronize": lambda engine: engine.synchronize(),
}


@pytest.mark.parametrize("use", BETWEEN)
def test_a_model_that_is_half_stepped_is_not_used(use: str, engine: Engine) -> None:
    engine.backward(loss_of(engine))
    with pytest.raises(EngineStateError, match=r"begun under backward.*call step\(\)"):
        BETWEEN[use](engine)
    engine.step()
    expected = dict(engine.state_dict())
    assert all(torch.isfinite(value).all() for value in expected.values())


def test_another_backward_than_announced_is_refused(engine: Engine) -> None:
    first, second = loss_of(engine), loss_of(engine, 1)
    engine.backward(first)
    with pytest.raises(EngineStateError, match=r"accumulation_steps|before step\(\)"):
        engine.backward(second)


def test_a_gradient_discarded_after_backward_is_refused(engine: Engine) -> None:
    engine.backward(loss_of(engine))
    next(iter(engine.module.parameters())).grad = None
    with pytest.raises(EngineStateError, match=r"discarded or replaced between backward and step\(\)"):
        engine.step()


def test_a_hyper_parameter_changed_after_backward_is_refused(engine: Engine) -> None:
    engine.backward(loss_of(engine))
    engine.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ModelError, match=r"group 0, 'lr' was changed between backward and step\(\)"):
        engine.step()
    with pytest.raises(EngineStateError, match="no longer whole"):
        loss_of(engine)


def test_a_backward_interrupted_after_the_step_has_begun_is_the_end(engine: Engine) -> None:
    loss = loss_of(engine)
    hooked = engine.module.tokens.weight.register_hook(lambda grad: (_ for _ in ()).throw(KeyboardInterrupt))  # type: ignore[union-attr,operator]
    with pytest.raises(KeyboardInterrupt):
        engine.backward(loss)
    hooked.remove()
    with pytest.raises(EngineStateError, match="interrupted when the step had begun"):
        loss_of(engine)


def test_a_backward_interrupted_before_the_step_has_begun_is_forgotten(tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for seed in range(3):
            loss = trainer.model(*models.tokens(seed))
            handle = trainer.model.head.weight.register_hook(lambda grad: None)  # type: ignore[union-attr,operator]
            handle.remove()
            trainer.backward(loss)
            trainer.step()
            losses.append(loss.detach())
        return losses

    case = Parity(GPT, adamw, script)
    case.check(case.blockwise(tmp_path, accumulation_steps=1))


class Drawing(torch.optim.SGD):
    """Adds noise to what it steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(torch.randn_like(param), alpha=group["lr"])


@pytest.mark.parametrize("fields", [{}, {"accumulation_steps": 1}])
def test_an_optimizer_that_draws_random_numbers_draws_those_of_plain_pytorch(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    """It is stepped at step(), in order: dropout draws from the same generator."""

    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for seed in range(4):
            losses.append(trainer.model(*models.sequences(seed)).square().mean())
            trainer.backward(losses[-1])
            trainer.step()
        return [loss.detach() for loss in losses]

    case = Parity(
        lambda: nn.Sequential(*(models.Block() for _ in range(3))),
        lambda model: Drawing(model.parameters(), lr=0.01),
        script,
    )
    case.check(case.blockwise(tmp_path, **fields))


def test_a_step_that_fails_beside_training_is_told_to_whoever_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise StorageError("write failed on purpose", path="nowhere")

    with start(tmp_path, accumulation_steps=None) as engine:
        engine.backward(loss_of(engine))
        monkeypatch.setattr(SubGroupStepper, "step", fail)
        engine.step()
        with pytest.raises(StorageError, match="on purpose"):
            loss_of(engine)
        with pytest.raises(EngineStateError, match=r"half-way.*on purpose"):
            loss_of(engine)
        with pytest.raises(EngineStateError, match=r"half-way.*on purpose"):
            engine.step()


def test_an_engine_closes_with_a_step_under_way(tmp_path: Path) -> None:
    engine = start(tmp_path, accumulation_steps=None)
    engine.backward(loss_of(engine))
    engine.step()
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_budgets_too_small_for_two_at_once_take_turns(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward waits where steps begin under it, and holds no host memory meanwhile."""
    case = Parity(GPT, adamw, steps_of(1))
    config: Config = case.smallest(tmp_path, accumulation_steps=1)
    with infinity.initialize(*build(GPT, adamw), config) as engine:
        assert not engine._steps.overlaps
        pinned: list[set[str]] = []
        real = SubGroupStepper.step

        async def step(*arguments: Any) -> None:
            residents = engine._store.host.residency._residents.values()
            pinned.append({owner for resident in residents for owner in resident.pins})
            await real(*arguments)

        monkeypatch.setattr(SubGroupStepper, "step", step)
        engine.backward(loss_of(engine))
        assert watch.num(complete=False) == len(engine._parts)
        assert pinned == [set()] * len(engine._parts), "stepped when backward ends"
        engine.step()
        assert watch.num(complete=True) == 0


def test_turns_keep_gradients_off_the_disk(tmp_path: Path) -> None:
    """What has been stepped needs no room any more when the gradients of the next unit come."""
    written = []
    for schedule in ({"overlap": False}, {"accumulation_steps": 1}):
        case = Parity(lambda: GPT(num_blocks=6), adamw, steps_of(1))
        engine = case.check(case.smallest(tmp_path, **schedule))
        traffic = engine._store.traffic()
        written.append(sum(each.written_bytes for (_, kind), each in traffic.items() if kind == GRAD))
    assert written[1] < 0.9 * written[0]


def test_a_step_that_fails_while_backward_waits_fails_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*arguments: Any) -> None:
        raise StorageError("the disk is gone", path=tmp_path)

    case = Parity(GPT, adamw, steps_of(1))
    with infinity.initialize(*build(GPT, adamw), case.smallest(tmp_path, accumulation_steps=1)) as engine:
        loss = loss_of(engine)
        monkeypatch.setattr(SubGroupStepper, "step", fail)
        with pytest.raises(StorageError, match="the disk is gone"):
            engine.backward(loss)
        with pytest.raises(EngineStateError, match="no longer whole"):
            loss_of(engine)


def test_backward_waits_when_steps_are_too_far_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that stand still, as with a slow disk, until backward has come to wait for them."""
    monkeypatch.setattr("infinity.engine.assembly.BACKLOG_SHARE", 64)
    gate = asyncio.Event()
    backlogs: list[tuple[int, int]] = []
    real_step, real_wait = SubGroupStepper.step, StepStream.until_backlog

    async def step_behind_gate(*args: Any) -> None:
        await asyncio.wait_for(gate.wait(), timeout=30.0)
        await real_step(*args)

    async def until_backlog(stream: StepStream, num_bytes: int) -> None:
        before = stream.backlog_bytes
        gate.set()
        await real_wait(stream, num_bytes)
        backlogs.append((before, stream.backlog_bytes))

    monkeypatch.setattr(SubGroupStepper, "step", step_behind_gate)
    monkeypatch.setattr(StepStream, "until_backlog", until_backlog)
    case = Parity(lambda: GPT(num_blocks=6), momentum, steps_of(1))
    engine = case.check(case.blockwise(tmp_path, accumulation_steps=1))
    limit = engine.config.ram // 64
    assert backlogs
    assert all(before > limit >= after for before, after in backlogs)
