"""Steps on trial under backward: the numbers of waiting, and of plain PyTorch, whether they are kept or undone."""

from __future__ import annotations

import asyncio
import copy
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
import parity_models as models
from accidents import momentum, two_groups
from infinity import EngineStateError, NonFiniteError, StorageError
from infinity.engine import assembly, speculation
from infinity.engine.engine import Engine
from infinity.engine.planar import _Writer
from infinity.engine.speculation import Speculation, Trial, speculated_bytes
from infinity.engine.stream import StepStream
from infinity.engine.substep import SubGroupStepper
from parity import Parity, Plain, Tiered, Trainer, build, same_bits, tiny_scale
from parity_models import GPT

__all__ = ["tiny_scale"]

MODEL = 4
"""Blocks: enough that some units are away."""


def gpt() -> nn.Module:
    return GPT(num_blocks=MODEL)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01)


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True, foreach=True, maximize=True)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


class InPlace(torch.optim.SGD):
    """Changes the gradients that it steps with."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5).sign_()
                    state = self.state[param]
                    state["seen"] = state.get("seen", torch.zeros(())).add_(1)
                    state["sum"] = state.get("sum", torch.zeros_like(param)).add_(param.grad)
                    param.sub_(group["lr"] * state["sum"] / state["seen"])


def in_place(model: nn.Module) -> torch.optim.Optimizer:
    return InPlace(model.parameters(), lr=0.01)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step begins on trial, whatever became of those before."""
    monkeypatch.setattr(Speculation, "pays", True)


def let_begin(trainer: Trainer) -> None:
    """Have all that is on trial stepped before anything else happens."""
    if isinstance(trainer, Tiered):
        trainer.engine._resources.loop.run(trainer.engine._stream.drain())


def scaled(factors: Sequence[float], num_backwards: int = 1) -> Callable[[Trainer], list[Any]]:
    """A step for each factor, by which its losses are multiplied: a large one is clipped, or overflows."""

    def script(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for step, factor in enumerate(factors):
            for micro in range(num_backwards):
                loss = trainer.model(*models.tokens(10 * step + micro))
                trainer.backward(loss * factor)
                seen.append(loss.detach())
            let_begin(trainer)
            trainer.step()
            seen.append(trainer.grad_norm)
            for group in trainer.optimizer.param_groups:
                group["lr"] *= 0.9
        return seen

    return script


FINE, LARGE = 0.01, 100.0
NEVER = [FINE] * 6
ALWAYS = [LARGE] * 5
RARELY = [FINE, FINE, FINE, LARGE, FINE, FINE, FINE]
ALTERNATING = [FINE, LARGE, FINE, LARGE, FINE, LARGE, FINE]


@pytest.mark.parametrize(
    ("budgets", "precision"),
    [("smallest", "bf16"), ("blockwise", "bf16"), ("blockwise", "fp32"), ("half", "fp32"), ("resident", "bf16")],
)
@pytest.mark.parametrize("factors", [NEVER, ALWAYS, RARELY], ids=["never", "always", "rarely"])
def test_numbers_are_those_of_plain_pytorch(precision: str, factors: list[float], budgets: str, tmp_path: Path) -> None:
    case = Parity(gpt, adamw, scaled(factors), precision, max_grad_norm=1.0)
    engine = case.check(getattr(case, budgets)(tmp_path, accumulation_steps=1, speculation="auto"))
    tries = budgets in ("blockwise", "half")
    assert (engine.num_trial_steps > 1) == (tries and factors is not ALWAYS)
    assert engine.num_undone_steps == (1 if tries and factors is RARELY else 0)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("budgets", "precision"), [("blockwise", "bf16"), ("half", "fp32")])
