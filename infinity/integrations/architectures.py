"""Hugging Face models by their ``config.json``: built for their shapes, without weights."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from infinity.engine.deferred import deferred_init
from infinity.errors import ConfigError, ModelError


def model_from_config(path: str | os.PathLike[str]) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model that a ``config.json`` describes; no memory for its tensors, and nothing is downloaded.

    Args:
        path: the file, or the directory that holds it.

    Returns:
        The model, under ``deferred_init``, and what the file says.

    Raises:
        ConfigError: transformers is missing, or the file is missing or is no such file.
        ModelError: transformers cannot build it.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a Hugging Face config.json") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(f"{path}: expected a Hugging Face config.json with 'model_type'; this has none")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"{path}: a Hugging Face model needs transformers, which is not installed: pip install transformers"
        ) from error
    try:
        config = transformers.AutoConfig.for_model(**fields)
        names = config.architectures or []
        maker = getattr(transformers, names[0], None) if names else None
        with deferred_init():
            if maker is not None:
                model = maker(config)
            elif type(config) in transformers.AutoModelForCausalLM._model_mapping:
                model = transformers.AutoModelForCausalLM.from_config(config)
            else:
                model = transformers.AutoModel.from_config(config)
    except Exception as error:  # whatever the architecture's own code does with these fields
        raise ModelError(f"{path}: transformers cannot build model_type {fields['model_type']!r}: {error}") from error
    assert isinstance(model, nn.Module)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = {
        name: getattr(text, name, None)
        for name in ("num_hidden_layers", "hidden_size", "max_position_embeddings", "vocab_size")
    }
    return model, {**fields, **{name: value for name, value in sizes.items() if value is not None}}
