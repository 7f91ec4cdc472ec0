"""DeepSpeed scripts on infinity: one changed import, the numbers of plain PyTorch, and errors for what there is not."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import infinity.integrations.deepspeed as deepspeed
from deepspeed_training import ROOM, train, train_plainly, under, weights_of
from infinity import ConfigError, EngineStateError, ModelError, NoCommitError, NonFiniteWarning, open_checkpoint
from infinity.engine.meeting import Place
from infinity.engine.traffic import kept, state_for
from infinity.integrations.deepspeed.data import load_micro_batches
from infinity.integrations.deepspeed.log import _said
from parity import assert_same, tiny_scale
from parity_models import GPT, MLP, WIDTH, tokens
from ranks_harness import RankServer, ranks

__all__ = ["ranks", "tiny_scale"]

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 3}}

ISSUE: dict[str, Any] = {
    "train_batch_size": 256,
    "gradient_accumulation_steps": 4,
    "fp16": {"enabled": True},
    "optimizer": ADAMW,
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "", "buffer_count": 5, "buffer_size": 1e8},
    },
}

ISSUE_TOLD = {
    "train_batch_size": "honoured",
    "gradient_accumulation_steps": "honoured",
    "fp16.enabled": "honoured",
    "optimizer.type": "honoured",
    "optimizer.params": "honoured",
    "zero_optimization.stage": "honoured",
    "zero_optimization.contiguous_gradients": "not needed",
    "zero_optimization.overlap_comm": "not needed",
    "zero_optimization.reduce_scatter": "not needed",
    "zero_optimization.reduce_bucket_size": "not needed",
    "zero_optimization.allgather_bucket_size": "not needed",
    "zero_optimization.offload_optimizer.device": "honoured",
    "zero_optimization.offload_optimizer.pin_memory": "not needed",
    "zero_optimization.offload_param.device": "honoured",
    "zero_optimization.offload_param.nvme_path": "honoured",
    "zero_optimization.offload_param.buffer_count": "not needed",
    "zero_optimization.offload_param.buffer_size": "not needed",
}
"""What the report says of each of its keys."""


@pytest.fixture(autouse=True, scope="module")
def leave_group() -> Iterator[None]:
    """``initialize`` makes a default group, as DeepSpeed does; other test files begin without one."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


