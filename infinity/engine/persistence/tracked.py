"""``Tracked``: objects of the user's whose state goes along with commits: schedulers, loaders, counters, anything.

An object has ``state_dict`` and ``load_state_dict``. Its state is taken at the moment that makes a resumed run the
same as one that was never interrupted. Where batches come through ``engine.batches(loader)`` that is one moment for
all: a step and whatever follows it are over, and the next batch has not been fetched. In a plain loop there are two:

    for batch in loader:              # the loader counts a batch before it is trained on
        loss = engine(batch)          <- here, before anything else happens: schedulers, and all others
        engine.backward(loss)
        engine.step()                 <- here: what is data, as of the batches whose step is in the commit
        scheduler.step()              # the scheduler counts a step after it was taken

What can be iterated over, and is no module and no collection, is taken for data, unless ``track`` is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from infinity.engine.persistence.documents import Writer
from infinity.errors import ModelError


class Tracked:
    """Objects by name."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._data: set[str] = set()
        self._waiting: dict[str, Any] = {}

    def add(self, name: str, tracked: Any, *, is_data: bool | None = None) -> bool:
        """Take one in; whether it got the state that a commit has of that name.

        Args:
            name: the same in every run.
            tracked: the object.
            is_data: whether it is a position in data; ``None``: to be told by its type.

        Raises:
            ModelError: it has no state, or the name is none or is taken.
        """
        if type(name) is not str or not name.isprintable() or not name:
            raise ModelError(f"engine.track(): expected a name, which is the same in every run, got {name!r}")
        missing = [each for each in ("state_dict", "load_state_dict") if not callable(getattr(tracked, each, None))]
        if missing or isinstance(tracked, type):
            got = f"the class {tracked.__name__}" if isinstance(tracked, type) else f"a {type(tracked).__name__}"
            raise ModelError(
                f"engine.track({name!r}): expected an object with state_dict() and load_state_dict(), got {got}"
                + (f" without {missing[0]}()" if missing else " itself")
                + ("; a loader gets them by infinity.ReplayedLoader(loader)" if missing and _is_data(tracked) else "")
            )
        if self._objects.get(name, tracked) is not tracked:
            raise ModelError(f"engine.track({name!r}): another object is tracked by that name")
        self._objects[name] = tracked
        if _is_data(tracked) if is_data is None else is_data:
            self._data.add(name)
        if name not in self._waiting:
            return False
        tracked.load_state_dict(self._waiting.pop(name))
        return True

    def remove(self, name: str) -> None:
        """Forget an object, or the state of one that has not been tracked.

        Raises:
            ModelError: there is none of that name.
        """
        if name not in self._objects and name not in self._waiting:
            there = ", ".join(map(repr, [*self._objects, *self._waiting])) or "nothing"
            raise ModelError(f"engine.untrack({name!r}): nothing is tracked by that name, but {there}")
        self._objects.pop(name, None)
        self._data.discard(name)
        self._waiting.pop(name, None)

    def documents(self, writer: Writer, *, data: bool) -> dict[str, Any]:
        """The states of those that are positions in data, or of the others.

        Raises:
            ModelError: one has something in its state that cannot be kept.
        """
        taken = {
            name: writer.write(each.state_dict(), f"the state of {name!r}, which engine.track() was given,")
            for name, each in self._objects.items()
            if (name in self._data) == data
        }
        if data:  # who is not tracked yet keeps what the commit before had
            taken |= {name: writer.write(state, f"tracked {name!r}") for name, state in self._waiting.items()}
        return taken

    def load(self, states: Mapping[str, Any]) -> None:
        """Give objects the states of a commit; those that are not tracked yet get theirs when they are."""
        self._waiting = dict(states)
        for name in [name for name in self._objects if name in self._waiting]:
            self._objects[name].load_state_dict(self._waiting.pop(name))


def _is_data(tracked: Any) -> bool:
    is_iterable = hasattr(type(tracked), "__iter__")
    return is_iterable and not isinstance(tracked, (nn.Module, Mapping, Sequence))
