"""Where a plan's speeds come from: a bench document, flags, and what is measured here in a moment."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.plan.machine import GB, Machine
from infinity.plan.settings import PlanSettings

_ROUTES = {
    "read": "nvme->host",
    "write": "host->nvme",
    "mixed": "nvme<->host",
    "to_device": "host->device",
    "from_device": "device->host",
    "network": "all-gather",
    "copy": "memcpy",
    "optimizer": "optimizer",
}
_PLANES_SHARE = 0.5
"""What a step in planes goes through in a second, of what one with masters does."""

_SHAPES = 4
_SECONDS = 0.2
_OPTIMIZER_ELEMENTS = 1 << 22
_OPTIMIZER_BYTES = 16


def machine_of(settings: PlanSettings) -> Machine:
    """The machine that the flags and the bench document describe; what neither tells is a guess, which is named.

    Raises:
        ConfigError: the document cannot be used.
    """
    machine = Machine(source="assumed")
    if settings.bench_file is not None:
        machine = from_bench(settings.bench_file)
    given: dict[str, Any] = {name: getattr(settings, name) for name in ("read", "write", "mixed", "network", "flops")}
    given |= {"to_device": settings.pcie, "from_device": settings.pcie, "optimizer": settings.optimizer_speed}
    given["planes"] = None if settings.optimizer_speed is None else settings.optimizer_speed * _PLANES_SHARE
    given = {name: value for name, value in given.items() if value is not None}
    if "mixed" not in given and ("read" in given or "write" in given):
        given["mixed"] = max(given.get("read", machine.read), given.get("write", machine.write))
    source = " and ".join([*([machine.source] if settings.bench_file else []), *(["given"] if given else [])])
    return dataclasses.replace(machine, **given, source=source or "assumed")


def from_bench(path: Path) -> Machine:
    """The speeds of a document of ``infinity bench --json``.

    Raises:
        ConfigError: it is missing, is none, or has no NVMe in it.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--bench: {path}: {error.strerror}; make it by infinity bench --json {path}") from error
    except ValueError as error:
        raise ConfigError(f"--bench: {path}: not valid JSON: {error}") from error
    best = document.get("best") if isinstance(document, dict) else None
    try:
        found = {
            name: float(best[route]["gb_s"]["median"]) * GB
            for name, route in _ROUTES.items()
            if isinstance(best, dict) and route in best
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--bench: {path}: expected what infinity bench --json writes; {error!r} in it") from error
    if not {"read", "write"} <= found.keys() or min(found.values()) <= 0:
        raise ConfigError(
            f"--bench: {path}: expected what infinity bench --nvme DIR --json writes, with routes "
            f"{_ROUTES['read']} and {_ROUTES['write']}"
        )
    found.setdefault("mixed", max(found["read"], found["write"]))
    machine = Machine(**found, source=f"{path.name}")
    return dataclasses.replace(machine, planes=machine.optimizer * _PLANES_SHARE)


def measure_flops(model: nn.Module, device: torch.device, dtype: torch.dtype, num_tokens: int) -> float:
    """How fast this machine multiplies matrices of the model's own shapes, forward and backward.

    Args:
        model: its largest matrices count, each as often as it has them; their values do not matter.
        device: where; it must be here.
        dtype: what they are computed in.
        num_tokens: rows of what they are multiplied with; at most 4096 are taken.

    Returns:
        Operations per second.
    """
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    shapes = Counter((module.out_features, module.in_features) for module in found) or Counter({(512, 512): 1})
    largest = sorted(shapes, key=lambda shape: shape[0] * shape[1] * shapes[shape], reverse=True)[:_SHAPES]
    rows = min(num_tokens, 4096)
    operations = seconds = 0.0
    for out_features, in_features in largest:
        each = _product_seconds(rows, out_features, in_features, device, dtype, _SECONDS / len(largest))
        operations += 6 * rows * out_features * in_features * shapes[out_features, in_features]
        seconds += each * shapes[out_features, in_features]
    return operations / seconds


def _product_seconds(
    rows: int, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype, seconds: float
) -> float:
    """Of the three products of a layer, the best of what fits the time."""
    weight = torch.rand(out_features, in_features, device=device).to(dtype)
    inputs = torch.rand(rows, in_features, device=device).to(dtype)
    outputs = torch.rand(rows, out_features, device=device).to(dtype)
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        _wait_for(device)
        begun = time.perf_counter()
        inputs @ weight.t()
        outputs @ weight
        outputs.t() @ inputs
        _wait_for(device)
        best = min(best, time.perf_counter() - begun)
    return best


def measure_optimizer(name: str) -> float:
    """Bytes of state per second that a step of an optimizer of ``torch.optim`` goes through on this machine."""
    param = nn.Parameter(torch.zeros(_OPTIMIZER_ELEMENTS))
    param.grad = torch.ones_like(param)
    optimizer: Any = getattr(torch.optim, name)([param], lr=1e-3)
    optimizer.step()  # makes the states
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while best == float("inf") or time.perf_counter() < end:
        begun = time.perf_counter()
        optimizer.step()
        best = min(best, time.perf_counter() - begun)
    return _OPTIMIZER_BYTES * _OPTIMIZER_ELEMENTS / best


def with_optimizer(machine: Machine, name: str) -> Machine:
    """A machine whose optimizer has been measured here."""
    optimizer = measure_optimizer(name)
    return dataclasses.replace(machine, optimizer=optimizer, planes=optimizer * _PLANES_SHARE)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