CASES: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "four": {"gradient_accumulation_steps": 4},
    "clipping": {"gradient_clipping": 0.05},
    "all of it": {"gradient_accumulation_steps": 4, "gradient_clipping": 0.05, "scheduler": WARMUP},
    "bf16": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.05, "bf16": {"enabled": True}},
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_plain_pytorch(case: str, stage: int, tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": ADAMW, "zero_optimization": {"stage": stage}}
    config |= CASES[case]
    expected, plain = train_plainly(config, 3)
    with under(config, nvme=str(tmp_path)) as engine:
        assert_same(train(engine, 3), expected, "losses")
        assert_same(weights_of(engine), plain.outcome(None).weights, "weights")
        assert engine.optimizer is not None
        assert_same(engine.optimizer.state_dict(), plain.optimizer.state_dict(), "optimizer")
        assert (engine.global_steps, engine.skipped_steps) == (3, 0)
        assert engine.micro_steps == 3 * engine.gradient_accumulation_steps()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        assert norm > 0
        if plain.grad_norm is not None:
            assert norm == float(plain.grad_norm)


def test_the_example_trains_as_it_stands(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads(json.dumps(ISSUE))
    config["zero_optimization"]["offload_param"]["nvme_path"] = str(tmp_path)
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    torch.manual_seed(0)
    model = GPT()
    torch.manual_seed(1)
    _said.clear()
    with caplog.at_level(logging.INFO, logger="infinity.deepspeed"):
        engine, optimizer, _, _ = deepspeed.initialize(args, model, model_parameters=model.parameters(), **ROOM)
    assert optimizer is not None
    assert engine.infinity.config.nvme == (tmp_path,)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (256, 64)
    assert (engine.zero_optimization_stage(), engine.fp16_enabled()) == (3, True)
    said = [record.getMessage() for record in caplog.records]
    [report] = [each for each in said if "ZeRO stage 3, fp16, 1 rank" in each]
    assert f"parameters: {engine.infinity.num_parameters:,} in all" in report
    assert f"NVMe ({tmp_path})" in report
    told = [each.split(" = ", 1) for each in said if each != report]
    assert {key: "honoured" if ": honoured: " in rest else "not needed" for key, rest in told} == ISSUE_TOLD
    assert len(told) == len(ISSUE_TOLD), "each once"
    why = dict(told)
    assert why["zero_optimization.offload_param.buffer_size"].endswith(": not needed: the budgets size the pools")
    assert why["zero_optimization.reduce_bucket_size"].startswith("500000000.0: not needed: units travel in one piece")
    assert why["zero_optimization.stage"] == "3: honoured: Config.stage"
    assert optimizer.loss_scale == optimizer.cur_scale == engine.infinity.loss_scale == 65536.0
    losses = train(engine, 6)
    expected, plain = train_plainly(config, 6)
    assert engine.skipped_steps == 0, "the reference knows no hysteresis"
    assert_same(losses, expected, "losses")
    assert_same(weights_of(engine), plain.outcome(None).weights, "weights")
    assert engine.global_samples == 6 * 256
    engine.destroy()


def test_an_overflow_skips_the_step_and_its_scheduler() -> None:
    config = {"train_batch_size": 3, "optimizer": ADAMW, "scheduler": WARMUP}
    config |= {"fp16": {"enabled": True, "initial_scale_power": 10}}
    with under(config) as engine:
        assert engine.optimizer is not None
        before, scheduler = weights_of(engine), engine.lr_scheduler
        assert scheduler.last_batch_iteration == -1
        engine.backward(engine(*tokens(0)) * 1e30)
        engine.step()
        assert (engine.skipped_steps, engine.global_steps, engine.was_step_applied()) == (1, 1, False)
        overflows = [engine.optimizer.overflow]
        assert scheduler.last_batch_iteration == -1
        assert_same(weights_of(engine), before, "weights")
        train(engine, 1)
        assert (engine.skipped_steps, engine.global_steps, engine.was_step_applied()) == (1, 2, True)
        assert [*overflows, engine.optimizer.overflow] == [True, False]
        assert scheduler.last_batch_iteration == 0


@pytest.mark.parametrize("made", [False, True], ids=["objects", "callables"])
def test_an_optimizer_and_a_scheduler_of_the_users_own(made: bool, caplog: pytest.LogCaptureFixture) -> None:
    def make_optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    config: dict[str, Any] = {"train_batch_size": 6, "gradient_accumulation_steps": 2, "optimizer": ADAMW}
    torch.manual_seed(0)
    model = GPT()
    optimizer = make_optimizer if made else make_optimizer(model.parameters())
    scheduler = make_scheduler if callable(optimizer) else make_scheduler(optimizer)
    with caplog.at_level(logging.INFO, logger="infinity.deepspeed"):
        engine, wrapped, loader, stepped = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, **ROOM
        )
    assert "given counts (SGD), not that of the configuration (AdamW)" in caplog.text
    assert wrapped is engine.optimizer
    assert loader is None
    assert stepped is (engine.lr_scheduler if made else scheduler)
    torch.manual_seed(1)
    losses = train(engine, 3)
    assert wrapped is not None
    assert wrapped.param_groups[0]["lr"] == engine.get_lr()[0] == 0.0125
    assert engine.get_type() == [0.0]
    engine.set_lr(0.5)
    assert engine.infinity.optimizer.param_groups[0]["lr"] == 0.5
    weights = weights_of(engine)
    engine.destroy()

    torch.manual_seed(0)
    model = GPT()
    own = make_optimizer(model.parameters())
    schedule = make_scheduler(own)
    torch.manual_seed(1)
    for index, loss in enumerate(losses):
        expected = model(*tokens(index))
        assert torch.equal(loss, expected)
        (expected / 2).backward()
        if index % 2:
            own.step()
            own.zero_grad()
            schedule.step()
    assert_same(weights, dict(model.state_dict()), "weights")


def test_a_run_goes_on_from_its_checkpoint_as_if_never_stopped(tmp_path: Path) -> None:
    config = {"train_batch_size": 6, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "optimizer": ADAMW}
    config |= {"scheduler": WARMUP, "bf16": {"enabled": True}}
    folder = tmp_path / "made" / "here"
    client_state = {"epoch": 3, "best": torch.tensor([0.25]), "names": ["a", "b"]}
    with under(config) as engine:
        train(engine, 2)
        assert engine.save_checkpoint(folder, client_state=client_state)
        assert engine.save_checkpoint(folder, tag="kept", save_latest=False)
        assert (folder / "latest").read_text() == "global_step2"
        expected, weights = train(engine, 2, first=2), weights_of(engine)
        rates = engine.get_lr()
        engine.save_checkpoint(folder, tag=7)
    assert sorted(each.name for each in folder.iterdir()) == ["7", "global_step2", "kept", "latest"]
    assert (folder / "latest").read_text() == "7"
    with under(config, nvme=str(tmp_path)) as engine:
        path, state = engine.load_checkpoint(folder, tag="global_step2")
        assert path == str(folder / "global_step2")
        assert_same(state, client_state, "client_state")
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 4, 12)
        assert_same(train(engine, 2, first=2), expected, "losses")
        assert_same(weights_of(engine), weights, "weights")
        assert engine.get_lr() == rates
        assert engine.load_checkpoint(folder)[1] == {}
        assert engine.global_steps == 4
        assert engine.load_checkpoint(tmp_path) == (None, None)


