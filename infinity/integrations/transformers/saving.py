"""A model under the engine, saved as plain transformers loads it: configuration, weights one tensor at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from infinity.engine.engine import Engine
from infinity.integrations.weights import write_weights


def is_adapted(model: nn.Module) -> bool:
    """Whether it is PEFT's, of which adapters are saved and the base is not."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def save_pretrained(engine: Engine, directory: Path, *, writes: bool) -> None:
    """Save the model; of one with adapters, these. All ranks call this, and the others return before the last file.

    Args:
        engine: whose model.
        directory: made if it is not there; other files in it stay.
        writes: whether this rank is the one that writes.

    Raises:
        InfinityError: see ``Engine.export_safetensors``.
    """
    model: Any = engine.module
    if is_adapted(model):
        names = [name for name, param in model.named_parameters() if param.requires_grad]
        state = engine.state_dict()
        adapters = {name: state[name] for name in names}
        if writes:
            model.save_pretrained(str(directory), state_dict=adapters)
        return
    write_weights(engine, directory, moves=writes)
    if writes and isinstance(model, PreTrainedModel):
        _save_configuration(model, directory, _dtype_of(engine))


def _save_configuration(model: Any, directory: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if getattr(model, "_auto_class", None) is not None:  # the model's own code goes along
        custom_object_save(model, str(directory), config=config)
    config.save_pretrained(str(directory))
    if model.can_generate():
        model.generation_config.save_pretrained(str(directory))


def _dtype_of(engine: Engine) -> torch.dtype:
    """The dtype in which weights are saved, which is the one that is stepped."""
    stepped = {"bf16": torch.float32, "fp16": torch.float32}
    own = next((param.dtype for param in engine.module.parameters() if param.is_floating_point()), torch.float32)
    return stepped.get(engine.config.precision, own)
