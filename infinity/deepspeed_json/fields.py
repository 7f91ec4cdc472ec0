"""From the keys of a DeepSpeed configuration to the fields of ``Config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.config import Config
from infinity.deepspeed_json.batches import Batches
from infinity.deepspeed_json.budgets import default_budgets
from infinity.deepspeed_json.document import Given, wrong
from infinity.errors import ConfigError

_ZERO = "zero_optimization"
_DEVICES = ("none", "cpu", "nvme")
_DTYPES = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
_DTYPES |= {"bfloat16": "bf16", "half": "fp16", "float": "fp32"}

_HYSTERESIS, _WINDOW, _LEAST_SCALE, _SCALE_POWER = 2, 1000, 1.0, 16
"""DeepSpeed's defaults of dynamic loss scaling."""

_LARGEST_POWER = 126
_KEY_OF_FIELD = {
    "nvme": "nvme_path",
    "max_grad_norm": "gradient_clipping",
    "loss_scale": "fp16.loss_scale",
    "loss_scale_window": "fp16.loss_scale_window",
    "loss_scale_hysteresis": "fp16.hysteresis",
    "min_loss_scale": "fp16.min_loss_scale",
}


def make_config(given: Given, batches: Batches, fields: Mapping[str, Any]) -> Config:
    """The ``Config`` that a configuration asks for.

    Args:
        given: the configuration.
        batches: its batch sizes.
        fields: fields of ``Config`` that count more.

    Raises:
        ConfigError: a value is not what it must be, or two contradict each other.
    """
    made: dict[str, Any] = {"stage": _stage(given), "precision": _precision(given), "nvme": _directories(given)}
    made |= _loss_scale(given) if made["precision"] == "fp16" else {}
    made |= _dtypes(given, made["precision"])
    clipping = given.number("gradient_clipping")
    if clipping:
        made["max_grad_norm"] = clipping
    if batches.total is not None or given.raw("gradient_accumulation_steps") is not None:
        made["accumulation_steps"] = batches.accumulation_steps
    shard_ranks = given.count(f"{_ZERO}.mics_shard_size", least=-1)
    if shard_ranks is not None and shard_ranks > 0:
        made["shard_ranks"] = shard_ranks
    _check({name: value for name, value in made.items() if name not in fields})
    device = Config(device=fields.get("device", "auto")).torch_device()
    nvme = fields.get("nvme", made["nvme"])
    return Config(**{**default_budgets(device, on_nvme=bool(nvme)), **made, **fields})


def _check(made: Mapping[str, Any]) -> None:
    """Have a field that cannot be what the configuration says refused under the name of its key."""
    for name in (name for name in _KEY_OF_FIELD if name in made):
        try:
            Config(**{name: made[name]})
        except ConfigError as error:
            raise ConfigError(f"DeepSpeed configuration: {_KEY_OF_FIELD[name]}: {error}") from error


def _stage(given: Given) -> int:
    zero = given.raw(_ZERO)
    if isinstance(zero, bool):
        return int(zero)
    stage = given.count(f"{_ZERO}.stage") or 0
    if stage > 3:
        raise wrong(f"{_ZERO}.stage", "0, 1, 2 or 3", given.raw(f"{_ZERO}.stage"))
    return stage


def _precision(given: Given) -> str:
    fp16, now, before = (given.flag(f"{name}.enabled") for name in ("fp16", "bf16", "bfloat16"))
    if None not in {now, before} and now != before:
        raise ConfigError("DeepSpeed configuration: bf16.enabled and bfloat16.enabled differ; leave bfloat16 out")
    bf16 = now or before
    if fp16 and bf16:
        raise ConfigError("DeepSpeed configuration: fp16.enabled and bf16.enabled are both true; enable one of them")
    return "fp16" if fp16 else "bf16" if bf16 else "fp32"


def _loss_scale(given: Given) -> dict[str, Any]:
    scale = given.number("fp16.loss_scale")
    if scale:
        return {"loss_scale": scale}
    power = given.count("fp16.initial_scale_power")
    if power is not None and power > _LARGEST_POWER:
        raise wrong("fp16.initial_scale_power", f"a whole number from 0 to {_LARGEST_POWER}", power)
    window, hysteresis = given.count("fp16.loss_scale_window", least=1), given.count("fp16.hysteresis", least=1)
    least = given.number("fp16.min_loss_scale")
    return {
        "initial_loss_scale": 2.0 ** (_SCALE_POWER if power is None else power),
        "loss_scale_window": _WINDOW if window is None else window,
        "loss_scale_hysteresis": _HYSTERESIS if hysteresis is None else hysteresis,
        "min_loss_scale": _LEAST_SCALE if least is None else least,
    }


def _dtypes(given: Given, precision: str) -> dict[str, Any]:
    """What ranks exchange, and what several backwards are summed in."""
    exchanged = _dtype(given, "communication_data_type", precision)
    if given.flag("fp32_allreduce"):
        exchanged = "fp32"
    summed = _dtype(given, "data_types.grad_accum_dtype", precision)
    made: dict[str, Any] = {}
    if exchanged is not None:
        made["reduction_dtype"] = "same" if exchanged == precision else "fp32"
    if summed is not None:
        made["accumulation_dtype"] = "fp32" if summed == "fp32" else "same"
    return made


def _dtype(given: Given, key: str, precision: str) -> str | None:
    value = given.raw(key)
    dtype = None if value is None else _DTYPES.get(str(value).lower())
    if value is not None and dtype not in {precision, "fp32"}:
        raise wrong(key, f"fp32, or {precision}, which computes", value)
    return dtype


def _directories(given: Given) -> tuple[str, ...]:
    """The directories of whatever may live on NVMe, each once."""
    for legacy, section in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_param", "offload_param"),
        ("cpu_offload_params", "offload_param"),
    ):
        device = given.word(f"{_ZERO}.{section}.device", _DEVICES)
        if given.flag(f"{_ZERO}.{legacy}") and device not in {None, "cpu"}:
            raise wrong(f"{_ZERO}.{legacy}", f"nothing beside {_ZERO}.{section}.device = {device!r}", True)
    paths = []
    for section in ("offload_param", "offload_optimizer"):
        if given.word(f"{_ZERO}.{section}.device", _DEVICES) != "nvme":
            continue
        path = given.raw(f"{_ZERO}.{section}.nvme_path")
        if not isinstance(path, str) or not path.strip():
            raise wrong(f"{_ZERO}.{section}.nvme_path", f"a directory, since {_ZERO}.{section}.device is nvme", path)
        paths.append(path)
    return tuple(dict.fromkeys(paths))