def test_parts_of_a_checkpoint(tmp_path: Path) -> None:
    config = {"train_batch_size": 3, "optimizer": ADAMW, "scheduler": WARMUP}
    with under(config) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path, client_state={"n": 1})
        saved, rates = weights_of(engine), engine.get_lr()
    with under(config) as engine:
        param = next(iter(engine.module.parameters()))
        begun = engine.get_lr()
        assert engine.load_checkpoint(tmp_path, load_module_only=True)[1] == {"n": 1}
        assert_same(weights_of(engine), saved, "weights")
        assert (engine.global_steps, engine.get_lr()) == (0, begun)
        assert engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
        assert (engine.global_steps, engine.get_lr()) == (2, begun)
        assert engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert engine.get_lr() == rates
        with pytest.raises(ModelError, match="has no optimizer state"):
            deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg")
        assert engine.load_checkpoint(tmp_path, load_module_strict=False)
        assert deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg") is not None
    smaller: dict[str, Any] = {"train_batch_size": 3, "optimizer": ADAMW}
    with under(smaller, lambda: GPT(num_blocks=1)) as engine:
        with pytest.raises(ModelError, match="load_optimizer_states=False"):
            engine.load_checkpoint(tmp_path, load_module_strict=False)
        with pytest.raises(ModelError):
            engine.load_checkpoint(tmp_path, load_module_only=True)
        engine.load_checkpoint(tmp_path, load_module_only=True, load_module_strict=False)
        assert torch.equal(weights_of(engine)["tokens.weight"], saved["tokens.weight"])
    with under(smaller | {"scheduler": WARMUP}) as engine:
        train(engine, 1)
        engine.lr_scheduler = None
    with under(smaller) as engine:
        engine.save_checkpoint(tmp_path / "without")
    with under(config) as engine:
        with pytest.raises(ModelError, match="load_lr_scheduler_states=False"):
            engine.load_checkpoint(tmp_path / "without", load_optimizer_states=False)
        engine.load_checkpoint(tmp_path / "without", load_lr_scheduler_states=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_others_load(precision: str, tmp_path: Path) -> None:
    config = {"train_batch_size": 3, "optimizer": ADAMW, "bf16": {"enabled": precision == "bf16"}}
    with under(config, nvme=str(tmp_path)) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "ckpt")
        for _ in range(2):  # what is there is replaced
            assert engine.save_16bit_model(tmp_path / "out")
            assert engine.save_16bit_model(tmp_path / "out", "pytorch_model.bin")
        computing, full = engine.module_state_dict(), weights_of(engine)
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["model.safetensors", "pytorch_model.bin"]
    pickled = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert_same(dict(pickled), dict(computing), "torch.save")
    safe = load_file(tmp_path / "out" / "model.safetensors")
    tied = set(computing) - set(safe)
    assert tied == {"head.weight"}
    assert_same(safe, {name: value for name, value in computing.items() if name not in tied}, "safetensors")
    plain = GPT()
    plain.load_state_dict(pickled)
    from_zero = importlib.import_module("infinity.integrations.deepspeed.utils.zero_to_fp32")
    assert_same(from_zero.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpt"), full, "full precision")
    from_zero.load_state_dict_from_zero_checkpoint(plain, tmp_path / "ckpt", tag="global_step2")
    assert_same(dict(plain.state_dict()), full, "loaded")
    from_zero.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "ckpt", tmp_path / "fp32")
    assert torch.equal(load_file(tmp_path / "fp32" / "model.safetensors")["tokens.weight"], full["tokens.weight"])
    with pytest.raises(ModelError, match="safetensors"):
        from_zero.convert_zero_checkpoint_to_fp32_state_dict(
            tmp_path / "ckpt", tmp_path / "x", safe_serialization=False
        )


