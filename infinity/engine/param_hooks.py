"""``ParamHooks``: the hooks on parameters that take each gradient off them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.engine.gradients import GradientSink
from infinity.engine.unit import Part


class ParamHooks:
    """The hooks on stepped parameters that hand their gradients to the sink.

    Args:
        sink: takes them.
        parts: all parts.
        before: called with part and position before autograd accumulates a gradient.
        on_gradient: called when it has, and the gradient is about to be taken.
        after: called with part and position when it has been taken.
    """

    def __init__(
        self,
        sink: GradientSink,
        parts: Sequence[Part],
        *,
        before: Callable[[Part, int], None],
        on_gradient: Callable[[], None],
        after: Callable[[Part, int], None],
    ) -> None:
        self._sink = sink
        self._await = before
        self._on_gradient = on_gradient
        self._taken = after
        self._hooks: list[Any] = []
        self._frozen = [(part, i) for part in parts if part.stepped for i in range(len(part.slots))]
        self.update()

    def update(self) -> None:
        """Hook parameters that require a gradient and are not hooked yet: all at first, unfrozen ones later."""
        thawed = [(part, i) for part, i in self._frozen if part.slots[i].param.requires_grad]
        if not thawed:
            return
        for part, position in thawed:
            param = part.slots[position].param
            before = functools.partial(self._before, part, position)
            after = functools.partial(self._after, part, position)
            self._hooks += [param.register_hook(before), param.register_post_accumulate_grad_hook(after)]
        self._frozen = [(part, i) for part, i in self._frozen if not part.slots[i].param.requires_grad]

    def remove(self) -> None:
        """Take the hooks off the parameters, and what stands in for gradients that nobody will step any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._sink.clear_placeholders()

    def _before(self, part: Part, position: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._await(part, position)
            self._sink.expect(part, position)

    def _after(self, part: Part, position: int, param: torch.Tensor) -> None:
        self._on_gradient()
        gradient, param.grad = param.grad, None
        assert gradient is not None
        self._sink.arrive(part, position, gradient)
        self._taken(part, position)
