"""``InfinityTrainer``: a ``transformers.Trainer`` with the engine; its arguments, its checkpoints, its numbers."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import infinity
import trainer_jobs
from infinity import ConfigError, DirectoryError, EngineStateError, ModelError, NoCommitError
from infinity.engine.deferred import is_deferred
from infinity.integrations.transformers import InfinityTrainer
from infinity.integrations.transformers.arguments import NOT_NEEDED, REFUSED
from trainers import BUDGETS, arguments, both, gpt2, quiet, same, texts, told, weights

__all__ = ["quiet"]

pytestmark = pytest.mark.usefixtures("one_thread")

DATA: dict[str, Any] = {"train_dataset": texts(), "eval_dataset": texts(6)}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def ours(directory: Path, model: nn.Module | None = None, config: Any = None, **fields: Any) -> InfinityTrainer:
    """One with the engine, which has not trained."""
    given: dict[str, Any] = {**DATA}
    given |= {name: fields.pop(name) for name in ("optimizers", "model_init", "train_dataset") if name in fields}
    args = arguments(directory, **fields)
    model = model if model is not None or "model_init" in given else gpt2()
    return InfinityTrainer(model, args, infinity_config=BUDGETS if config is None else config, **given)


class Counts(TrainerCallback):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_substep_end(self, *args: Any, **named: Any) -> None:
        self.seen.append("substep")

    def on_pre_optimizer_step(self, *args: Any, **named: Any) -> None:
        self.seen.append("before")

    def on_step_end(self, *args: Any, **named: Any) -> None:
        self.seen.append("step")


@pytest.mark.parametrize(
    "fields",
    [
        {"gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
        {"optim": "adafactor", "max_grad_norm": 0.0, "label_smoothing_factor": 0.1},
        {"optim": "sgd", "optim_args": "momentum=0.9", "max_grad_norm": 0.01,
         "lr_scheduler_type": "reduce_lr_on_plateau",
         "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"},
        {"optim": "rmsprop", "gradient_checkpointing": True, "weight_decay": 0.1, "warmup_steps": 2,
         "neftune_noise_alpha": 5.0},
        {"optim": "adagrad", "num_train_epochs": 2, "max_steps": -1, "dataloader_drop_last": True, "data_seed": 3},
    ],
    ids=["accumulation", "adafactor", "sgd", "rmsprop", "adagrad"],
)  # fmt: skip
def test_the_numbers_are_those_of_the_plain_trainer(fields: dict[str, Any], tmp_path: Path) -> None:
    plain, trainer = both(gpt2, tmp_path, **fields)
    with trainer.engine:
        assert told(trainer) == told(plain)
        assert same(weights(trainer), weights(plain))


def test_steps_that_begin_under_backward_are_the_same(tmp_path: Path) -> None:
    for max_grad_norm in (0.05, 0.0):
        config = {**BUDGETS, "accumulation_steps": 2}
        fields: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": max_grad_norm}
        plain, trainer = both(gpt2, tmp_path / str(max_grad_norm), config=config, **fields)
        with trainer.engine:
            expected = told(plain)
            if not max_grad_norm:
                for entry in expected:
                    entry.pop("grad_norm", None)  # which nobody knows
            assert told(trainer) == expected
            assert same(weights(trainer), weights(plain))


def test_callbacks_metrics_and_prediction(tmp_path: Path) -> None:
    counts = [Counts(), Counts()]
    seen: list[Any] = []

    def measure(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"sum": float(prediction.predictions.sum())}

    fields = {"gradient_accumulation_steps": 2, "max_steps": 2, "per_device_eval_batch_size": 4}
    data: Any = texts(8)
    plain = Trainer(
        gpt2(), arguments(tmp_path / "plain", **fields), train_dataset=data, eval_dataset=data, compute_metrics=measure,
        callbacks=[counts[0]],
    )  # fmt: skip
    trainer = InfinityTrainer(
        gpt2(), arguments(tmp_path / "ours", **fields), None, data, data, compute_metrics=measure,
        callbacks=[counts[1]], infinity_config=BUDGETS,
    )  # fmt: skip
    for each in (plain, trainer):
        torch.manual_seed(1)
        each.evaluate()  # before there is training
        each.train()
        each.predict(data[:3])
    with trainer.engine:
        assert told(trainer) == told(plain)
        assert counts[0].seen == counts[1].seen == ["substep", "before", "step"] * 2
        assert len(seen) == 4
        assert all((one == other).all() for one, other in zip(seen[:2], seen[2:], strict=True))


@pytest.mark.parametrize("durability", ["off", "checkpoint"])
def test_a_resumed_run_is_one_that_never_stopped(durability: str, tmp_path: Path) -> None:
    config = {**BUDGETS, "nvme": str(tmp_path), "ram": "4MiB"}
    whole = Trainer(gpt2(), arguments(tmp_path / "plain", **SAVING), train_dataset=texts())
    whole.train()
    if durability != "off":
        config |= {"durability": durability, "resume": "auto"}
    first = ours(tmp_path / "out", config=config, **{**SAVING, "max_steps": 6})
    first.train()
    with first.engine:
        assert told(first) == told(whole)
    (tmp_path / "out" / "checkpoint-6" / "trainer_state.json").unlink()  # as if it had been cut off there

    if durability != "off":
        begun = ours(tmp_path / "out", config=config, **SAVING)
        with pytest.raises(EngineStateError, match="have a state of step 6"):
            begun.train()

    again = ours(tmp_path / "out", gpt2(seed=9), config=config, **SAVING)
    again.train(resume_from_checkpoint=True)
    with again.engine:
        assert told(again)[:6] == told(whole)[:6]
        assert again.state.global_step == 6
        assert same(weights(again), weights(whole))


def test_hard_links_share_the_bytes_of_checkpoints(tmp_path: Path) -> None:
    config = {**BUDGETS, "nvme": str(tmp_path), "durability": "checkpoint"}
    trainer = ours(tmp_path / "out", config=config, **{**SAVING, "max_steps": 2})
    trainer.train()
    with trainer.engine:
        files = list((tmp_path / "out" / "checkpoint-2" / "infinity").glob("shards-*.bin"))
        assert files
        assert all(file.stat().st_nlink > 1 for file in files)


def test_only_checkpoints_of_the_trainer_are_removed_and_the_best_is_loaded(tmp_path: Path) -> None:
    strangers = [tmp_path / "ours" / name for name in ("checkpoint-1", "checkpoint-final", "checkpoint-7-mine")]
    for stranger in strangers:
        stranger.mkdir(parents=True)
        (stranger / "precious").touch()
    fields = {
        **SAVING, "save_total_limit": 1, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
        "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 2.0,
    }  # fmt: skip
    plain, trainer = both(gpt2, tmp_path, **fields)
    with trainer.engine:
        best = trainer.state.best_model_checkpoint
        assert best is not None
        assert Path(best).name == Path(plain.state.best_model_checkpoint or "").name != "checkpoint-6"
        assert same(weights(trainer), weights(plain))
        assert all((stranger / "precious").exists() for stranger in strangers)
        left = {path.name for path in (tmp_path / "ours").iterdir()} - {stranger.name for stranger in strangers}
        assert left == {Path(best).name}
        assert trainer.args.save_total_limit == 1
        assert torch.load(Path(best) / "training_args.bin", weights_only=False).save_total_limit == 1


def test_what_a_run_before_has_left_goes_first(tmp_path: Path) -> None:
    old = tmp_path / "checkpoint-50"
    old.mkdir()
    (old / "trainer_state.json").write_text('{"global_step": 50}')
    os.utime(old / "trainer_state.json", (1, 1))
    trainer = ours(tmp_path, **{**SAVING, "max_steps": 4}, save_total_limit=2)
    trainer.train()
    trainer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4"}


def test_a_saved_model_is_loaded_by_plain_transformers(tmp_path: Path) -> None:
    for precision in ("fp32", "bf16"):
        trainer = ours(tmp_path / precision, gpt2(), {**BUDGETS}, bf16=precision == "bf16")
        trainer.train()
        assert trainer.engine.config.precision == precision
        expected = weights(trainer)
        trainer.save_model()
        trainer.close()
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path / precision)
        assert loaded.dtype is torch.float32
        assert same({**loaded.state_dict()}, expected)
        plain = Trainer(loaded, arguments(tmp_path / "plain"), train_dataset=texts())
        plain.train()


def test_a_model_before_training_is_saved_and_evaluated_from_its_record(tmp_path: Path) -> None:
    plain = Trainer(gpt2(), arguments(tmp_path / "plain"), train_dataset=texts(), eval_dataset=texts(6))
    expected = plain.evaluate()["eval_loss"]
    with infinity.deferred_init(threshold_bytes=1024):
        model = gpt2()
    trainer = ours(tmp_path / "ours", model)
    assert is_deferred(model.transformer.h[0].mlp.c_fc.weight)  # nothing has asked for its values
    assert not trainer.accelerator.has_engine
    assert trainer.evaluate()["eval_loss"] == expected
    for each in (plain, trainer):
        torch.manual_seed(1)
        each.train()
    with trainer.engine:
        assert told(trainer) == told(plain)
        assert same(weights(trainer), weights(plain))


def test_optimizers_of_ones_own(tmp_path: Path) -> None:
    logs: list[Any] = []
    kinds: list[Any] = [Trainer, InfinityTrainer]
    for kind in kinds:
        model = gpt2()
        optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        extra = {"infinity_config": BUDGETS} if kind is InfinityTrainer else {}
        trainer = kind(
            model,
            arguments(tmp_path / kind.__name__),
            train_dataset=texts(),
            optimizers=(optimizer, scheduler),
            **extra,
        )
        trainer.train()
        logs.append(told(trainer))
        logs.append(list(weights(trainer).values()))
    trainer.close()
    assert logs[0] == logs[2]
    assert all(map(torch.equal, logs[1], logs[3]))


def test_training_again_goes_on_and_a_new_model_begins(tmp_path: Path) -> None:
    plain, trainer = both(gpt2, tmp_path, lr_scheduler_type="constant")
    for each in (plain, trainer):
        torch.manual_seed(3)
        each.train()
    with trainer.engine:
        assert trainer.engine.num_steps == 8
        assert told(trainer) == told(plain)
        assert same(weights(trainer), weights(plain))

    plain = Trainer(None, arguments(tmp_path / "plain"), train_dataset=texts(), model_init=lambda: gpt2())
    trainer = ours(tmp_path / "ours", model_init=lambda: gpt2(), config={**BUDGETS, "nvme": str(tmp_path)})
    for each in (plain, trainer):
        each.train()
        each.train()
    with trainer.engine:
        assert trainer.engine.num_steps == 4
        assert told(trainer) == told(plain)


def test_a_checkpoint_of_the_plain_trainer_is_gone_on_from(tmp_path: Path) -> None:
    whole = Trainer(gpt2(), arguments(tmp_path / "plain", **SAVING), train_dataset=texts())
    whole.train()
    trainer = ours(tmp_path / "ours", gpt2(seed=9), **SAVING)
    trainer.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-4"))
    with trainer.engine:
        assert same(weights(trainer), weights(whole))


def test_steps_that_overflow_are_skipped_and_the_schedule_waits(tmp_path: Path) -> None:
    config = {**BUDGETS, "precision": "fp16", "initial_loss_scale": 2.0**24}
    trainer = ours(tmp_path, config=config, lr_scheduler_type="linear", max_steps=12)
    trainer.train()
    with trainer.engine as engine:
        num_skipped = engine.num_skipped_steps
        assert 0 < num_skipped < 12
        assert engine.loss_scale == 2.0 ** (24 - num_skipped)
        assert trainer.lr_scheduler is not None
        assert trainer.lr_scheduler.last_epoch == 12 - num_skipped


@pytest.mark.parametrize(
    ("fields", "config", "what"),
    [
        ({"optim": "galore_adamw"}, {}, r"optim='galore_adamw'.*optimizers="),
        ({"optim": "lomo"}, {}, r"optim='lomo'.*expected one of adafactor, adagrad"),
        ({"fsdp": "full_shard"}, {}, "takes the place of FSDP"),
        ({"push_to_hub": True}, {}, "push_to_hub.*hf upload"),
        ({"use_liger_kernel": True}, {}, "use_liger_kernel"),
        ({"fp16_full_eval": True}, {}, "fp16_full_eval"),
        ({"ddp_broadcast_buffers": True}, {}, "ddp_broadcast_buffers"),
        ({"torch_compile": True}, {}, r"torch_compile.*Config\(compile=True\)"),
        ({"bf16_full_eval": True}, {}, "bf16_full_eval"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
        ({"max_grad_norm": 1.0}, {"max_grad_norm": 0.5}, "TrainingArguments say 1.0 and Config says 0.5"),
        ({"gradient_accumulation_steps": 4}, {"accumulation_steps": 2}, "accumulation_steps: Config says 2 .*=4"),
        ({"gradient_checkpointing": True}, {"recompute": True}, "three times"),
        ({"bf16": True}, {"precision": "fp16"}, r"mixed_precision='bf16' and Config\(precision='fp16'\)"),
        ({"use_cpu": True}, {"device": "cuda"}, "use_cpu=True and Config says 'cuda'"),
        ({}, {"hbn": "1MiB"}, "unknown key 'hbn'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(
    fields: dict[str, Any], config: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=what):
        ours(tmp_path, config=config, **fields)


def test_every_argument_is_in_the_table_of_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "trainer.md").read_text(encoding="utf-8")
    rows = [row for row in page.split("## Arguments")[1].splitlines() if row.startswith("| `")]
    named = {name: row.split("|")[2] for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert fields - named.keys() == set()
    refused = {name for name, words in named.items() if "**refused**" in words}
    assert refused >= REFUSED.keys()
    assert all(name in named and "nothing to do" in named[name] for name in NOT_NEEDED)


def test_deepspeed_is_refused_and_what_is_not_needed_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(tmp_path)
    args.deepspeed = {"zero_optimization": {"stage": 3}}  # transformers takes it only where DeepSpeed is installed
    with pytest.raises(ConfigError, match=r"deepspeed.*Config\.from_deepspeed"):
        InfinityTrainer(gpt2(), args, infinity_config=BUDGETS)
    logger: Any = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING, logger="transformers"):
            ours(tmp_path, ddp_bucket_cap_mb=7, log_level="warning")
    finally:
        logger.removeHandler(caplog.handler)
    assert "ddp_bucket_cap_mb=…) has nothing to do under infinity: gradients are summed unit by unit" in caplog.text


def test_what_there_is_not_to_go_on_from_is_said(tmp_path: Path) -> None:
    trainer = ours(tmp_path)
    with pytest.raises(NoCommitError, match="no whole checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(DirectoryError, match="no such directory"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "missing"))
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    with pytest.raises(DirectoryError, match="save_only_model"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(EngineStateError, match="no engine"):
        _ = trainer.engine
    trainer.train()
    model: Any = trainer.model
    with pytest.raises(ModelError, match="holds a placeholder"), trainer.engine:
        model.to(torch.float64)


def test_two_ranks_train_as_two_ranks_of_the_plain_trainer(tmp_path: Path) -> None:
    port = trainer_jobs.free_port()
    codes = trainer_jobs.run(trainer_jobs.train_as_rank, (0, 2, port, tmp_path), (1, 2, port, tmp_path))
    assert codes == [0, 0]
    files = {path.name for path in (tmp_path / "InfinityTrainer" / "checkpoint-2").iterdir()}
    assert files >= {"infinity", "model.safetensors", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"}
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert same(dict(loaded.state_dict()), torch.load(tmp_path / "state.pt", weights_only=True))
