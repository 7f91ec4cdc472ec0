"""``from_pretrained``: a model of Transformers whose weights are read when the engine stores them.

Transformers itself does the loading, as it always does: it makes the model, renames, casts, merges and splits tensors
by its own tables, ties weights, initialises what is missing, and reports. But the tensors that it is given are deferred
ones: their values are in the files, and what is done to them is recorded. ``infinity.initialize`` then makes the value
of one parameter after the other, so memory never holds the model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from infinity.config import Config
from infinity.engine.budget import plan_for, plan_within
from infinity.engine.deferred import beside_meta, is_deferred, materialize
from infinity.engine.persistence.tensor_reading import StoredTensor
from infinity.engine.precision import precision_of
from infinity.errors import ConfigError, InfinityError, ModelError, StorageError
from infinity.integrations.transformers.sources import find_directory, find_weights

_REFUSED = {
    "device_map": "the engine decides where values are: give budgets to infinity.Config",
    "max_memory": "give budgets to infinity.Config",
    "offload_folder": "give directories to infinity.Config(nvme=...)",
    "quantization_config": "weights that are trained cannot be quantized",
    "load_in_8bit": "weights that are trained cannot be quantized",
    "load_in_4bit": "weights that are trained cannot be quantized",
    "gguf_file": "only safetensors are read; convert the model first",
    "state_dict": "load a state dict with engine.load_state_dict()",
    "tp_plan": "ranks share the state by infinity.Config(stage=...)",
    "distributed_config": "ranks share the state by infinity.Config(stage=...)",
    "trust_remote_code": "nothing that is read is run; import the model's class yourself and give it as model_class",
    "config": "give infinity's as the second argument, and the model's as model_config",
}
_LOADING = {"dtype", "key_mapping", "generation_config"}
_SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"


def from_pretrained(
    path_or_dir: str | os.PathLike[str],
    config: Config | dict[str, Any] | str | os.PathLike[str] | None = None,
    *,
    model_class: type[Any] | None = None,
    model_config: PretrainedConfig | None = None,
    dtype: torch.dtype | str = torch.float32,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    **others: Any,
) -> Any:
    """A pretrained model that takes no memory until ``infinity.initialize`` stores it, parameter by parameter.

    It is what ``model_class.from_pretrained`` makes, bit for bit, with the same random numbers for what is missing in
    the files, and the same report. In evaluation mode, as there: call ``model.train()``.

    Args:
        path_or_dir: a directory with ``config.json`` and safetensors files, one or several with an index; or the name
            of a repository on the hub, which is downloaded into the local cache as Transformers does.
        config: the engine's, as ``infinity.initialize`` takes it. If given, budgets that are too small for the model
            whatever the optimizer are refused now. ``infinity.initialize`` checks all of it before it reads weights.
        model_class: a class of Transformers, also an ``AutoModelFor...``; ``None``: the one that the model's
            configuration names.
        model_config: the model's configuration; ``None``: the one in the directory.
        dtype: of floating-point parameters. fp32, the default, widens what the files have, exactly; with
            ``Config(precision="bf16")`` these are the master weights. A name, or ``"auto"`` for the model's own.
        revision: of the repository: a branch, a tag or a commit.
        subfolder: where in the directory the model is.
        variant: of the weights, as in ``model.fp16.safetensors``.
        cache_dir: where repositories are kept.
        token: for private ones.
        local_files_only: do not ask the hub.
        others: for the model's configuration or class, as in Transformers: ``num_labels``, ``attn_implementation``,
            ``key_mapping``, ``ignore_mismatched_sizes``, ``output_loading_info``, …

    Returns:
        A ``transformers.PreTrainedModel``; with ``output_loading_info`` also which keys were missing and unexpected.

    Raises:
        BudgetError: the budgets of ``config`` are too small for the model; the message names the smallest.
        ConfigError: an argument cannot be used.
        ModelError: the model is not known to Transformers or is quantized, or a tensor has another shape.
        StorageError: weights are missing, damaged or no safetensors, or the repository cannot be had.
    """
    dtype = others.pop("torch_dtype", dtype)
    if not can_load_deferred():
        raise ConfigError(
            f"from_pretrained needs Transformers 5 or newer, and {transformers.__version__} is installed: "
            "pip install -U 'transformers>=5'"
        )
    _refuse(others)
    if model_config is not None and not isinstance(model_config, PretrainedConfig):
        raise ConfigError(
            "from_pretrained(model_config): expected a configuration of Transformers, got a "
            f"{type(model_config).__name__}"
        )
    if isinstance(config, PretrainedConfig):
        raise ConfigError(
            f"from_pretrained(config): expected infinity's, got a {type(config).__name__}; the model's is model_config"
        )
    budgets = None if config is None else Config.of(config)
    directory = find_directory(
        path_or_dir,
        revision=revision,
        subfolder=subfolder,
        variant=variant,
        cache_dir=cache_dir,
        token=token,
        local_files_only=local_files_only,
        force_download=others.pop("force_download", False),
    )
    others = {name: value for name, value in others.items() if name not in _REFUSED}
    loading = {name: others.pop(name) for name in _LOADING if name in others}
    with_info = others.pop("output_loading_info", False)
    resizes = others.pop("ignore_mismatched_sizes", False)
    own_config, found_class = model_config, model_class
    if own_config is None:
        own_config, others = _read_config(directory, model_class, others)
    if found_class is None:
        found_class = _named_class(own_config, directory)
    if getattr(own_config, "quantization_config", None) is not None:
        raise ModelError(
            f"the model in {directory} is quantized, and its weights cannot be trained; give the directory of the one "
            "that it was made from"
        )
    stored = find_weights(directory, variant=variant)
    kind, own_config = _chosen_class(found_class, own_config)
    model, info = _load(kind, own_config, stored, directory, dtype=dtype, **loading, **others)
    if info["mismatched_keys"] and not resizes:
        raise ModelError(_mismatch(kind, info["mismatched_keys"], stored, directory))
    if model.can_generate() and loading.get("generation_config") is None:
        model.generation_config = _read_generation_config(directory)
    model.config.name_or_path = model.name_or_path = str(directory)
    if budgets is not None:
        _check_budgets(model, budgets)
        _check_fp32(model, budgets)
    return (model, info) if with_info else model


def can_load_deferred() -> bool:
    """Whether this version of Transformers loads deferred tensors as it loads those in files."""
    return int(transformers.__version__.partition(".")[0]) >= 5


def converted_weights(model: PreTrainedModel, directory: Path) -> Mapping[str, torch.Tensor]:
    """Weights in a directory as a model of this class has them, by its names; each is read when it is asked for.

    Raises:
        ModelError: there are not those of this model.
        StorageError: a file is missing or damaged.
    """
    stored, kind = find_weights(directory), type(model)
    is_wide = any(tensor.dtype == torch.float64 for tensor in stored.values())
    dtype = torch.float64 if is_wide else torch.float32  # which loses nothing
    loaded, info = _load(kind, model.config, stored, directory, dtype=dtype)
    if info["mismatched_keys"]:
        raise ModelError(_mismatch(kind, info["mismatched_keys"], stored, directory))
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"]))
        raise ModelError(f"the weights in {directory} are not all that a {kind.__name__} has; missing: {missing}")
    return _ReadWhenAsked(loaded.state_dict())


class _ReadWhenAsked(Mapping[str, torch.Tensor]):
    """Values of deferred and real tensors by name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return materialize(tensor) if is_deferred(tensor) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _refuse(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name in _REFUSED and value not in (None, False):
            raise ConfigError(f"from_pretrained({name}=...): {_REFUSED[name]}")
    if others.get("use_safetensors") is False:
        raise ConfigError("from_pretrained(use_safetensors=False): only safetensors are read")


def _read_config(
    directory: Path, model_class: type[Any] | None, fields: Mapping[str, Any]
) -> tuple[PretrainedConfig, dict[str, Any]]:
    """The model's configuration with some fields changed, and those that it does not have."""
    if not (directory / "config.json").is_file():
        raise StorageError("there is no config.json in the model's directory", path=directory)
    kind: Any = getattr(model_class, "config_class", None) or AutoConfig
    try:
        found, others = kind.from_pretrained(directory, return_unused_kwargs=True, trust_remote_code=False, **fields)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"config.json in {directory} is no configuration that Transformers knows: {error}") from error
    others.pop("trust_remote_code", None)
    return found, others


