"""What models and tracked objects hold beside parameters and plain buffers goes along with commits and checkpoints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import Config, EngineStateError, ModelError

WIDTH = 8
OTHER_LAYOUT = {"precision": "bf16", "sub_group_bytes": "16KiB"}


class Counting(nn.Module):
    """Counts what it has seen, in its extra state; has a buffer that is there from the first forward on."""

    noise: torch.Tensor | None
    last: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: Counter[str] = Counter()
        self.register_buffer("last", None)
        self.register_buffer("noise", None, persistent=False)

    def get_extra_state(self) -> Any:
        return {"seen": Counter(self.seen), "of": tuple(self.linear.weight.shape), "rates": torch.ones(2) / 3}

    def set_extra_state(self, state: Any) -> None:
        assert torch.equal(state["rates"], torch.ones(2) / 3)
        self.seen = state["seen"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["batches"] += 1
        with torch.no_grad():
            self.last, self.noise = x.detach().mean(0), x.detach()[0] * 2
        y: torch.Tensor = self.linear(x)
        return y


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Counting(), nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2), nn.Flatten(), Counting())
        self.append(self[0])  # shared: two names


def start(path: Path | None, model: nn.Module | None = None, **config: Any) -> Any:
    model = Model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"device": "cpu", "hbm": "1MiB", "ram": "1MiB", "nvme": path or ()}
    return infinity.initialize(model, optimizer, Config(**{**settings, **config}))


def train(engine: Any, num_steps: int) -> list[float]:
    losses = []
    while engine.num_steps < num_steps:
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(engine.num_steps))
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def assert_same_model(ours: Any, theirs: Any) -> None:
    """All of the state dict, extra states and what no state dict has included."""
    first, second = dict(ours.state_dict()), dict(theirs.state_dict())
    assert list(first) == list(second)
    assert {"0._extra_state", "4._extra_state", "5._extra_state"} < set(first)
    for name, value in first.items():
        if not isinstance(value, torch.Tensor):
            assert type(second[name]["seen"]) is Counter
            assert (value["seen"], value["of"]) == (second[name]["seen"], second[name]["of"])
        elif "linear" not in name:
            assert torch.equal(value.float(), second[name].float()), name
    assert torch.equal(ours.module[0].noise.float(), theirs.module[0].noise.float())


@pytest.mark.parametrize("config", [{}, OTHER_LAYOUT])
def test_extra_states_and_buffers_without_values_are_resumed(tmp_path: Path, config: dict[str, Any]) -> None:
    with start(None) as plain:
        expected = train(plain, 4)
        with start(tmp_path, durability=2) as engine:
            assert train(engine, 2) == expected[:2]
        with start(tmp_path, durability=2, resume="must", **config) as engine:
            assert engine.module[0].seen == Counter(batches=4)
            losses = train(engine, 4)
            if not config:
                assert losses == expected[2:]
            assert engine.module[0].seen == plain.module[0].seen == Counter(batches=8)
            if not config:
                assert_same_model(plain, engine)


@pytest.mark.parametrize("config", [{}, OTHER_LAYOUT])
@pytest.mark.parametrize("durability", ["off", "checkpoint"])
def test_extra_states_are_saved_and_loaded(tmp_path: Path, config: dict[str, Any], durability: str) -> None:
    (tmp_path / "nvme").mkdir()
    with start(tmp_path / "nvme", durability=durability) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved")
        with start(None, **config) as other:
            assert other.load_checkpoint(tmp_path / "saved") == 2
            assert_same_model(engine, other)
        with infinity.open_checkpoint(tmp_path / "saved") as stored, start(None, **config) as other:
            assert set(stored.weights) == set(engine.state_dict())
            other.module[0].last = other.module[4].last = torch.zeros(WIDTH)  # as PyTorch wants of a strict load
            other.load_state_dict(stored.weights)
            assert other.module[4].seen == engine.module[4].seen == Counter(batches=2)


def test_a_model_that_has_never_run_has_buffers_without_values(tmp_path: Path) -> None:
    with start(tmp_path, durability="checkpoint") as engine:
        engine.commit()
        train(engine, 1)
        assert engine.module[0].last is not None
        engine.rollback(steps=1)
        assert engine.module[0].last is None
        assert engine.module[0].noise is None
        assert engine.module[0].seen == Counter()
        assert "0.last" not in engine.state_dict()
        train(engine, 1)
    with start(tmp_path, durability="checkpoint", resume="must") as engine:
        assert engine.module[0].last is None


def test_extra_state_is_of_the_step_whose_commit_it_is_in(tmp_path: Path) -> None:
    with start(tmp_path, durability=1) as engine:
        train(engine, 1)
        engine(torch.ones(4, WIDTH))
        assert engine.module[0].seen == Counter(batches=4)
        engine.rollback()
        assert engine.module[0].seen == Counter(batches=2)


class OfValues(nn.Linear):
    look: Any

    def get_extra_state(self) -> Any:
        return self.look(self)

    def set_extra_state(self, state: Any) -> None:
        """Nothing to take."""


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (lambda module: module.weight.sum().item(), r"1\._extra_state: get_extra_state\(\) of a OfValues cannot be"),
        (lambda module: {"w": [module.weight]}, r"1\._extra_state\['w'\]\[0\] is a tensor on the meta device"),
        (lambda module: 1 / 0, r"1\._extra_state: get_extra_state\(\) of a OfValues .* division by zero"),
        (lambda module: {"f": print}, r"1\._extra_state\['f'\] is a builtins.builtin_function_or_method"),
    ],
)  # fmt: skip
def test_extra_state_that_cannot_be_kept_is_refused(tmp_path: Path, look: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), OfValues(WIDTH, WIDTH))
    model[1].look = look
    with start(tmp_path, model, durability="checkpoint") as engine:
        with pytest.raises(ModelError, match=message):
            engine.commit()
        train(engine, 1)
        vars(model[1])["look"] = lambda module: list(module.weight.shape)
        assert engine.commit().step == 1


class Plain(nn.Module):
    """Counting without an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y


