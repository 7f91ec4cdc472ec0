"""From unit plans to units with a layout: which parameters are stepped together, and where each lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from infinity.engine.precision import Precision
from infinity.engine.unit import Part, Slot, Unit
from infinity.engine.wrap import UnitPlan


def lay_out_units(
    plans: Sequence[UnitPlan],
    stepped: set[nn.Parameter],
    precision: Precision,
    device: torch.device,
    *,
    states: Mapping[nn.Parameter, Sequence[str]],
    sub_group_bytes: int,
) -> list[Unit]:
    """Cut each unit into parts and give every parameter its place.

    Args:
        plans: the units of ``plan_units``.
        stepped: the parameters that the optimizer holds.
        precision: the dtypes.
        device: where the gathered units live.
        states: the names of the states of its own shape that the optimizer keeps for a parameter.
        sub_group_bytes: the largest state of a part of several parameters.

    Returns:
        The units, with parts numbered across them.
    """
    units: list[Unit] = []
    num_parts = 0
    for plan in plans:
        unit = Unit(len(units), plan.name, plan.triggers, [], device)
        for part in _cut(plan, stepped, precision, states, sub_group_bytes):
            part.index, part.unit, part.position = num_parts, unit.index, len(unit.parts)
            part.lay_out()
            part.start = unit.num_bytes
            unit.parts.append(part)
            num_parts += 1
        units.append(unit)
    return units


def _cut(
    plan: UnitPlan,
    stepped: set[nn.Parameter],
    precision: Precision,
    states: Mapping[nn.Parameter, Sequence[str]],
    limit_bytes: int,
) -> list[Part]:
    """Runs of parameters, in order, alike in dtype and in being stepped, each within the limit or of one parameter."""
    parts: list[Part] = []
    room = 0
    for name, param in plan.params:
        compute, step = precision.compute_dtype(param.dtype, name), precision.step_dtype(param.dtype, name)
        is_stepped = param in stepped
        names = states.get(param, ())
        num_step_copies = len(names) + 1 + (step != compute) if is_stepped else 0
        size = param.numel() * (compute.itemsize + step.itemsize * num_step_copies)
        last = parts[-1] if parts else None
        alike = last is not None and (last.dtype, last.compute_dtype, last.stepped) == (
            param.dtype,
            compute,
            is_stepped,
        )
        if not alike or size > room:
            sums = precision.sum_dtype(param.dtype, name)
            parts.append(Part(0, 0, 0, param.dtype, compute, step, sums, is_stepped, []))
            room = limit_bytes
        parts[-1].state_names |= dict.fromkeys(names)
        parts[-1].slots.append(Slot(name, param, param.shape, _dense_stride(param), 0))
        room -= size
    return parts


def _dense_stride(param: nn.Parameter) -> tuple[int, ...]:
    """The parameter's own stride where its elements are dense (channels-last stays so), else contiguous."""
    dense = param.is_contiguous() or torch.empty_like(param, device="meta").stride() == param.stride()
    return param.stride() if dense else torch.empty(param.shape, device="meta").stride()
