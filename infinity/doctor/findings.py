"""``Finding``: one line of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["good", "slow", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one thing.

    Attributes:
        name: the thing.
        state: ``"good"``; ``"slow"``: training runs, and loses time or safety by it; ``"missing"``: it is not there or
            does not work.
        text: what there is, in words.
        why: what follows from it, where it is not good.
        repairs: commands that mend it, or, where there is none, what to do. A ``#`` begins a remark.
        essential: whether training cannot run while it is missing.
    """

    name: str
    state: State
    text: str
    why: str = ""
    repairs: Sequence[str] = ()
    essential: bool = False

    @property
    def prevents_training(self) -> bool:
        """Whether training cannot run."""
        return self.essential and self.state == "missing"

    def as_document(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {**asdict(self), "repairs": list(self.repairs)}


def good(name: str, text: str) -> Finding:
    """Nothing to mend."""
    return Finding(name, "good", text)
