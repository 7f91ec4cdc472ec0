"""``Turns``: who runs when, as the hooks see it. Here: one passage, which waits for nobody."""

from __future__ import annotations

from typing import NoReturn

from infinity.engine.unit import Part, Unit
from infinity.errors import EngineStateError


class Turns:
    """The contract, and what holds for a single passage.

    Attributes:
        is_shared: whether other passages rest that must not be disturbed.
    """

    is_shared = False

    def before_gather(self, unit: Unit) -> None:
        """A forward or a backward is about to need ``unit``; may let others run first."""

    def before_gradient(self, part: Part, position: int) -> None:
        """The gradient of a part's slot is about to be accumulated; may let others run first."""

    def after_gradient(self, part: Part, position: int) -> None:
        """It has been."""

    def note_use(self, unit: Unit, *, is_lent: bool) -> None:
        """A forward begins to use a unit that it did not use before; ``is_lent``: until some later end."""

    def keeps(self, unit: Unit) -> bool:
        """Whether a unit that has become idle stays gathered for others; whoever says so releases it later."""
        return False


def refuse_inner_backward(name: str) -> NoReturn:
    """Refuse a gradient of parameter ``name`` that a backward inside of ``compute_loss`` has brought.

    Raises:
        EngineStateError: always.
    """
    raise EngineStateError(
        f"parameter {name}: got a gradient from a backward inside the compute_loss of accumulate(), which runs "
        "backward itself: return the loss, and leave backward() and step() to the engine"
    )
