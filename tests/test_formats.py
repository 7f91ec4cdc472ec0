"""How weights are stored: which format serves where, that all keep the same weights, and what each costs in bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import Config, Engine
from infinity.engine import budget, formats
from infinity.engine.budget import Plan
from infinity.engine.formats import Master, Whole, runs_of, with_masters
from infinity.engine.planar import with_planes
from infinity.engine.planes import Residuals
from infinity.engine.unit import GRAD, GRAD_SUM, MASTER, PARAM, RESIDUAL, SCRATCH, UPPER
from parity import CPU, Parity, Tiered, Trainer, assert_same, build, plan_of
from parity import tiny_scale as tiny_scale

PAGE = 4096


class Stack(nn.Sequential):
    """Layers with weights of a few pages."""

    def __init__(self, num_layers: int = 3, width: int = 96) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(num_layers)))


class HalfStack(Stack):
    """As if loaded from fp16: an eighth of the values are ties."""

    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict({name: value.half().float() for name, value in self.state_dict().items()})


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def step_of(trainer: Trainer, seed: int) -> torch.Tensor:
    inputs = torch.randn(4, 96, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = trainer.model(inputs).float().square().mean()
    trainer.backward(loss)
    trainer.step()
    return loss.detach()


def three_steps(trainer: Trainer) -> list[torch.Tensor]:
    return [step_of(trainer, seed) for seed in range(3)]


def parts_with(engine: Engine, kind: str) -> list[bool]:
    """For each stepped part, whether it has a shard of a kind."""
    engine.synchronize()
    return [part.key(kind) in engine._store for part in engine._parts if part.stepped]


def in_planes(make_model: Any, make_optimizer: Any, nvme: Path, **fields: Any) -> Config:
    """The least host memory with which a model is trained in planes, each parameter a sub-group."""
    shared = {"device": "cpu", "hbm": "1MiB", "precision": "bf16", "nvme": nvme, "sub_group_bytes": 1, **fields}
    made = plan_of(*build(make_model, make_optimizer), Config(**shared))
    ram = dataclasses.replace(made, format_of=with_planes(made.parts)).smallest_ram(uploads=False)
    config = Config(**shared, ram=ram)
    with_planes_now = plan_of(*build(make_model, make_optimizer), config)
    assert any(RESIDUAL in with_planes_now.shard_bytes(part) for part in with_planes_now.parts)
    return config


def plan(config: Config, make_model: Any = Stack) -> Plan:
    return plan_of(*build(make_model, adamw), config)


# Which format


@pytest.mark.parametrize("pay_below", [1, 2])
def test_planes_serve_where_most_state_is_on_nvme(pay_below: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "PLANES_PAY_BELOW", pay_below)
    shared: dict[str, Any] = {"device": "cpu", "precision": "bf16", "nvme": ".", "sub_group_bytes": 1}
    most = -(-plan(Config(**shared), make_model=lambda: Stack(9)).state_bytes // pay_below)
    for fields, kinds in (
        ({"ram": most}, {PARAM, MASTER}),
        ({"ram": most - 1}, {PARAM, RESIDUAL, UPPER}),
        ({"ram": most - 1, "nvme": ()}, {PARAM, MASTER}),
        ({"ram": most - 1, "precision": "fp32"}, {PARAM}),
        ({"ram": 1}, {PARAM, MASTER}),  # in planes a step takes more memory than with masters
    ):
        made = plan(Config(**{**shared, **fields}), make_model=lambda: Stack(9))
        for part in made.parts:
            assert {*made.format_of(part).at_most(part)} == kinds


def test_what_has_no_second_dtype_is_stored_whole() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.frozen = nn.Parameter(torch.randn(4))
            self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))

    model = Odd()
    optimizer = torch.optim.SGD([model.phase, model.wide], lr=0.1)
    made = plan_of(model, optimizer, Config(device="cpu", precision="bf16", nvme="."))
    for format_of in (with_masters, with_planes(made.parts)):
        found = {slot.name: format_of(part) for part in made.parts for slot in part.slots}
        assert isinstance(found["phase"], Whole)
        assert isinstance(found["frozen"], Whole)
        assert isinstance(found["wide"], Master) == (format_of is with_masters)
        phase = next(part for part in made.parts if part.slots[0].name == "phase")
        assert GRAD_SUM not in made.shard_bytes(phase)


def test_the_arithmetic_of_planes() -> None:
    """One part of whole pages and of one run."""
    model, optimizer = build(lambda: nn.Linear(96, 128), adamw)
    config = Config(device="cpu", precision="bf16", nvme=".", ram="64KiB", sub_group_bytes="1GiB")
    made = plan_of(model, optimizer, config)
    made = dataclasses.replace(made, format_of=with_planes(made.parts))
    (part,) = made.parts
    n = part.num_elements
    assert n == 4 * PAGE
    residual = 2 * n + PAGE
    states = {"state.exp_avg": 4 * n, "state.exp_avg_sq": 4 * n}
    assert made.shard_bytes(part) == {
        PARAM: 2 * n, RESIDUAL: residual, UPPER: 2 * n, GRAD: 2 * n, GRAD_SUM: 4 * n, **states
    }  # fmt: skip
    assert {key.kind for key in made.step_keys(part)} == {PARAM, RESIDUAL, UPPER, GRAD, GRAD_SUM, *states}
    assert made.state_bytes == 2 * n + residual + 2 * n + 8 * n
    assert made.nvme_bytes == sum(made.shard_bytes(part).values())
    scratch = 13 * PAGE
    assert scratch - PAGE < 4 * (96 * 128 + 128) <= scratch
    assert made.step_bytes(part) == 2 * n + residual + 2 * n + scratch + 4 * n + 8 * n
    assert made.smallest_ram(uploads=False) == made.step_bytes(part)
    complaint, *_ = made.complaints(model, config, CPU)
    assert "scratch" in complaint


def test_runs_are_single_parameters_or_many_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_RUN_ELEMENTS", 500)
    sizes = [100, 300, 1, 600, 0, 128, 2000, 10]
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    config = Config(device="cpu", precision="bf16", nvme=".", ram="1GiB")
    (part,) = plan_of(model, torch.optim.SGD(model.parameters(), lr=0.1), config).parts
    runs = runs_of(part)
    assert [position for run in runs for position in run.positions] == list(range(len(sizes)))
    assert [run.start for run in runs] == [part.slots[run.positions.start].offset for run in runs]
    assert [len(run.positions) for run in runs] == [2, 1, 1, 2, 1, 1]
    assert all(run.stop - run.start <= 500 or len(run.positions) == 1 for run in runs)


# The same numbers


@pytest.mark.parametrize("run_elements", [1, 4096, 1 << 20])
@pytest.mark.parametrize("make_model", [Stack, HalfStack])
def test_training_in_runs_of_any_size(
    make_model: Any, run_elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_RUN_ELEMENTS", run_elements)
    case = Parity(make_model, adamw, three_steps, "bf16")
    for config in (in_planes(make_model, adamw, tmp_path), case.half(tmp_path, sub_group_bytes="1MiB", debug=True)):
        case.check(config)


class Rounding(torch.optim.Optimizer):
    """Steps by sign; every second time, what it leaves of every second weight are values of fp16, with their ties."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 1e-3})
        for index, param in enumerate(model.parameters()):
            param.rounds = index % 4 == 2  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    number = self.state[param]["number"] = self.state[param].get("number", 0) + 1
                    param.sub_(param.grad.sign() * group["lr"])
                    if number % 2 == 0 and param.rounds:
                        param.copy_(param.half())


