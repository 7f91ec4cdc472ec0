"""State dicts with modules' own saving, loading and hooks; and optimizers' states that do not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from infinity import Engine, ModelError, StorageError
from infinity.engine.persistence.streamed import StreamedState
from infinity.store.store import TieredStore
from parity import assert_same, build, same_bits, tiny_scale
from parity_models import GPT

__all__ = ["tiny_scale"]


class Packed(nn.Module):
    """Two matrices that state dicts hold as one, by hooks; the other way round in its own ``_load_from_state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 3, bias=False)
        self.right = nn.Linear(4, 2, bias=False)
        self.register_state_dict_post_hook(self._pack)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._unpack)  # type: ignore[no-untyped-call]

    @staticmethod
    def _pack(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + "weight"] = torch.cat([state.pop(f"{prefix}{name}.weight") for name in ("left", "right")])

    @staticmethod
    def _unpack(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        whole = state.pop(prefix + "weight", None)
        if whole is not None:
            state[prefix + "left.weight"], state[prefix + "right.weight"] = whole.split([3, 2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.left(x), self.right(x)], -1)


class Counting(nn.Module):
    """Scales what it saves and loads, in methods of its own, and needs its value to load a part of it."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(5.0))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "doubled"] = self.weight.detach() * 2
        destination[prefix + "count"] = self.count

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        value = state.get(prefix + "doubled")
        if value is None:
            rest[2].append(prefix + "doubled")
            return
        with torch.no_grad():
            self.weight[: len(value)] = value / 2
            self.count.copy_(state[prefix + "count"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.packed = Packed()
        self.counting = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.counting(self.packed(self.first(x)))
        return y


@pytest.fixture(params=["fp32", "bf16"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Model, Engine]]:
    """A plain model, and an engine of one with the same values."""
    torch.manual_seed(0)
    plain = Model()
    model = Model()
    config = infinity.Config(device="cpu", hbm="1MiB", ram="1MiB", nvme=tmp_path, precision=request.param)
    with infinity.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config) as engine:
        engine.load_state_dict(plain.state_dict())
        yield plain, engine


def test_modules_own_saving_and_hooks_see_values(pair: tuple[Model, Engine]) -> None:
    plain, engine = pair
    expected = plain.state_dict()
    state = engine.state_dict()
    assert list(state) == list(expected)
    assert state._metadata == expected._metadata  # type: ignore[attr-defined]
    assert_same(dict(state), dict(expected), "at full precision")
    dtype = torch.bfloat16 if engine.config.precision == "bf16" else torch.float32
    assert_same(dict(engine.module.state_dict()), dict(plain.to(dtype).state_dict()), "in the precision that computes")
    assert_same(dict(engine.module.get_submodule("packed").state_dict()), dict(plain.packed.state_dict()), "a part")


def test_a_hook_registered_later_sees_values_too(pair: tuple[Model, Engine]) -> None:
    plain, engine = pair

    def add(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + "sum"] = state[prefix + "first.weight"].sum()

    for model in (plain, engine.module):
        model.register_state_dict_post_hook(add)
    expected = plain.state_dict()
    assert_same(dict(engine.state_dict()), dict(expected), "state")


def test_a_hook_that_looks_at_values_to_name_them_is_refused_with_a_way_out(pair: tuple[Model, Engine]) -> None:
    _, engine = pair

    def drop_small(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if float(state[prefix + "first.bias"].abs().max()) < 1:
            del state[prefix + "first.bias"]

    handle = engine.module.register_state_dict_post_hook(drop_small)
    with pytest.raises(ModelError, match=r"needs the values of parameters .* module\.state_dict\(\)"):
        engine.state_dict()
    assert "first.bias" not in engine.module.state_dict()
    handle.remove()
    assert "first.bias" in engine.state_dict()


def test_saving_that_raises_leaves_placeholders_and_training(pair: tuple[Model, Engine]) -> None:
    _, engine = pair

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = engine.module.get_submodule("packed").register_state_dict_post_hook(fail)
    for save in (engine.state_dict, engine.module.state_dict):
        with pytest.raises(ZeroDivisionError):
            save()
    handle.remove()
    assert all(param.isnan().all() for param in engine.module.parameters())
    engine.backward(engine(torch.ones(2, 4)).float().sum())
    engine.step()


def test_partial_states_go_through_modules_own_loading(pair: tuple[Model, Engine]) -> None:
    plain, engine = pair
    part = {"counting.doubled": torch.full((2,), 8.0), "counting.count": torch.tensor(3)}
    expected = plain.load_state_dict(part, strict=False)
    got = engine.load_state_dict(part, strict=False)
    assert got == expected
    assert_same(dict(engine.state_dict()), dict(plain.state_dict()), "state")


def test_a_trial_changes_nothing(pair: tuple[Model, Engine]) -> None:
    _, engine = pair
    part = {"counting.doubled": torch.full((2,), 8.0), "counting.count": torch.tensor(3)}
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    with pytest.raises(ModelError, match=r"missing: .*first\.weight.*"):
        engine.load_state_dict(part)
    assert_same(dict(engine.state_dict()), before, "state")


def test_post_hooks_may_forgive_missing_names(pair: tuple[Model, Engine]) -> None:
    plain, engine = pair
    for model in (plain, engine.module):
        model.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())
    state = {"first.bias": torch.ones(4)}
    assert engine.load_state_dict(state) == plain.load_state_dict(state)
    assert_same(dict(engine.state_dict()), dict(plain.state_dict()), "state")


class OnDemand(Mapping[str, Any]):
    """A state dict that tells how many values live at once."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state
        self.reads: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self._state[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def test_values_are_asked_for_as_they_are_needed_and_written_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build(GPT, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    config = infinity.Config(device="cpu", hbm="1MiB", ram="2MiB", nvme=tmp_path)
    with infinity.initialize(model, optimizer, config) as engine:
        values = {name: torch.randn_like(value) for name, value in engine.state_dict().items()}
        state = OnDemand({**values, "head.weight": values["tokens.weight"]})
        writes: list[int] = []
        change = engine.values._writer.change

        def note(changes: Any) -> None:
            changes = list(changes)
            writes.append(len(state.reads))
            change(changes)

        monkeypatch.setattr(engine.values._writer, "change", note)
        engine.load_state_dict(state)
        assert len(state.reads) == 2 * len(state)
        assert len(set(writes)) > 2, "written while others have not been read"
        owners = [module for module in model.modules() if list(module.parameters(recurse=False))]
        assert len(writes) <= len(owners) / 2, "modules that share a part are written together"
        assert_same(dict(engine.state_dict()), dict(state._state), "state")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1, 2], "expected a mapping of names to tensors, got list"),
        ({"first.weight": [1.0]}, "expected torch.Tensor or Tensor-like object"),
        ({"first.weight": None}, "expected torch.Tensor or Tensor-like object"),
    ],
)
def test_what_is_no_state_dict_is_refused(pair: tuple[Model, Engine], state: Any, message: str) -> None:
    _, engine = pair
    if isinstance(state, dict):
        state = {**engine.state_dict(), **state}
    with pytest.raises(ModelError, match=message):
        engine.load_state_dict(state)


