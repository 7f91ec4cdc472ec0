"""What a ``Trainer`` is told and what ``Config`` says, brought together; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import torch

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.integrations.lightning.precision import EnginePrecision

_ALLOWED = {
    "32-true": ("fp32", "bf16", "fp16"),
    "bf16-true": ("bf16",),
    "16-true": ("fp16",),
    "bf16-mixed": ("fp32", "bf16"),
    "16-mixed": ("fp16",),
}
"""What ``Config.precision`` may be, by what the Trainer's is. The first is taken where the user has not set it."""


_AVERAGING = {"StochasticWeightAveraging", "WeightAveraging"}


def name_of(plugin: Any, plain: tuple[type, ...]) -> str:
    """What ``Trainer(precision=...)`` was.

    Args:
        plugin: that Lightning has made of it.
        plain: the classes of plugins that are known.

    Raises:
        ConfigError: the engine does not compute so.
    """
    name = str(plugin.precision)
    if not isinstance(plugin, EnginePrecision) and (type(plugin) not in plain or name not in _ALLOWED):
        raise ConfigError(
            f"Trainer(precision=...) with InfinityStrategy: expected one of {', '.join(map(repr, _ALLOWED))}, got "
            f"{name!r} ({type(plugin).__name__})"
        )
    return name


def agreed(config: Config, name: str) -> Config:
    """The configuration that both sides mean.

    Args:
        config: the user's.
        name: what ``Trainer(precision=...)`` is.

    Raises:
        ConfigError: they contradict each other.
    """
    allowed = _ALLOWED[name]
    if "precision" not in config.model_fields_set:
        return config.model_copy(update={"precision": allowed[0]})
    if config.precision not in allowed:
        raise ConfigError(
            f"Trainer(precision={name!r}) means Config(precision={' or '.join(map(repr, allowed))}), got "
            f"{config.precision!r}; leave one of them out"
        )
    return config


def check_trainer(config: Config, trainer: Any, device: torch.device) -> Config:
    """The configuration of the engine under a trainer.

    Args:
        config: the user's, with the precision that is agreed on.
        trainer: which.
        device: where the trainer puts batches.

    Raises:
        ConfigError: they contradict each other; the message names both settings.
    """
    if config.max_grad_norm is not None and trainer.gradient_clip_val:
        raise ConfigError("Config.max_grad_norm and Trainer(gradient_clip_val=...) both clip; leave one of them out")
    if config.accumulation_steps not in (None, 1):
        raise ConfigError(
            f"Config(accumulation_steps={config.accumulation_steps}): Lightning counts backwards, with "
            "Trainer(accumulate_grad_batches=...); accumulation_steps=1 has steps begin under the last of them"
        )
    if config.accumulation_steps is not None and trainer.gradient_clip_val:
        raise ConfigError(
            "Config.accumulation_steps has steps begin under backward, when Trainer(gradient_clip_val=...) knows no "
            "gradients yet; clip with Config(max_grad_norm=...) instead"
        )
    if config.durability != "off":
        raise ConfigError(
            f"Config(durability={config.durability!r}): Lightning has a state of its own that commits would not have; "
            "save with ModelCheckpoint, and resume with trainer.fit(ckpt_path=...)"
        )
    for callback in trainer.callbacks:
        if _AVERAGING.intersection(kind.__name__ for kind in type(callback).__mro__):
            raise ConfigError(
                f"callbacks: {type(callback).__name__} averages weights in memory, which are away under the engine; "
                "average checkpoints of ModelCheckpoint instead"
            )
    if trainer.strategy._layer_sync is not None:
        raise ConfigError(
            "Trainer(sync_batchnorm=True): not with InfinityStrategy; call "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm() in the module's configure_model() or constructor"
        )
    if config.device == "auto":
        return config.model_copy(update={"device": str(device)})
    if config.torch_device().type != device.type:
        raise ConfigError(
            f"Config(device={config.device!r}), but Trainer's accelerator is on {str(device)!r}; leave device out"
        )
    return config
