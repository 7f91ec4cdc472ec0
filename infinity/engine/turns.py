"""``Turns``: who runs when, as the hooks see it. Here: one passage, which waits for nobody."""

from __future__ import annotations

from infinity.engine.unit import Part, Unit


class Turns:
    """The contract, and what holds for a single passage."""

    def before_gather(self, unit: Unit) -> None:
        """A forward or a backward is about to need ``unit``; may let others run first."""

    def before_gradient(self, part: Part, position: int) -> None:
        """The gradient of a part's slot is about to be accumulated; may let others run first."""

    def after_gradient(self, part: Part, position: int) -> None:
        """It has been."""

    def note_use(self, unit: Unit) -> None:
        """A forward begins to use a unit that it did not use before."""

    def keeps(self, unit: Unit) -> bool:
        """Whether a unit that has become idle stays gathered for others; whoever says so releases it later."""
        return False

    @property
    def is_shared(self) -> bool:
        """Whether other passages rest that must not be disturbed."""
        return False
