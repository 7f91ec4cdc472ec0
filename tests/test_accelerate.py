"""``Accelerator``: the loop of scripts for Hugging Face Accelerate, with the engine; its numbers, its refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]
from accelerate.utils import (  # type: ignore[import-untyped]
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    ProjectConfiguration,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset

from infinity import Config, ConfigError, DirectoryError, EngineStateError, ModelError
from infinity.integrations.accelerate import Accelerator

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGETS: dict[str, Any] = {"hbm": "1MiB", "ram": "8MiB"}
FP16 = {"precision": "fp16"}


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps one state for the whole process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Rows(Dataset[torch.Tensor]):
    """Vectors of their number."""

    def __init__(self, count: int = 10) -> None:
        self._rows = torch.randn(count, 16, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


class Net(nn.Sequential):
    """Three blocks, with dropout."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)))


Parts = tuple[nn.Module, torch.optim.Optimizer, DataLoader[torch.Tensor], Any]


def parts(count: int = 10) -> Parts:
    """What a script prepares."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Rows(count), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(accelerator: Any, prepared: Parts, num_epochs: int = 2) -> list[Any]:
    """The loop of accelerate's own documentation, with all that may come between; what it sees."""
    model, optimizer, loader, scheduler = prepared
    seen: list[Any] = []
    for _ in range(num_epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                seen.append(float(norm))
            seen += [loss.item(), optimizer.param_groups[0]["lr"], accelerator.sync_gradients]
        model.eval()
        with torch.no_grad():
            outputs = torch.cat([accelerator.gather_for_metrics(model(batch)) for batch in loader])
        model.train()
        seen.append(outputs)
    return seen


def same(seen: list[Any], expected: list[Any]) -> bool:
    """Whether two loops have seen the same, bit for bit."""
    return len(seen) == len(expected) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(seen, expected, strict=True)
    )