@pytest.mark.parametrize("optimizer", [adamw, momentum, two_groups, adagrad, amsgrad, adafactor, in_place])
def test_every_optimizer_with_every_second_step_undone(
    precision: str, optimizer: Any, budgets: str, tmp_path: Path
) -> None:
    case = Parity(gpt, optimizer, scaled(ALTERNATING), precision, max_grad_norm=1.0)
    engine = case.check(getattr(case, budgets)(tmp_path, accumulation_steps=1, speculation="auto"))
    assert engine.num_undone_steps > 1
    assert engine.num_trial_steps > engine.num_undone_steps


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("budgets", ["blockwise", "half"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_overflow_in_fp16(max_grad_norm: float | None, budgets: str, tmp_path: Path) -> None:
    script = scaled([1.0, 1.0, 1e30, 1.0, 1e30, 1e30, 0.1, 0.1])
    scaler = {"init_scale": 1024.0, "growth_interval": 2}
    case = Parity(gpt, adamw, script, "fp16", scaler=scaler, max_grad_norm=max_grad_norm)
    engine = case.check(getattr(case, budgets)(tmp_path, accumulation_steps=1, speculation="auto"))
    assert engine.num_skipped_steps == 3
    assert engine.num_undone_steps >= 2


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", ["horizontal", "vertical"])
def test_several_backwards(accumulation: str, precision: str, tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for step, factor in enumerate((FINE, FINE, LARGE, FINE, LARGE)):
            batches = [models.tokens(10 * step + micro) for micro in range(3)]
            seen += trainer.accumulate(batches, lambda batch: trainer.model(*batch) * factor)  # noqa: B023
            let_begin(trainer)
            trainer.step()
            seen.append(trainer.grad_norm)
        return seen

    case = Parity(gpt, adamw, script, precision, scaler={"init_scale": 256.0}, max_grad_norm=1.0)
    engine = case.check(case.blockwise(tmp_path, accumulation_steps=3, speculation="auto", accumulation=accumulation))
    assert engine.num_undone_steps > 0
    assert engine.num_trial_steps > engine.num_undone_steps


class Partly(GPT):
    """Only some of its units get gradients in most steps; so states come to be in later ones."""

    def __init__(self) -> None:
        super().__init__(num_blocks=MODEL)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if int(batch[0, 0]) % 2:
            return self.blocks[1](self.blocks[0](self.tokens(batch))).square().mean()  # type: ignore[no-any-return]
        return super().forward(batch)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_that_come_to_be_on_trial_are_gone_again(precision: str, tmp_path: Path) -> None:
    factors = [LARGE, FINE, LARGE, FINE, LARGE, FINE, LARGE, FINE]
    case = Parity(Partly, momentum, scaled(factors), precision, max_grad_norm=1.0)
    engine = case.check(case.blockwise(tmp_path, accumulation_steps=1, speculation="auto"))
    assert engine.num_undone_steps > 0


def zero_grad(trainer: Trainer) -> None:
    trainer.zero_grad()


def drop_gradients(trainer: Trainer) -> None:
    trainer.model.zero_grad()
    if isinstance(trainer, Plain):
        trainer.zero_grad()


def drop_one(trainer: Trainer) -> None:
    param = next(iter(trainer.model.parameters()))
    param.grad = None
    if isinstance(trainer, Plain) and trainer.masters:
        trainer.masters[param].grad = None


def evaluate(trainer: Trainer) -> Any:
    with torch.no_grad():
        return trainer.model(*models.tokens(77))


def compute_only(trainer: Trainer) -> Any:
    return trainer.model(*models.tokens(77)).detach()


def more_backward(trainer: Trainer) -> None:
    trainer.backward(trainer.model(*models.tokens(78)) * FINE)


def change_rate(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] *= 0.5


def change_nothing(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] = float(trainer.optimizer.param_groups[0]["lr"])


def save(trainer: Trainer) -> Any:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def save_optimizer(trainer: Trainer) -> Any:
    return copy.deepcopy(trainer.optimizer.state_dict())


def clip_otherwise(trainer: Trainer) -> Any:
    return trainer.clip(0.01, math.inf)


BETWEEN = [
    (zero_grad, "fp32"), (drop_gradients, "bf16"), (drop_one, "fp32"), (drop_one, "fp16"), (evaluate, "bf16"),
    (compute_only, "fp32"), (more_backward, "fp32"), (more_backward, "bf16"), (more_backward, "fp16"),
    (change_rate, "fp32"), (change_rate, "fp16"), (change_nothing, "bf16"), (save, "bf16"), (save_optimizer, "fp32"),
    (clip_otherwise, "bf16"), (clip_otherwise, "fp16"),
]  # fmt: skip


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("between", "precision"), BETWEEN)
def test_whatever_comes_between_backward_and_step(between: Any, precision: str, tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for step in range(6):
            loss = trainer.model(*models.tokens(step)) * FINE
            trainer.backward(loss)
            let_begin(trainer)
            if step in (2, 4):
                seen.append(between(trainer))
            trainer.step()
            seen += [loss.detach(), trainer.grad_norm if between is not clip_otherwise else None]
        return seen

    case = Parity(gpt, adamw, script, precision, scaler={"init_scale": 64.0}, max_grad_norm=1.0)
    engine = case.check(case.blockwise(tmp_path, accumulation_steps=1, speculation="auto"))
    assert engine.num_undone_steps == (0 if between is change_nothing else 2)
    assert engine.num_trial_steps >= 4


class PlannedError(Exception):
    """Raised on purpose."""


def interrupted_with(error: type[BaseException]) -> Callable[[Trainer], list[Any]]:
    """Backward is interrupted when much of the step has begun; what it has brought counts as in plain PyTorch."""

    def script(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for step in range(6):
            loss = trainer.model(*models.tokens(step)) * FINE
            if step in (2, 4):

                def interrupt(gradient: torch.Tensor) -> None:
                    let_begin(trainer)
                    raise error

                handle = trainer.model.tokens.weight.register_hook(interrupt)  # type: ignore[union-attr,operator]
                with pytest.raises(error):
                    trainer.backward(loss)
                handle.remove()
                seen.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
                trainer.zero_grad()
                continue
            trainer.backward(loss)
            let_begin(trainer)
            trainer.step()
            seen.append(trainer.grad_norm)
        return seen

    return script


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("error", [PlannedError, KeyboardInterrupt])
def test_an_interrupted_backward_has_stepped_nothing(error: type[BaseException], tmp_path: Path) -> None:
    case = Parity(gpt, adamw, interrupted_with(error), "fp32", max_grad_norm=1.0)
    engine = case.check(case.blockwise(tmp_path, accumulation_steps=1, speculation="auto"))
    assert engine.num_undone_steps == 2


def start(tmp_path: Path, precision: str = "fp32", **fields: Any) -> Engine:
    case = Parity(gpt, adamw, lambda trainer: None, precision, max_grad_norm=1.0)
    return infinity.initialize(
        *build(gpt, adamw), case.blockwise(tmp_path, **{"accumulation_steps": 1, "speculation": "auto", **fields})
    )


def backward(engine: Engine, seed: int, factor: float = FINE) -> None:
    engine.backward(engine(*models.tokens(seed)) * factor)
    engine._resources.loop.run(engine._stream.drain())


@pytest.mark.usefixtures("eager")
def test_the_weights_of_a_trial_are_never_read(tmp_path: Path) -> None:
    with start(tmp_path) as engine:
        for seed in range(2):
            backward(engine, seed)
            engine.step()
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        backward(engine, 2)
        assert engine._store.nvme is not None
        for name, value in engine.state_dict().items():
            assert same_bits(value, before[name]), name
        assert engine.num_undone_steps == 1


@pytest.mark.usefixtures("eager")
def test_nothing_stays_saved_and_nothing_is_written_where_it_is_held(tmp_path: Path) -> None:
    with start(tmp_path) as engine:
        nvme = engine._store.nvme
        assert nvme is not None
        for seed, factor in enumerate([FINE, FINE, LARGE, FINE, LARGE, FINE]):
            backward(engine, seed, factor)
            trial = engine._speculation._trial  # type: ignore[union-attr]
            if seed > 2:
                assert trial is not None
                held = [version for each in trial._savepoints for version in each.held.values()]
                assert held
                assert all(version.num_holders > version.num_reads for version in held)
            engine.step()
            engine.synchronize()
            assert not any(version.is_held for version in nvme.versions.live.values())
            assert nvme.usage().used_bytes == sum(version.num_bytes for version in nvme.versions.live.values())
            assert not [key for key in engine._store._sizes if key.kind.startswith("saved")]
            assert not engine._orders.on_trial
        assert engine.num_undone_steps == 2


def test_it_has_to_be_asked_for() -> None:
    assert infinity.Config().speculation == "off"


def test_room_is_made_for_what_may_be_saved(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with start(tmp_path) as engine, start(other, speculation="off") as waiting:
        more = engine.usage()["nvme"].budget_bytes - waiting.usage()["nvme"].budget_bytes
        assert more == speculated_bytes(engine._plan) > 0
        for seed in range(4):
            backward(waiting, seed)
            waiting.step()
        assert waiting.num_trial_steps == waiting.num_undone_steps == 0


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("share", [0, 8])
def test_no_more_is_saved_than_there_is_room_for(share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "speculated_bytes", lambda plan: share * plan.committed_bytes // 32)
    monkeypatch.setattr(assembly, "speculated_bytes", speculation.speculated_bytes)
    case = Parity(gpt, adamw, scaled(ALTERNATING), "bf16", max_grad_norm=1.0)
    engine = case.check(case.blockwise(tmp_path, accumulation_steps=1, speculation="auto"))
    assert (engine.num_trial_steps > 0) == (share > 0)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("factor", [FINE, LARGE])
def test_a_sub_group_that_is_under_way_when_the_guess_is_checked(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each trial one sub-group stands still, in turns while it is saved and while it is stepped."""
    gates: list[asyncio.Event] = []
    trials: list[Trial] = []
    real_save, real_step, real_accept, real_withdraw = (
        Trial._save, SubGroupStepper.step, Trial.accept, StepStream.withdraw,
    )  # fmt: skip

    async def stand_still(in_saving: bool) -> None:
        if len(gates) < len(trials) and in_saving == (len(trials) % 2 == 0):
            gates.append(asyncio.Event())
            await asyncio.wait_for(gates[-1].wait(), timeout=30.0)

    async def save(trial: Trial, gradients: Any) -> Any:
        if trial not in trials:
            trials.append(trial)
        await stand_still(in_saving=True)
        return await real_save(trial, gradients)

    async def step(stepper: SubGroupStepper, *args: Any, tentative: bool = False) -> None:
        if tentative:
            await stand_still(in_saving=False)
        await real_step(stepper, *args, tentative=tentative)

    async def accept(trial: Trial) -> None:
        await real_accept(trial)
        for gate in gates:
            gate.set()

    def withdraw(stream: StepStream) -> None:
        real_withdraw(stream)
        for gate in gates:
            gate.set()

    monkeypatch.setattr(Trial, "_save", save)
    monkeypatch.setattr(SubGroupStepper, "step", step)
    monkeypatch.setattr(Trial, "accept", accept)
    monkeypatch.setattr(StepStream, "withdraw", withdraw)
    monkeypatch.setattr("test_speculation.let_begin", lambda trainer: None)
    case = Parity(gpt, adamw, scaled([FINE, FINE, factor, FINE, factor, factor, FINE]), "bf16", max_grad_norm=1.0)
    engine = case.check(case.blockwise(tmp_path, accumulation_steps=1, speculation="auto"))
    assert gates
    assert (engine.num_undone_steps > 0) == (factor == LARGE)


@pytest.mark.usefixtures("eager")
def test_planes_that_widen_on_trial_are_narrow_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for no exceptions, weights that are ties have a third plane; undone, there is the one that was."""
    real = _Writer.write

    def write(writer: _Writer, start: int, weights: torch.Tensor) -> bool:
        hopeless = bool((weights.view(torch.int32)[0] >> 8) & 1) and not writer.wide
        return False if hopeless else real(writer, start, weights)

    monkeypatch.setattr(_Writer, "write", write)
    case = Parity(gpt, adamw, scaled(ALTERNATING), "bf16", max_grad_norm=1.0)
    engine = case.check(case.blockwise(tmp_path, accumulation_steps=1, speculation="auto"))
    assert engine.num_undone_steps > 0


@pytest.mark.usefixtures("eager")
def test_commits_beside_trials(tmp_path: Path) -> None:
    factors = [FINE, FINE, LARGE, FINE, FINE, LARGE, FINE]
    case = Parity(gpt, adamw, scaled(factors), "bf16", max_grad_norm=1.0)
    engine = case.check(case.blockwise(tmp_path, accumulation_steps=1, speculation="auto", durability=1))
    assert engine.num_undone_steps > 0
    assert engine.last_commit is not None
    assert engine.last_commit.step == len(factors)


@pytest.mark.usefixtures("eager")
def test_going_back_to_a_commit_in_the_middle_of_a_trial(tmp_path: Path) -> None:
    with start(tmp_path, durability="checkpoint") as engine:
        for seed in range(3):
            backward(engine, seed)
            engine.step()
        engine.commit()
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        for _ in range(2):
            backward(engine, 3)
            engine.step()
            backward(engine, 4)
            engine.rollback(steps=1)
            after = engine.state_dict()
            assert all(same_bits(after[name], before[name]) for name in before)
        assert engine.num_undone_steps == 2
        engine.close()


@pytest.mark.usefixtures("eager")
def test_gradients_that_are_not_finite_have_stepped_nothing(tmp_path: Path) -> None:
    with start(tmp_path, max_grad_norm=None, on_nonfinite="error") as engine:
        for seed in range(3):
            backward(engine, seed)
            engine.step()
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        backward(engine, 3, math.nan)
        with pytest.raises(NonFiniteError, match="nothing has been stepped"):
            engine.step()
        engine.zero_grad()
        after = engine.state_dict()
        assert all(same_bits(after[name], before[name]) for name in before)
        assert engine.num_undone_steps == 1
        backward(engine, 4)
        engine.step()


@pytest.mark.usefixtures("eager")
def test_a_failure_on_trial_is_told_and_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise StorageError("write failed on purpose", path="nowhere")

    with start(tmp_path) as engine:
        for seed in range(2):
            backward(engine, seed)
            engine.step()
        engine.synchronize()
        monkeypatch.setattr(SubGroupStepper, "step", fail)
        backward(engine, 2)
        with pytest.raises(StorageError, match="on purpose"):
            engine.step()
        with pytest.raises(EngineStateError, match=r"half-way.*on purpose"):
            engine.zero_grad()


@pytest.mark.usefixtures("eager")
def test_an_engine_closes_in_the_middle_of_a_trial(tmp_path: Path) -> None:
    engine = start(tmp_path)
    backward(engine, 0)
    engine.step()
    backward(engine, 1)
    engine.close()
    assert list(tmp_path.iterdir()) == []


def decisions(refuted: Sequence[bool], trials: Speculation | None = None) -> list[bool]:
    """For each step whether it begins on trial, when so many before it were guessed right, or would have been."""
    trials = trials or Speculation(cast(Any, None), cast(Any, None))
    decided = []
    for each in refuted:
        decided.append(trials.pays)
        trials.note(each)
    return decided


def test_it_stops_where_most_steps_are_clipped_and_goes_on_where_they_are_not() -> None:
    assert decisions([False] * 4) == [False, True, True, True], "the first step has nothing to go by"
    assert decisions([True] * 20) == [False] * 20
    assert decisions([False] * 16 + [True] * 16)[16:] == [True] * 8 + [False] * 8
    assert decisions([True] * 16 + [False] * 16)[16:] == [False] * 9 + [True] * 7
    assert decisions([False, True] * 8)[:4] == [False, True, False, True]
    assert all(decisions([False] * 16 + [False, False, False, True] * 16)[1:])


def test_whoever_undoes_steps_by_what_he_does_is_left_alone_for_a_while() -> None:
    trials = Speculation(cast(Any, None), cast(Any, None))
    assert decisions([False] * 3, trials) == [False, True, True]
    trials._was_undone = True
    assert decisions([False] * 19, trials) == [False] * 17 + [True] * 2
    trials._was_undone = True
    assert decisions([True, False], trials) == [False, True], "it was the gradients"


STEPS = st.lists(
    st.tuples(
        st.sampled_from([FINE, FINE, 0.3, LARGE]),
        st.sampled_from([None, None, *(function for function, _ in BETWEEN)]),
        st.booleans(),
    ),
    min_size=2,
    max_size=5,
)


@pytest.mark.usefixtures("eager")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.sampled_from(["fp32", "bf16"]), st.sampled_from(["blockwise", "half"]))
def test_any_course_of_training(steps: list[tuple[float, Any, bool]], precision: str, budgets: str) -> None:
    def script(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for seed in range(2):
            trainer.backward(trainer.model(*models.tokens(seed)) * FINE)
            trainer.step()
        for seed, (factor, between, waits) in enumerate(steps):
            trainer.backward(trainer.model(*models.tokens(10 + seed)) * factor)
            if waits:
                let_begin(trainer)
            if between is not None:
                seen.append(between(trainer))
            trainer.step()
            seen.append(trainer.grad_norm)
        return seen

    with tempfile.TemporaryDirectory() as directory:
        case = Parity(gpt, adamw, script, precision, max_grad_norm=1.0)
        case.check(getattr(case, budgets)(Path(directory), accumulation_steps=1, speculation="auto"))