def _named_class(model_config: PretrainedConfig, directory: Path) -> type[PreTrainedModel]:
    """The class that the configuration names, or that of the directory."""
    names = getattr(model_config, "architectures", None)
    if not names:
        names = getattr(_read_config(directory, None, {})[0], "architectures", None) or []
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    raise ModelError(
        f"config.json in {directory} names no class of Transformers (architectures: {names}); give model_class"
    )


def _chosen_class(given: Any, model_config: PretrainedConfig) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """A class of models, of several the one for the configuration, and what of the configuration is its own."""
    if isinstance(given, type) and issubclass(given, PreTrainedModel):
        return given, model_config
    if not hasattr(given, "from_config"):
        raise ConfigError(f"from_pretrained(model_class): expected a class of models of Transformers, got {given!r}")
    try:
        with torch.device("meta"):
            kind = type(given.from_config(model_config, trust_remote_code=False))
    except ValueError as error:
        raise ModelError(f"{given.__name__} has no class for this model: {error}") from error
    if kind.config_class is model_config.sub_configs.get("text_config", AutoConfig):
        return kind, model_config.get_text_config()
    return kind, model_config


def _load(
    kind: type[PreTrainedModel],
    model_config: PretrainedConfig,
    stored: Mapping[str, StoredTensor],
    directory: Path,
    **how: Any,
) -> tuple[Any, dict[str, Any]]:
    """Have Transformers load deferred tensors."""
    state = {name: tensor.deferred() for name, tensor in stored.items()}
    with _in_this_thread(), _named(directory), beside_meta():
        try:
            return kind.from_pretrained(  # type: ignore[return-value]
                None,
                config=model_config,
                state_dict=state,
                ignore_mismatched_sizes=True,  # refused later, by name and file
                output_loading_info=True,
                **how,
            )
        except InfinityError:
            raise
        except TypeError as error:
            if not how.keys() - _LOADING:
                raise
            raise ConfigError(f"from_pretrained: an argument is not known to the {kind.__name__}: {error}") from error
        except (RuntimeError, ValueError, KeyError) as error:  # the first is what Transformers raises after its report
            raise ModelError(f"Transformers cannot load the {kind.__name__} in {directory}: {error}") from error


