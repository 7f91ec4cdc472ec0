"""Random initial values of parameters in pieces, as if they were drawn for all pieces at once.

On the CPU, PyTorch draws one element after the other: uniform values one by one; normal values in runs of 16, the last
of which is drawn anew where it is incomplete. So pieces that end where a run does get the values of the whole. Where
they do not, and on other devices, the whole is drawn and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

UNIFORM_RUN = 1
NORMAL_RUN = 16


@torch.no_grad()
def draw_rows(params: Sequence[nn.Parameter], draw: Callable[[torch.Tensor], object], *, run: int) -> None:
    """Give parameters the values that ``draw`` would give to all their rows in one tensor.

    Args:
        params: alike but for their first dimension.
        draw: writes random values into a contiguous tensor.
        run: how many elements it draws together.
    """
    if not params:
        return
    sizes = [param.numel() for param in params]
    in_pieces = all(size % run == 0 for size in sizes[:-1]) and sizes[-1] >= run
    if params[0].device.type == "cpu" and in_pieces:
        for param in params:
            draw(param)
        return
    rows = [len(param) for param in params]
    whole = torch.empty((sum(rows), *params[0].shape[1:]), dtype=params[0].dtype, device=params[0].device)
    draw(whole)
    for param, values in zip(params, whole.split(rows), strict=True):
        param.copy_(values)
