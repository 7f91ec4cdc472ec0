"""``initialize``: a model, an optimizer and a DeepSpeed configuration, under the engine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from infinity.config import Config
from infinity.deepspeed_json import DeepSpeedConfig, read_deepspeed
from infinity.engine.initialize import initialize as make_engine
from infinity.engine.meeting import ensure_default_group, place
from infinity.errors import ConfigError, ModelError
from infinity.integrations.deepspeed.comm import DEFAULT_PORT
from infinity.integrations.deepspeed.data import DeepSpeedDataLoader
from infinity.integrations.deepspeed.engine import DeepSpeedEngine
from infinity.integrations.deepspeed.log import log_dist, not_needed, say_once
from infinity.integrations.deepspeed.optimizer import DeepSpeedOptimizer
from infinity.integrations.deepspeed.report import start_report

_MEASURE_ONLY = sys.float_info.max
"""A ``max_grad_norm`` that clips nothing: DeepSpeed's engine always tells the norm."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **infinity_fields: Any,
) -> tuple[DeepSpeedEngine, DeepSpeedOptimizer | None, DeepSpeedDataLoader | None, Any]:
    """Put a model under infinity's engine, with DeepSpeed's arguments and a DeepSpeed configuration.

    Args:
        args: has ``deepspeed_config``, the path of the configuration, if ``config`` is not given.
        model: real, or made under ``zero.Init``.
        optimizer: any of ``torch.optim``, or what makes one of parameters; it counts, whatever the configuration says.
            Without one, and without one there, the engine only computes.
        model_parameters: what the optimizer is made of, tensors or groups; ``None``: all that require a gradient.
        training_data: a dataset, of which micro-batches are made for this rank.
        lr_scheduler: an object, or what makes one of the optimizer; it counts, whatever the configuration says.
        distributed_port: not needed: torchrun chooses it.
        mpu: refused, unless it says that there is no model parallelism.
        dist_init_required: ``False``: a process that is alone makes no default group of ``torch.distributed``.
        collate_fn: makes a micro-batch of samples.
        config: the configuration, or its path.
        mesh_param: refused, unless its second dimension is 1.
        config_params: the same as ``config``.
        infinity_fields: fields of ``infinity.Config``, which count more than the configuration: ``hbm="20GiB"``.

    Returns:
        The engine, its optimizer, the loader of ``training_data``, and the scheduler; ``None`` for what there is not.

    Raises:
        ConfigError: a key or an argument cannot be honoured.
        ModelError: the model or the optimizer cannot be managed.
        BudgetError: the budgets are too small; the message names the smallest that would do.
        RanksError: not all ranks came.
        StorageError: an NVMe path is unusable, in use, or full.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"deepspeed.initialize(): expected an nn.Module as model, got a {type(model).__name__}")
    document = _document(args, config, config_params)
    _refuse_parallel(mpu, mesh_param)
    if distributed_port != DEFAULT_PORT:
        not_needed(f"distributed_port={distributed_port}", "torchrun chooses the port (--master-port)")
    settings = read_deepspeed(document, num_ranks=place().num_ranks, fields=infinity_fields)
    fields = _complete(settings, infinity_fields)
    if dist_init_required is not False:
        ensure_default_group(fields.torch_device(), seconds=fields.ranks_timeout_seconds)
    trains = optimizer is not None or settings.optimizer is not None
    made = _optimizer(model, optimizer, model_parameters, settings)
    trained = sum(each.numel() for group in made.param_groups for each in group["params"] if each.requires_grad)
    scheduler = _scheduler(lr_scheduler, settings, trains=trains)
    engine = make_engine(model, made, fields)
    try:
        wrapped = DeepSpeedEngine(
            engine,
            settings,
            trains=trains,
            lr_scheduler=scheduler,
            training_data=training_data,
            collate_fn=collate_fn,
        )
    except BaseException:
        engine.close()
        raise
    log_dist(start_report(engine, trained=trained))
    for note in settings.notes:
        say_once(str(note))
    return wrapped, wrapped.optimizer, wrapped.training_dataloader, wrapped.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE`` to a parser, and return it."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument(
        "--deepspeed", action="store_true", help="for the script's own use; nothing follows from it here"
    )
    group.add_argument("--deepspeed_config", metavar="FILE", help="the DeepSpeed configuration, a JSON file")
    return parser


def _document(args: Any, *configs: Mapping[str, Any] | str | os.PathLike[str] | None) -> Any:
    of_args = getattr(args, "deepspeed_config", None)
    given = [each for each in (of_args, *configs) if each is not None]
    if len(given) != 1:
        raise ConfigError(
            f"deepspeed.initialize(): expected one configuration, got {len(given)}; give config= (a dictionary or the "
            "path of a JSON file), or args.deepspeed_config (--deepspeed_config FILE)"
        )
    return given[0]


def _refuse_parallel(mpu: Any, mesh_param: Any) -> None:
    asked = getattr(mpu, "get_model_parallel_world_size", None) or getattr(
        mpu, "get_tensor_model_parallel_world_size", None
    )
    size = 1 if mpu is None else asked() if asked is not None else None
    if size != 1:
        raise ConfigError(
            f"deepspeed.initialize(mpu=...): {size or 'several'} ranks share the model's layers, and there "
            "is no model parallelism here: every rank runs the whole model, whose state they share"
        )
    if mesh_param is not None and list(mesh_param)[1:] != [1]:
        raise ConfigError(
            f"deepspeed.initialize(mesh_param={mesh_param}): there is no sequence parallelism; for shards and copies "
            "give shard_ranks"
        )


def _complete(settings: DeepSpeedConfig, given: Mapping[str, Any]) -> Config:
    """What DeepSpeed's engine does without a key for it, unless the caller says otherwise.

    It always tells the norm, so that is measured also where nothing is clipped; with ``max_grad_norm=None`` it is not,
    and the last backward of a step, which is known, has steps begin under it.
    """
    fields = {"max_grad_norm": _MEASURE_ONLY, "accumulation_steps": settings.accumulation_steps}
    config = settings.config
    missing = {name: value for name, value in fields.items() if getattr(config, name) is None and name not in given}
    return config.model_copy(update=missing)


def _optimizer(
    model: nn.Module,
    given: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    settings: DeepSpeedConfig,
) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        made = given
    elif given is None and settings.optimizer is None:
        return torch.optim.SGD([{"params": []}], lr=0.0)  # so that nothing is stepped
    else:
        params = [each for each in model.parameters() if each.requires_grad]
        if model_parameters is not None:
            params = list(model_parameters)
        make = settings.optimizer.make if given is None and settings.optimizer is not None else given
        if not callable(make):
            raise ModelError(
                f"deepspeed.initialize(): expected an optimizer of torch.optim, or what makes one of parameters, got a "
                f"{type(given).__name__}"
            )
        made = make(params)
    if given is not None and settings.optimizer is not None:
        log_dist(
            f"the optimizer that initialize() was given counts ({type(made).__name__}), not that of the configuration "
            f"({settings.optimizer.type})"
        )
    return made


def _scheduler(given: Any, settings: DeepSpeedConfig, *, trains: bool) -> Any:
    """An object, what makes one of the optimizer, or ``None``."""
    scheduler = given if given is not None or settings.scheduler is None else settings.scheduler.make
    if trains or scheduler is None:
        return scheduler
    log_dist("the scheduler is left out: there is no optimizer, so the engine only computes")
    return None
