"""``Accelerator``: accelerate's own, with the engine in the place of what it wraps around a model.

    accelerator = Accelerator({"hbm": "8GiB", "ram": "32GiB", "nvme": "/mnt/nvme0"}, gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

It is a subclass, so what has nothing to do with parameters is accelerate's: loaders and their shares of batches,
schedulers, ``accumulate``, gathering, printing, trackers. ``prepare`` makes the engine of the model and the optimizer,
and returns the user's model, which computes under it.

*Precision* is the engine's: ``mixed_precision`` sets ``Config.precision``. No autocast is put around the forward, and
the engine scales the loss. *Ranks* are those that accelerate has found; the engine averages gradients as DDP does, and
stages and slices are ``Config``'s. *State*: ``save_state`` writes the engine's checkpoint beside what accelerate keeps
of its own (random states, samplers). Prepared schedulers and registered objects are tracked by the engine, so they are
in its checkpoints and commits, and nothing of them is unpickled.

Of accelerate's private parts it relies on the lists ``_models``, ``_optimizers``, ``_schedulers`` and
``_custom_objects``, and on ``AcceleratedOptimizer._is_overflow``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_file_size_to_int  # type: ignore[import-untyped]
from torch import nn

from infinity.config import Config
from infinity.errors import ConfigError, ModelError
from infinity.integrations.accelerate.preparing import PreparingAccelerator
from infinity.integrations.accelerate.settings import refuse_others, refuse_precision
from infinity.integrations.weights import write_weights

STATE_NAME = "infinity"
"""The engine's checkpoint, in a directory of ``save_state``."""

_LISTS = ("_models", "_optimizers", "_schedulers", "_custom_objects")