def test_frozen_parameters_stay_and_can_be_left_out(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = GPT()
        model.positions.weight.requires_grad_(False)
        return model

    with under({"train_batch_size": 3, "optimizer": ADAMW}, make) as engine:
        before = weights_of(engine)["positions.weight"]
        train(engine, 1)
        assert torch.equal(weights_of(engine)["positions.weight"], before)
        assert "positions.weight" in engine.module_state_dict()
        assert "positions.weight" not in engine.module_state_dict(exclude_frozen_parameters=True)
        engine.save_16bit_model(tmp_path, exclude_frozen_parameters=True)
    assert "positions.weight" not in load_file(tmp_path / "model.safetensors")


def test_states_of_one_parameter() -> None:
    utils = deepspeed.utils
    config = {"train_batch_size": 6, "gradient_accumulation_steps": 2, "optimizer": ADAMW, "bf16": {"enabled": True}}
    with under(config) as engine:
        train(engine, 1)
        param = engine.module.get_parameter("blocks.0.qkv.weight")
        assert utils.safe_get_full_grad(param) is None
        engine.backward(engine(*tokens(8)))
        gradient = utils.safe_get_full_grad(param)
        assert gradient is not None
        assert gradient.dtype == torch.float32
        utils.safe_update_full_grad_vectorized([param], lambda value, _: value * 0)
        assert not utils.safe_get_full_grad(param).any()  # type: ignore[union-attr]
        utils.safe_set_full_grad(param, gradient)
        assert torch.equal(utils.safe_get_local_grad(param), gradient.flatten())  # type: ignore[arg-type]
        utils.safe_set_local_grad(param, 2 * gradient.flatten())
        assert torch.equal(utils.safe_get_full_grad(param), 2 * gradient)  # type: ignore[arg-type]
        engine.zero_grad()
        weight = utils.safe_get_full_fp32_param(param)
        assert weight is not None
        assert torch.equal(weight, weights_of(engine)["blocks.0.qkv.weight"])
        utils.safe_set_full_fp32_param(param, weight + 1)
        assert torch.equal(utils.safe_get_local_fp32_param(param), (weight + 1).flatten())  # type: ignore[arg-type]
        utils.safe_set_local_fp32_param(param, weight.flatten())
        assert torch.equal(weights_of(engine)["blocks.0.qkv.weight"], weight)
        average = utils.safe_get_full_optimizer_state(param, "exp_avg")
        assert average is not None
        assert average.any()
        utils.safe_set_full_optimizer_state(param, average * 3, "exp_avg")
        local = utils.safe_get_local_optimizer_state(param, "exp_avg")
        assert local is not None
        assert torch.equal(local, (average * 3).flatten())
        utils.safe_set_local_optimizer_state(param, local * 0, "exp_avg")
        assert not utils.safe_get_full_optimizer_state(param, "exp_avg").any()  # type: ignore[union-attr]
        with pytest.raises(ModelError, match="768 elements, got 5"):
            utils.safe_set_local_fp32_param(param, torch.zeros(5))
    other = nn.Parameter(torch.zeros(2))
    for stranger in (other, param):  # that of an engine that is closed, too
        assert utils.safe_get_full_fp32_param(stranger) is None
        assert utils.safe_get_local_grad(stranger) is None
        with pytest.raises(ModelError, match="no engine has"):
            utils.safe_set_full_fp32_param(stranger, torch.zeros(2))


def test_parameters_hold_their_values_inside_gathered_parameters() -> None:
    with under({"train_batch_size": 3, "optimizer": ADAMW, "bf16": {"enabled": True}}) as engine:
        before = weights_of(engine)
        param = engine.module.get_parameter("blocks.0.qkv.weight")
        with deepspeed.zero.GatheredParameters(param):
            assert torch.equal(param, before["blocks.0.qkv.weight"].bfloat16())
        with (
            deepspeed.zero.GatheredParameters(engine.module.get_submodule("blocks.0").parameters(), modifier_rank=0),
            torch.no_grad(),
        ):
            param[0] = 7.0
        assert (weights_of(engine)["blocks.0.qkv.weight"][0] == 7).all()
        assert torch.equal(weights_of(engine)["blocks.0.qkv.weight"][1:], before["blocks.0.qkv.weight"][1:])
        with pytest.raises(ModelError, match="changed"), deepspeed.zero.GatheredParameters([param]), torch.no_grad():
            param.zero_()
        with deepspeed.zero.GatheredParameters(param, enabled=False):
            assert param.isnan().all()
        with under({"train_batch_size": 3, "optimizer": ADAMW}) as other:
            both = [param, other.module.get_parameter("tokens.weight")]
            with pytest.raises(ModelError, match="several engines"), deepspeed.zero.GatheredParameters(both):
                pass
    plain = nn.Linear(2, 2)
    with deepspeed.zero.GatheredParameters(plain, modifier_rank=0), torch.no_grad():
        plain.weight.fill_(1)  # before initialize: as it is
    assert (plain.weight == 1).all()


def test_a_model_made_without_memory_has_the_values_that_it_would_have(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> nn.Module:
        with deepspeed.zero.Init(config_dict_or_path={}, remote_device="nvme", dtype=torch.bfloat16):
            large = nn.Linear(256, 256)
            assert large.weight.device.type == "cpu"
            return large

    _said.clear()
    with caplog.at_level(logging.INFO, logger="infinity.deepspeed"):
        torch.manual_seed(0)
        assert make().get_parameter("weight").is_meta
        make()
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    given = ("config_dict_or_path", "dtype", "remote_device")
    assert sorted(said) == [f"zero.Init({name}=...)" for name in given], "each once, the others not at all"
    torch.manual_seed(0)
    expected = nn.Linear(256, 256).state_dict()
    with under({"train_batch_size": 3, "optimizer": ADAMW}, make) as engine:
        assert_same(weights_of(engine), dict(expected), "weights")
    with deepspeed.zero.Init(enabled=False):
        assert not nn.Linear(256, 256).weight.is_meta
    with pytest.raises(ModelError, match="'dtpye'"):
        deepspeed.zero.Init(dtpye=torch.half)
    deepspeed.zero.register_external_parameter(nn.Linear(1, 1), nn.Parameter(torch.zeros(1)))


def test_boundaries_of_accumulation(tmp_path: Path) -> None:
    config = {"train_batch_size": 9, "gradient_accumulation_steps": 3, "optimizer": ADAMW}
    with under(config) as engine:
        seen = []
        for index in range(6):
            engine.backward(engine(*tokens(index)))
            seen.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            seen.append(engine.was_step_applied())
        assert seen == [False, False, False, False, True, True] * 2
        assert (engine.global_steps, engine.micro_steps, engine.get_batch_info()) == (2, 6, (9, 3, 3))
        engine.set_train_batch_size(6)
        assert engine.gradient_accumulation_steps() == 2
        train(engine, 1)
        assert engine.global_steps == 3
        engine.backward(engine(*tokens(0)))
        engine.step()
        with pytest.raises(EngineStateError, match="after step"):
            engine.set_train_batch_size(3)
        with pytest.raises(ConfigError, match="multiple of 3"):
            engine.set_train_batch_size(7)
        with pytest.raises(EngineStateError, match="wait for a step"):
            engine.save_checkpoint(tmp_path / "new")
        assert not (tmp_path / "new").exists()
        train(engine, 1)

    with under(config) as engine:  # the caller's own boundaries, and one step for several backwards
        losses = []
        engine.set_gradient_accumulation_boundary(False)
        with engine.no_sync():
            for index in range(2):
                loss = engine(*tokens(index))
                engine.backward(loss)
                losses.append(loss.detach())
        engine.step()
        assert engine.global_steps == 0
        engine.set_gradient_accumulation_boundary(True)
        losses.append(engine(*tokens(2)).detach())
        engine.backward(engine(*tokens(2)))
        engine.step()
        assert engine.global_steps == 1


def test_without_the_norm_steps_begin_under_backward() -> None:
    config = {"train_batch_size": 6, "gradient_accumulation_steps": 2, "optimizer": ADAMW}
    expected, plain = train_plainly(config, 2)
    with under(config, max_grad_norm=None) as engine:
        assert_same(train(engine, 2), expected, "losses")
        assert_same(weights_of(engine), plain.outcome(None).weights, "weights")
        assert engine.get_global_grad_norm() is None
        with pytest.raises(EngineStateError, match="max_grad_norm"):
            engine.set_train_batch_size(3)
        for index in range(2):
            engine.backward(engine(*tokens(index)))
            if index == 0:
                engine.step()
        with pytest.raises(EngineStateError, match="begun under backward"):
            deepspeed.utils.safe_get_full_grad(engine.module.get_parameter("tokens.weight"))
        engine.step()


def test_a_run_that_keeps_commits_resumes_by_itself(tmp_path: Path) -> None:
    config = {"train_batch_size": 3, "optimizer": ADAMW, "scheduler": WARMUP}
    durable: dict[str, Any] = {"nvme": str(tmp_path), "durability": "checkpoint", "resume": "auto"}
    with under(config, **durable) as engine:
        train(engine, 2)
        engine.infinity.commit()
        expected = train(engine, 1, first=2)
        rates = engine.get_lr()
    with under(config, **durable) as engine:
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 2, 6)
        assert_same(train(engine, 1, first=2), expected, "losses")
        assert engine.get_lr() == rates
        engine.infinity.rollback()
        assert engine.global_steps == 2


def test_a_step_that_goes_back_to_a_commit_counts_as_none(tmp_path: Path) -> None:
    config = {"train_batch_size": 3, "optimizer": ADAMW, "scheduler": WARMUP}
    durable: dict[str, Any] = {"nvme": str(tmp_path), "durability": "checkpoint", "on_nonfinite": "rollback"}
    with under(config, **durable) as engine:
        train(engine, 1)
        engine.infinity.commit()
        saved, rates = weights_of(engine), engine.get_lr()
        train(engine, 1)
        engine.backward(engine(*tokens(5)) * float("nan"))
        with pytest.warns(NonFiniteWarning):
            engine.step()
        assert (engine.global_steps, engine.micro_steps, engine.was_step_applied()) == (1, 1, False)
        assert_same(weights_of(engine), saved, "weights")
        assert engine.get_lr() == rates


def test_what_is_asked_of_the_model_and_of_the_engine() -> None:
    config = {"train_batch_size": 3, "optimizer": ADAMW, "gradient_clipping": 0.5, "steps_per_print": 2}
    with under(config | {"scheduler": WARMUP}) as engine:
        assert engine.blocks is engine.module.blocks
        assert not hasattr(engine, "no_such_thing")
        assert not hasattr(engine, "train_batch")
        with pytest.raises(ModelError, match="pipeline"):
            engine.train_batch(iter(()))
        with pytest.raises(ModelError, match=r"engine\.backward"):
            engine.scale(torch.zeros(1))
        modes = []
        for switch in (engine.eval, engine.train):
            switch()
            modes.append((engine.training, engine.module.training))
        assert modes == [(False, False), (True, True)]
        assert next(name for name, _ in engine.named_parameters()).startswith("module.")
        assert list(engine.state_dict()) == [f"module.{name}" for name in engine.module_state_dict()]
        assert engine.gradient_clipping() == 0.5
        assert (engine.optimizer_name(), engine.scheduler_name()) == ("AdamW", "WarmupLR")
        assert [tuple(betas) for betas in engine.get_mom()] == [(0.9, 0.999)]
        assert engine.device == torch.device("cpu")
        assert engine.steps_per_print() == 2
        assert not engine.bfloat16_enabled()
        engine.load_module_state_dict(engine.module_state_dict())
        engine.global_steps = 5
        assert engine.progress.global_steps == 5
        with pytest.raises(ModelError, match="a gradient, got a tensor of shape \\(2,\\)"):
            engine.backward(torch.zeros(2, requires_grad=True))
        with pytest.raises(ModelError, match="requires none"):
            engine.backward(torch.zeros(1))
        with pytest.raises(ModelError, match="got a float"):
            engine.backward(1.0)  # type: ignore[arg-type]


def test_gradients_that_were_not_divided_are_not_stepped() -> None:
    config = {"train_batch_size": 6, "gradient_accumulation_steps": 2, "optimizer": ADAMW}
    with under(config) as engine:
        engine(*tokens(0)).backward()
        engine.step()
        engine(*tokens(1)).backward()
        with pytest.raises(EngineStateError, match=r"=2 gradients of loss\.backward"):
            engine.step()


def test_progress_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config = {"train_batch_size": 3, "optimizer": ADAMW, "steps_per_print": 2, "wall_clock_breakdown": True}
    with under(config) as engine, caplog.at_level(logging.INFO, logger="infinity.deepspeed"):
        caplog.clear()
        train(engine, 5)
    said = [record.getMessage() for record in caplog.records]
    assert [each.partition(",")[0] for each in said] == ["step=2", "step=4"]
    assert "lr=[0.01]" in said[0]
    assert "NVMe read 0 B" in said[0]


def test_a_model_that_only_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = GPT().eval()
    with torch.no_grad():
        expected = model(*tokens(0))
    config = {"train_batch_size": 3, "zero_optimization": {"stage": 3}, "scheduler": WARMUP}
    with caplog.at_level(logging.INFO, logger="infinity.deepspeed"):
        engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=config, nvme=str(tmp_path), **ROOM)
    assert "the scheduler is left out" in caplog.text
    assert (optimizer, scheduler) == (None, None)
    with torch.no_grad():
        assert torch.equal(engine(*tokens(0)), expected)
    for act in (engine.step, lambda: engine.backward(torch.zeros(1, requires_grad=True)), lambda: engine.set_lr(1.0)):
        with pytest.raises(EngineStateError, match="without an optimizer"):
            act()
    assert engine.get_lr() == []
    engine.destroy()


