"""``deepspeed.ops.adagrad``: PyTorch's Adagrad, with the arguments of DeepSpeed's."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from infinity.errors import ModelError


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """As ``torch.optim.Adagrad``.

    Args:
        model_params: parameters or groups.
        lr: learning rate.
        eps: added to the denominator.
        weight_decay: part of the gradient.
        amsgrad: Adagrad has no such variant; ``True`` is refused.

    Raises:
        ModelError: something is refused.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise ModelError("DeepSpeedCPUAdagrad(amsgrad=True): Adagrad has no such variant; leave it out")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
