"""``InfinityTrainer`` in users' hands: data of all kinds, stops and kills, what is done in another order or twice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import IterableDataset

pytest.importorskip("transformers", reason="needs Hugging Face transformers, which the extra 'test' installs")

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_utils import HPSearchBackend

import trainer_jobs
from infinity import ConfigError, ModelError
from infinity.integrations.transformers import InfinityTrainer
from trainers import BUDGETS, VOCAB, arguments, both, gpt2, quiet, same, texts, told, weights

__all__ = ["quiet"]

pytestmark = pytest.mark.usefixtures("one_thread")

EACH: tuple[type[Trainer], type[InfinityTrainer]] = (Trainer, InfinityTrainer)


def made(kind: type[Trainer], directory: Path, model: Any = None, config: Any = None, **fields: Any) -> Trainer:
    """A trainer of either kind that has not trained."""
    given: dict[str, Any] = {"train_dataset": texts(), "eval_dataset": texts(6)}
    given |= {name: fields.pop(name) for name in ("callbacks", "model_init", "train_dataset") if name in fields}
    if kind is InfinityTrainer:
        given["infinity_config"] = BUDGETS if config is None else config
    model = model if model is not None or "model_init" in given else gpt2()
    return kind(model, arguments(directory / kind.__name__, **fields), **given)


def agree(plain: Trainer, trainer: Trainer, *, resumed: bool = False) -> None:
    """Both have the same log and weights; the engine is closed. The last line of a log is about this process only."""
    assert isinstance(trainer, InfinityTrainer)
    with trainer.engine:
        last = -1 if resumed else None
        assert told(trainer)[:last] == told(plain)[:last]
        assert same(weights(trainer), weights(plain))


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Twelve examples, whose number it does not tell."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(texts(12))


def ragged(count: int = 16) -> list[dict[str, torch.Tensor]]:
    """Examples of different lengths."""
    rows = [torch.randint(1, VOCAB, (4 + index % 5,), generator=torch.Generator().manual_seed(index)) for index in
            range(count)]  # fmt: skip
    return [{"input_ids": row, "labels": row} for row in rows]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One batch of them."""
    length = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, value: int) -> torch.Tensor:
        return torch.stack([nn.functional.pad(row[name], (0, length - len(row[name])), value=value) for row in rows])

    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100)}


@pytest.mark.parametrize(
    "fields",
    [
        {"data": ragged(), "data_collator": padded, "train_sampling_strategy": "group_by_length",
         "gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all"},
        {"data": texts(15), "num_train_epochs": 2, "max_steps": -1, "gradient_accumulation_steps": 3,
         "eval_strategy": "epoch", "save_strategy": "epoch", "eval_dataset": {"a": texts(4), "b": texts(3)}},
        {"data": ragged(), "data_collator": padded, "gradient_accumulation_steps": 2, "warmup_steps": 0.5,
         "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3},
         "average_tokens_across_devices": False, "logging_steps": 0.5},
        {"save_strategy": "best", "metric_for_best_model": "eval_loss", "eval_strategy": "steps", "eval_steps": 1,
         "save_only_model": True, "load_best_model_at_end": True, "learning_rate": 1.0, "debug": "underflow_overflow",
         "accelerator_config": {"split_batches": True, "use_seedable_sampler": False}},
    ],
    ids=["grouped", "epochs", "tokens", "best"],
)  # fmt: skip
def test_the_numbers_are_those_of_the_plain_trainer(fields: dict[str, Any], tmp_path: Path) -> None:
    agree(*both(gpt2, tmp_path, **fields))


def test_a_stream_of_data_is_trained_on_and_gone_on_with(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"train_dataset": Stream(), "max_steps": 8, "save_strategy": "steps", "save_steps": 5}
    plain = made(Trainer, tmp_path, **fields)
    plain.train()
    trainer = made(InfinityTrainer, tmp_path, **fields)
    trainer.train()
    agree(plain, trainer)
    trainer = made(InfinityTrainer, tmp_path, gpt2(9), **fields)
    trainer.train(str(tmp_path / "InfinityTrainer" / "checkpoint-5"))
    agree(plain, trainer, resumed=True)


