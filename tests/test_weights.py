"""Reading weights and optimizer state while they are away."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from accidents import good_step, two_groups
from infinity import Engine, StorageError
from infinity.io.backend import Priority
from infinity.store.loop import LoopThread
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey
from parity import ENOUGH, Parity, assert_same, build, same_bits
from parity_models import GPT, WIDTH


class Everything(nn.Module):
    """Buffers of both kinds, extra state, a tied and a frozen parameter, and one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.note = {"version": 7}

    def get_extra_state(self) -> dict[str, int]:
        return self.note

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.note = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))) * self.scale  # type: ignore[no-any-return]


@pytest.fixture(params=["fp32", "bf16"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[nn.Module, Engine]]:
    """A plain model, and the same under an engine."""
    plain, _ = build(Everything, two_groups)
    model, optimizer = build(Everything, two_groups)
    config = {**ENOUGH, "nvme": tmp_path, "precision": request.param}
    with infinity.initialize(model, optimizer, config) as engine:
        yield plain, engine


def test_a_state_dict_of_the_model_has_the_precision_that_computes(pair: tuple[nn.Module, Engine]) -> None:
    plain, engine = pair
    dtype = torch.bfloat16 if engine.config.precision == "bf16" else torch.float32
    state = engine.module.state_dict()
    expected = plain.to(dtype).state_dict()
    assert list(state) == list(expected)
    assert_same(dict(state), dict(expected), "state_dict")
    assert state["first.weight"].is_contiguous()


def test_the_engines_state_dict_has_full_precision_and_reads_on_demand(pair: tuple[nn.Module, Engine]) -> None:
    plain, engine = pair
    state = engine.state_dict()
    expected = plain.state_dict()
    assert list(state) == list(expected)
    assert len(state) == len(expected)
    assert "first.weight" in state
    assert "nothing" not in state
    for name, value in expected.items():
        if name != "frozen" and "norm.running" not in name and name != "kept":
            assert_same(state[name], value, name)
    num_before = engine.usage()["host"].used_bytes
    copy = state["first.weight"]
    copy.zero_()
    assert same_bits(state["first.weight"], expected["first.weight"]), "what it gives are copies"
    assert engine.usage()["host"].used_bytes <= num_before


def test_a_submodules_state_dict_and_the_parameters_themselves(pair: tuple[nn.Module, Engine]) -> None:
    plain, engine = pair
    dtype = torch.bfloat16 if engine.config.precision == "bf16" else torch.float32
    part = engine.module.get_submodule("first").state_dict(prefix="a.")
    assert_same(dict(part), dict(plain.to(dtype).get_submodule("first").state_dict(prefix="a.")), "part")
    kept = engine.module.state_dict(keep_vars=True)
    assert kept["first.weight"] is engine.module.get_parameter("first.weight")


def test_state_between_backward_and_step_and_inside_forward(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []
    model, optimizer = build(GPT, two_groups)
    with infinity.initialize(model, optimizer, {**ENOUGH, "nvme": tmp_path}) as engine:
        before = dict(engine.state_dict())
        handle = model.get_submodule("blocks.0").register_forward_hook(
            lambda *_: seen.append(engine.state_dict()["blocks.0.out.weight"])
        )
        engine.backward(engine(*models.tokens(0)))
        assert_same(dict(engine.state_dict()), before, "weights")
        assert same_bits(seen[0], before["blocks.0.out.weight"])
        handle.remove()


def test_optimizer_state_is_empty_before_the_first_step_and_whole_after(tmp_path: Path) -> None:
    case = Parity(GPT, two_groups, lambda trainer: [good_step(trainer, 0)])
    model, optimizer = build(GPT, two_groups)
    with infinity.initialize(model, optimizer, case.blockwise(tmp_path)) as engine:
        assert engine.optimizer.state_dict()["state"] == {}
        loss = engine(*models.tokens(0))
        loss.backward()
        engine.step()
        state = engine.optimizer.state_dict()
        assert_same(state, case.expected.optimizer, "optimizer")
        assert_same(optimizer.state_dict(), case.expected.optimizer, "the user's optimizer")
        other = two_groups(GPT())
        other.load_state_dict(state)
        state["state"][0]["exp_avg"].zero_()
        assert_same(engine.optimizer.state_dict(), case.expected.optimizer, "what it gives are copies")


def test_state_saved_here_goes_on_there(tmp_path: Path) -> None:
    """Weights and optimizer state read from one engine start another, which goes on as if nothing had been."""
    whole = Parity(GPT, two_groups, lambda trainer: [good_step(trainer, seed) for seed in range(4)])
    model, optimizer = build(GPT, two_groups)
    with infinity.initialize(model, optimizer, whole.blockwise(tmp_path)) as engine:
        losses = [_step(engine, seed) for seed in range(2)]
        weights, state = dict(engine.state_dict()), engine.optimizer.state_dict()
        random_state = torch.get_rng_state()
    model, optimizer = build(GPT, two_groups)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    config = whole.half(tmp_path)
    torch.set_rng_state(random_state)
    with infinity.initialize(model, optimizer, config) as engine:
        losses += [_step(engine, seed) for seed in range(2, 4)]
        assert_same(losses, whole.expected.returned, "losses")
        assert_same(dict(engine.state_dict()), whole.expected.weights, "weights")
        assert_same(engine.optimizer.state_dict(), whole.expected.optimizer, "optimizer")


def _step(engine: Engine, seed: int) -> torch.Tensor:
    loss: torch.Tensor = engine(*models.tokens(seed))
    engine.backward(loss)
    engine.step()
    return loss.detach()


def test_a_read_that_fails_or_is_interrupted_pins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Parity(GPT, two_groups, lambda trainer: [])
    model, optimizer = build(GPT, two_groups)

    async def fail(tier: NvmeTier, key: ShardKey, target: memoryview, *, priority: Priority = Priority.DEMAND) -> None:
        raise StorageError(f"read of {key} failed", path=tmp_path)

    real_wait = LoopThread.wait

    def interrupt(loop: LoopThread, future: concurrent.futures.Future[Any]) -> Any:
        real_wait(loop, future)
        raise KeyboardInterrupt

    with infinity.initialize(model, optimizer, case.smallest(tmp_path)) as engine:
        state = engine.state_dict()
        for patched, replacement, error in (
            (NvmeTier, fail, StorageError),
            (LoopThread, interrupt, KeyboardInterrupt),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(patched, "read" if patched is NvmeTier else "wait", replacement)
                num_errors = 0
                for name in state:
                    try:
                        state[name]
                    except error:
                        num_errors += 1
            assert num_errors > 5
        # With the smallest budgets one pin too many would leave no room for a step.
        for seed in range(2):
            _step(engine, seed)
        engine.synchronize()
        assert all(not resident.pins for resident in engine._store.host.residency._residents.values())
