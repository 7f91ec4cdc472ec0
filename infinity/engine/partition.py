"""From unit plans to units with a layout: which parameters are stepped together, and where each lies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from infinity.engine.precision import Precision
from infinity.engine.unit import Part, Slot, Unit
from infinity.engine.wrap import UnitPlan

_BESIDE = 33 / 32
"""The largest parameter, and the biases and norms beside it."""


def lay_out_units(
    plans: Sequence[UnitPlan],
    stepped: set[nn.Parameter],
    precision: Precision,
    device: torch.device,
    *,
    states: Mapping[nn.Parameter, Sequence[str]],
    sub_group_bytes: int,
    largest_bytes: int = 0,
    num_slices: int = 1,
) -> list[Unit]:
    """Cut each unit into parts and give every parameter its place.

    Args:
        plans: the units of ``plan_units``.
        stepped: the parameters that the optimizer holds.
        precision: the dtypes.
        device: where the gathered units live.
        states: the names of the states of its own shape that the optimizer keeps for a parameter.
        sub_group_bytes: the largest state of a part of several parameters.
        largest_bytes: up to which that may be as much as the largest parameter's: a step has to have memory for that
            one anyway, and each part takes as many transfers and calls of the optimizer, however small it is.
        num_slices: into how many equal slices each part is to be cut.

    Returns:
        The units, with parts numbered across them.
    """
    units: list[Unit] = []
    num_parts = 0
    size_of = functools.partial(_state_bytes, stepped=stepped, precision=precision, states=states)
    largest = max((size_of(name, param) for plan in plans for name, param in plan.params), default=0)
    limit_bytes = max(sub_group_bytes, min(int(largest * _BESIDE), largest_bytes))
    for plan in plans:
        unit = Unit(len(units), plan.name, plan.triggers, [], device)
        for part in _cut(plan, stepped, precision, states, size_of, limit_bytes):
            part.index, part.unit, part.position = num_parts, unit.index, len(unit.parts)
            part.lay_out(num_slices)
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
    size_of: Callable[[str, nn.Parameter], int],
    limit_bytes: int,
) -> list[Part]:
    """Runs of parameters, in order, alike in dtype and in being stepped, each within the limit or of one parameter."""
    parts: list[Part] = []
    room = 0
    for name, param in plan.params:
        compute, step = precision.compute_dtype(param.dtype, name), precision.step_dtype(param.dtype, name)
        is_stepped = param in stepped
        size = size_of(name, param)
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
        parts[-1].state_names |= dict.fromkeys(states.get(param, ()))
        parts[-1].slots.append(Slot(name, param, param.shape, _dense_stride(param), 0))
        room -= size
    return parts


def _state_bytes(
    name: str,
    param: nn.Parameter,
    *,
    stepped: set[nn.Parameter],
    precision: Precision,
    states: Mapping[nn.Parameter, Sequence[str]],
) -> int:
    """All state of a parameter."""
    compute, step = precision.compute_dtype(param.dtype, name), precision.step_dtype(param.dtype, name)
    num_step_copies = len(states.get(param, ())) + 1 + (step != compute) if param in stepped else 0
    return param.numel() * (compute.itemsize + step.itemsize * num_step_copies)


def _dense_stride(param: nn.Parameter) -> tuple[int, ...]:
    """The parameter's own stride where its elements are dense (channels-last stays so), else contiguous."""
    dense = param.is_contiguous() or torch.empty_like(param, device="meta").stride() == param.stride()
    return param.stride() if dense else torch.empty(param.shape, device="meta").stride()
