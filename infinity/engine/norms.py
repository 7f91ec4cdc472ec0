"""Norms of gradients, taken while each gradient is at hand; on one rank bit by bit those of ``torch.nn.utils``.

``torch.nn.utils.clip_grad_norm_`` takes the norm of each gradient and then the norm of these. Gradients leave their
parameters as they come and may go as far as NVMe; so the first half is done when a gradient arrives, in the dtype that
is stepped, on the device where it lies: with several backwards, of the sum so far. What nobody has asked for in time is
taken later, from the shard (``clipping.py``).

Where the number of backwards in a step is known, only the last brings norms that count, and none is taken before.

``Norms`` is what they all have in common; how single norms become one, and whether others are asked, is what
``GradientNorms`` (here) and ``RankNorms`` (``ranks/norms.py``) differ in.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

from infinity.engine.scaling import SHOWS_OVERFLOW, Scaling
from infinity.engine.unit import Part

T = TypeVar("T")
"""The norm of one gradient, or what stands for it."""


def norm_of(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of one gradient as ``torch.nn.utils.get_total_norm`` takes it: no dimensions."""
    with torch.no_grad():
        if _has_foreach_support([gradient], gradient.device):
            return torch._foreach_norm([gradient], norm_type)[0]
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type)
        return norm


def total_norm(norms: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], norm_type: float) -> torch.Tensor:
    """The norm of all gradients from that of each, as ``torch.nn.utils.get_total_norm`` joins them.

    Args:
        norms: of each gradient, in the order of the parameters.
        dtypes: of each gradient. PyTorch groups gradients by them, and what is summed first is part of the sum's bits.
        norm_type: which norm.
    """
    if not norms:
        return torch.tensor(0.0)
    kinds = [torch.empty(0, dtype=dtype) for dtype in dtypes]
    groups = _group_tensors_by_device_and_dtype([kinds], with_indices=True)  # type: ignore[list-item]
    order = [index for _, indices in groups.values() for index in indices]
    with torch.no_grad():
        stacked = torch.stack([norms[index].to(norms[0].device) for index in order])
        total: torch.Tensor = torch.linalg.vector_norm(stacked, norm_type)
        return total


@dataclass(frozen=True, slots=True)
class Check:
    """What is known of whether gradients are finite.

    Attributes:
        any_came: whether there are any.
        culprit: the first that is infinite or NaN: two numbers that say how early it comes, and its parameter's name.
    """

    any_came: bool
    culprit: tuple[int, int, str] | None = None