class Counted(Plain):
    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        assert state == 1


@pytest.mark.parametrize("kinds", [(Plain, Counted), (Counted, Plain)])
def test_commit_of_a_model_with_other_extra_states_is_refused(tmp_path: Path, kinds: tuple[Any, Any]) -> None:
    first, second = kinds
    with start(tmp_path, nn.Sequential(first()), durability="checkpoint") as engine:
        engine.commit()
    where = "the commit" if first is Counted else "this run"
    with pytest.raises(ModelError, match=rf"another model: only {where} has 0\._extra_state"):
        start(tmp_path, nn.Sequential(second()), durability="checkpoint", resume="must")
    with start(tmp_path, nn.Sequential(first()), durability="checkpoint", resume="must") as engine:
        assert engine.num_steps == 0


# Tracked objects


class Noted:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_what_cannot_be_tracked_is_refused_when_it_is_given(tmp_path: Path) -> None:
    with start(tmp_path, durability="checkpoint") as engine:
        for name in (5, None, "", b"a", "\ud800", "a\nb"):
            with pytest.raises(ModelError, match=r"engine\.track\(\): expected a name"):
                engine.track(name, Noted())
        with pytest.raises(ModelError, match=r"engine\.track\('c'\): expected an object .* got the class Noted itself"):
            engine.track("c", Noted)
        with pytest.raises(ModelError, match=r"got a object without state_dict\(\)"):
            engine.track("c", object())
        assert engine.commit().number >= 0


def test_what_is_tracked_no_more_is_in_no_later_commit(tmp_path: Path) -> None:
    with start(tmp_path, durability="checkpoint") as engine:
        engine.track("kept", Noted({frozenset([1, 2]): [{frozenset([3])}]}))
        engine.track("gone", Noted(1))
        engine.track("asked for by nobody", Noted(2))
        engine.commit()
        engine.untrack("gone")
        with pytest.raises(ModelError, match=r"engine\.untrack\('gone'\): nothing is tracked .* but 'kept', 'asked"):
            engine.untrack("gone")
        engine.track("gone", gone := Noted(3))
        assert gone.state == 3
        engine.untrack("gone")
        engine.commit()
    with start(tmp_path, durability="checkpoint", resume="must") as engine:
        kept = Noted()
        assert engine.track("kept", kept)
        assert kept.state == {frozenset([1, 2]): [{frozenset([3])}]}
        assert type(next(iter(kept.state))) is frozenset
        assert not engine.track("gone", Noted())
        engine.untrack("asked for by nobody")
        engine.commit()
    with pytest.raises(EngineStateError):
        engine.untrack("kept")
    with start(tmp_path, durability="checkpoint", resume="must") as engine:
        assert not engine.track("asked for by nobody", Noted())


def schedulers() -> dict[str, Any]:
    kinds = torch.optim.lr_scheduler
    return {
        "SequentialLR": lambda optimizer: kinds.SequentialLR(
            optimizer, [kinds.LinearLR(optimizer, total_iters=3), kinds.MultiStepLR(optimizer, [1, 2, 2, 4])], [3]
        ),
        "ChainedScheduler": lambda optimizer: kinds.ChainedScheduler(
            [kinds.ConstantLR(optimizer), kinds.ExponentialLR(optimizer, 0.9)]
        ),
        "OneCycleLR": lambda optimizer: kinds.OneCycleLR(optimizer, 0.1, total_steps=20),
        "CyclicLR": lambda optimizer: kinds.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
        "LambdaLR": lambda optimizer: kinds.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        "PolynomialLR": lambda optimizer: kinds.PolynomialLR(optimizer, 9),
        "CosineAnnealingWarmRestarts": lambda optimizer: kinds.CosineAnnealingWarmRestarts(optimizer, 3),
    }


@pytest.mark.parametrize("kind", list(schedulers()))
def test_every_scheduler_goes_on_as_if_never_stopped(tmp_path: Path, kind: str) -> None:
    def rates(path: Path | None, stop: int, **config: Any) -> tuple[list[float], dict[str, Any]]:
        found = []
        with start(path, **config) as engine:
            scheduler = schedulers()[kind](engine.optimizer)
            engine.track("scheduler", scheduler)
            while engine.num_steps < stop:
                train(engine, engine.num_steps + 1)
                scheduler.step()
                found.append(engine.optimizer.param_groups[0]["lr"])
            return found, scheduler.state_dict()

    expected, state = rates(None, 8)
    first, _ = rates(tmp_path, 2, durability=1, resume="auto")
    second, resumed = rates(tmp_path, 8, durability=1, resume="must")
    assert [*first, *second] == expected
    assert {name: type(value) for name, value in state.items()} == {n: type(value) for n, value in resumed.items()}


def test_an_average_of_the_model_is_tracked_as_any_state_dict(tmp_path: Path) -> None:
    torch.manual_seed(1)
    average = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with start(tmp_path, durability="checkpoint") as engine:
        engine.track("average", average)
        engine.commit()
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with infinity.open_checkpoint(tmp_path) as stored:
        expected: Any = average.state_dict()
        assert stored.tracked["average"]._metadata == expected._metadata
    with start(tmp_path, durability="checkpoint", resume="must") as engine:
        assert engine.track("average", other)
    assert all(
        torch.equal(a, b) for a, b in zip(average.state_dict().values(), other.state_dict().values(), strict=True)
    )
