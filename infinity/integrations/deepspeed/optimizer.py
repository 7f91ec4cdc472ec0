"""The optimizer as DeepSpeed's scripts know it: the engine's, with the loss scale that it has."""

from __future__ import annotations

import weakref

from infinity.engine.engine import Engine
from infinity.engine.optimizer import OffloadedOptimizer


class DeepSpeedOptimizer(OffloadedOptimizer):
    """One object with ``engine.infinity.optimizer``: both have the same attributes, groups and hooks.

    Args:
        engine: whose.

    Attributes:
        overflow: whether the latest step of the engine changed nothing, because an fp16 gradient had overflowed.
    """

    def __init__(self, engine: Engine) -> None:
        self.__dict__ = engine.optimizer.__dict__
        self.overflow = False
        self._engine = weakref.ref(engine)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward: 1 without fp16."""
        return self._of.loss_scale

    cur_scale = loss_scale

    @property
    def _of(self) -> Engine:
        engine = self._engine()
        assert engine is not None, "the engine's methods keep it"
        return engine