@contextlib.contextmanager
def _in_this_thread() -> Iterator[None]:
    """Have Transformers load without threads and a progress bar: only what this thread does is recorded."""
    before, bar = os.environ.get(_SYNCHRONOUS), transformers_logging.is_progress_bar_enabled()
    os.environ[_SYNCHRONOUS] = "1"
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if bar:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if before is None:
            del os.environ[_SYNCHRONOUS]
        else:
            os.environ[_SYNCHRONOUS] = before


@contextlib.contextmanager
def _named(directory: Path) -> Iterator[None]:
    """Have the report of Transformers, which is given a state dict, name the directory."""
    logger = logging.getLogger(transformers.modeling_utils.__name__)

    def name(record: logging.LogRecord) -> bool:
        record.msg = str(record.msg).replace("from: None\n", f"from: {directory}\n")
        return True

    logger.addFilter(name)
    try:
        yield
    finally:
        logger.removeFilter(name)


def _mismatch(
    kind: type[PreTrainedModel],
    mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]],
    stored: Mapping[str, StoredTensor],
    directory: Path,
) -> str:
    complaints = []
    for name, got, expected in sorted(mismatched, key=lambda each: each[0]):
        end = ".".join(name.split(".")[-2:])
        files = sorted({tensor.path.name for key, tensor in stored.items() if key == name or key.endswith(end)})
        complaints.append(
            f"{name}: expected {tuple(expected)}, got {tuple(got)} from {' or '.join(files) or directory}"
        )
    return (
        f"the weights in {directory} do not fit the {kind.__name__}: {'; '.join(complaints)}. Give the model_config "
        "that they were made with, or ignore_mismatched_sizes=True to have these initialised anew"
    )


def _read_generation_config(directory: Path) -> GenerationConfig:
    name = "generation_config.json"
    how: dict[str, Any] = {}
    if not (directory / name).is_file():
        name, how = "config.json", {"config_file_name": "config.json", "_from_model_config": True}
    try:
        return GenerationConfig.from_pretrained(directory, **how)
    except (OSError, ValueError) as error:
        raise ModelError(f"{name} in {directory} says nothing valid of generation: {error}") from error


def _check_budgets(model: PreTrainedModel, config: Config) -> None:
    """Refuse budgets that no optimizer could train the model in; as far as that is known without ranks and tiles."""
    if config.tile_large_layers or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
    device = config.torch_device()
    stepped = {param for param in model.parameters() if param.requires_grad}
    stateless: dict[torch.nn.Parameter, tuple[str, ...]] = dict.fromkeys(stepped, ())
    plan_within(model, config, device, lambda other: plan_for(model, stepped, stateless, other, device))


def _check_fp32(model: PreTrainedModel, config: Config) -> None:
    """Warn where Transformers keeps modules in fp32, and the configuration does not."""
    patterns = set(model._keep_in_fp32_modules_strict or ()) if config.precision != "fp32" else set()
    if config.precision == "fp16":
        patterns |= set(model._keep_in_fp32_modules or ())
    converted = precision_of(config)
    names = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_floating_point()]
    kept = {pattern: [name for name in names if re.search(pattern.replace("*", ".*"), name)] for pattern in patterns}
    lost = sorted(
        f"*{pattern}*"
        for pattern, found in kept.items()
        if any(converted.compute_dtype(torch.float32, name) != torch.float32 for name in found)
    )
    if lost:
        warnings.warn(
            f"Transformers keeps parts of a {type(model).__name__} in fp32 with {config.precision}; for that, give "
            f"infinity.Config(keep_fp32={tuple(lost)!r})",
            UserWarning,
            stacklevel=3,
        )
