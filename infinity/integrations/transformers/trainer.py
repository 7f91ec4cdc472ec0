"""``InfinityTrainer``: a ``transformers.Trainer`` whose model and optimizer are under the engine.

    trainer = InfinityTrainer(model, args, train_dataset=data, infinity_config={"hbm": "8GiB", "nvme": "/mnt/nvme0"})
    trainer.train()

Everything about the loop is transformers': batches, accumulation, schedulers, logging, evaluation, callbacks. What is
put in its place goes through the accelerator (``infinity.integrations.accelerate``), whose ``prepare`` makes the engine
at the first ``train()`` or ``evaluate()``. Until then nothing is moved or looked at: a model of ``deferred_init`` stays
without memory, and goes from its record into the tiers.

What of ``Trainer`` is overridden, which is all that a new version of transformers could break:

- ``create_accelerator_and_postprocess``: the accelerator that it has made becomes ours.
- ``create_optimizer``: where an engine was closed, one is made anew.
- ``_move_model_to_device``: the engine does that, unit by unit.
- ``evaluation_loop``: there is an engine before it, also without ``train()``.
- ``prediction_step``: what it predicts is fp32 in any precision.
- ``save_model``, ``_save_optimizer_and_scheduler``, ``_save_checkpoint``: what is in ``checkpoint-<step>``
  (``checkpoints.py``), and which of them go.
- ``_load_from_checkpoint``, ``_load_optimizer_and_scheduler``, ``_load_best_model``: the engine's state comes back at
  once, when there is an engine.
- ``train``: finds the newest whole checkpoint; keeps transformers from removing any, as it would take every directory
  whose name begins alike.

In accelerate and transformers a plain model stays in memory when the trainer goes. Here its values are in the tiers:
save before ``close()``, or before the process ends.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_to_fp32  # type: ignore[import-untyped]
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from infinity.config import Config
from infinity.engine.engine import Engine
from infinity.errors import EngineStateError, system_errors
from infinity.integrations.accelerate.accelerator import Accelerator
from infinity.integrations.accelerate.optimizer import PreparedOptimizer
from infinity.integrations.transformers.arguments import settle
from infinity.integrations.transformers.checkpoints import (
    STATE_NAME,
    check_resumable,
    load_state,
    load_weights,
    newest_checkpoint,
    rotate,
)
from infinity.integrations.transformers.saving import save_pretrained

_SCHEDULER_NAME = "scheduler.pt"
_ARGUMENTS_NAME = "training_args.bin"

_logger = logging.get_logger(__name__)


class TrainerAccelerator(Accelerator):
    """The accelerator of a trainer, which keeps its engine from one ``train()`` to the next.

    Attributes:
        begins_anew: whether an engine that finds a state on NVMe is refused.
        found_steps: how many steps the state had that the engine has found there.
    """

    begins_anew = False
    found_steps = 0

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """As ``Accelerator.prepare``; an engine of another model (``model_init``) is closed.

        Raises:
            EngineStateError: training is to begin anew, and the engine goes on from a commit.
            InfinityError: see ``Accelerator.prepare``.
        """
        models = [each for each in objects if isinstance(each, nn.Module)]
        if models and self._engine is not None and models[0] is not self._engine.module:
            self.close()
        is_new = not self.has_engine
        prepared = super().prepare(*objects, device_placement=device_placement)
        if models and is_new:
            self.found_steps = self.engine.num_steps
        if models and self.begins_anew and self.found_steps:
            self.close()
            raise EngineStateError(
                f"the NVMe directories have a state of step {self.found_steps}, of a run before; train("
                "resume_from_checkpoint=True) goes on from a checkpoint of it. To begin anew, remove that state or "
                "give other directories"
            )
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """As accelerate's; the engine stays."""
        return super(Accelerator, self).free_memory(*objects)


