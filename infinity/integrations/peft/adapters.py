"""Adapters of a model under the engine, in files as PEFT has them; nothing of the base is read, but what is trained."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict

from infinity.engine.engine import Engine
from infinity.engine.meeting import place
from infinity.engine.persistence.importing import open_weights
from infinity.errors import ModelError, StorageError, system_errors
from infinity.integrations.peft.models import adapted_model, check_adapter
from infinity.io.paths import user_path

_CONFIG_NAME = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_COMPUTING = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias")
"""What changes the outputs of the same tensors."""


def save_adapters(engine: Engine, path: str | os.PathLike[str], *, adapters: Sequence[str] | None = None) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, which ``PeftModel.from_pretrained`` loads.

    At full precision. The base is neither read nor written. As in PEFT, adapters that are not called ``"default"`` get
    a directory of their own inside. All ranks call this; the others return before the first one has written.

    Args:
        engine: whose model is PEFT's.
        path: a directory, made if it is not there; files of those names are replaced, others stay.
        adapters: their names; ``None``: all.

    Raises:
        ConfigError: ``path`` is no path.
        ModelError: the model is not PEFT's, or there is no such adapter.
        StorageError: something could not be read or written.
    """
    model, out = adapted_model(engine, "save_adapters"), user_path(path, "save_adapters")
    names = list(model.peft_config) if adapters is None else list(adapters)
    for name in names:
        check_adapter(model, name, "save_adapters")
    state = engine.state_dict()
    wanted = {own for name in names for own in _own_names(engine, model, name).values()}
    values = {own: state[own] for own in state if own in wanted}
    if place().rank == 0:
        _write(model, out, values, names)


def load_adapters(engine: Engine, path: str | os.PathLike[str], *, adapter: str = "default") -> None:
    """Give an adapter of the model the values of a saved one; optimizer states stay.

    Args:
        engine: whose model is PEFT's, with an adapter of the same configuration.
        path: a directory with ``adapter_config.json`` and ``adapter_model.safetensors`` (or ``adapter_model.bin``).
        adapter: which one gets them.

    Raises:
        ConfigError: ``path`` is no path.
        ModelError: the model is not PEFT's, there is no such adapter, or the saved one has other tensors or computes
            otherwise; nothing has been changed.
        StorageError: a file is missing or damaged.
    """
    model, given = adapted_model(engine, "load_adapters"), user_path(path, "load_adapters")
    check_adapter(model, adapter, "load_adapters")
    _check_config(_read_config(given / _CONFIG_NAME), model.peft_config[adapter].to_dict(), given)
    file = next((given / name for name in _WEIGHTS if (given / name).exists()), given / _WEIGHTS[0])
    saved = open_weights(file)
    own_names = _own_names(engine, model, adapter)
    missing, unexpected = sorted(own_names.keys() - set(saved)), sorted(set(saved) - own_names.keys())
    if missing or unexpected:
        raise ModelError(
            f"load_adapters: {file} is of another adapter than {adapter!r}: "
            + "; ".join(
                f"{len(found)} tensors are {kind}, such as {found[0]}"
                for kind, found in (("missing", missing), ("unexpected", unexpected))
                if found
            )
        )
    engine.load_state_dict({own: saved[name] for name, own in own_names.items()}, strict=False)


def _own_names(engine: Engine, model: Any, adapter: str) -> dict[str, str]:
    """Under which name in the model's state each tensor of an adapter's file is."""
    deferred = engine.state_dict().deferred()
    names = {id(tensor): name for name, tensor in reversed(deferred.items())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is saved beside; told when it is written
        found: Mapping[str, torch.Tensor] = get_peft_model_state_dict(model, deferred, adapter_name=adapter)
    return {name: names[id(tensor)] for name, tensor in found.items()}


def _write(model: Any, out: Path, values: Mapping[str, torch.Tensor], adapters: list[str]) -> None:
    """Have PEFT write into a directory inside, and put its files in their place once all are there."""
    made = out / f".adapters-{secrets.token_hex(4)}"
    with system_errors("saving adapters", out):
        out.mkdir(parents=True, exist_ok=True)
        try:
            model.save_pretrained(str(made), state_dict=values, selected_adapters=adapters)
            for file in [each for each in made.rglob("*") if each.is_file()]:
                target = out / file.relative_to(made)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _read_config(path: Path) -> Mapping[str, Any]:
    with system_errors("reading the configuration of an adapter", path):
        text = path.read_text(encoding="utf-8")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"not the configuration of an adapter: {error}", path=path) from error
    if not isinstance(config, dict) or "peft_type" not in config:
        raise StorageError("not the configuration of an adapter: expected an object with 'peft_type'", path=path)
    return config


def _check_config(saved: Mapping[str, Any], own: Mapping[str, Any], path: Path) -> None:
    for key in _COMPUTING:
        here = getattr(own.get(key), "value", own.get(key))
        if key in saved and saved[key] != here:
            raise ModelError(
                f"load_adapters: the adapter in {path} has {key}={saved[key]!r}, and that of this model {here!r}; "
                "make the model with peft.get_peft_model(base, peft.PeftConfig.from_pretrained(path))"
            )
