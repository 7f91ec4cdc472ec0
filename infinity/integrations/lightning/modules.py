"""What is done to a LightningModule: before it goes under an engine, and to have its steps run there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infinity.engine.deferred import deferred_from
from infinity.errors import ModelError


def move_others(module: nn.Module, device: torch.device) -> None:
    """Have metrics on the device, and modules say that they are there; the engine moves parameters and buffers."""
    for child in module.modules():
        if "_device" in vars(child):  # LightningModules and torchmetrics
            if next(child.parameters(), None) is None:
                child.to(device)
            else:
                vars(child)["_device"] = device


def idle_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """One for a model that is not trained: the engine wants one, which is never stepped.

    Raises:
        ModelError: there are no parameters.
    """
    smallest = min(module.parameters(), key=lambda param: param.numel(), default=None)
    if smallest is None:
        raise ModelError(f"{type(module).__name__} has no parameters, so there is nothing for InfinityStrategy to do")
    return torch.optim.SGD([smallest], lr=0.0)


def await_values(module: nn.Module) -> None:
    """Give a module that an engine has left without weights others, for the next engine: zeros without memory."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for child in module.modules():
        for name, param in child._parameters.items():
            if param is not None:
                if param not in made:
                    made[param] = _deferred(param)
                child._parameters[name] = made[param]


def _deferred(param: nn.Parameter) -> nn.Parameter:
    shape, dtype = param.shape, param.dtype
    zeros = deferred_from(shape, dtype, lambda: torch.zeros(shape, dtype=dtype))
    return nn.Parameter(zeros, requires_grad=param.requires_grad)


def call_as_forward(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the module as its forward, which the method may call in turn."""
    method, before = getattr(module, name), vars(module).get("forward")

    def restore() -> None:
        vars(module).pop("forward", None)
        if before is not None:
            vars(module)["forward"] = before

    def forward(*args: Any, **kwargs: Any) -> Any:
        restore()
        return method(*args, **kwargs)

    vars(module)["forward"] = forward
    try:
        return module(*args, **kwargs)
    finally:
        restore()