class Norms(ABC, Generic[T]):
    """The norm of each gradient that has come since the last step, as far as somebody asks for norms.

    ``total`` and ``join`` may ask other ranks: all ranks call them at the same points of the program, whatever their
    own gradients are.

    Args:
        norm_type: which norm is asked for in every step; ``None``: none, until ``ask``.
        num_backwards: how many backwards make a step, if that is known.
        scaling: what is to be undone on gradients.
    """

    def __init__(self, norm_type: float | None, *, num_backwards: int | None, scaling: Scaling) -> None:
        self._scaling = scaling
        self._always = self._norm_type = norm_type
        self._num_backwards = num_backwards or 1
        self._was_asked = False
        self._norms: dict[tuple[int, int], T] = {}

    def note(self, part: Part, position: int, gradient: torch.Tensor, *, num_backwards: int) -> None:
        """A gradient has come, or has been added to others, in backward number ``num_backwards`` since the last step.

        Args:
            part: the parameter's part.
            position: its slot in it.
            gradient: all of it so far, in the dtype that computes or that is stepped: the slot's shape.
            num_backwards: counts from 1.
        """
        self._norms.pop((part.index, position), None)
        if self._norm_type is not None and num_backwards >= self._num_backwards and gradient.numel():
            self.take(part, position, gradient, self._scaling.inverses)

    @property
    def norm_type(self) -> float | None:
        """Which norm is taken; ``None``: none."""
        return self._norm_type

    def ask(self, norm_type: float) -> None:
        """Norms of this type are wanted, in this step and, in all likelihood, in the next."""
        if norm_type != self._norm_type:
            self._norms.clear()
        self._norm_type, self._was_asked = norm_type, True

    def take(self, part: Part, position: int, gradient: torch.Tensor, scales: Sequence[torch.Tensor]) -> None:
        """Take and keep the norm of a gradient times ``scales``, one after the other."""
        assert self._norm_type is not None
        self._norms[part.index, position] = self._measure(part, position, gradient, scales, self._norm_type)

    def get(self, part: Part, position: int) -> T | None:
        """A gradient's norm, if it has been taken."""
        return self._norms.get((part.index, position))

    def forget(self, part: Part, position: int) -> None:
        """The gradient is about to be another."""
        self._norms.pop((part.index, position), None)

    def end_step(self) -> None:
        """All gradients have been handed over or discarded."""
        self._norms.clear()
        if not self._was_asked:
            self._norm_type = self._always
        self._was_asked = False

    @abstractmethod
    def _measure(
        self, part: Part, position: int, gradient: torch.Tensor, scales: Sequence[torch.Tensor], norm_type: float
    ) -> T: ...

    @abstractmethod
    def measure_unstepped(self, gradient: torch.Tensor, norm_type: float) -> T | None:
        """The norm of a gradient that lies on its parameter because nobody steps it; ``None``: it does not count."""

    @property
    @abstractmethod
    def shows_nonfinite(self) -> bool:
        """Whether norms of the type that is taken are not finite (``finite``) wherever an element is not."""

    @abstractmethod
    def proves_nonfinite(self, part: Part) -> bool:
        """Whether, where such a norm of one of a part's gradients is not finite, an element is not."""

    @abstractmethod
    def finite(self, norms: Sequence[T]) -> list[bool]:
        """Whether each norm is finite. Waits once for the device."""

    @abstractmethod
    def total(self, norms: Sequence[T], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
        """The norm of all gradients, of the type that was asked for: no dimensions; 0 without gradients.

        Args:
            norms: of each gradient, in the order of the parameters.
            dtypes: of each gradient, as it is stepped.
        """

    @abstractmethod
    def join(self, check: Check) -> Check:
        """What is true of all ranks."""


class GradientNorms(Norms[torch.Tensor]):
    """One rank's: those of ``torch.nn.utils``, bit by bit."""

    def _measure(
        self, part: Part, position: int, gradient: torch.Tensor, scales: Sequence[torch.Tensor], norm_type: float
    ) -> torch.Tensor:
        return norm_of(scaled(gradient.to(part.step_dtype), scales), norm_type)

    def measure_unstepped(self, gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Like any other."""
        return norm_of(gradient, norm_type)

    @property
    def shows_nonfinite(self) -> bool:
        """Not where large elements make small norms, or are only counted."""
        return self._norm_type is not None and self._norm_type > 0

    def proves_nonfinite(self, part: Part) -> bool:
        """Not where sums of powers may overflow."""
        is_wide = part.compute_dtype == torch.float16 and part.step_dtype == torch.float32
        return self._norm_type == math.inf or (is_wide and self._norm_type in SHOWS_OVERFLOW)

    def finite(self, norms: Sequence[torch.Tensor]) -> list[bool]:
        """See ``Norms``."""
        flags = [norm.isfinite().to(norms[0].device) for norm in norms]  # one wait for all
        return [bool(flag) for flag in torch.stack(flags).tolist()] if flags else []

    def total(self, norms: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
        """See ``total_norm``."""
        assert self._norm_type is not None
        return total_norm(norms, dtypes, self._norm_type)

    def join(self, check: Check) -> Check:
        """There is nobody else."""
        return check


def scaled(gradient: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """A gradient times ``scales``, tensors of no dimensions, one after the other."""
    for scale in scales:
        gradient = gradient * scale.to(gradient.device)
    return gradient
