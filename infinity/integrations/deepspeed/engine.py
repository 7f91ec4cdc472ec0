"""``DeepSpeedEngine``: infinity's engine with the methods of DeepSpeed's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from infinity.deepspeed_json import DeepSpeedConfig
from infinity.engine.engine import Engine
from infinity.engine.meeting import place
from infinity.errors import ConfigError, EngineStateError, ModelError
from infinity.integrations.deepspeed import registry
from infinity.integrations.deepspeed.checkpoints import TRACKED, Checkpoints
from infinity.integrations.deepspeed.data import DeepSpeedDataLoader, load_micro_batches
from infinity.integrations.deepspeed.log import log_dist
from infinity.integrations.deepspeed.optimizer import DeepSpeedOptimizer
from infinity.integrations.deepspeed.progress import Progress
from infinity.integrations.deepspeed.report import readable
from infinity.integrations.deepspeed.settings import Settings
from infinity.integrations.deepspeed.unsupported import METHODS, refuse_method


def _counter(name: str, what: str) -> Any:
    def read(engine: DeepSpeedEngine) -> int:
        return int(getattr(engine.progress, name))

    def write(engine: DeepSpeedEngine, value: int) -> None:
        setattr(engine.progress, name, value)

    return property(read, write, doc=what)


class DeepSpeedEngine(Checkpoints, Settings):
    """Made by ``initialize``. What it does not have, it looks up in the model.

    Args:
        engine: infinity's, of the model.
        settings: what the DeepSpeed configuration says.
        trains: whether there is an optimizer.
        lr_scheduler: an object, or what makes one of the optimizer; ``None``: there is none.
        training_data: a dataset.
        collate_fn: makes a micro-batch of its samples.

    Attributes:
        infinity: infinity's own engine, with all that DeepSpeed has no word for.
        module: the model.
        optimizer: steps like the user's own; ``None`` without one.
        lr_scheduler: stepped by ``step()``, unless the step was skipped.
        training_dataloader: micro-batches of ``training_data`` for this rank; ``None`` without.
        device: where the model computes.
    """

    global_steps: int = _counter("global_steps", "Optimizer steps, skipped ones included.")
    global_samples: int = _counter("global_samples", "Samples of these steps, of all ranks.")
    micro_steps: int = _counter("micro_steps", "Calls of ``step()``.")
    skipped_steps: int = _counter("skipped_steps", "Steps in which an fp16 gradient overflowed.")

    def __init__(
        self,
        engine: Engine,
        settings: DeepSpeedConfig,
        *,
        trains: bool,
        lr_scheduler: Any = None,
        training_data: Dataset[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self.infinity = engine
        self.module = engine.module
        self.training = engine.module.training
        self.device = engine.config.torch_device()
        self.optimizer = DeepSpeedOptimizer(engine) if trains else None
        self.collate_fn = collate_fn
        self._settings = settings
        self._accumulation_steps = settings.accumulation_steps
        self._micro_batch_size = settings.micro_batch_size
        self._is_boundary: bool | None = None
        self._num_backwards = 0
        self._step_applied = False
        is_made = lr_scheduler is not None and callable(lr_scheduler) and not hasattr(lr_scheduler, "step")
        self.lr_scheduler = lr_scheduler(self.optimizer) if is_made else lr_scheduler
        self.progress = Progress(self.lr_scheduler)
        engine.track(TRACKED, self.progress, is_data=False)
        registry.register(engine)
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        return self.infinity(*inputs, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run backward from the loss, divided by the number of accumulation steps; fp16 scales it beside.

        Args:
            loss: of one micro-batch, one element.
            retain_graph: as in ``torch.Tensor.backward``.
            scale_wrt_gas: whether to divide it.

        Returns:
            The divided loss.

        Raises:
            EngineStateError: there is no optimizer.
            ModelError: ``loss`` is no loss.
        """
        self._require_optimizer("backward")
        given: Any = loss
        if not isinstance(given, torch.Tensor) or given.numel() != 1 or not given.requires_grad:
            raise ModelError(
                f"engine.backward(loss): expected one element that requires a gradient, got {_words(given)}"
            )
        if scale_wrt_gas and self._accumulation_steps > 1:
            loss = loss / self._accumulation_steps
        self.infinity.backward(loss, retain_graph=retain_graph)
        self._num_backwards += 1
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the boundary of accumulation step the optimizer, then the scheduler.

        Gradients are clipped and consumed. A step in which an fp16 gradient overflowed changes nothing, the scheduler
        included.

        Args:
            lr_kwargs: for ``lr_scheduler.step``.

        Raises:
            EngineStateError: there is no optimizer, or ``backward`` was not called since the step before.
            NonFiniteError: fp16 overflows at the smallest loss scale.
            StorageError: a shard could not be read or written; the engine cannot go on.
        """
        self._require_optimizer("step")
        self._step_applied = False
        is_boundary = self.is_gradient_accumulation_boundary()
        if is_boundary and not self._take_step(lr_kwargs):
            return
        self.progress.micro_steps += 1
        self.progress.micro_batches = 0 if is_boundary else self.progress.micro_batches + 1

    def _take_step(self, lr_kwargs: Mapping[str, Any] | None) -> bool:
        """Whether the step counts: not where the engine went back to a commit instead, and all counters with it."""
        if self._accumulation_steps > 1 and not self._num_backwards:
            raise EngineStateError(
                "engine.step() without engine.backward(loss) since the step before: with gradient_accumulation_steps="
                f"{self._accumulation_steps} gradients of loss.backward() would be that many times too large; call "
                "engine.backward(loss)"
            )
        progress, num_skipped = self.progress, self.infinity.num_skipped_steps
        self._step_applied = self.infinity.step()
        self._num_backwards = 0
        is_skipped = self.infinity.num_skipped_steps > num_skipped
        self._require_optimizer("step").overflow = is_skipped
        if not self._step_applied and not is_skipped:
            return False
        progress.skipped_steps += is_skipped
        if self.lr_scheduler is not None and not is_skipped:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        progress.global_steps += 1
        progress.global_samples += self.train_batch_size() or 0
        if self.steps_per_print() and progress.global_steps % self.steps_per_print() == 0:
            log_dist(self._progress_line())
        return True

    def _progress_line(self) -> str:
        said = f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}"
        stats = self.infinity.last_step
        if not self.wall_clock_breakdown() or stats is None:
            return said
        stalls = ", ".join(f"{cause} {seconds:.3f} s" for cause, seconds in stats.stalls.items()) or "none"
        return (
            f"{said} | step {stats.seconds:.3f} s, of which something computed {stats.compute_seconds:.3f} s; waited "
            f"for: {stalls}; NVMe read {readable(stats.nvme_read_bytes)}, wrote {readable(stats.nvme_written_bytes)}"
        )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether ``step()`` after this micro-batch steps the optimizer."""
        if self._is_boundary is not None:
            return self._is_boundary
        return self.progress.micro_batches + 1 >= self._accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say so for each micro-batch yourself, from now on."""
        self._is_boundary = is_boundary

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context for backwards whose gradients are not reduced among ranks yet; in every stage. No step inside."""
        return self.infinity.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that have not been stepped."""
        self.infinity.zero_grad()
        self._num_backwards = 0

    def was_step_applied(self) -> bool:
        """Whether the latest ``step()`` changed the weights: not between boundaries, nor after an overflow."""
        return self._step_applied

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Have a step take more or fewer micro-batches, from the next step on.

        Raises:
            ConfigError: it is no multiple of what all ranks take at once, or that is not known.
            EngineStateError: a step's micro-batches have begun, or steps begin under a backward whose number is set.
        """
        if self._micro_batch_size is None:
            raise ConfigError("set_train_batch_size(): the configuration has no train_micro_batch_size_per_gpu")
        at_once = self._micro_batch_size * place().num_ranks
        if train_batch_size < at_once or train_batch_size % at_once:
            raise ConfigError(f"set_train_batch_size(): expected a multiple of {at_once}, got {train_batch_size}")
        if self.progress.micro_batches or self._num_backwards:
            raise EngineStateError("set_train_batch_size(): a step's micro-batches have begun; call it after step()")
        if self.infinity.config.max_grad_norm is None:
            raise EngineStateError(
                "set_train_batch_size(): with max_grad_norm=None steps begin under the last of a fixed number of "
                "backwards; leave max_grad_norm out of initialize()"
            )
        self._accumulation_steps = train_batch_size // at_once

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Say that micro-batches have another size; a loader that was made keeps its own."""
        self._micro_batch_size = micro_batch_size

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's state in the precision that computes, all of it in memory."""
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            frozen = {name for name, param in self.module.named_parameters() if not param.requires_grad}
            for name in frozen:
                state.pop(prefix + name, None)
        return state

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Give the model other values; see ``infinity.Engine.load_state_dict``."""
        return self.infinity.load_state_dict(state_dict, strict=strict)

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader of this rank's micro-batches.

        Args:
            dataset: of torch.
            batch_size: ``None`` for the configuration's.
            route: ``"train"`` shuffles; ``"eval"`` and ``"predict"`` do not.
            pin_memory: where there is an accelerator.
            data_sampler: chooses samples; ``None``: each rank its share.
            collate_fn: ``None`` for the one that ``initialize`` was given.
            num_local_io_workers: processes that load; ``None`` for none.

        Raises:
            ConfigError: the size of micro-batches is not known.
            ModelError: ``dataset`` is none.
        """
        return load_micro_batches(
            dataset,
            self._micro_batch_size if batch_size is None else batch_size,
            place(),
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            sampler=data_sampler,
            shuffle=route == "train",
            drop_last=bool(self._settings.document.get("dataloader_drop_last", False)),
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type != "cpu",
        )

    def empty_partition_cache(self) -> None:
        """Nothing: what is gathered leaves when its memory is needed."""

    def destroy(self) -> None:
        """Close the engine: end all work, give back memory and files. State that was not saved is gone."""
        registry.forget(self.infinity)
        self.infinity.close()

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            refuse_method(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)


def _words(loss: object) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}"
    return f"a tensor of shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " that requires none")
