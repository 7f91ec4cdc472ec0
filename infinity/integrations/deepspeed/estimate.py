"""Memory estimators under DeepSpeed's names, by the formulas that the engine itself goes by (``engine/traffic.py``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.engine.meeting import place
from infinity.engine.traffic import kept, state_for
from infinity.engine.wrap import plan_units
from infinity.errors import ModelError
from infinity.integrations.deepspeed.log import not_needed

_BUFFER_FACTOR = 1.5
_IN_HOST = 0.25


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """One way to place a model's state: 16-bit parameters and gradients, fp32 masters, two fp32 states of Adam.

    Attributes:
        device_bytes: on each device, for gathered parameters; activations come on top.
        host_bytes: on each node, for shards.
        nvme_bytes: on each node.
        option: what it is, in words.
    """

    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    option: str


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> list[MemoryNeed]:
    """Print what stage 3 needs for a model, and return it.

    Args:
        model: real, or made under ``zero.Init``.
        num_gpus_per_node: ranks of each node.
        num_nodes: how many.
        additional_buffer_factor: not needed: pools have no slots that are larger than what they hold.
    """
    total, largest = _sizes(model)
    return estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> list[MemoryNeed]:
    """The same from counts.

    Args:
        total_params: elements of all parameters.
        largest_layer_params: of the largest block.
        num_gpus_per_node: ranks of each node.
        num_nodes: how many.
        additional_buffer_factor: not needed.
    """
    return _estimate(3, total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> list[MemoryNeed]:
    """As for stage 3, for stage 2, which also keeps all 16-bit parameters on every rank."""
    total, largest = _sizes(model)
    return _estimate(2, total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> list[MemoryNeed]:
    """The same from a count; that of the largest block is not known, so all parameters are counted on the device."""
    return _estimate(2, total_params, total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)


def _estimate(
    stage: int, total: int, largest: int, num_per_node: int, num_nodes: int, buffer_factor: float
) -> list[MemoryNeed]:
    counts: dict[str, Any] = {"total_params": total, "largest_layer_params": largest}
    counts |= {"num_gpus_per_node": num_per_node, "num_nodes": num_nodes}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"memory estimate: {name}: expected a number of at least 1, got {value!r}")
    if buffer_factor != _BUFFER_FACTOR:
        not_needed(
            f"additional_buffer_factor={buffer_factor:g}", "budgets are hard: pools lease exactly what is asked for"
        )
    state = state_for(total, compute_dtype=torch.bfloat16)
    width = torch.bfloat16.itemsize
    on_node = num_per_node * sum(kept(state, stage, num_per_node * num_nodes).values())
    few, all_of_it = min(2 * largest, total) * width, total * width
    in_host = math.ceil(_IN_HOST * on_node)
    needs = [
        MemoryNeed(all_of_it, on_node, 0, "all state in host memory, all parameters gathered on the device"),
        MemoryNeed(few, on_node, 0, "all state in host memory, two blocks at a time on the device"),
        MemoryNeed(all_of_it, in_host, on_node - in_host, "a quarter of the state in host memory, the rest on NVMe"),
        MemoryNeed(few, in_host, on_node - in_host, "the same, two blocks at a time on the device"),
    ]
    if few == all_of_it:
        needs = needs[::2]
    if place().rank == 0:
        print(_table(stage, total, largest, num_per_node, num_nodes, needs))
    return needs


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Elements of all parameters, shared ones once, and of the largest unit."""
    units = plan_units(model, "auto", max_unit_bytes=1 << 62)
    sizes = [sum(param.numel() for _, param in unit.params) for unit in units]
    if not sum(sizes):
        raise ModelError(f"memory estimate: a {type(model).__name__} has no parameters")
    return sum(sizes), max(sizes)


def _table(stage: int, total: int, largest: int, num_per_node: int, num_nodes: int, needs: list[MemoryNeed]) -> str:
    blocks = "" if largest == total else f", {largest:,} of them in the largest block"
    title = f"Estimated memory for the state of a model with {total:,} parameters{blocks}, on {num_nodes} node(s) with "
    lines = [
        f"{title}{num_per_node} rank(s) each, at stage {stage} (16-bit parameters, AdamW):",
        f"{'per device':>12} | {'host, node':>12} | {'NVMe, node':>12} | options",
    ]
    for need in needs:
        sizes = (_gib(size) for size in (need.device_bytes, need.host_bytes, need.nvme_bytes))
        lines.append(" | ".join(f"{size:>12}" for size in sizes) + f" | {need.option}")
    lines.append("Budgets (hbm, ram, nvme in initialize) may be anything from the smallest that start-up names on.")
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
