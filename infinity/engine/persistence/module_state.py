"""What a module holds beside parameters, by the names of ``state_dict()``: buffers, and what ``get_extra_state`` says.

Parameters are away when it is taken and given back. In their place ``get_extra_state`` and ``set_extra_state`` find
others on the meta device: shapes and dtypes can be looked at, and PyTorch refuses to look at values, where placeholders
would have given NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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


def check_buffers(module: nn.Module, values: Mapping[str, Any], persistent: Iterable[str]) -> None:
    """Refuse buffers of another model: those of state dicts have to be the same, with or without a value.

    Args:
        module: the model.
        values: what ``buffers_of`` returned.
        persistent: the names of those that a state dict had.

    Raises:
        ModelError: it says which differs first.
    """
    ours = buffers_of(module)
    for name in [*persistent_buffers_of(module), *persistent]:
        there, here = (_shape(found, name) for found in (values, ours))
        if there != here and "no value" not in (there, here):
            raise ModelError(
                f"the commit is of another model: buffer {name} has shape {there} there, and {here} here; build the "
                "model as it was, or give another NVMe directory"
            )


def _shape(buffers: Mapping[str, Any], name: str) -> object:
    buffer = buffers.get(name)
    return list(buffer.shape) if isinstance(buffer, torch.Tensor) else "no value" if name in buffers else "none"


def restore_buffers(module: nn.Module, values: Mapping[str, Any], device: torch.device) -> None:
    """Give buffers the values that ``buffers_of`` returned; ``check_buffers`` has been called.

    Args:
        module: the model.
        values: by name; of buffers that are not persistent, those that there are still.
        device: where buffers are that had no value so far.
    """
    owners = {name: (owner, key) for name, owner, key in _registered(module)}
    for name in [name for name in values if name in owners]:
        (owner, key), value = owners[name], values[name]
        ours = owner._buffers[key]
        if ours is None or value is None:
            owner._buffers[key] = None if value is None else value.to(device)
        elif ours.shape == value.shape:
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