@pytest.mark.parametrize("run_elements", [1, 1 << 20])
def test_ties_beyond_the_table_take_a_third_plane_until_they_are_gone(
    run_elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_RUN_ELEMENTS", run_elements)
    seen: list[list[bool]] = []

    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for seed in range(4):
            losses.append(step_of(trainer, seed))
            if isinstance(trainer, Tiered):
                seen.append(parts_with(trainer.engine, UPPER))
        return losses

    def stack() -> Stack:
        return Stack(16)

    case = Parity(stack, Rounding, script, "bf16")
    single = in_planes(stack, Rounding, tmp_path, debug=True)
    several = in_planes(stack, Rounding, tmp_path, sub_group_bytes="400KiB")  # in which the second weight is rounded
    for config in (single, several):
        seen.clear()
        case.check(config)
        first, second, third, fourth = seen
        assert any(second), "values of fp16 have more ties than the table holds"
        assert not any(first)
        assert not any(third), "other values fit"
        assert fourth == second


def test_weights_from_fp16_are_kept_from_the_start(tmp_path: Path) -> None:
    case = Parity(HalfStack, adamw, three_steps, "bf16")
    model, optimizer = build(HalfStack, adamw)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with infinity.initialize(model, optimizer, in_planes(HalfStack, adamw, tmp_path)) as engine:
        assert any(parts_with(engine, UPPER))
        assert_same(dict(engine.state_dict()), expected, "weights")
        assert_same(
            dict(model.state_dict()), {name: value.bfloat16() for name, value in expected.items()}, "parameters"
        )
        three_steps(Tiered(engine, optimizer))
        assert not any(parts_with(engine, UPPER))
        assert_same(dict(engine.state_dict()), case.expected.weights, "weights")


def test_what_diverges_is_kept_too(tmp_path: Path) -> None:
    def diverging(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e38)

    case = Parity(Stack, diverging, three_steps, "bf16")
    assert any(value.isnan().any() for value in case.expected.weights.values())
    case.check(in_planes(Stack, diverging, tmp_path))


def test_weights_of_other_dtypes_and_strides(tmp_path: Path) -> None:
    class Various(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.short = nn.Parameter(torch.randn(40, 50).half())
            self.long = nn.Parameter(torch.randn(30, 20, dtype=torch.float64))
            self.turned = nn.Parameter(torch.randn(60, 30).t())
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.one = nn.Parameter(torch.tensor(1.5))

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = build(Various, sgd)
    expected = {name: value.detach().float().clone() for name, value in model.named_parameters()}
    config = in_planes(Various, sgd, tmp_path)
    with infinity.initialize(model, optimizer, config) as engine:
        assert all(parts_with(engine, RESIDUAL))
        state = dict(engine.state_dict())
        assert_same(state, expected, "weights")
        assert state["turned"].stride() == (1, 30)


# Bytes


def test_a_step_writes_twelve_bytes_for_each_parameter(tmp_path: Path) -> None:
    """Nothing stays: each part's planes and states are written once, and nothing else is."""
    model, optimizer = build(lambda: Stack(6, 256), adamw)
    config = Config(device="cpu", precision="bf16", nvme=tmp_path, ram="2MiB", hbm="2MiB", sub_group_bytes=1)
    with infinity.initialize(model, optimizer, config) as engine:
        for _ in range(3):
            engine.backward(engine(torch.randn(2, 256)).square().mean())
            engine.step()
        engine.synchronize()
        assert engine._store.nvme is not None
        shards = engine._store.nvme.versions.live
        kinds = {key.kind for key in shards}
        assert RESIDUAL in kinds
        assert not kinds & {MASTER, UPPER, SCRATCH}
        weights = [part for part in engine._parts if part.slots[0].name.endswith("weight")]
        for part in weights:
            sizes = {kind: engine._store.num_bytes(part.key(kind)) for kind in (PARAM, RESIDUAL)}
            assert sum(sizes.values()) <= 4.1 * part.num_elements
            assert sizes[RESIDUAL] == Residuals.num_bytes(part.num_elements)