# Optimizers


def trained(make: Callable[[nn.Module], torch.optim.Optimizer], tmp_path: Path) -> Engine:
    model, optimizer = build(GPT, make)
    engine = infinity.initialize(model, optimizer, infinity.Config(device="cpu", hbm="1MiB", ram="4MiB", nvme=tmp_path))
    engine.backward(engine(*models.tokens(0)))
    engine.step()
    return engine


def adam(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, **kwargs)


def sgd(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, **kwargs)


def saved(make: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, Any]:
    model, optimizer = build(GPT, make)
    model(*models.tokens(1)).backward()
    optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


def without_state(state: dict[str, Any], name: str) -> dict[str, Any]:
    for each in state["state"].values():
        each.pop(name)
    return state


def with_state(state: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    state["state"][0][name] = value
    return state


REFUSED: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "amsgrad into plain": (adam, lambda: saved(lambda m: adam(m, amsgrad=True)),
        "no room was planned for state 'max_exp_avg_sq' of parameter .*: .* has exp_avg, exp_avg_sq"),
    "momentum into plain": (sgd, lambda: saved(lambda m: sgd(m, momentum=0.9)),
        "no room was planned for state 'momentum_buffer' of parameter .*: .* has none"),
    "another class": (adam, lambda: saved(sgd), "group 0 has no '.*', which Adam needs"),
    "and the reverse": (sgd, lambda: saved(adam), "group 0 has no '.*', which SGD needs"),
    "a state is missing": (adam, lambda: without_state(saved(adam), "exp_avg_sq"), "has no 'exp_avg_sq'; it has: step"),
    "the step is missing": (adam, lambda: without_state(saved(adam), "step"), "Adam cannot take this state: KeyError"),
    "a wrong shape": (adam, lambda: with_state(saved(adam), "exp_avg", torch.ones(2)), "expected a tensor of shape"),
    "a wrong small shape": (adam, lambda: with_state(saved(adam), "step", torch.ones(2)), "expected a tensor of shape"),
    "a state is no tensor": (adam, lambda: with_state(saved(adam), "exp_avg", [1.0]), "expected a tensor .* got list"),
    "no mapping": (adam, lambda: [1], "expected a state dict of an optimizer, got list"),
    "states are no mapping": (adam, lambda: {**saved(adam), "state": [1]}, "expected 'state' to be a mapping"),
    "groups without params": (adam, lambda: {**saved(adam), "param_groups": [{}]}, "'params'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_states_that_do_not_fit_are_refused_and_change_nothing(case: str, tmp_path: Path) -> None:
    make, state, message = REFUSED[case]
    with trained(make, tmp_path) as engine:
        before = engine.optimizer.state_dict()
        with pytest.raises(ModelError, match=message):
            engine.optimizer.load_state_dict(state())
        assert_same(engine.optimizer.state_dict(), before, "state")
        engine.backward(engine(*models.tokens(0)))
        engine.step()


def test_states_of_older_versions_are_brought_up_to_date_by_the_class(tmp_path: Path) -> None:
    """Steps used to be numbers, and groups had fewer settings."""
    state = saved(adam)
    for each in state["state"].values():
        each["step"] = 5
    del state["param_groups"][0]["maximize"]
    _, optimizer = build(GPT, adam)
    optimizer.load_state_dict(copy.deepcopy(state))
    with trained(adam, tmp_path) as engine:
        engine.optimizer.load_state_dict(state)
        assert_same(engine.optimizer.state_dict(), optimizer.state_dict(), "state")


def test_step_counters_keep_the_dtype_that_pytorch_keeps(tmp_path: Path) -> None:
    state = saved(adam)
    for each in state["state"].values():
        each["step"] = each["step"].double()
    _, optimizer = build(GPT, adam)
    optimizer.load_state_dict(copy.deepcopy(state))
    with trained(adam, tmp_path) as engine:
        engine.optimizer.load_state_dict(state)
        assert_same(engine.optimizer.state_dict(), optimizer.state_dict(), "state")
        got = engine.optimizer.state_dict()["state"][0]["step"]
        assert got.dtype == torch.float64
        assert same_bits(got, state["state"][0]["step"])


def test_a_load_that_fails_half_way_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trained(adam, tmp_path) as engine:
        state = engine.optimizer.state_dict()

        async def fail(*args: Any, **kwargs: Any) -> Any:
            raise StorageError("write failed on purpose", path="shards.bin")

        monkeypatch.setattr(TieredStore, "put", fail)
        with pytest.raises(StorageError, match="on purpose"):
            engine.optimizer.load_state_dict(state)
        with pytest.raises(infinity.EngineStateError, match="failed half-way"):
            engine(*models.tokens(0))


class Streamed(StreamedState):
    """A state of which large tensors are read, and the reads counted, when they are asked for."""

    def __init__(self, state: Mapping[str, Any], read: list[str]) -> None:
        self._state = state
        self._read = read

    @property
    def on_demand(self) -> frozenset[str]:
        return frozenset(name for name, value in self._state.items() if value.dim())

    def outline(self) -> dict[str, Any]:
        return {
            name: value.new_full((), torch.nan).expand(value.shape) if name in self.on_demand else value
            for name, value in self._state.items()
        }

    def __getitem__(self, name: str) -> Any:
        self._read.append(name)
        return self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


class Looking(torch.optim.Adam):
    """Brings states up to date by looking at their values."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for each in self.state.values():
            each["exp_avg"] = each["exp_avg"] + 0


@pytest.mark.parametrize("kind", [torch.optim.Adam, Looking])
def test_states_that_are_read_on_demand_are_read_once_and_late(kind: type[torch.optim.Adam], tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return kind(model.parameters(), lr=0.01)

    state, read = saved(make), list[str]()
    streamed = {**state, "state": {number: Streamed(each, read) for number, each in state["state"].items()}}
    _, optimizer = build(GPT, make)
    optimizer.load_state_dict(copy.deepcopy(state))
    with trained(make, tmp_path) as engine:
        with pytest.raises(ModelError, match="expected parameter groups"):
            engine.optimizer.load_state_dict({**streamed, "param_groups": []})
        assert kind is Looking or not read
        read.clear()
        engine.optimizer.load_state_dict(streamed)
        assert read.count("exp_avg") == read.count("exp_avg_sq") == len(state["state"])
        assert_same(engine.optimizer.state_dict(), optimizer.state_dict(), "state")
