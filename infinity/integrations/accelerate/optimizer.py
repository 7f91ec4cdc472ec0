"""``PreparedOptimizer``: the engine's optimizer in the clothes of accelerate's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]

from infinity.engine.engine import Engine
from infinity.errors import ModelError


class PreparedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Steps the engine where gradients are complete (``sync_gradients``), and does nothing elsewhere.

    Args:
        engine: whose optimizer it is.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self._engine = engine
        self._norm: torch.Tensor | None = None

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step; ``step_was_skipped`` tells whether it was taken.

        Raises:
            InfinityError: see ``Engine.step``.
        """
        if closure is not None:
            raise ModelError("optimizer.step(closure) is not supported: call accelerator.backward(loss) before step()")
        if not self.gradient_state.sync_gradients:
            return
        norm, self._norm = self._norm, None
        self._is_overflow = not self._engine.step()
        if norm is not None and self._engine.grad_norm is not None:
            norm.copy_(self._engine.grad_norm)

    def norm_to_come(self) -> torch.Tensor:
        """The norm of the gradients of the next step, which gets its value there: no dimensions, NaN until then."""
        if self._norm is None:
            self._norm = torch.tensor(float("nan"))
        return self._norm

    def __getstate__(self) -> Any:
        """Refused: the engine is part of it.

        Raises:
            ModelError: always.
        """
        raise ModelError("a prepared optimizer cannot be copied or pickled; take its state_dict() instead")
