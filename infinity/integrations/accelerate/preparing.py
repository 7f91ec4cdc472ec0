"""What ``Accelerator.prepare`` is: a model and its optimizer go under the engine; there is one engine at a time."""

from __future__ import annotations

from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
from torch import nn

from infinity.config import Config
from infinity.engine.engine import Engine
from infinity.engine.initialize import initialize
from infinity.errors import EngineStateError, ModelError
from infinity.integrations.accelerate.optimizer import PreparedOptimizer
from infinity.integrations.accelerate.settings import settle


class PreparingAccelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An ``accelerate.Accelerator`` that makes the engine of what is prepared.

    Attributes:
        infinity_config: what the engine is made with.
    """

    infinity_config: Config
    _engine: Engine | None
    _prepared: PreparedOptimizer | None
    _given: torch.optim.Optimizer | None

    def _take_charge(self, config: Config) -> None:
        handlers = (self.ddp_handler, self.scaler_handler, self.autocast_handler)
        given = [handler for handler in handlers if handler is not None]
        self.infinity_config = settle(config, self.state.mixed_precision, self.device, given)
        self.native_amp, self.scaler = False, None
        self._engine = self._prepared = self._given = None

    @property
    def engine(self) -> Engine:
        """The engine that ``prepare`` has made.

        Raises:
            EngineStateError: there is none yet, or it was closed.
        """
        if self._engine is None:
            raise EngineStateError("there is no engine: call accelerator.prepare(model, optimizer, …) first")
        return self._engine

    @property
    def has_engine(self) -> bool:
        """Whether ``prepare`` has made an engine, which is open."""
        return self._engine is not None and self._engine.is_open

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Put a model and its optimizer under an engine; prepare loaders and schedulers as accelerate does.

        Args:
            objects: in any order; the model and its optimizer together.
            device_placement: whether to put the batches of a loader on the device, one for each object.

        Returns:
            The objects, prepared, in their order; one alone as it is.

        Raises:
            EngineStateError: there is an engine already, of another model.
            InfinityError: see ``infinity.initialize``.
            ModelError: the model or its optimizer is missing, or there are several.
        """
        models = [each for each in objects if isinstance(each, nn.Module)]
        optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        if (models or optimizers) and not self._has_all(models, optimizers):
            self._begin(models, optimizers)
        prepared = super().prepare(*objects, device_placement=device_placement)
        self._track()
        return prepared

    def _has_all(self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> bool:
        """Whether all of these are under the engine already."""
        if self._engine is None or not self._engine.is_open:
            return False
        return all(each is self._engine.module for each in models) and all(map(self._is_ours, optimizers))

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in (self._prepared, self._given)

    def _begin(self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        """Make the engine."""
        if len(models) != 1 or len(optimizers) != 1:
            raise ModelError(
                "prepare(): expected one model and its optimizer in one call, which the engine takes together, got "
                f"{len(models)} models and {len(optimizers)} optimizers; what is only evaluated need not be prepared: "
                "model.to(accelerator.device)"
            )
        if self._engine is not None and self._engine.is_open:
            raise EngineStateError(
                f"prepare(): the {type(self._engine.module).__name__} prepared before has the engine of this "
                "Accelerator; make another Accelerator with NVMe directories of its own, or call free_memory() first"
            )
        [optimizer] = optimizers
        if isinstance(optimizer, PreparedOptimizer):
            raise ModelError(
                "prepare(): the optimizer is one that prepare() has returned, of an engine that is closed; build an "
                "optimizer of the model's parameters"
            )
        if callable(getattr(optimizer, "train", None)):
            raise ModelError(
                f"optimizer: {type(optimizer).__name__} has train() and eval(), which exchange the values of "
                "parameters in memory; those are away under the engine. Use an optimizer without"
            )
        self._engine = initialize(models[0], optimizer, self.infinity_config)
        self._prepared, self._given = PreparedOptimizer(self._engine), optimizer

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model, if ``prepare`` has put it under the engine.

        Raises:
            ModelError: it has not.
        """
        if self._engine is None or model is not self._engine.module:
            raise ModelError(
                f"prepare_model(): the {type(model).__name__} is not under the engine; give it to "
                "prepare(model, optimizer, …) together with its optimizer"
            )
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """The engine's optimizer, if ``prepare`` has made it of this one.

        Raises:
            ModelError: it has not.
        """
        if self._prepared is None or not self._is_ours(optimizer):
            raise ModelError(
                f"prepare_optimizer(): the {type(optimizer).__name__} is not under the engine; give it to "
                "prepare(model, optimizer, …) together with its model"
            )
        if self._prepared not in self._optimizers:
            self._optimizers.append(self._prepared)
        return self._prepared

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have the states of objects saved and loaded with everything else, and kept by commits.

        Raises:
            ModelError: one has a state that cannot be kept.
            ValueError: one has no ``state_dict`` and ``load_state_dict``.
        """
        super().register_for_checkpointing(*objects)
        self._track()

    def _track(self) -> None:
        if self._engine is not None:
            for kind, tracked in (("scheduler", self._schedulers), ("registered", self._custom_objects)):
                for index, each in enumerate(tracked):
                    self._engine.track(f"{kind} {index}", each, is_data=False)

    def close(self) -> None:
        """Close the engine, if there is one."""
        engine, self._engine, self._prepared, self._given = self._engine, None, None, None
        if engine is not None:
            engine.close()
