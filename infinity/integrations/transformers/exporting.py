"""``export_pretrained``: the engine's model as a directory that Transformers loads."""

from __future__ import annotations

import copy
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from infinity.engine.deferred import deferred_init
from infinity.engine.engine import Engine
from infinity.errors import ConfigError, ModelError, StorageError, system_errors
from infinity.io.paths import user_path

DtypeName = Literal["keep", "fp32", "bf16", "fp16"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_TOKENIZER = (
    "added_tokens.json",
    "additional_chat_templates",  # a directory
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "normalizer.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
)
"""What belongs to tokenizers and processors; files of sentencepiece end as ``_ENDINGS``."""

_ENDINGS = (".model", ".spm", ".tiktoken")


def export_pretrained(
    engine: Engine,
    directory: str | os.PathLike[str],
    *,
    dtype: DtypeName = "keep",
    max_shard_size: int | str = "5GB",
    tokenizer: str | os.PathLike[str] | bool = True,
    save_original_format: bool = True,
) -> None:
    """Write the engine's model as ``model.save_pretrained`` does, one tensor in memory at a time.

    That is: ``config.json``, ``generation_config.json`` where the model generates, and safetensors files, with an index
    where there are several. Tied weights are there once. The directory gets its name when all of it is on the disk.
    With several ranks all call this; the first one writes.

    Args:
        engine: with a model of Transformers.
        directory: one that does not exist, or is empty.
        dtype: of floating-point weights; ``"keep"``: that of each at full precision, so fp32 for master weights.
        max_shard_size: of a file, in bytes or as ``"5GB"``; a larger tensor has a file of its own.
        tokenizer: a directory whose tokenizer's or processor's files are copied; ``True``: the one that the model was
            loaded from, if it is there; ``False``: none.
        save_original_format: names and tensors as in the files that are published, as ``save_pretrained`` does (each
            expert by itself); else as in the model.

    Raises:
        ConfigError: an argument cannot be used.
        DirectoryError: ``directory`` is no such directory.
        DiskFullError: there is no room.
        ModelError: the engine's model is none of Transformers, or has adapters, of which the base is not written.
        StorageError: something could not be read or written; nothing is left.
    """
    model = engine.module
    if is_adapted(model):
        raise ModelError(
            "export_pretrained: the model has adapters of PEFT; infinity.integrations.peft has save_adapters(), which "
            "leaves the base out, and export_merged(), which writes a model with the adapters in its weights"
        )
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"export_pretrained: expected an engine with a model of Transformers, got a {type(model).__name__}; engine."
            "export_safetensors() writes the weights of any model"
        )
    write_pretrained(
        engine,
        model,
        weights_by_name(model, engine.state_dict().deferred()),
        directory,
        dtype=dtype,
        max_shard_size=max_shard_size,
        tokenizer=tokenizer,
        save_original_format=save_original_format,
    )


def write_pretrained(
    engine: Engine,
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    *,
    dtype: DtypeName = "keep",
    max_shard_size: int | str = "5GB",
    tokenizer: str | os.PathLike[str] | bool = True,
    save_original_format: bool = True,
) -> None:
    """Write weights as those of a model that is under the engine, or inside it; see ``export_pretrained``.

    Args:
        engine: what reads them.
        model: whose configuration is written beside them.
        weights: by the names of ``model``, real and deferred ones; each by one name.
        directory: one that does not exist, or is empty.
        dtype: of floating-point weights.
        max_shard_size: of a file.
        tokenizer: whose files are copied.
        save_original_format: names and tensors as in the files that are published.

    Raises:
        InfinityError: as for ``export_pretrained``.
    """
    if dtype not in ("keep", *_DTYPES):
        raise ConfigError(f"export (dtype): expected 'keep', 'fp32', 'bf16' or 'fp16', got {dtype!r}")
    max_file_bytes = _num_bytes(max_shard_size)
    source = (model.name_or_path if tokenizer else None) if isinstance(tokenizer, bool) else tokenizer
    with deferred_init():
        tensors = {name: _cast(tensor, dtype) for name, tensor in weights.items()}
        if save_original_format:
            tensors = _as_published(model, tensors)

    def write_beside(out: Path) -> None:
        _write_configs(model, tensors, out)
        if source:
            _copy_tokenizer(user_path(source, "export (tokenizer)"), out, must=tokenizer is not True)

    engine.export_tensors(directory, tensors, max_file_bytes=max_file_bytes, beside=write_beside)


def is_adapted(model: nn.Module) -> bool:
    """Whether it has adapters of PEFT, which are saved while the base is not."""
    is_wrapped = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return is_wrapped or bool(getattr(model, "_hf_peft_config_loaded", False))


def weights_by_name(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is saved of a model's state, each tensor by one name: of several, the one that others are tied to."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    names: dict[int, str] = {}
    for name, tensor in state.items():
        other = names.get(id(tensor))
        if other is None or (other in tied and name not in tied):
            names[id(tensor)] = name
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = set(names.values()) - ignored
    return {name: tensor for name, tensor in state.items() if name in kept}


def _cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.to(_DTYPES[dtype]) if dtype != "keep" and tensor.is_floating_point() else tensor


def _as_published(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names and tensors as in the files that the model was loaded from, or that others publish."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5: models have the tensors that files have
        return tensors
    published: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return published


def _write_configs(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], out: Path) -> None:
    config: Any = copy.deepcopy(model.config)
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), None)
    config.dtype = str(dtype).removeprefix("torch.") if dtype is not None else None
    config.architectures = [type(model).__name__]
    with system_errors("writing a configuration", out):
        if getattr(model, "_auto_class", None) is not None:  # the code of a class that is registered goes along
            custom_object_save(model, str(out), config=config)
        config.save_pretrained(out)
        if model.can_generate():
            model.generation_config.save_pretrained(out)


def _copy_tokenizer(source: Path, out: Path, *, must: bool) -> None:
    found = _tokenizer_files(source)
    if must and not found:
        raise StorageError("export (tokenizer): there are no files of a tokenizer here", path=source)
    for path in found:
        with system_errors("copying a file of the tokenizer", path):
            if path.is_dir():
                shutil.copytree(path, out / path.name)
            else:
                shutil.copyfile(path, out / path.name)


def _tokenizer_files(source: Path) -> Sequence[Path]:
    if not source.is_dir():
        return []
    with system_errors("looking for a tokenizer", source):
        return sorted(path for path in source.iterdir() if path.name in _TOKENIZER or path.name.endswith(_ENDINGS))


def _num_bytes(size: int | str) -> int:
    """Bytes as Transformers writes them: ``"5GB"`` are 5 * 10**9, ``"5GiB"`` 5 * 2**30."""
    if type(size) is int and size > 0:
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B", str(size).strip().upper())
    found = math.floor(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")) if match else 0
    if found <= 0:
        raise ConfigError(f"export (max_shard_size): expected bytes, or a size like '5GB', got {size!r}")
    return found