def test_loaders_give_each_rank_its_share() -> None:
    samples = TensorDataset(torch.arange(12).float().repeat(WIDTH, 1).T)
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "optimizer": ADAMW, "dataloader_drop_last": True}
    torch.manual_seed(0)
    model = MLP()
    engine, _, loader, _ = deepspeed.initialize(model=model, training_data=samples, config=config, **ROOM)
    assert loader is not None
    assert len(loader) == 6
    epochs = [[batch[0][:, 0].tolist() for batch in loader] for _ in range(2)]
    assert all(sorted(itertools.chain(*epoch)) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    ordered = engine.deepspeed_io(samples, batch_size=5, route="eval")
    assert [len(batch[0]) for batch in ordered] == [5, 5]
    assert next(iter(ordered))[0][:, 0].tolist() == [0, 1, 2, 3, 4]
    collated = engine.deepspeed_io(samples, collate_fn=len)
    assert list(collated) == [2] * 6
    engine.destroy()

    shares = [load_micro_batches(samples, 3, Place(rank, 2, rank)) for rank in range(2)]
    taken = [{int(x) for batch in share for x in batch[0][:, 0]} for share in shares]
    assert taken[0] | taken[1] == set(range(12))
    assert not taken[0] & taken[1]

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    assert [batch.tolist() for batch in load_micro_batches(Stream(), 2, Place(0, 2, 0))] == [[0, 1], [2, 3], [4]]
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu"):
        load_micro_batches(samples, None, Place(0, 1, 0))
    with pytest.raises(ModelError, match="got a list_iterator"):
        load_micro_batches(iter([1]), 1, Place(0, 1, 0))  # type: ignore[arg-type]
    repeating = deepspeed.RepeatingLoader([1, 2])
    assert [next(repeating) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(ModelError, match="no batch"):
        next(deepspeed.RepeatingLoader([]))


def test_estimates_are_the_engines_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    state = state_for(1_000_000, compute_dtype=torch.bfloat16)
    zero3 = deepspeed.zero.estimate_zero3_model_states_mem_needs_all_cold(1_000_000, 10_000, 4, 2)
    assert [need.host_bytes + need.nvme_bytes for need in zero3] == [4 * sum(kept(state, 3, 8).values())] * 4
    assert [need.device_bytes for need in zero3] == [2_000_000, 40_000] * 2
    assert [need.nvme_bytes == 0 for need in zero3] == [True, True, False, False]
    said = capsys.readouterr().out
    assert "1,000,000 parameters, 10,000 of them in the largest block, on 2 node(s) with 4 rank(s)" in said
    assert f"{zero3[2].nvme_bytes / 2**30:.2f} GiB" in said
    zero2 = deepspeed.zero.estimate_zero2_model_states_mem_needs_all_cold(1_000_000, 4, 2)
    assert [need.host_bytes + need.nvme_bytes for need in zero2] == [4 * sum(kept(state, 2, 8).values())] * 2
    model = GPT()
    paths = importlib.import_module("infinity.integrations.deepspeed.runtime.zero.stage3")
    live = paths.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=1)
    total = sum(param.numel() for param in model.parameters())
    assert live[0].device_bytes == 2 * total
    assert live[0].host_bytes == sum(kept(state_for(total, compute_dtype=torch.bfloat16), 3, 1).values())
    with pytest.raises(ModelError, match="num_nodes: expected a number of at least 1, got 0"):
        deepspeed.zero.estimate_zero3_model_states_mem_needs_all_cold(1, 1, num_nodes=0)


def test_deepspeeds_optimizers_are_pytorchs() -> None:
    param = nn.Parameter(torch.ones(3))
    for made in (deepspeed.ops.adam.DeepSpeedCPUAdam([param], lr=0.1), deepspeed.ops.adam.FusedAdam([param], lr=0.1)):
        assert isinstance(made, torch.optim.AdamW)
        assert (made.defaults["lr"], made.defaults["weight_decay"]) == (0.1, 0)
    assert isinstance(deepspeed.ops.adagrad.DeepSpeedCPUAdagrad([param]), torch.optim.Adagrad)
    for options, said in (
        ({"adamw_mode": False}, "torch.optim.Adam"),
        ({"bias_correction": False}, "bias_correction"),
        ({"fp32_optimizer_states": False}, "optimizer_states='bf16'"),
    ):
        with pytest.raises(ModelError, match=said):
            deepspeed.ops.adam.DeepSpeedCPUAdam([param], **options)  # type: ignore[arg-type]
    config = {"train_batch_size": 3}
    expected, plain = train_plainly(config | {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0}}}, 2)
    with under(config, optimizer=deepspeed.ops.adam.DeepSpeedCPUAdam) as engine:
        assert_same(train(engine, 2), expected, "losses")
        assert_same(weights_of(engine), plain.outcome(None).weights, "weights")


