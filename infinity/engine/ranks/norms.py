"""``RankNorms``: norms of gradients over several ranks, the same bits on each, for every stage and number of ranks.

Each rank measures what it answers for: of every part the slice ``part.cut(rank, num_ranks)``, whether it holds no more
(stages 2 and 3) or the whole gradient, as all others do (stages 0 and 1). So each element counts once, and what is
summed does not depend on the stage. Sums of powers are exact beyond a block (``exact_sum.py``), so they do not depend
on the number of ranks either. What ranks tell each other is one small document per question.

The norm is that of ``torch.nn.utils.clip_grad_norm_`` but for rounding: PyTorch rounds the norm of each gradient to its
dtype, here only the result is rounded. So a sum of squares that overflows there need not overflow here.

Norms of order 0: ``torch.nn.utils`` counts the gradients that are not 0, not their elements; so does this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.engine.norms import Check, Norms, scaled
from infinity.engine.ranks.exact_sum import ExactSum, block_sums
from infinity.engine.scaling import Scaling
from infinity.engine.unit import CutSlot, Part
from infinity.errors import EngineStateError

_DOUBLE = (torch.float64, torch.complex128)
_LARGEST_SAFE_POWER = 7
"""Blocks of powers up to this one of what fp32 can hold do not overflow in fp64."""


@dataclass(frozen=True, slots=True)
class Measure:
    """What this rank knows of one gradient.

    Attributes:
        place: its part's index and its position in it.
        numbers: fp64, one dimension: of order 0, whether any element is not 0; of an infinite order, the norm; else the
            sums of blocks. Empty where all elements are other ranks'. It takes 8 bytes for 4096 elements.
        finite: whether all elements are finite: no dimensions; ``None``: exactly if ``numbers`` are.
    """

    place: tuple[int, int]
    numbers: torch.Tensor
    finite: torch.Tensor | None


class RankNorms(Norms[Measure]):
    """Those of several ranks.

    Gradients of parameters that nobody steps are not reduced, so they differ between ranks: they do not count.

    Args:
        norm_type: which norm is asked for in every step; ``None``: none, until ``ask``.
        num_backwards: how many backwards make a step, if that is known.
        scaling: what is to be undone on gradients.
        slices: of each part, by index, what this rank answers for: ``part.cut(rank, num_ranks)`` in every stage.
        exchange: tells all ranks what each has to say, in the order of ranks (``Collectives.exchange``).
    """

    def __init__(
        self,
        norm_type: float | None,
        *,
        num_backwards: int | None,
        scaling: Scaling,
        slices: Sequence[Part],
        exchange: Callable[[Any], list[Any]],
    ) -> None:
        super().__init__(norm_type, num_backwards=num_backwards, scaling=scaling)
        self._slices = slices
        self._exchange = exchange

    def _measure(
        self, part: Part, position: int, gradient: torch.Tensor, scales: Sequence[torch.Tensor], norm_type: float
    ) -> Measure:
        own = self._slices[part.index].slots[position]
        is_piece = isinstance(part.slots[position], CutSlot)
        with torch.no_grad():
            piece = (gradient if is_piece else own.take(gradient)).reshape(-1)
            assert piece.numel() == own.num_elements
            piece = scaled(piece.to(part.step_dtype), scales)
            numbers = _numbers(piece, own.offset, norm_type)
            shows = norm_type == math.inf or (0 < norm_type <= _LARGEST_SAFE_POWER and part.step_dtype not in _DOUBLE)
            return Measure((part.index, position), numbers, None if shows else piece.isfinite().all())

    def measure_unstepped(self, gradient: torch.Tensor, norm_type: float) -> None:
        """It does not count."""

    @property
    def shows_nonfinite(self) -> bool:
        """Whatever norm is taken, finiteness is noted beside it."""
        return self._norm_type is not None

    def proves_nonfinite(self, part: Part) -> bool:
        """Always: what is noted is whether elements are finite."""
        return True

    def finite(self, norms: Sequence[Measure]) -> list[bool]:
        """See ``Norms``: of the elements, whatever their norm is; of this rank's alone."""
        flags = [each.numbers.isfinite().all() if each.finite is None else each.finite for each in norms]
        together = [flag.to(flags[0].device) for flag in flags]
        return [bool(flag) for flag in torch.stack(together).tolist()] if flags else []

    def total(self, norms: Sequence[Measure], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
        """See ``Norms``: on the CPU, fp64 if any gradient is and else fp32, rounded once.

        Raises:
            EngineStateError: another rank asks for something else.
        """
        norm_type = self._norm_type
        assert norm_type is not None
        documents = self._ask_all(
            f"the norm of order {norm_type}",
            {
                "any": bool(norms),
                "double": any(dtype in _DOUBLE for dtype in dtypes),
                "norm": _document(norms, norm_type),
            },
        )
        dtype = torch.float64 if any(each["double"] for each in documents) else torch.float32
        if not any(each["any"] for each in documents):
            return torch.tensor(0.0)
        return _joined([each["norm"] for each in documents], norm_type).to(dtype)

    def join(self, check: Check) -> Check:
        """See ``Norms``.

        Raises:
            EngineStateError: another rank asks for something else.
        """
        documents = self._ask_all("whether gradients are finite", {"any": check.any_came, "culprit": check.culprit})
        culprits = [(first, second, name) for first, second, name in (d["culprit"] for d in documents if d["culprit"])]
        return Check(any(each["any"] for each in documents), min(culprits, default=None))

    def _ask_all(self, question: str, answer: Mapping[str, Any]) -> list[Any]:
        """What all ranks have to say to a question, if it is the same on all."""
        documents = self._exchange({"question": question, **answer})
        for rank, document in enumerate(documents):
            if document["question"] != question:
                raise EngineStateError(
                    f"rank {rank} asks for {document['question']} of gradients where this one asks for {question}: "
                    "all ranks must clip and step in the same order, with the same arguments and configuration"
                )
        return documents


def _numbers(piece: torch.Tensor, first: int, norm_type: float) -> torch.Tensor:
    """See ``Measure.numbers``."""
    if not math.isinf(norm_type) and norm_type != 0:
        return block_sums(piece, first, norm_type)
    if not piece.numel():
        return torch.empty(0, dtype=torch.float64, device=piece.device)
    number = (piece != 0).any() if norm_type == 0 else torch.linalg.vector_norm(piece, norm_type)
    return number.double().reshape(1)


def _document(norms: Sequence[Measure], norm_type: float) -> Any:
    """What other ranks must know of this one's gradients."""
    if not norms:
        numbers = torch.empty(0, dtype=torch.float64)
    else:
        numbers = torch.cat([each.numbers.to(norms[0].numbers.device) for each in norms]).cpu()
    if norm_type == 0:
        counted = [each.place for each in norms if each.numbers.numel()]
        return [place for place, number in zip(counted, numbers.tolist(), strict=True) if number]
    if math.isinf(norm_type):
        return float(torch.linalg.vector_norm(numbers, norm_type)).hex() if numbers.numel() else None
    return ExactSum.of(numbers).document()


def _joined(documents: Sequence[Any], norm_type: float) -> torch.Tensor:
    """The norm that all documents together stand for: fp64."""
    if norm_type == 0:
        return torch.tensor(len({tuple(place) for each in documents for place in each}), dtype=torch.float64)
    if math.isinf(norm_type):
        numbers = [float.fromhex(each) for each in documents if each is not None]
        total: torch.Tensor = torch.linalg.vector_norm(torch.tensor(numbers or [0.0], dtype=torch.float64), norm_type)
        return total
    return sum((ExactSum.from_document(each) for each in documents), ExactSum()).root(norm_type)
