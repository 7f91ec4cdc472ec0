"""Models and optimizers that cannot be managed, and uses of the engine without meaning, are refused in clear words."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from accidents import good_step, two_groups
from fakes_io import resources
from infinity import Config, DiskFullError, Engine, EngineStateError, ModelError
from infinity.io.backend import Priority
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey
from parity import ENOUGH, Parity, Tiered, assert_same
from parity_models import GPT, WIDTH


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def empty() -> tuple[Any, Any]:
    return nn.Sequential(nn.ReLU()), torch.optim.SGD([nn.Parameter(torch.ones(1))])


def no_module() -> tuple[Any, Any]:
    return [nn.Linear(2, 2)], torch.optim.SGD([nn.Parameter(torch.ones(1))])


def no_optimizer() -> tuple[Any, Any]:
    return nn.Linear(2, 2), torch.optim.SGD


def foreign_parameter() -> tuple[Any, Any]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3, 5))])


def replaced_parameter() -> tuple[Any, Any]:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    model.weight = nn.Parameter(torch.ones(2, 2))
    return model, optimizer


def sparse_embedding() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    return model, sgd(model)


def renormalising_embedding() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))
    return model, sgd(model)


def lazy() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    return model, torch.optim.SGD(model[0].parameters())


def sparse_parameter() -> tuple[Any, Any]:
    model = nn.Linear(2, 2)
    model.extra = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    return model, torch.optim.SGD([model.weight])


def shared_memory() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    return model, sgd(model)


def without_values() -> tuple[Any, Any]:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    return model, sgd(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (empty, "model: Sequential has no parameters; there is nothing to train"),
        (no_module, r"model: expected a torch.nn.Module, got list"),
        (no_optimizer, r"optimizer: expected a torch.optim.Optimizer, got type"),
        (
            foreign_parameter,
            r"parameter 2 of group 0, of shape \(3, 5\), is not one of the model's; build the",
        ),
        (replaced_parameter, r"parameter 0 of group 0, of shape \(2, 2\), is not one of the model's"),
        (sparse_embedding, "module 0: sparse gradients are not supported; build it with sparse=False"),
        (renormalising_embedding, "module 0: max_norm changes the weight in forward, which is not supported"),
        (lazy, r"parameter 1\.weight is lazy; run one forward pass before initialize\(\)"),
        (sparse_parameter, r"parameter extra has layout torch\.sparse_coo; expected a dense tensor"),
        (shared_memory, r"parameters 0\.weight and 1\.weight share memory but are two nn\.Parameter objects"),
        (without_values, r"(?s)plain meta tensor of shape .*no initialisation was recorded.*deferred_init"),
    ],
)
def test_models_and_optimizers(make: Callable[[], tuple[Any, Any]], message: str, tmp_path: Path) -> None:
    model, optimizer = make()
    before = resources()
    for nvme in ((), tmp_path):
        with pytest.raises(ModelError, match=message):
            infinity.initialize(model, optimizer, Config(**ENOUGH, nvme=nvme))
        assert resources() == before
        assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_or_was_under_an_engine() -> None:
    model = GPT()
    optimizer = two_groups(model)
    with infinity.initialize(model, optimizer, Config(**ENOUGH)) as engine:
        with pytest.raises(ModelError, match=r"parameter \S+ has no values.*another engine"):
            infinity.initialize(model, optimizer, Config(**ENOUGH))
        engine.backward(engine(*models.tokens(0)))
        engine.step()
    with pytest.raises(ModelError, match=r"parameter \S+ has no values.*or was until close\(\), under another engine"):
        infinity.initialize(model, optimizer, Config(**ENOUGH))


# Use


def new_group() -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.ones(2))]}


def step_with_another_group(engine: Engine) -> None:
    engine.optimizer.param_groups.append(new_group())
    engine.step()


REFUSED: list[tuple[Callable[[Engine], Any], str]] = [
    (lambda e: e.optimizer.step(lambda: 0.0), r"step\(closure\) is not supported: call loss\.backward\(\) before"),
    (lambda e: e.optimizer.zero_grad(set_to_none=False), r"zero_grad\(set_to_none=False\) is not supported"),
    (lambda e: e.optimizer.add_param_group(new_group()), r"add every parameter group before infinity\.initialize\(\)"),
    (
        lambda e: e.optimizer.load_state_dict({}),
        r"expected a state dict of an optimizer, got one without 'param_groups'",
    ),
    (
        lambda e: e.module.load_state_dict({}),
        r"load_state_dict\(\) of a \w+ under the engine.*engine\.load_state_dict\(\)",
    ),
    (lambda e: step_with_another_group(e), r"group 2 holds a parameter of shape \(2,\)"),
]


@pytest.mark.parametrize(("use", "message"), REFUSED)
@pytest.mark.parametrize("whose", ["engine's", "user's"])
def test_uses_that_are_refused_leave_the_engine_whole(use: Any, message: str, whose: str, tmp_path: Path) -> None:
    def script(trainer: Any) -> list[torch.Tensor]:
        losses = [good_step(trainer, 0)]
        loss = trainer.model(*models.tokens(1))
        loss.backward()
        if isinstance(trainer, Tiered):
            refused(trainer)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return [*losses, loss.detach(), good_step(trainer, 2)]

    def refused(trainer: Tiered) -> None:
        subject: Any = trainer.engine
        if whose == "user's":
            subject = _Facade(trainer.engine, trainer.user)
        with pytest.raises(ModelError, match=message):
            use(subject)
        del trainer.engine.optimizer.param_groups[2:]

    case = Parity(GPT, two_groups, script)
    case.check(case.blockwise(tmp_path))


class _Facade:
    """The engine with the user's own optimizer in the place of its own."""

    def __init__(self, engine: Engine, user: torch.optim.Optimizer) -> None:
        self.module, self.optimizer, self.step = engine.module, user, user.step


