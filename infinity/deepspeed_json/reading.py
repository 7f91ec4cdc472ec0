"""``read_deepspeed``: a DeepSpeed configuration, as what it asks for.

Every key is looked up in one table (``keys.py``), so that none is ignored in silence: it is honoured, or told to be not
needed, or refused. What DeepSpeed has no word for are fields of ``Config``, given beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinity.config import Config
from infinity.deepspeed_json.batches import batches_of
from infinity.deepspeed_json.document import Given, check, complete, load, wrong
from infinity.deepspeed_json.fields import make_config
from infinity.deepspeed_json.notes import Note
from infinity.deepspeed_json.optimizers import OptimizerSpec
from infinity.deepspeed_json.scheduling import SchedulerSpec
from infinity.errors import ConfigError

_STEPS_PER_PRINT = 10


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """What a DeepSpeed configuration asks for.

    Attributes:
        config: what the engine is made with.
        train_batch_size: samples of a step, of all ranks; ``None`` where it does not say.
        micro_batch_size: samples of a micro-batch, of one rank; ``None`` where it does not say.
        accumulation_steps: micro-batches of a step.
        optimizer: makes the optimizer; ``None`` where it has none.
        scheduler: makes the schedule; ``None`` where it has none.
        steps_per_print: after so many steps one is reported; 0 for never.
        wall_clock_breakdown: whether that says where the time went.
        notes: what became of each key.
        document: the configuration as it was read, completed.
    """

    config: Config
    train_batch_size: int | None
    micro_batch_size: int | None
    accumulation_steps: int
    optimizer: OptimizerSpec | None
    scheduler: SchedulerSpec | None
    steps_per_print: int
    wall_clock_breakdown: bool
    notes: tuple[Note, ...]
    document: dict[str, Any]


def read_deepspeed(
    source: Mapping[str, Any] | str | os.PathLike[str],
    *,
    num_ranks: int = 1,
    fields: Mapping[str, Any] | None = None,
    auto: Mapping[str, Any] | None = None,
) -> DeepSpeedConfig:
    """Read a DeepSpeed configuration.

    Args:
        source: the configuration, or the path of a JSON file with it.
        num_ranks: how many train; micro-batch x accumulation x ranks is the size of a step.
        fields: fields of ``Config``, which count more than what the configuration says.
        auto: what ``"auto"`` stands for, by dotted key (``"optimizer.params.lr"``); elsewhere, for the default.

    Raises:
        ConfigError: a key is unknown or asks for what cannot be done, a value is not what it must be, or batch sizes do
            not go together; it names the key, what was expected, what came, and what to do.
    """
    document = load(source)
    defaulted = complete(document, auto or {})
    notes = check(document)
    given = Given(document)
    batches = batches_of(given, num_ranks)
    made, optimizer = _section(given, "optimizer")
    scheduled, schedule = _section(given, "scheduler")
    spec = OptimizerSpec(made, optimizer) if made else None
    plan = SchedulerSpec(scheduled, schedule) if scheduled else None
    if spec is not None:
        spec.check()
    if plan is not None:
        plan.check(spec)
    return DeepSpeedConfig(
        config=make_config(given, batches, fields or {}),
        train_batch_size=batches.total,
        micro_batch_size=batches.micro,
        accumulation_steps=batches.accumulation_steps,
        optimizer=spec,
        scheduler=plan,
        steps_per_print=_steps_per_print(given),
        wall_clock_breakdown=bool(given.flag("wall_clock_breakdown")),
        notes=(*notes, *defaulted),
        document=document,
    )


def _steps_per_print(given: Given) -> int:
    if given.raw("steps_per_print") == float("inf"):  # as Accelerate has it
        return 0
    steps = given.count("steps_per_print")
    return _STEPS_PER_PRINT if steps is None else steps


def _section(given: Given, name: str) -> tuple[str | None, Mapping[str, Any]]:
    """The type and the arguments of an optimizer or a schedule."""
    section = given.raw(name)
    if section is None:
        return None, {}
    kind, params = section.get("type"), section.get("params", {})
    if kind is None and not params:
        return None, {}
    if not isinstance(kind, str):
        raise wrong(f"{name}.type", f"a name, to go with {name}.params" if kind is None else "a name", kind)
    if not isinstance(params, Mapping):
        raise ConfigError(f"DeepSpeed configuration: {name}.params: expected a section, got {params!r}")
    return kind, params
