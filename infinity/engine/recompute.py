"""``Recomputation``: activation checkpoints around blocks, without a change in the user's model.

Each block runs under ``torch.utils.checkpoint`` (``use_reentrant=False``): what autograd saves inside it is dropped,
and computed again in backward. The call of the module is what runs there, its hooks included, exactly as if the model
had called ``checkpoint(block, ...)`` itself. So the engine's own hooks gather the block's unit for the recomputation
too, and nothing else in the engine knows of it. Without gradients (evaluation, a reentrant checkpoint's forward) a
block runs as it is.

How: ``nn.Module`` looks ``_call_impl`` up on the object, which ``refusals.py`` uses for other names in the same way.
Rejected: a module around each block (changes names and types that are the user's); replacing ``forward`` (the hooks
would run outside the checkpoint in forward, and not at all in the recomputation); wrapping the units, whatever they are
(an embedding or a head saves little but its input, and the size of units depends on budgets, on which memory for
activations should not).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_NAME = "_call_impl"


class Recomputation:
    """Activation checkpoints around modules, from construction to ``remove``.

    Args:
        modules: which.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._calls: dict[nn.Module, Callable[..., Any]] = {}
        for module in modules:
            call = functools.partial(_call, module._call_impl)
            self._calls[module] = vars(module)[_NAME] = call

    def remove(self) -> None:
        """Have the modules run as before."""
        for module, call in self._calls.items():
            if vars(module).get(_NAME) is call:
                del vars(module)[_NAME]
        self._calls.clear()


def _call(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    names, num_args = tuple(kwargs), len(args)

    def run(*inputs: Any) -> Any:
        return call(*inputs[:num_args], **dict(zip(names, inputs[num_args:], strict=True)))

    # By position: what comes by keyword would be kept as it is, past all hooks, and might be named like a setting.
    return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)
