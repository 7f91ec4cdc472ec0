"""``deepspeed.ops.adam``: PyTorch's Adam and AdamW, with the arguments of DeepSpeed's.

The engine steps any of torch's optimizers in host memory, sub-group by sub-group, beside training; so these are
PyTorch's arithmetic, to the bit, and no kernels of their own.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from infinity.errors import ModelError
from infinity.integrations.deepspeed.log import not_needed


class DeepSpeedCPUAdam(torch.optim.AdamW):
    """AdamW, as ``torch.optim.AdamW``.

    Args:
        model_params: parameters or groups.
        lr: learning rate.
        bias_correction: torch's always corrects; ``False`` is refused.
        betas: decays of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient.
        amsgrad: as in torch.
        adamw_mode: ``False`` is refused: give ``torch.optim.Adam``.
        fp32_optimizer_states: ``False`` is refused: give ``optimizer_states="bf16"`` to ``initialize``.

    Raises:
        ModelError: something is refused.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check(type(self).__name__, bias_correction, adamw_mode, "adamw_mode")
        if not fp32_optimizer_states:
            raise ModelError(
                f"{type(self).__name__}(fp32_optimizer_states=False): give optimizer_states='bf16' to initialize(), "
                "with which states take half and are stepped in fp32"
            )
        super().__init__(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


class FusedAdam(torch.optim.AdamW):
    """AdamW, as ``torch.optim.AdamW``.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: torch's always corrects; ``False`` is refused.
        betas: decays of the two moments.
        eps: added to the denominator.
        adam_w_mode: ``False`` is refused: give ``torch.optim.Adam``.
        weight_decay: decoupled from the gradient.
        amsgrad: as in torch.
        set_grad_none: ``False`` is not needed: a step consumes gradients.

    Raises:
        ModelError: something is refused.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check(type(self).__name__, bias_correction, adam_w_mode, "adam_w_mode")
        if not set_grad_none:
            not_needed(f"{type(self).__name__}(set_grad_none=False)", "a step consumes gradients")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def _check(name: str, bias_correction: bool, decoupled: bool, mode: str) -> None:
    if not bias_correction:
        raise ModelError(f"{name}(bias_correction=False): torch's Adam always corrects; give a class of your own")
    if not decoupled:
        raise ModelError(f"{name}({mode}=False): decay as part of the gradient is torch.optim.Adam; give that one")
