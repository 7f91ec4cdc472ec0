"""What stands on ``param.grad`` while a gradient is away (``standin.AwayGradient``), made once per parameter."""

from __future__ import annotations

import torch
from torch import nn

from infinity.engine.standin import AwayGradient, StandIn
from infinity.engine.unit import Part, Slot
from infinity.errors import ModelError


class Placeholders:
    """The placeholders of gradients, by parameter."""

    def __init__(self) -> None:
        self._made: dict[nn.Parameter, StandIn] = {}

    def __contains__(self, slot: Slot) -> bool:
        return slot.param in self._made

    def put(self, part: Part, slot: Slot) -> None:
        """Put one onto the parameter: a new one where the last has been written to."""
        if not self._is_intact(slot):
            self._made[slot.param] = StandIn(slot.param.shape, part.compute_dtype, slot.param.device, AwayGradient)
        slot.param.grad = self._made[slot.param].tensor

    def is_on(self, slot: Slot) -> bool:
        """Whether it stands there still: the gradient was neither discarded nor replaced."""
        known = self._made.get(slot.param)
        return known is not None and slot.param.grad is known.tensor

    def clear(self) -> None:
        """Take all of them off their parameters."""
        for param, known in self._made.items():
            if param.grad is known.tensor:
                param.grad = None

    def refuse_change(self, slot: Slot) -> None:
        """Refuse a gradient that was written to while it was away.

        Raises:
            ModelError: it was.
        """
        if self.is_on(slot) and not self._is_intact(slot):
            raise ModelError(
                f"parameter {slot.name}: its gradient was changed in place after backward, while it was away; "
                "discard gradients with zero_grad(set_to_none=True), or set param.grad to a new tensor"
            )

    def _is_intact(self, slot: Slot) -> bool:
        known = self._made.get(slot.param)
        return known is not None and known.tensor._version == 0 and known.is_in(known.tensor)


def refuse_away(slot: Slot, gradient: torch.Tensor) -> None:
    """Refuse what is computed from a placeholder, NaN throughout: the user's code has scaled what is not there.

    Raises:
        ModelError: it is.
    """
    if gradient.layout is torch.strided and gradient.numel() and bool(gradient.isnan().all()):
        raise ModelError(
            f"parameter {slot.name}: its gradient was set to NaN throughout, which is what reading a gradient "
            "that is away gives; change gradients in a hook (param.register_hook), where their values are"
        )


def refuse_sparse(slot: Slot, gradient: torch.Tensor) -> None:
    """Refuse a gradient that is not dense.

    Raises:
        ModelError: it is not.
    """
    if gradient.layout is not torch.strided:
        raise ModelError(
            f"parameter {slot.name}: got a gradient of layout {gradient.layout}, expected a dense one; "
            "build its module with sparse=False"
        )
