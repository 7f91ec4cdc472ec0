"""``Scope``: a forward that is running."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType

from torch import nn

from infinity.engine.unit import Unit


@dataclass(slots=True, eq=False)
class Scope:
    """A forward that is running: a unit's trigger, or the whole model (``unit`` is ``None``).

    Attributes:
        unit: what it needs.
        module: whose forward it is.
        frame: Python's frame around the whole model's forward.
        pushed: whether it put the saved-tensor hooks in force.
        lent: units gathered for it beside its own.
    """

    unit: Unit | None
    module: nn.Module | None
    frame: FrameType | None = None
    pushed: bool = False
    lent: list[Unit] = field(default_factory=list)


def is_on_stack(scopes: Iterable[Scope], frame: FrameType | None) -> bool:
    """Whether ``frame``, or one that called it, is that of a forward of the whole model."""
    frames = {id(scope.frame) for scope in scopes if scope.frame is not None}
    while frames and frame is not None:
        if id(frame) in frames:
            return True
        frame = frame.f_back
    return False