def test_early_stopping_stops_and_loads_the_best(tmp_path: Path) -> None:
    fields = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1.0,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "max_steps": 10,
    }  # fmt: skip
    each = [made(kind, tmp_path, callbacks=[EarlyStoppingCallback(2)], **fields) for kind in EACH]
    for trainer in each:
        torch.manual_seed(0)
        trainer.train()
    assert each[1].state.global_step < 10
    agree(*each)


def test_evaluation_training_and_prediction_in_any_order(tmp_path: Path) -> None:
    each: list[Any] = [made(kind, tmp_path, max_steps=2) for kind in EACH]
    for trainer in each:
        torch.manual_seed(0)
        trainer.evaluate()
        trainer.train()
        trainer.predict(texts(3))
        trainer.train()
        trainer.evaluate()
    agree(*each)


class Stops(TrainerCallback):
    """Ctrl-C, once, after two steps."""

    def __init__(self, where: str) -> None:
        self._where = where
        setattr(self, where, self._stop)

    def _stop(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 2:
            setattr(self, self._where, lambda *_, **__: None)
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["on_substep_end", "on_pre_optimizer_step", "on_step_end"])
def test_training_goes_on_after_an_interrupt(where: str, tmp_path: Path) -> None:
    each = [made(kind, tmp_path, callbacks=[Stops(where)], gradient_accumulation_steps=2) for kind in EACH]
    for trainer in each:
        torch.manual_seed(0)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
    agree(*each)


def test_an_interrupt_leaves_the_newest_checkpoint_beside_the_best(tmp_path: Path) -> None:
    fields = {
        "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
        "learning_rate": 2.0,
    }  # fmt: skip
    trainer: Any = made(InfinityTrainer, tmp_path, callbacks=[Stops("on_step_begin")], **fields)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.close()
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-1"
    assert {path.name for path in (tmp_path / "InfinityTrainer").iterdir()} == {"checkpoint-1", "checkpoint-2"}


def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    fields = {"max_steps": 7, "save_strategy": "steps", "save_steps": 2}
    config = {**BUDGETS, "ram": "4MiB", "nvme": str(tmp_path), "durability": "checkpoint", "resume": "auto"}
    assert trainer_jobs.run(trainer_jobs.train_and_die, (tmp_path, fields, config)) == [-signal.SIGKILL]
    trainer = InfinityTrainer(
        gpt2(seed=9), arguments(tmp_path / "out", **fields), train_dataset=texts(), infinity_config=config
    )
    trainer.train(resume_from_checkpoint=True)
    plain = made(Trainer, tmp_path, **fields)
    plain.train()
    agree(plain, trainer, resumed=True)


class Terminated(TrainerCallback):
    """As if SIGTERM had come in the middle of the third step."""

    trainer: Trainer

    def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 2:
            [manager] = [
                each.jit_manager for each in self.trainer.callback_handler.callbacks if hasattr(each, "jit_manager")
            ]
            manager.is_checkpoint_requested = True


def test_a_run_that_is_terminated_saves_after_the_step(tmp_path: Path) -> None:
    plain = made(Trainer, tmp_path, gradient_accumulation_steps=2)
    plain.train()
    told_to_end = Terminated()
    trainer: Any = made(
        InfinityTrainer, tmp_path, gradient_accumulation_steps=2, enable_jit_checkpoint=True, callbacks=[told_to_end]
    )
    told_to_end.trainer = trainer
    trainer.train()
    trainer.close()
    assert trainer.state.global_step == 3
    trainer = made(InfinityTrainer, tmp_path, gpt2(9), gradient_accumulation_steps=2)
    trainer.train(resume_from_checkpoint=True)
    agree(plain, trainer, resumed=True)


def test_a_closed_trainer_says_that_it_has_no_values(tmp_path: Path) -> None:
    trainer: Any = made(InfinityTrainer, tmp_path)
    trainer.train()
    state = weights(trainer)
    loss = trainer.evaluate()["eval_loss"]
    trainer.close()
    for wrong in (trainer.train, trainer.evaluate, lambda: trainer.predict(texts(2)), trainer.save_model):
        with pytest.raises(ModelError, match=r"has no values.*load values into the model"):
            wrong()
    trainer.model.load_state_dict(state)
    assert trainer.evaluate()["eval_loss"] == loss
    with trainer.engine:
        pass
    with pytest.raises(ModelError, match="has no values"):
        trainer.train()

    trainer = made(InfinityTrainer, tmp_path, model_init=lambda: gpt2())  # which makes a model for each train()
    trainer.train()
    trainer.close()
    trainer.train()
    trainer.close()