def test_recomputation_is_pytorchs(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing = deepspeed.checkpointing
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    _said.clear()
    with caplog.at_level(logging.INFO, logger="infinity.deepspeed"):
        checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=True)
    assert checkpointing.is_configured()
    assert "partition_activations" in caplog.text
    assert "activation_bytes" in caplog.text
    out = checkpointing.checkpoint(layer, x)
    assert torch.equal(out, layer(x))
    assert "Checkpoint" not in type(out.grad_fn).__name__
    with pytest.raises(ModelError, match=r"torch\.manual_seed"):
        checkpointing.model_parallel_cuda_manual_seed(1)


def test_schedules_are_where_scripts_look_for_them() -> None:
    theirs = importlib.import_module("infinity.integrations.deepspeed.runtime.lr_schedules")
    assert theirs.__all__ == ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert theirs.WarmupLR(optimizer, warmup_min_lr=0.25).get_last_lr() == [0.25]


def test_who_this_process_is() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
    comm = deepspeed.comm
    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
    comm.barrier()
    with pytest.raises(ModelError, match=r"torch\.distributed\.all_reduce"):
        comm.all_reduce(torch.zeros(1))
    accelerator = deepspeed.get_accelerator()
    assert accelerator.is_available()
    assert accelerator.device(accelerator.current_device()) == torch.device(accelerator.current_device_name())
    assert accelerator.device_count() >= 1
    assert accelerator.communication_backend_name()
    assert accelerator.max_memory_allocated() >= accelerator.memory_allocated() >= 0
    accelerator.synchronize()
    accelerator.empty_cache()