def expected(**settings: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What plain accelerate gives."""
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    prepared = accelerator.prepare(*parts())
    return train(accelerator, prepared), prepared[0].state_dict()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"max_grad_norm": 0.05}, {"max_grad_norm": 0.05, "accumulation_steps": 1}])
def test_the_numbers_are_those_of_plain_accelerate(steps: int, fields: dict[str, Any], tmp_path: Path) -> None:
    wanted, state = expected(gradient_accumulation_steps=steps)
    accelerator = Accelerator({**BUDGETS, "nvme": str(tmp_path), **fields}, cpu=True, gradient_accumulation_steps=steps)
    scheduler, loader, optimizer, model = accelerator.prepare(*reversed(parts()))  # in any order
    assert accelerator.unwrap_model(model) is model is accelerator.engine.module
    assert same(train(accelerator, (model, optimizer, loader, scheduler)), wanted)
    got = accelerator.get_state_dict(model)
    assert all(torch.equal(got[name], value) for name, value in state.items())
    accelerator.end_training()
    assert accelerator.has_engine  # scripts save the model after this
    accelerator.free_memory()
    assert not accelerator.has_engine


def test_a_saved_state_is_gone_on_from(tmp_path: Path) -> None:
    class Counter:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    def begin(project: Path) -> tuple[Any, Parts, Counter]:
        accelerator = Accelerator(
            BUDGETS, cpu=True, gradient_accumulation_steps=2,
            project_config=ProjectConfiguration(str(project), automatic_checkpoint_naming=True, total_limit=2),
        )  # fmt: skip
        prepared, counter = accelerator.prepare(*parts()), Counter()
        accelerator.register_for_checkpointing(counter)
        return accelerator, prepared, counter

    accelerator, prepared, counter = begin(tmp_path)
    train(accelerator, prepared, 1)
    counter.count = 7
    places = [accelerator.save_state() for _ in range(3)]
    assert [place.exists() for place in places] == [False, True, True]
    assert not list(places[2].glob("custom_checkpoint*"))
    assert not list(places[2].glob("optimizer*"))
    wanted = train(accelerator, prepared, 1)
    accelerator.free_memory()

    accelerator, prepared, counter = begin(tmp_path)
    for _ in range(2):
        list(prepared[2])  # what was trained on, and evaluated
    accelerator.load_state()
    assert counter.count == 7
    assert same(train(accelerator, prepared, 1), wanted)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DirectoryError):
        accelerator.load_state(str(tmp_path / "empty"))
    accelerator.free_memory()


def test_a_durable_run_resumes_with_its_scheduler(tmp_path: Path) -> None:
    config = Config(device="cpu", hbm="1MiB", ram="8MiB", nvme=str(tmp_path), durability="checkpoint", resume="auto")
    accelerator = Accelerator(config, cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    train(accelerator, (model, optimizer, loader, scheduler), 1)
    accelerator.engine.commit()
    state, rate = scheduler.state_dict(), optimizer.param_groups[0]["lr"]
    accelerator.free_memory()
    _, optimizer, _, scheduler = accelerator.prepare(*parts())
    assert accelerator.engine.num_steps == 5
    assert scheduler.state_dict() == state
    assert optimizer.param_groups[0]["lr"] == rate != 1e-2
    accelerator.free_memory()


def test_weights_are_saved_beside_other_files(tmp_path: Path) -> None:
    accelerator = Accelerator(BUDGETS, mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(*parts())[0]
    (tmp_path / "mine.txt").touch()
    accelerator.save_model(model, tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 3
    accelerator.save_model(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "model.safetensors"]
    accelerate.load_checkpoint_in_model(plain := nn.Sequential(*Net().double().float()), str(tmp_path))
    assert all(torch.equal(value, Net().state_dict()[name]) for name, value in plain.state_dict().items())
    with pytest.raises(ConfigError, match="safetensors only"):
        accelerator.save_model(model, tmp_path, safe_serialization=False)
    accelerator.free_memory()


def test_transformers_saves_what_get_state_dict_returns(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs Hugging Face transformers, which the extra 'test' installs")
    from transformers import GPT2LMHeadModel

    from trainers import gpt2, same, texts

    accelerator, model = Accelerator(BUDGETS, cpu=True), gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = {name: value[None] for name, value in texts(1)[0].items()}
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    state = accelerator.get_state_dict(model)
    given = dict(state)  # transformers empties it
    assert state["lm_head.weight"] is state["transformer.wte.weight"]  # as in the model
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=given
    )
    assert same(dict(GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()), state)
    accelerator.save(state, tmp_path / "state.pt")
    assert same(torch.load(tmp_path / "state.pt", weights_only=True), state)
    assert not torch.equal(state["transformer.wte.weight"], gpt2().transformer.wte.weight)
    accelerator.free_memory()


def test_the_rest_of_the_interface_is_that_of_accelerate(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    for kind in (accelerate.Accelerator, lambda cpu: Accelerator(BUDGETS, cpu=cpu)):
        accelerator = kind(cpu=True)
        model, optimizer, loader, _ = accelerator.prepare(*parts(9))
        for batch in accelerator.skip_first_batches(loader, 1):
            with accelerator.no_sync(model):
                accelerator.backward(model(batch).square().mean())
                accelerator.trigger_sync_in_backward(model)
            with accelerator.autocast():
                loss = model(batch).square().mean()
            accelerator.backward(loss)
            accelerator.unscale_gradients(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        accelerator.print("printed")
        assert accelerator.is_main_process
        assert accelerator.is_local_main_process
        with accelerator.join_uneven_inputs([model]), accelerator.main_process_first():
            seen.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.wait_for_everyone()
        accelerator.clear()
    assert len(seen) == 10
    assert seen[:5] == seen[5:]
    assert capsys.readouterr().out == "printed\n" * 2


def test_another_order_of_prepare_is_as_good() -> None:
    wanted = train(accelerate.Accelerator(cpu=True), accelerate.Accelerator(cpu=True).prepare(*parts()))
    accelerator = Accelerator(BUDGETS, cpu=True)
    model, raw, loader, scheduler = parts()
    scheduler = accelerator.prepare(scheduler)
    model, _ = accelerator.prepare(model, raw)
    loader = accelerator.prepare(loader)
    assert same(train(accelerator, (model, raw, loader, scheduler)), wanted)  # the user's own optimizer steps as well
    accelerator.free_memory()

    accelerator = Accelerator(BUDGETS, cpu=True)
    model, raw, loader, _ = parts()
    model, optimizer, loader = accelerator.prepare(model, raw, loader)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    assert same(train(accelerator, (model, optimizer, loader, scheduler)), wanted)
    accelerator.free_memory()


def test_what_remains_after_the_engine_refuses_clearly() -> None:
    accelerator = Accelerator(BUDGETS, cpu=True)
    model, optimizer, *_ = accelerator.prepare(*parts())
    accelerator.free_memory()
    with pytest.raises(EngineStateError, match="the engine that had it is closed"):
        model(torch.randn(2, 16))
    with pytest.raises(EngineStateError, match="the engine that had it is closed"):
        accelerator.get_state_dict(model)
    with pytest.raises(ModelError, match=r"one that prepare\(\) has returned"):
        accelerator.prepare(Net(), optimizer)
    prepared = accelerator.prepare(*parts())  # and begins anew
    accelerator.engine.close()
    with pytest.raises(EngineStateError, match="is closed"):
        train(accelerator, prepared, 1)
    accelerator.prepare(*parts())
    assert accelerator.has_engine
    accelerator.free_memory()


def test_precision_is_the_engines() -> None:
    accelerator = Accelerator(BUDGETS, mixed_precision="bf16", cpu=True)
    model, optimizer, *_ = accelerator.prepare(*parts())
    with accelerator.autocast():
        assert model(torch.randn(2, 16)).dtype is torch.bfloat16
    assert (accelerator.mixed_precision, accelerator.engine.config.precision) == ("bf16", "bf16")
    accelerator.free_memory()
    AcceleratorState._reset_state(True)

    scaler = GradScalerKwargs(init_scale=2.0**40, growth_interval=7)
    accelerator = Accelerator(BUDGETS, mixed_precision="fp16", cpu=True, kwargs_handlers=[scaler])
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    accelerator.backward(model(next(iter(loader))).float().square().mean())
    optimizer.step()
    scheduler.step()
    assert optimizer.step_was_skipped
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.engine.loss_scale == 2.0**39
    assert accelerator.engine.config.loss_scale_window == 7
    assert scheduler.scheduler.last_epoch == 0
    accelerator.free_memory()


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"mixed_precision": "fp8"}, "expected 'no', 'bf16' or 'fp16', got 'fp8'"),
        ({"mixed_precision": "fp16"}, r"mixed_precision='fp16' and Config\(precision='bf16'\)"),
        ({"mixed_precision": "no"}, r"mixed_precision='no' and Config\(precision='bf16'\)"),
        ({"dynamo_backend": "inductor"}, r"Config\(compile=True\)"),
        ({"fsdp_plugin": object()}, "infinity takes the place of FSDP"),
        ({"kwargs_handlers": [AutocastKwargs()]}, "AutocastKwargs"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="fp16")]}, "communication hook"),
        ({"kwargs_handlers": [GradScalerKwargs(growth_factor=3.0)], "infinity_config": FP16}, "got 3.0 and 0.5"),
        ({"infinity_config": True}, "expected a Config, a dictionary or a path, got bool"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Accelerator(**{"infinity_config": {"precision": "bf16"}, "cpu": True, **settings})


def test_what_accelerate_launch_has_set_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Accelerator(BUDGETS, cpu=True).infinity_config.precision == "bf16"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="ACCELERATE_USE_FSDP"):
        Accelerator(BUDGETS, cpu=True)


def test_what_the_engine_cannot_do_is_refused(tmp_path: Path) -> None:
    class Switching(torch.optim.SGD):
        def train(self) -> None:
            """Exchange parameters."""

    accelerator = Accelerator(BUDGETS, cpu=True)
    with pytest.raises(EngineStateError, match=r"call accelerator\.prepare"):
        _ = accelerator.engine
    model, optimizer, loader, _ = parts()
    for alone in (model, optimizer):
        with pytest.raises(ModelError, match="one model and its optimizer in one call"):
            accelerator.prepare(alone, loader)
    with pytest.raises(ModelError, match="not under the engine"):
        accelerator.prepare_model(model)
    with pytest.raises(ModelError, match=r"Switching has train\(\)"):
        accelerator.prepare(model, Switching(model.parameters()))
    model, optimizer = accelerator.prepare(model, optimizer)
    assert accelerator.prepare(optimizer, model) == (optimizer, model)
    with pytest.raises(EngineStateError, match="make another Accelerator"):
        accelerator.prepare(*parts())
    with pytest.raises(ModelError, match=r"need not be prepared: model\.to\(accelerator\.device\)"):
        accelerator.prepare(Net())
    with pytest.raises(ModelError, match=r"lomo_backward\(\) is not supported"):
        accelerator.lomo_backward(model(torch.randn(2, 16)).mean(), 0.1)
    with pytest.raises(ModelError, match=r"use clip_grad_norm_\(\)"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(ConfigError, match="create_graph is not supported"):
        accelerator.backward(model(torch.randn(2, 16)).mean(), create_graph=True)
    with pytest.raises(ModelError, match="closure"):
        optimizer.step(lambda: 0.0)
    accelerator.free_memory()

    accelerator = Accelerator({**BUDGETS, "max_grad_norm": 1.0}, cpu=True)
    model, optimizer = accelerator.prepare(*parts()[:2])
    with pytest.raises(ConfigError, match=r"clip_grad_norm_\(max_norm=2.0"):
        accelerator.clip_grad_norm_(model.parameters(), 2.0)
    accelerator.free_memory()
