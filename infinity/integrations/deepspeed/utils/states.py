"""Weights, gradients and optimizer states of one parameter, between steps: ``engine.values`` under DeepSpeed's names.

*Full* is the whole tensor at the precision that is stepped, the same on every rank; all ranks call alike. *Local* is
what this rank keeps of it, in one dimension: with several ranks a slice, which may be empty; alone all of it. Of a
parameter that no engine has, each returns ``None``, and to set something is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from infinity.engine.engine import Engine
from infinity.errors import ModelError
from infinity.integrations.deepspeed.registry import engine_of


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The weight that is stepped, a copy on the engine's device.

    Raises:
        EngineStateError: it is no time to read, as inside a forward.
        StorageError: a shard could not be read.
    """
    engine = engine_of(param)
    return None if engine is None else _here(engine, engine.values.weight(param))


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change a weight; what computes becomes its rounding.

    Raises:
        ModelError: no engine has the parameter, or the value has another shape.
    """
    _engine_of(param, "safe_set_full_fp32_param").values.set_weight(param, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient as the step will take it: summed, without the loss scale; between backward and step.

    Returns:
        A copy on the engine's device; ``None`` where there is none.
    """
    engine = engine_of(param)
    gradient = None if engine is None else engine.values.grad(param)
    return gradient if engine is None or gradient is None else _here(engine, gradient)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change the gradient that the step will take.

    Raises:
        ModelError: no engine has the parameter, or the value cannot be its gradient.
    """
    _engine_of(param, "safe_set_full_grad").values.set_grad(param, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Change the gradients of several parameters, one at a time.

    Args:
        param_list: which; those without a gradient are left out.
        update_func: of the gradient and the parameter; returns the new gradient.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """One of the optimizer's states of a parameter, such as ``exp_avg``, a copy on the engine's device.

    Raises:
        ModelError: there is no such state; before its first step a parameter has none.
    """
    engine = engine_of(param)
    return None if engine is None else _here(engine, torch.as_tensor(engine.values.state(param, optim_state_key)))


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Change one of the optimizer's states of a parameter; it must have it already.

    Raises:
        ModelError: no engine has the parameter, it has no such state, or one of another shape.
    """
    _engine_of(param, "safe_set_full_optimizer_state").values.set_state(param, optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """What this rank keeps of ``safe_get_full_fp32_param``."""
    return _local(param, safe_get_full_fp32_param(param))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """What this rank keeps of ``safe_get_full_grad``."""
    return _local(param, safe_get_full_grad(param))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """What this rank keeps of ``safe_get_full_optimizer_state``."""
    return _local(param, safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """``safe_set_full_fp32_param`` of what ``safe_get_local_fp32_param`` gives; on one rank.

    Raises:
        ModelError: there are several ranks, or the value has another shape.
    """
    safe_set_full_fp32_param(param, _whole(param, value, "safe_set_local_fp32_param"))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """``safe_set_full_grad`` of what ``safe_get_local_grad`` gives; on one rank.

    Raises:
        ModelError: there are several ranks, or the value has another shape.
    """
    safe_set_full_grad(param, _whole(param, value, "safe_set_local_grad"))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """``safe_set_full_optimizer_state`` of what ``safe_get_local_optimizer_state`` gives; on one rank.

    Raises:
        ModelError: there are several ranks, or the value has another shape.
    """
    safe_set_full_optimizer_state(param, _whole(param, value, "safe_set_local_optimizer_state"), optim_state_key)


def _engine_of(param: nn.Parameter, what: str) -> Engine:
    engine = engine_of(param)
    if engine is None:
        raise ModelError(
            f"{what}(): expected a parameter of a model that initialize() was given, got a {type(param).__name__} that "
            "no engine has; take it from engine.module"
        )
    return engine


def _here(engine: Engine, value: torch.Tensor) -> torch.Tensor:
    return value.to(engine.config.torch_device())


def _local(param: nn.Parameter, full: torch.Tensor | None) -> torch.Tensor | None:
    engine = engine_of(param)
    if full is None or engine is None:
        return None
    slot = next(slot for slot in engine.values.part_of(param).slots if slot.param is param)
    return slot.take(full).reshape(-1)


def _whole(param: nn.Parameter, value: torch.Tensor, what: str) -> torch.Tensor:
    engine = _engine_of(param, what)
    if engine.summary().num_ranks > 1:
        raise ModelError(
            f"{what}() with several ranks: each has a slice that may be empty, and a change of one is seen by none of "
            f"the others; call {what.replace('_local_', '_full_')}() on all ranks with the whole value"
        )
    given: Any = value
    if not isinstance(given, torch.Tensor) or given.numel() != param.numel():
        got = f"{given.numel()}" if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"
        raise ModelError(f"{what}(): expected a tensor of {param.numel()} elements, got {got}")
    return value.reshape(param.shape)
