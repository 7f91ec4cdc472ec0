"""Base and adapters as one model without PEFT, written tensor by tensor.

Each layer is merged by PEFT's own code, on values read for it (``filled``), when its weight is about to be written.
What it leaves on the layer is taken back, so that training goes on.
"""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from infinity.engine.deferred import deferred_from
from infinity.engine.engine import Engine
from infinity.engine.filled import filled
from infinity.errors import ModelError
from infinity.integrations.peft.models import adapted_model

_PREFIX = "base_model.model."


def export_merged(engine: Engine, path: str | os.PathLike[str], *, max_file_bytes: int = 5 * 10**9) -> None:
    """Write the model that ``merge_and_unload()`` of the active adapters gives, bit for bit; the engine's stays.

    As ``config.json`` and safetensors files for ``from_pretrained``, or the weights alone where the base is not of
    transformers. One layer is in memory at a time. All ranks call this; the first one writes.

    Args:
        engine: whose model is PEFT's.
        path: a directory that does not exist, or is empty.
        max_file_bytes: how many bytes of tensors there are in a file.

    Raises:
        ModelError: the model is not PEFT's, or has adapters that are no change of weights (prompts), or of a kind that
            is not supported; the message names it.
        DirectoryError, DiskFullError, StorageError: as for ``Engine.export_safetensors``.
    """
    model = adapted_model(engine, "export_merged")
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        raise ModelError("export_merged: prompts are no change of weights, and cannot be merged; use save_adapters()")
    base = model.get_base_model()
    tensors = _Merging(engine, base).tensors()
    unique = {id(tensor): name for name, tensor in reversed(tensors.items())}
    written = {name: tensor for name, tensor in tensors.items() if unique[id(tensor)] == name}  # tied ones once
    beside = functools.partial(_write_configuration, base, _is_tied(base, tensors))
    engine.export_tensors(path, written, max_file_bytes=max_file_bytes, beside=beside)


class _Merging:
    """The tensors of a base with its adapters, by their names without PEFT."""

    def __init__(self, engine: Engine, base: nn.Module) -> None:
        self._state = engine.state_dict()
        self._kept: dict[str, str] = {}  # by name of what PEFT has put around a module: where inside that is
        self._layers: dict[nn.Parameter, Any] = {}
        for name, module in base.named_modules():
            if isinstance(module, BaseTunerLayer):
                self._add_layer(name, module)
            elif isinstance(module, AuxiliaryTrainingWrapper):
                self._kept[name] = _active_module(name, module)
        entries = engine.module.state_dict(keep_vars=True)
        self._places = {param: name for name, param in reversed(entries.items()) if isinstance(param, nn.Parameter)}
        self._params = {name: param for name, param in entries.items() if isinstance(param, nn.Parameter)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Deferred ones, and buffers."""
        found, merged = {}, {param: self._deferred(param, layer) for param, layer in self._layers.items()}
        for name, tensor in self._state.deferred().items():
            final = self._final_name(name.removeprefix(_PREFIX))
            if final is not None:
                param = self._params.get(name)
                found[final] = tensor if param is None else merged.get(param, tensor)
        return found

    def _add_layer(self, name: str, layer: Any) -> None:
        if isinstance(layer, ParamWrapper) or hasattr(layer, "unload_and_optionally_merge_module"):
            raise ModelError(f"export_merged: {name} has a {type(layer).__name__} of PEFT's, which is not supported")
        self._kept[name] = "base_layer."
        for param in layer.get_base_layer().parameters(recurse=False):
            if param in self._layers:
                raise ModelError(
                    f"export_merged: {name} has a weight that is tied to that of another module with adapters, which "
                    "is not supported"
                )
            self._layers[param] = layer

    def _final_name(self, name: str) -> str | None:
        """The name without PEFT; ``None``: it is an adapter's, or what one replaces."""
        steps = name.split(".")
        for end in range(len(steps), 0, -1):
            outside = ".".join(steps[:end])
            kept = self._kept.get(outside)
            if kept is not None:
                inside = name.removeprefix(f"{outside}.")
                if not inside.startswith(kept):
                    return None
                name = f"{outside}.{inside.removeprefix(kept)}"
        return name

    def _deferred(self, param: nn.Parameter, layer: Any) -> torch.Tensor:
        like = self._state.deferred()[self._places[param]]
        return deferred_from(like.shape, like.dtype, functools.partial(self._merge, param, layer))

    def _merge(self, param: nn.Parameter, layer: Any) -> torch.Tensor:
        """The value of a base's parameter after PEFT has merged its layer."""
        was_merged, caches = list(layer.merged_adapters), dict(getattr(layer, "_caches", {}))
        with filled(layer.modules(), lambda each: self._state[self._places[each]]) as values:
            try:
                layer.merge()
                return values[param].detach()
            finally:
                layer.merged_adapters[:] = was_merged
                if hasattr(layer, "_caches"):
                    layer._caches = caches


def _active_module(name: str, wrapper: AuxiliaryTrainingWrapper) -> str:
    """Where the module is that takes the place of a wrapper."""
    if not isinstance(wrapper, ModulesToSaveWrapper):
        raise ModelError(f"export_merged: {name} has a {type(wrapper).__name__} of PEFT's, which is not supported")
    active = wrapper.active_adapters
    return f"modules_to_save.{active[0]}." if active else "original_module."


def _is_tied(base: Any, tensors: dict[str, torch.Tensor]) -> bool | None:
    """Whether the head still shares its weight with the embedding; ``None``: the model has no such pair."""
    if not callable(getattr(base, "get_output_embeddings", None)):
        return None
    names = {id(module): name for name, module in base.named_modules()}
    pair = [names.get(id(module)) for module in (base.get_input_embeddings(), base.get_output_embeddings())]
    found = [tensors.get(f"{name}.weight") for name in pair]
    return None if None in found else found[0] is found[1]


def _write_configuration(base: Any, is_tied: bool | None, directory: Path) -> None:
    if not hasattr(base, "config") or not hasattr(base.config, "save_pretrained"):
        return
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    if is_tied is False and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
    config.save_pretrained(str(directory))
    if base.can_generate():
        base.generation_config.save_pretrained(str(directory))