def test_a_search_of_hyper_parameters_has_one_engine_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: True)
    plain = made(Trainer, tmp_path, model_init=lambda: gpt2(), gradient_accumulation_steps=2, learning_rate=0.1)
    plain.train()
    config = {**BUDGETS, "ram": "4MiB", "nvme": str(tmp_path)}
    trainer: Any = made(InfinityTrainer, tmp_path, model_init=lambda: gpt2(), config=config)
    trainer.hp_search_backend = HPSearchBackend.WANDB  # whose trials are dictionaries
    monkeypatch.setattr(trainer, "_get_output_dir", lambda trial: str(tmp_path))
    for trial in ({"learning_rate": 0.01}, {"learning_rate": 0.1, "gradient_accumulation_steps": 2}):
        trainer.train(trial=trial)
    agree(plain, trainer)
    with pytest.raises(ConfigError, match="push_to_hub"):
        trainer.train(trial={"push_to_hub": True})


def test_what_it_predicts_is_fp32_in_any_precision(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    def keep(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return logits

    for precision in ("bf16", "fp16"):
        trainer = InfinityTrainer(
            gpt2(), arguments(tmp_path, **{precision: True}), infinity_config=BUDGETS, train_dataset=texts(),
            compute_metrics=lambda _: {}, preprocess_logits_for_metrics=keep,
        )  # fmt: skip
        data: Any = texts(4)
        predictions: Any = trainer.predict(data).predictions
        trainer.close()
        assert predictions.dtype == "float32"
        assert seen.pop().dtype is torch.float32


class Adds(nn.Module):
    """No ``PreTrainedModel``, and its outputs are a tuple or have no loss."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self._returns = returns

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.embed(input_ids))
        if self._returns == "logits":
            return {"logits": logits}
        assert labels is not None
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def test_any_module_with_any_loss(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        logits = outputs["logits"].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch

    fields: dict[str, Any] = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3}
    agree(*both(lambda: Adds("loss"), tmp_path / "tuple", **fields))
    agree(*both(lambda: Adds("logits"), tmp_path / "none", compute_loss_func=loss, **fields))


def test_parts_of_a_model(tmp_path: Path) -> None:
    def frozen() -> Any:
        model = gpt2()
        model.lm_head.weight.requires_grad_(False)  # tied
        return model

    agree(*both(frozen, tmp_path, max_steps=2))
    each = []
    for kind in EACH:
        model = gpt2()
        optimizer = torch.optim.Adamax(model.transformer.h[1].parameters(), lr=1e-2)
        extra: dict[str, Any] = {"infinity_config": BUDGETS} if kind is InfinityTrainer else {}
        each.append(
            kind(model, arguments(tmp_path, max_steps=2), train_dataset=texts(), optimizers=(optimizer, None), **extra)
        )
        each[-1].train()
    agree(*each)


def test_the_hub_gets_what_was_saved_when_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[set[str]] = []

    class Hub:
        """Stands for the one on the net."""

        def create_repo(self, *_: Any, **named: Any) -> Any:
            return type("Repository", (), {"repo_id": "me/model"})

        def upload_folder(self, *, folder_path: str, **named: Any) -> None:
            sent.append({path.name for path in Path(folder_path).iterdir()})

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    trainer: Any = made(InfinityTrainer, tmp_path, max_steps=1)
    trainer.train()
    trainer.push_to_hub()
    trainer.close()
    assert sent == [{"README.md", "config.json", "generation_config.json", "model.safetensors", "training_args.bin"}]


def test_adapters_train_as_in_the_plain_trainer_and_all_are_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        model = gpt2()
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        model.add_adapter("idle", peft.LoraConfig(r=3, target_modules=["c_proj"], fan_in_fan_out=True))
        return model

    each = []
    for kind in EACH:
        trainer: Any = made(kind, tmp_path, model=adapted(), max_steps=3, save_strategy="steps", save_steps=3)
        torch.manual_seed(0)
        trainer.train()
        each.append(trainer)
    agree(*each)
    plain, ours = (tmp_path / kind.__name__ / "checkpoint-3" for kind in EACH)
    for name in ("adapter_model.safetensors", "idle/adapter_model.safetensors"):
        expected, found = (load_file(place / name) for place in (plain, ours))
        assert found.keys() == expected.keys()
        assert found
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
