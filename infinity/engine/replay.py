"""``ReplayedLoader``: a position for a loader that has none, kept as where its epoch began and how far it is.

A loader without ``state_dict`` (torch's own ``DataLoader``) can only begin an epoch. What it gives there follows from
the random states at that moment and from the epoch's number. So those are kept, and a resumed run begins the epoch
again, with them, and throws away what was trained on. The states of after a resume are put back when that is done.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy
import torch

from infinity.errors import ModelError

T = TypeVar("T")


class ReplayedLoader(Generic[T]):
    """A loader that ``engine.track`` takes, made from one that has no ``state_dict()``.

    ``set_epoch(epoch)`` of the loader, its sampler, batch sampler and dataset is called where there is one, before an
    epoch begins. Going back to a place in an epoch reads what came before it once more.

    Args:
        loader: gives the same batches whenever it begins the same epoch from the same random states of PyTorch's CPU,
            Python's and numpy's generators and of a ``generator`` that it or its sampler has.

    Attributes:
        epoch: how many epochs have ended.
        num_batches: how many batches of this one were given out.

    Raises:
        ModelError: it can be iterated over but once, as a generator; or it has a position of its own.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        given: Any = loader
        if isinstance(given, Iterator):
            raise ModelError(
                f"ReplayedLoader: a {type(given).__name__} cannot begin again, so its position cannot be kept; give an "
                "object whose __iter__() begins an epoch, or track one that has state_dict() and load_state_dict()"
            )
        if not isinstance(given, Iterable):
            raise ModelError(f"ReplayedLoader: expected a loader to iterate over, got a {type(given).__name__}")
        if callable(getattr(given, "state_dict", None)):
            raise ModelError(
                f"ReplayedLoader: a {type(given).__name__} has a state_dict() of its own; give it to engine.track()"
            )
        self._loader = loader
        self._begun: dict[str, Any] | None = None
        self._resumes = False
        self.epoch = 0
        self.num_batches = 0

    def __iter__(self) -> Iterator[T]:
        """The batches from here to the end of the epoch."""
        batches = self._begin_again() if self._resumes and self.num_batches else self._begin_anew()
        self._resumes = False
        for batch in batches:
            self.num_batches += 1
            yield batch
        self.epoch, self.num_batches, self._begun = self.epoch + 1, 0, None

    def __len__(self) -> int:
        """How many batches a whole epoch has, where the loader knows."""
        return len(self._loader)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Where it is, for ``engine.track``."""
        return {"epoch": self.epoch, "num_batches": self.num_batches, "begun": self._begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next ``iter()`` go on from there."""
        self.epoch, self.num_batches, self._begun = state["epoch"], state["num_batches"], state["begun"]
        self._resumes = True

    def _begin_anew(self) -> Iterator[T]:
        self.num_batches, self._begun = 0, {**_global_states(), "own": [g.get_state() for g in self._generators()]}
        return self._begin()

    def _begin_again(self) -> Iterator[T]:
        """The rest of the epoch in which the run before was; who draws from global generators draws as it would."""
        assert self._begun is not None
        now = _global_states()
        _restore_global(self._begun)
        for generator, state in zip(self._generators(), self._begun["own"], strict=True):
            generator.set_state(state)
        batches = self._begin()
        for number in range(self.num_batches):
            if next(batches, self) is self:
                raise ModelError(
                    f"ReplayedLoader: epoch {self.epoch} ended after {number} batches, and the run before had "
                    f"{self.num_batches} of it; give it the data and the batch size of then"
                )
        _restore_global(now)
        return batches

    def _begin(self) -> Iterator[T]:
        for each in self._parts():
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(self.epoch)
        return iter(self._loader)

    def _parts(self) -> list[Any]:
        names = ("sampler", "batch_sampler", "dataset")
        found = [self._loader, *(getattr(self._loader, name, None) for name in names)]
        found.append(getattr(getattr(self._loader, "batch_sampler", None), "sampler", None))
        return list({id(each): each for each in found if each is not None}.values())

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(each, "generator", None) for each in self._parts()]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _global_states() -> dict[str, Any]:
    numpys = numpy.random.get_state()
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpys}


def _restore_global(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
