"""What an ``accelerate.Accelerator`` is told and what ``Config`` says, brought together; what cannot be is refused."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch
from accelerate.utils import (  # type: ignore[import-untyped]
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)

from infinity.config import Config, Precision
from infinity.errors import ConfigError

_ENGINES = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
    "parallelism_config": "tensor, context or sequence parallelism",
}
_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context or sequence parallelism",
}


def refuse_others(settings: Mapping[str, Any]) -> None:
    """Refuse settings, and what ``accelerate launch`` has set, that would put another engine around the model.

    Raises:
        ConfigError: it names the setting.
    """
    for name, other in _ENGINES.items():
        if settings.get(name) is not None:
            raise ConfigError(f"{name}: infinity takes the place of {other}, so the two cannot be used together")
    for name, other in _SWITCHES.items():
        if os.environ.get(name, "false").lower() == "true":
            raise ConfigError(
                f"environment variable {name}: infinity takes the place of {other}; choose none of them in "
                "'accelerate config', or start with torchrun"
            )
    plugin = settings.get("dynamo_plugin")
    backend = settings.get("dynamo_backend") if plugin is None else plugin.backend
    if backend is not None and str(getattr(backend, "value", backend)).lower() != "no":
        raise ConfigError(
            f"dynamo_backend: {backend} would compile the hooks that bring parameters; have the blocks compiled with "
            "Config(compile=True)"
        )


def refuse_precision(config: Config, mixed_precision: Any) -> None:
    """Refuse a ``mixed_precision`` that is given and says otherwise than ``Config.precision``, which is given too.

    Raises:
        ConfigError: it does, or there is no such precision.
    """
    if mixed_precision is None:
        return
    asked = "fp32" if str(mixed_precision) == "no" else str(mixed_precision)
    if asked not in get_args(Precision):
        raise ConfigError(f"mixed_precision: expected 'no', 'bf16' or 'fp16', got {mixed_precision!r}")
    if "precision" in config.model_fields_set and config.precision != asked:
        raise ConfigError(
            f"mixed_precision={str(mixed_precision)!r} and Config(precision={config.precision!r}) say two things; give "
            "one of them, or both alike"
        )


def settle(config: Config, mixed_precision: str, device: torch.device, handlers: Iterable[Any] = ()) -> Config:
    """The configuration of the engine under an accelerator.

    Args:
        config: the user's.
        mixed_precision: the accelerator's: ``"no"`` leaves it to ``config``.
        device: where the accelerator puts batches.
        handlers: the accelerator's ``kwargs_handlers``.

    Raises:
        ConfigError: they contradict each other; the message names both settings.
    """
    changes: dict[str, Any] = {}
    if mixed_precision != "no":
        refuse_precision(config, mixed_precision)
        changes["precision"] = mixed_precision
    if config.device == "auto":
        changes["device"] = device.type
    elif config.torch_device().type != device.type:
        raise ConfigError(
            f"device: Config says {config.device!r}, and accelerate puts batches on {device.type!r}; make the "
            "Accelerator with cpu=True (TrainingArguments: use_cpu=True), or leave Config's device out"
        )
    for handler in handlers:
        changes |= _read(handler, changes.get("precision", config.precision))
    return config.model_copy(update=changes)


def _read(handler: Any, precision: Precision) -> dict[str, Any]:
    """What a handler says that ``Config`` says too."""
    if isinstance(handler, GradScalerKwargs):
        return _read_scaler(handler) if precision == "fp16" else {}
    if isinstance(handler, DistributedDataParallelKwargs):
        if handler.comm_hook != DDPCommunicationHookType.NO:
            raise ConfigError(
                "kwargs_handlers: a communication hook of DistributedDataParallel has no place in the engine, which "
                "sums gradients itself; see Config.reduction_dtype"
            )
    else:
        raise ConfigError(
            f"kwargs_handlers: {type(handler).__name__} is for something that the engine does itself or not at all: "
            "Config(precision=…) chooses what is computed in"
        )
    return {}


def _read_scaler(handler: Any) -> dict[str, Any]:
    if not handler.enabled:
        return {"loss_scale": 1.0}
    if (handler.growth_factor, handler.backoff_factor) != (2.0, 0.5):
        raise ConfigError(
            "kwargs_handlers: GradScalerKwargs with growth_factor 2 and backoff_factor 0.5 only: the loss scale is "
            f"doubled and halved, got {handler.growth_factor} and {handler.backoff_factor}"
        )
    return {"initial_loss_scale": float(handler.init_scale), "loss_scale_window": int(handler.growth_interval)}