class Accelerator(PreparingAccelerator):
    """An ``accelerate.Accelerator`` whose model and optimizer are under an engine.

    Args:
        infinity_config: a ``Config``, its fields, or the path of a JSON file; ``None`` for the defaults.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``: sets ``Config.precision``. ``None``: what
            ``accelerate launch`` was told, else what ``infinity_config`` says.
        cpu: compute on the CPU, whatever else there is.
        settings: accelerate's own: ``gradient_accumulation_steps``, ``dataloader_config``, ``log_with``, …

    Attributes:
        infinity_config: what the engine is made with.

    Raises:
        ConfigError: the configuration cannot be used, contradicts the settings, or these ask for another engine.
    """

    def __init__(
        self,
        infinity_config: Config | dict[str, Any] | str | os.PathLike[str] | None = None,
        *,
        mixed_precision: str | None = None,
        cpu: bool = False,
        **settings: Any,
    ) -> None:
        config = Config.of(infinity_config)
        refuse_others(settings)
        refuse_precision(config, mixed_precision)
        super().__init__(mixed_precision=mixed_precision, cpu=cpu or config.device == "cpu", **settings)
        self._take_charge(config)

    @classmethod
    def over(cls, plain: Any, config: Config) -> Accelerator:
        """Make one of a plain ``accelerate.Accelerator`` that nothing has been prepared with; it stays the object.

        Args:
            plain: which.
            config: the engine's.

        Raises:
            ConfigError: they contradict each other.
        """
        plain.__class__ = cls
        plain._take_charge(config)
        return plain  # type: ignore[no-any-return]

    @property
    def mixed_precision(self) -> str:
        """What the model computes in, in accelerate's words."""
        precision = self.infinity_config.precision
        return "no" if precision == "fp32" else precision

    def backward(self, loss: torch.Tensor, **settings: Any) -> None:
        """Run backward from the loss divided by ``gradient_accumulation_steps``.

        Args:
            loss: one element.
            settings: ``retain_graph``.

        Raises:
            ConfigError: there are other settings.
        """
        retain_graph = bool(settings.pop("retain_graph", False))
        if settings:
            raise ConfigError(f"backward(): {', '.join(settings)} is not supported; expected retain_graph only")
        self.engine.backward(loss / self.gradient_accumulation_steps, retain_graph=retain_graph)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """A context in which gradients only add up; the engine does not take its backwards for the last of a step."""
        with self.engine.no_sync():
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip, to the last bit as ``torch.nn.utils.clip_grad_norm_``.

        Where ``Config.max_grad_norm`` is set, the engine clips in the step, which knows the norm only then.

        Returns:
            The norm before, no dimensions. Where the engine clips in the step, NaN until then. ``None`` where nobody
            ever knows: steps begin under backward (``Config.accumulation_steps``), and ``max_norm`` is infinite.

        Raises:
            ConfigError: ``max_norm`` or ``norm_type`` is another than the engine's.
            EngineStateError: steps begin under backward, and ``Config.max_grad_norm`` is not set.
        """
        config = self.engine.config
        if config.max_grad_norm is not None:
            if (max_norm, norm_type) != (config.max_grad_norm, 2):
                raise ConfigError(
                    f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}): the engine clips in every step with "
                    f"max_grad_norm={config.max_grad_norm} and norm 2; give the same, or leave max_grad_norm out of "
                    "Config"
                )
            assert self._prepared is not None
            return self._prepared.norm_to_come()
        if config.accumulation_steps is not None and max_norm == float("inf"):
            return None
        return self.engine.clip_grad_norm_(max_norm, norm_type, parameters=parameters)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Refused.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "clip_grad_value_() is not supported: gradients leave for their tiers as they come, and only their norm is "
            "taken on the way; use clip_grad_norm_()"
        )

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Refused.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "lomo_backward() is not supported: LOMO changes parameters in memory under backward; with an optimizer of "
            "torch, Config(accumulation_steps=1) steps under backward"
        )

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """As accelerate's on one process; refused on several.

        Raises:
            ModelError: there are several.
        """
        if self.num_processes > 1:
            raise ModelError(
                "join_uneven_inputs() is not supported: all ranks take the same number of steps; leave "
                "even_batches=True, or end together with accelerator.engine.batches(loader)"
            )
        return super().join_uneven_inputs(joinables, even_batches=even_batches)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The model's state by name, at full precision, all in memory, as ``save_pretrained(state_dict=…)`` wants it.

        All ranks call this, and each gets all. ``engine.state_dict()`` reads one tensor at a time; ``save_model``
        writes so.
        """
        if self._engine is None or model is not self._engine.module:
            return super().get_state_dict(model, unwrap=unwrap)
        state = self._engine.state_dict()
        tied = {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}
        values: dict[int | str, torch.Tensor] = {}
        for name in state:
            if tied.get(name, name) not in values:
                values[tied.get(name, name)] = state[name]
        return {name: values[tied.get(name, name)] for name in state}

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights as safetensors files, one tensor in memory at a time. All ranks call this.

        Raises:
            ConfigError: ``safe_serialization`` is false.
            StorageError: they could not be written.
        """
        if not safe_serialization:
            raise ConfigError("save_model(safe_serialization=False): weights are written as safetensors only")
        if self._engine is None or model is not self._engine.module:
            super().save_model(model, save_directory, max_shard_size=max_shard_size)
            return
        max_file_bytes = max_shard_size if isinstance(max_shard_size, int) else convert_file_size_to_int(max_shard_size)
        write_weights(self._engine, Path(save_directory), max_file_bytes=max_file_bytes, moves=self.is_main_process)
        self.wait_for_everyone()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **settings: Any) -> Path:
        """Save everything: the engine's checkpoint, what is registered, and accelerate's own. All ranks call this.

        Returns:
            The directory.

        Raises:
            EngineStateError: gradients wait for a step.
            InfinityError: see ``Engine.save_checkpoint``.
        """
        engine = self.engine
        with self._without_state():
            place = Path(super().save_state(output_dir, safe_serialization, **settings))
        engine.save_checkpoint(place / STATE_NAME)
        return place

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **settings: Any) -> None:
        """Go on from what ``save_state`` has written, under any budgets and number of ranks. All ranks call this.

        Raises:
            InfinityError: see ``Engine.load_checkpoint``.
        """
        engine = self.engine

        def load(models: Any, place: str | os.PathLike[str]) -> None:
            engine.load_checkpoint(Path(place) / STATE_NAME)

        hook = self.register_load_state_pre_hook(load)
        try:
            with self._without_state():
                super().load_state(input_dir, load_kwargs, **settings)
        finally:
            hook.remove()

    @contextlib.contextmanager
    def _without_state(self) -> Iterator[None]:
        """A context in which accelerate does not see what the engine saves and loads."""
        seen = {name: getattr(self, name) for name in _LISTS}
        for name in _LISTS:
            setattr(self, name, [])
        try:
            yield
        finally:
            for name, entries in seen.items():
                setattr(self, name, entries)

    def free_memory(self, *objects: Any) -> Any:
        """Close the engine and forget everything; save before what is to stay, as the weights go too."""
        self.close()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """End trackers and the process group; of several ranks, close the engines, which need it.

        One process keeps its engine, as many scripts save the model after this.
        """
        if self.num_processes > 1:
            self.close()
        super().end_training()
