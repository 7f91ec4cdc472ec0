"""Where the model of a plan comes from. None of them takes memory for its tensors."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.engine.deferred import deferred_init
from infinity.errors import ConfigError, InfinityError, ModelError
from infinity.integrations.architectures import model_from_config
from infinity.plan.settings import PlanSettings
from infinity.train.model import GPT, GPTShape

_COUNTED_VOCAB = 32000


@dataclass(frozen=True, slots=True)
class Source:
    """A model to plan.

    Attributes:
        model: on no device, or wherever the user has it.
        name: what it is called.
        attention: layers times width of its attention, for its arithmetic; 0 where that is not known.
        is_ours: whether it was made here, and may be changed.
    """

    model: nn.Module
    name: str
    attention: int = 0
    is_ours: bool = True


class CountedBlock(nn.Module):
    """A transformer block of so many parameters: four square matrices, and two between width and another."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.attention_out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp_in = nn.Linear(hidden_size, inner_size, bias=False)
        self.mlp_out = nn.Linear(inner_size, hidden_size, bias=False)


class CountedModel(nn.Module):
    """What counts tell of a transformer: an embedding with a tied head, and equal blocks."""

    def __init__(self, num_parameters: int, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        inner_size = ((num_parameters - vocab_size * hidden_size) / num_layers - 4 * hidden_size**2) / 2 / hidden_size
        if round(inner_size) < 1:
            least = vocab_size * hidden_size + num_layers * (4 * hidden_size**2 + 2 * hidden_size)
            raise ConfigError(
                f"--parameters: expected at least {least:,} for --layers {num_layers}, --hidden {hidden_size} and "
                f"--vocab {vocab_size}, got {num_parameters:,}"
            )
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(CountedBlock(hidden_size, round(inner_size)) for _ in range(num_layers))
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.head.weight = self.embedding.weight


def source_of(model_or_config: nn.Module | str | os.PathLike[str] | None, settings: PlanSettings) -> Source:
    """The model that a call or the flags name.

    Args:
        model_or_config: a model, or the path of a Hugging Face ``config.json``; ``None``: what the settings say.
        settings: the flags.

    Raises:
        ConfigError: there is no such model.
        ModelError: it cannot be made.
    """
    if isinstance(model_or_config, nn.Module):
        return Source(model_or_config, type(model_or_config).__name__, is_ours=False)
    if model_or_config is not None and not isinstance(model_or_config, (str, os.PathLike)):
        raise ConfigError(
            f"model: expected a torch.nn.Module or the path of a config.json, got {type(model_or_config).__name__}"
        )
    path = model_or_config if model_or_config is not None else settings.hf_config
    if path is not None:
        model, fields = model_from_config(path)
        attention = int(fields.get("num_hidden_layers") or 0) * int(fields.get("hidden_size") or 0)
        return Source(model, type(model).__name__, attention)
    if settings.model_class is not None:
        return Source(_from_class(settings.model_class, settings.kwargs), settings.model_class)
    layers, hidden = settings.num_layers or 12, settings.hidden_size or 512
    with torch.device("meta"):
        if settings.num_parameters is not None:
            vocab = settings.vocab_size or _COUNTED_VOCAB
            counted = CountedModel(int(settings.num_parameters), layers, hidden, vocab)
            return Source(counted, f"{layers} layers of {hidden}", layers * hidden)
        heads = settings.num_heads or 8
        if hidden % heads:
            raise ConfigError(f"--hidden: expected a multiple of --heads {heads}, got {hidden}")
        shape = GPTShape(layers, hidden, heads, settings.seq_length, settings.vocab_size or 256)
        return Source(GPT(shape), f"GPT, {layers} layers of {hidden}", layers * hidden)


def _from_class(name: str, kwargs: str | None) -> nn.Module:
    package, colon, path = name.partition(":")
    if not (package and colon and path):
        raise ConfigError(f"--model: expected package.module:Class, got {name!r}")
    try:
        maker: Any = importlib.import_module(package)
        for part in path.split("."):
            maker = getattr(maker, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model: {name} cannot be found: {error}; it must be importable from here") from error
    try:
        arguments = json.loads(kwargs or "{}")
    except ValueError as error:
        raise ConfigError(f"--kwargs: not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"--kwargs: expected a JSON object such as '{{\"width\": 512}}', got {kwargs}")
    try:
        with deferred_init():
            model = maker(**arguments)
    except InfinityError:
        raise
    except Exception as error:  # whatever the user's class does with them
        raise ModelError(f"--model: {name} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"--model: expected {name} to make a torch.nn.Module, got {type(model).__name__}")
    return model


def optimizer_for(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """An optimizer of ``torch.optim`` for all parameters.

    Raises:
        ConfigError: there is no such class, or it cannot be made of these parameters alone.
    """
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
        known = sorted(
            each for each, value in vars(torch.optim).items()
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and each != "Optimizer"
        )  # fmt: skip
        raise ConfigError(f"--optimizer: expected a class of torch.optim ({', '.join(known)}), got {name!r}")
    params = list(model.parameters())
    if not params:
        raise ModelError(f"model: {type(model).__name__} has no parameters; there is nothing to train")
    try:
        return kind(params, lr=1e-3)  # type: ignore[call-arg]
    except Exception as error:  # of the class's own checks
        raise ConfigError(f"--optimizer: {name} cannot be made of all parameters of the model: {error}") from error
