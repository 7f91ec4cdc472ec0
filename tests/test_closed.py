"""Once its engine has ended, however it ended, a model refuses to compute with placeholders until it has values."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from accidents import PlannedError, two_groups
from infinity import Config, Engine, EngineStateError, ModelError, StorageError
from infinity.store.store import TieredStore
from parity import ENOUGH, assert_same, build
from parity_models import GPT, WIDTH

State = dict[str, Any]
EMPTY = r"parameter \S+ has no value, because the engine that had it is closed.*engine\.state_dict\(\).*load_state_dict"


def started(directory: Path, precision: str = "fp32") -> tuple[Engine, nn.Module]:
    model, optimizer = build(GPT, two_groups)
    engine = infinity.initialize(model, optimizer, Config(**ENOUGH, nvme=directory, precision=precision))
    return engine, model


def by_close(directory: Path) -> tuple[nn.Module, State]:
    engine, model = started(directory)
    engine.backward(engine(*models.tokens(0)))
    before = engine.has_gradients, engine.is_open
    engine.step()
    state, waits = dict(engine.state_dict()), engine.has_gradients
    engine.close()
    assert [*before, waits, engine.is_open] == [True, True, False, False]
    return model, state


def by_context(directory: Path) -> tuple[nn.Module, State]:
    engine, model = started(directory)
    with engine:
        return model, dict(engine.state_dict())


def by_exception_in_forward(directory: Path) -> tuple[nn.Module, State]:
    engine, model = started(directory)
    state = dict(engine.state_dict())

    def fail(*_: object) -> None:
        raise PlannedError

    handle = model.get_submodule("blocks.1.mlp").register_forward_hook(fail)
    with pytest.raises(PlannedError), engine:
        engine(*models.tokens(0))
    handle.remove()
    return model, state


def by_garbage_collection(directory: Path) -> tuple[nn.Module, State]:
    engine, model = started(directory)
    state = dict(engine.state_dict())
    del engine
    gc.collect()
    assert list(directory.iterdir()) == [], "it is closed"
    return model, state


def by_failing_start(directory: Path) -> tuple[nn.Module, State]:
    model, optimizer = build(GPT, two_groups)
    state = copy.deepcopy(dict(model.state_dict()))
    real_put, num_puts = TieredStore.put, 0

    async def put(store: TieredStore, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_puts
        num_puts += 1
        if num_puts == 4:
            raise StorageError("write failed on purpose", path=directory)
        return await real_put(store, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TieredStore, "put", put)
        with pytest.raises(StorageError):
            infinity.initialize(model, optimizer, Config(**ENOUGH, nvme=directory))
    return model, state


ENDINGS = [by_close, by_context, by_exception_in_forward, by_garbage_collection, by_failing_start]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("end", ENDINGS)
def test_forward_is_refused_until_values_are_loaded(
    end: Callable[[Path], tuple[nn.Module, State]], assign: bool, tmp_path: Path
) -> None:
    model, state = end(tmp_path)
    with pytest.raises(EngineStateError, match=rf"forward of a GPT: {EMPTY}"):
        model(*models.tokens(0))
    with torch.no_grad(), pytest.raises(EngineStateError, match=EMPTY):
        model.get_submodule("tokens")(*models.tokens(0))
    model.load_state_dict(state, assign=assign)
    other = GPT()
    other.load_state_dict(state, assign=assign)
    assert_same(dict(model.state_dict()), state, "state_dict")
    losses = []
    for each in (model, other):
        torch.manual_seed(5)
        losses.append(each(*models.tokens(3)))
        losses[-1].backward()
    assert_same(losses[0].detach(), losses[1].detach(), "loss")
    for (name, param), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_same(param.grad, expected.grad, name)
    copy.deepcopy(model.get_submodule("blocks"))
    torch.save(model, io.BytesIO())


USES: dict[str, Callable[[nn.Module], object]] = {
    "block": lambda model: model.get_submodule("blocks.1")(torch.zeros(1, 3, WIDTH)),
    "linear": lambda model: model.get_submodule("blocks.1.qkv")(torch.zeros(1, WIDTH)),
    "tied": lambda model: model.get_submodule("head")(torch.zeros(1, WIDTH)),
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a part": lambda model: model.get_submodule("blocks.0.mlp").state_dict(),
    "deepcopy": copy.deepcopy,
    "average": torch.optim.swa_utils.AveragedModel,
    "save": lambda model: torch.save(model, io.BytesIO()),
    "half": lambda model: model.half(),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "script": torch.jit.script,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("use", USES)
def test_whatever_would_make_nan_of_it_is_refused(use: str, tmp_path: Path) -> None:
    model, _ = by_context(tmp_path)
    with pytest.raises(EngineStateError, match=EMPTY):
        USES[use](model)
    assert model.state_dict(keep_vars=True)["norm.weight"] is model.get_parameter("norm.weight")
    model.to("cpu").float()


def test_values_come_back_module_by_module(tmp_path: Path) -> None:
    model, state = by_context(tmp_path)
    block, x = model.get_submodule("blocks.0"), torch.ones(1, 3, WIDTH)
    block.load_state_dict({name.removeprefix("blocks.0."): v for name, v in state.items() if "blocks.0." in name})
    assert block.eval()(x).isfinite().all()
    with pytest.raises(EngineStateError, match=rf"forward of a GPT: {EMPTY}"):
        model(*models.tokens(0))


def test_a_state_that_leaves_one_out_or_does_not_fit_leaves_it_refused(tmp_path: Path) -> None:
    model, state = by_context(tmp_path)
    partial = {**state, "norm.bias": torch.ones(WIDTH + 1)}
    del partial["norm.weight"]
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"norm.weight".*size mismatch for norm.bias'):
        model.load_state_dict(partial)
    for name in ("norm.weight", "norm.bias"):
        with pytest.raises(EngineStateError, match=rf"parameter {name} has no value"):
            model(*models.tokens(0))
        model.get_parameter(name).data = state[name]
    assert model(*models.tokens(0)).isfinite()


def test_a_value_that_cannot_be_copied_leaves_no_garbage(tmp_path: Path) -> None:
    model, state = by_context(tmp_path)
    with pytest.raises(RuntimeError, match=r'parameter named "norm\.bias"'):
        model.load_state_dict({**state, "norm.bias": torch.empty(WIDTH, device="meta")})
    assert model.state_dict()["norm.bias"].isnan().all()


class Small(nn.Module):
    """Parameters whose placeholders are as large as they are, or larger."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
        self.count = nn.Parameter(torch.tensor(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.none.sum() + self.count


def test_parameters_of_one_element_and_of_none(tmp_path: Path) -> None:
    model = Small()
    with infinity.initialize(model, torch.optim.SGD(model.parameters()), Config(**ENOUGH, nvme=tmp_path)) as engine:
        state = dict(engine.state_dict())
    with pytest.raises(EngineStateError, match="parameter scale has no value"):
        model(torch.ones(()))
    with pytest.raises(ModelError, match=r"parameter scale has no values.*another engine"):
        infinity.initialize(model, torch.optim.SGD(model.parameters()), Config(**ENOUGH, nvme=tmp_path))
    model.load_state_dict(state)
    assert model(torch.ones(())) == 7


def test_masters_come_back_at_full_precision_by_assignment(tmp_path: Path) -> None:
    engine, model = started(tmp_path, "bf16")
    with engine:
        state = dict(engine.state_dict())
        computing = dict(model.state_dict())
    model.load_state_dict(state)
    assert_same(dict(model.state_dict()), computing, "in the dtype of the model")
    engine, model = started(tmp_path, "bf16")
    engine.close()
    model.load_state_dict(state, assign=True)
    assert_same(dict(model.state_dict()), state, "in the dtype of the state")


def test_a_model_that_has_its_values_back_trains_under_another_engine(tmp_path: Path) -> None:
    model, state = by_context(tmp_path)
    model.load_state_dict(state)
    optimizer = two_groups(model)
    with infinity.initialize(model, optimizer, Config(**ENOUGH, nvme=tmp_path)) as engine:
        assert_same(dict(engine.state_dict()), state, "state")
        engine.backward(engine(*models.tokens(0)))
        engine.step()
        for module in (model, model.get_submodule("blocks.1.mlp.1"), model.get_submodule("head")):
            with pytest.raises(ModelError, match="under the engine"):
                copy.deepcopy(module)
    with pytest.raises(EngineStateError, match=EMPTY):
        model(*models.tokens(0))
