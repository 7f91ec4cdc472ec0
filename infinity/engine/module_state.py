"""What a module holds beside parameters, by the names of ``state_dict()``: buffers, and what ``get_extra_state`` says.

Parameters are away when it is taken and given back. A module's ``get_extra_state`` and ``set_extra_state`` find ones on
the meta device in their place: shapes and dtypes can be looked at, and what looks at values is refused by PyTorch, where
a placeholder would have given NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from infinity.engine.filled import filled
from infinity.errors import ModelError

_EXTRA = "_extra_state"


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """All buffers; ``None``: one that is registered, and has no value."""
    return {name: owner._buffers[key] for name, owner, key in _registered(module)}


def persistent_buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict has."""
    return {
        name: buffer
        for name, owner, key in _registered(module)
        if key not in owner._non_persistent_buffers_set and (buffer := owner._buffers[key]) is not None
    }


def restore_buffers(module: nn.Module, values: Mapping[str, Any], device: torch.device) -> None:
    """Give buffers values that ``buffers_of`` returned.

    Args:
        module: the model.
        values: by name.
        device: where buffers are that had none so far.

    Raises:
        ModelError: it has other buffers.
    """
    owners = {name: (owner, key) for name, owner, key in _registered(module)}
    for name, value in values.items():
        owner, key = owners.get(name, (module, ""))
        ours = owner._buffers.get(key)
        is_other = name not in owners or not (value is None or isinstance(value, torch.Tensor))
        if is_other or (ours is not None and value is not None and ours.shape != value.shape):
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise ModelError(f"the commit is of another model: it has a buffer {name} of {shape}")
        if ours is None or value is None:
            owner._buffers[key] = None if value is None else value.to(device)
        else:
            with torch.no_grad():
                ours.copy_(value)


def extra_state_names(module: nn.Module) -> list[str]:
    """The names of what ``extra_states`` returns."""
    return [name for name, _ in _with_extra_state(module)]


def extra_states(module: nn.Module) -> dict[str, Any]:
    """What modules say of themselves beside parameters and buffers.

    Raises:
        ModelError: a module looks at values of parameters, or fails.
    """
    return {name: _get_extra_state(name, owner) for name, owner in _with_extra_state(module)}


def restore_extra_states(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Give modules what ``extra_states`` returned; of the names of this model."""
    for name, owner in _with_extra_state(module):
        if name in values:
            with filled(owner.modules(), _on_meta):
                owner.set_extra_state(values[name])


def _get_extra_state(name: str, owner: nn.Module) -> Any:
    try:
        with filled(owner.modules(), _on_meta):
            return owner.get_extra_state()
    except Exception as error:  # the user's code; PyTorch has no type of its own for values that there are not
        raise ModelError(
            f"{name}: get_extra_state() of a {type(owner).__name__} cannot be kept in a checkpoint, since it failed "
            f"where parameters have shapes and no values; keep there only what is no parameter: {error}"
        ) from error


def _registered(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Each name of a buffer, with its module and its name there."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key in owner._buffers:
            yield (f"{prefix}.{key}" if prefix else key), owner, key


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have some and take it back; as PyTorch finds them, by their class."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        kind = type(owner)
        gives = kind.get_extra_state is not nn.Module.get_extra_state
        if gives and kind.set_extra_state is not nn.Module.set_extra_state:
            yield (f"{prefix}.{_EXTRA}" if prefix else _EXTRA), owner


def _on_meta(param: nn.Parameter) -> torch.Tensor:
    return torch.empty_like(param, device="meta")
