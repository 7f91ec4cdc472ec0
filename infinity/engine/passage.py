"""``Passage``: a micro-batch on its way through the model, forward and back.

As a rule there is one, and it lasts as long as the engine. Where several take turns (``vertical.py``), each has its
own, and all but one of them rest: what a resting one uses stays gathered (``Unit.num_waiting``), and is not counted as
used by the one that runs (``Unit.forward_depth``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.engine.holds import Holds
from infinity.engine.hookstack import Hooks
from infinity.engine.scope import Scope
from infinity.engine.unit import Unit


@dataclass(slots=True, eq=False)
class Passage:
    """What the hooks know of one forward and backward.

    Attributes:
        running: the forwards that are on the stack, the innermost last.
        holds: what its backward keeps gathered.
        backward_task: autograd's number of the backward that is under way; ``None`` where there is none.
        backward_scope: holds what is lent to its backward outside of any forward.
        outer_hooks: the saved-tensor hooks in force before each of the engine's.
        leaf_hooks: hooks on inputs that may outlive the backward.
    """

    running: list[Scope] = field(default_factory=list)
    holds: Holds = field(default_factory=Holds)
    backward_task: int | None = None
    backward_scope: Scope = field(default_factory=lambda: Scope(None, None))
    outer_hooks: list[Hooks | None] = field(default_factory=list)
    leaf_hooks: list[Any] = field(default_factory=list)

    @property
    def is_under_way(self) -> bool:
        """Whether something has begun that has not ended, or was interrupted."""
        return bool(self.running or self.holds) or self.backward_task is not None

    def rest(self) -> None:
        """Another passage will run."""
        for unit in self._used():
            unit.forward_depth -= 1
            unit.num_waiting += 1

    def resume(self) -> None:
        """It runs again."""
        for unit in self._used():
            unit.num_waiting -= 1
            unit.forward_depth += 1

    def remove_leaf_hooks(self) -> None:
        """Its backward is over."""
        for hook in self.leaf_hooks:
            hook.remove()
        self.leaf_hooks.clear()

    def _used(self) -> Iterator[Unit]:
        """The units that its forwards use, each as often as it counts."""
        for scope in (*self.running, self.backward_scope):
            if scope.unit is not None:
                yield scope.unit
            yield from scope.lent


def in_backward() -> bool:
    """Whether the calling thread runs autograd's hooks."""
    return torch._C._current_graph_task_id() != -1