def test_use_after_close(tmp_path: Path) -> None:
    model = GPT()
    engine = infinity.initialize(model, two_groups(model), Config(**ENOUGH, nvme=tmp_path))
    late = engine(*models.tokens(0))
    engine.close()
    engine.close()
    assert list(tmp_path.iterdir()) == []
    for use in (
        lambda: engine(*models.tokens(0)), lambda: engine.backward(late), engine.step, engine.zero_grad,
        engine.state_dict, engine.usage, engine.optimizer.step, engine.optimizer.zero_grad,
        engine.synchronize,
    ):  # fmt: skip
        with pytest.raises(EngineStateError, match=r"closed; make another with infinity\.initialize\(\)"):
            use()
    with pytest.raises(EngineStateError, match="closed"):
        late.backward()


def test_an_engine_that_is_forgotten_gives_everything_back(tmp_path: Path) -> None:
    before = threading.enumerate()
    engine = infinity.initialize(model := GPT(), two_groups(model), Config(**ENOUGH, nvme=tmp_path))
    engine.backward(engine(*models.tokens(0)))
    engine.step()
    del engine, model
    gc.collect()
    assert threading.enumerate() == before
    assert list(tmp_path.iterdir()) == []


class SparseGradient(nn.Module):
    """Makes a sparse gradient without a module that would tell."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + torch.nn.functional.embedding(torch.tensor(2), self.table, sparse=True)).sum()


def test_a_sparse_gradient(tmp_path: Path) -> None:
    model = SparseGradient()
    with infinity.initialize(model, sgd(model), Config(**ENOUGH, nvme=tmp_path)) as engine:
        loss = engine(*models.vectors(0))
        with pytest.raises(ModelError, match=r"parameter table: got a gradient of layout torch\.sparse_coo"):
            loss.backward()


def test_a_disk_that_fills_up_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preallocated file makes it unlikely; a file system with copy-on-write or quotas can still do it."""
    case = Parity(GPT, two_groups, lambda trainer: [])
    model = GPT()
    engine = infinity.initialize(model, two_groups(model), case.smallest(tmp_path))
    try:
        engine.backward(engine(*models.tokens(0)))

        async def write(
            tier: NvmeTier, key: ShardKey, source: memoryview, *, priority: Priority = Priority.BACKGROUND
        ) -> None:
            raise DiskFullError(f"write of {key} failed: the file system is full", path=tmp_path, errno=28)

        monkeypatch.setattr(NvmeTier, "write", write)
        with pytest.raises(DiskFullError, match=r"write of unit \d+ part \d+ \S+ failed: the file system is full"):
            engine.step()
        with pytest.raises(EngineStateError, match=r"half-way.*the file system is full"):
            engine(*models.tokens(0))
    finally:
        engine.close()
    assert list(tmp_path.iterdir()) == []


def test_values_of_the_failed_start_of_a_second_model_are_untouched(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    twin.load_state_dict(model.state_dict())
    with infinity.initialize(other := GPT(), two_groups(other), Config(**ENOUGH, nvme=tmp_path)):
        with pytest.raises(infinity.DirectoryInUseError):
            infinity.initialize(model, sgd(model), Config(**ENOUGH, nvme=tmp_path))
        assert_same(dict(model.state_dict()), dict(twin.state_dict()), "weights")
