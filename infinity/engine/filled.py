"""``filled``: modules whose parameters are other objects for a while, for PyTorch's own code that reads or writes them.

State dicts are made and loaded by code of PyTorch's and of users' (``_save_to_state_dict``, ``_load_from_state_dict``,
hooks), which expects values where placeholders are. What it gets are parameters made for it, in the place of the
model's own, which stay as they are: an exception cannot leave a value behind. Rejected: setting ``param.data``, which
the version counters, the placeholders and whoever else holds the parameter would see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

Fill = Callable[[nn.Parameter], "torch.Tensor | None"]
"""The value for a parameter; ``None`` leaves it as it is."""


@contextlib.contextmanager
def filled(modules: Iterable[nn.Module], fill: Fill) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Have the parameters of each of ``modules`` itself replaced by others with values; one that is shared by one.

    Args:
        modules: which; their children are not meant.
        fill: asked once for each parameter.

    Yields:
        The replacement of each parameter.
    """
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    with contextlib.ExitStack() as stack:
        for module in modules:
            params = dict(module._parameters)
            for name, param in params.items():
                if param is None:
                    continue
                if param not in replacements and (like := _like(param, fill)) is not None:
                    replacements[param] = like
                params[name] = replacements.get(param, param)
            stack.callback(vars(module).__setitem__, "_parameters", module._parameters)
            vars(module)["_parameters"] = params
        yield replacements


def _like(param: nn.Parameter, fill: Fill) -> nn.Parameter | None:
    with torch.inference_mode(False):  # what becomes of it may be trained
        value = fill(param)
        if value is None:
            return None
        like = nn.Parameter(value, requires_grad=param.requires_grad)
    vars(like).update(vars(param))
    return like
