"""From unit plans to units with a layout: which parameters are stepped together, and where each lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from infinity.engine.precision import Precision
from infinity.engine.unit import Part, Slot, Unit
from infinity.engine.wrap import UnitPlan

_SMALL_SHARE = 32
"""What part of a parameter those beside it take at most, to be stepped with it where it is too large for others."""


def lay_out_units(
    plans: Sequence[UnitPlan],
    stepped: set[nn.Parameter],
    precision: Precision,
    device: torch.device,
    *,
    states: Mapping[nn.Parameter, Sequence[str]],
    sub_group_bytes: int,
    largest_bytes: int = 0,
) -> list[Unit]:
    """Cut each unit into parts and give every parameter its place.

    Args:
        plans: the units of ``plan_units``.
        stepped: the parameters that the optimizer holds.
        precision: the dtypes.
        device: where the gathered units live.
        states: the names of the states of its own shape that the optimizer keeps for a parameter.
        sub_group_bytes: the largest state of a part of several parameters.
        largest_bytes: the same where all but one of them are small beside that one. Biases and norms alone would be
            sub-groups of a few KiB, each of which takes as many transfers as a large one.

    Returns:
        The units, with parts numbered across them.
    """
    units: list[Unit] = []
    num_parts = 0
    for plan in plans:
        unit = Unit(len(units), plan.name, plan.triggers, [], device)
        for part in _cut(plan, stepped, precision, states, sub_group_bytes, largest_bytes):
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
    largest_bytes: int,
) -> list[Part]:
    """Runs of parameters, in order, alike in dtype and in being stepped, each within the limits or of one parameter."""
    parts: list[Part] = []
    part_bytes = param_bytes = 0  # of the last part, and of its largest parameter
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
        part_bytes, param_bytes = part_bytes + size, max(param_bytes, size)
        fits = part_bytes <= min(largest_bytes, param_bytes + param_bytes // _SMALL_SHARE) or part_bytes <= limit_bytes
        if not (alike and fits):
            sums = precision.sum_dtype(param.dtype, name)
            parts.append(Part(0, 0, 0, param.dtype, compute, step, sums, is_stepped, []))
            part_bytes = param_bytes = size
        parts[-1].state_names |= dict.fromkeys(names)
        parts[-1].slots.append(Slot(name, param, param.shape, _dense_stride(param), 0))
    return parts


def _dense_stride(param: nn.Parameter) -> tuple[int, ...]:
    """The parameter's own stride where its elements are dense (channels-last stays so), else contiguous."""
    dense = param.is_contiguous() or torch.empty_like(param, device="meta").stride() == param.stride()
    return param.stride() if dense else torch.empty(param.shape, device="meta").stride()