class InfinityTrainer(Trainer):
    """Trains like ``transformers.Trainer``, inside the budgets of a ``Config``, with the same numbers.

    Args:
        model: a ``PreTrainedModel``, PEFT's or any other module that returns a loss; its parameters may be deferred.
        args: ``TrainingArguments``; ``bf16`` and ``fp16`` set ``Config.precision``.
        positional: further arguments of ``Trainer``, in its order.
        infinity_config: a ``Config``, its fields, or the path of a JSON file; ``None`` for the defaults.
        named: further arguments of ``Trainer``.

    Raises:
        ConfigError: an argument cannot be honoured, or contradicts the configuration; both are named.
    """

    accelerator: TrainerAccelerator

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        infinity_config: Config | dict[str, Any] | str | os.PathLike[str] | None = None,
        **named: Any,
    ) -> None:
        self._config = Config.of(infinity_config)
        self._keep: int | None = None
        super().__init__(model, args, *positional, **named)
        self._given_optimizer = self.optimizer

    @property
    def engine(self) -> Engine:
        """The engine; it is made at the first ``train()``, ``evaluate()``, ``predict()`` or ``save_model()``.

        Raises:
            EngineStateError: there is none yet, or it was closed.
        """
        return self.accelerator.engine

    def close(self) -> None:
        """Close the engine: memory, files and threads. Save what is to stay before."""
        self.accelerator.close()

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, with the engine's configuration in it; a search of hyper-parameters does so again."""
        config = settle(self.args, self._config)
        before: TrainerAccelerator | None = getattr(self, "accelerator", None)
        super().create_accelerator_and_postprocess()  # type: ignore[no-untyped-call, unused-ignore]
        TrainerAccelerator.over(self.accelerator, config)
        if before is not None:
            before.close()
            self.accelerator.begins_anew = before.begins_anew

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Nothing: the engine brings parameters to the device when they are needed, and buffers at its start."""

    def create_optimizer(self, *positional: Any, **named: Any) -> torch.optim.Optimizer:
        """See ``Trainer.create_optimizer``."""
        if isinstance(self.optimizer, PreparedOptimizer) and not self._has_engine():
            self.optimizer = self._given_optimizer
        return super().create_optimizer(*positional, **named)

    def _has_engine(self) -> bool:
        """Whether there is an engine of the model."""
        return self.accelerator.has_engine and self.accelerator.engine.module is self.model

    def _begin_engine(self) -> Engine:
        """Have an engine of the model."""
        if not self._has_engine():
            self.create_optimizer()
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        return self.accelerator.engine

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **named: Any) -> Any:
        """Train; see ``Trainer.train``.

        Args:
            resume_from_checkpoint: a directory ``checkpoint-<step>`` of this trainer or of a plain one; ``True``: the
                newest whole one in ``args.output_dir``.
            positional: further arguments of ``Trainer.train``, in its order.
            named: further arguments of ``Trainer.train``.

        Raises:
            DirectoryError: there is nothing to go on from in that directory.
            EngineStateError: training is to begin, and the NVMe directories have a state of a run before.
            NoCommitError: there is no whole checkpoint.
        """
        checkpoint: str | None = None
        if resume_from_checkpoint is True:
            checkpoint = str(newest_checkpoint(Path(str(self.args.output_dir))))
        elif resume_from_checkpoint:
            checkpoint = str(resume_from_checkpoint)
        self.accelerator.begins_anew = checkpoint is None
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._keep = limit
        try:
            outcome = super().train(checkpoint, *positional, **named)
        finally:
            self.accelerator.begins_anew = False
            self.args.save_total_limit = limit
        if self.args.should_save and limit == 1 and self.state.best_model_checkpoint is not None:
            rotate(Path(str(self.args.output_dir)), 1, self.state.best_model_checkpoint, newest_stays=False)
        return outcome

    def evaluation_loop(self, *positional: Any, **named: Any) -> Any:
        """See ``Trainer.evaluation_loop``: evaluation and prediction compute under the engine too."""
        self._begin_engine()
        return super().evaluation_loop(*positional, **named)

    def prediction_step(self, *positional: Any, **named: Any) -> tuple[Any, Any, Any]:
        """See ``Trainer.prediction_step``; logits come in fp32, as they do from the autocast of a plain trainer."""
        loss, logits, labels = super().prediction_step(*positional, **named)
        return loss, convert_to_fp32(logits), labels

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, as ``from_pretrained()`` loads it, one tensor in memory at a time. All ranks call this.

        Raises:
            InfinityError: see ``Engine.export_safetensors``.
        """
        place = Path(str(output_dir if output_dir is not None else self.args.output_dir))
        save_pretrained(self._begin_engine(), place, writes=self.args.should_save)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(place))
            args = copy.copy(self.args)
            args.save_total_limit = args.save_total_limit or self._keep
            torch.save(args, place / _ARGUMENTS_NAME)
        self.accelerator.wait_for_everyone()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.engine.has_gradients:  # args.enable_jit_checkpoint asks before the step too
            self.control.should_save = True  # which is looked at after the step
            return
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            rotate(Path(str(self._get_output_dir(trial=trial))), self._keep, self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        place = Path(output_dir)
        with system_errors("making the checkpoint", place):
            place.mkdir(parents=True, exist_ok=True)
        self.engine.save_checkpoint(place / STATE_NAME)
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), place / _SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights come back with the rest of the engine's state; until then a checkpoint is only looked at."""
        check_resumable(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load_state(self.engine, Path(checkpoint))
        self.accelerator.found_steps = 0
        place = Path(checkpoint) / _SCHEDULER_NAME
        if self.lr_scheduler is not None and place.is_file():
            self.lr_scheduler.load_state_dict(torch.load(place, weights_only=True))

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        _logger.info(f"Loading best model from {best} (score: {self.state.best_metric}).")
        load_weights(self.engine, Path(best))