ANY: Any = deepspeed
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: ANY.PipelineModule, "no pipeline parallelism"),
    (lambda: ANY.pipe.PipelineModule, "no pipeline parallelism"),
    (lambda: ANY.moe.layer, "no expert parallelism"),
    (lambda: ANY.init_inference(nn.Linear(1, 1)), "without an optimizer"),
    (lambda: ANY.zero.TiledLinear(1, 1), "tile_large_layers"),
    (lambda: ANY.ops.lion, "Lion"),
]


@pytest.mark.parametrize(("use", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_there_is_not_is_refused_by_its_name(use: Callable[[], Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        use()


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(AttributeError, match="did you mean 'initialize'"):
        ANY.initialise  # noqa: B018
    assert not hasattr(deepspeed, "qqqqqq")


def test_an_engine_that_cannot_be_made_leaves_its_directory_free(tmp_path: Path) -> None:
    def no_scheduler(optimizer: torch.optim.Optimizer) -> None:
        raise ZeroDivisionError

    config = {"train_batch_size": 3, "optimizer": ADAMW}
    with pytest.raises(ZeroDivisionError), under(config, nvme=str(tmp_path), lr_scheduler=no_scheduler):
        pass
    assert not [*tmp_path.iterdir()]


def test_arguments_that_cannot_be_used(tmp_path: Path) -> None:
    class Parallel:
        def get_model_parallel_world_size(self) -> int:
            return 2

    model: Any = MLP()
    config = {"train_batch_size": 3, "optimizer": ADAMW}
    given: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"model": None, "config": config}, ModelError, "expected an nn.Module as model, got a NoneType"),
        ({"model": model}, ConfigError, "expected one configuration, got 0"),
        ({"model": model, "config": config, "config_params": config}, ConfigError, "got 2"),
        ({"model": model, "config": config, "mpu": Parallel()}, ConfigError, "2 ranks share the model's layers"),
        ({"model": model, "config": config, "mesh_param": (1, 2)}, ConfigError, "sequence parallelism"),
        ({"model": model, "config": config, "optimizer": "AdamW"}, ModelError, "got a str"),
        ({"model": model, "config": config, "hbmm": 1}, ConfigError, "hbmm"),
    ]
    for options, kind, said in given:
        with pytest.raises(kind, match=said):
            deepspeed.initialize(**{**ROOM, **options})
    with under(config) as engine:
        for tag in ("", "..", "a/b", "latest"):
            with pytest.raises(ModelError, match="expected the name of a directory"):
                engine.save_checkpoint(tmp_path, tag=tag)
        with pytest.raises(ModelError, match="client_state"):
            engine.save_checkpoint(tmp_path, client_state={"function": print})
        with pytest.raises(NoCommitError, match="no checkpoint of tag 'other'"):
            engine.load_checkpoint(tmp_path, tag="other")
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        (theirs / "mp_rank_00_model_states.pt").touch()
        with pytest.raises(ModelError, match="zero_to_fp32"):
            engine.load_checkpoint(tmp_path, tag="theirs")
        with pytest.raises(ModelError, match="load_state_dict"):
            engine.load_checkpoint(tmp_path, tag="theirs", custom_load_fn=print)  # type: ignore[arg-type]
        assert [each.name for each in tmp_path.iterdir()] == ["theirs"]


def test_two_ranks_train_save_and_resume(ranks: RankServer, tmp_path: Path) -> None:
    first, second = ranks.run("deepspeed_jobs:train_and_resume", 2, folder=str(tmp_path))
    assert first["losses"] != second["losses"], "each rank has batches of its own"
    for told in (first, second):
        assert told["bitwise"] is True
        assert told["resumed"] is True
        assert told["world"] == 2
    assert first["said"] > 0
    assert second["said"] == 0, "rank 0 speaks"
    assert first["local"] + second["local"] == first["numel"]
    with open_checkpoint(tmp_path / "ckpt" / "global_step2") as stored:
        assert stored.step == 2
    assert load_file(tmp_path / "out" / "model.safetensors")
