"""``StreamedState``: an optimizer's state of one parameter whose large tensors are read when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any


class StreamedState(Mapping[str, Any]):
    """The optimizer's state of one parameter, of which large tensors are read when they are asked for.

    Whoever loads it looks at the outline first, and asks for tensors one at a time.
    """

    @abstractmethod
    def outline(self) -> dict[str, Any]:
        """All of it, with tensors that take no memory in the place of those that would be read; their values are void.

        Raises:
            ModelError: what is not read on demand cannot be read.
        """

    @property
    @abstractmethod
    def on_demand(self) -> frozenset[str]:
        """The names of those that are read when they are asked for."""
