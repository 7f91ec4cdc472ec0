"""``Arrived``: what has come of the gradients of one part since the last step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from infinity.engine.placeholders import Placeholders
from infinity.engine.unit import GRAD, OWN_GRAD, Part, PartGradients


@dataclass(slots=True)
class Arrived:
    """The gradients of one part.

    Attributes:
        kind: ``GRAD`` or ``OWN_GRAD`` in the compute dtype, ``GRAD_SUM`` or ``OWN_GRAD_SUM`` in that of sums.
        arrived: for each slot that has a gradient, the backward that brought the latest.
        backward: the backward that began the shard of this kind.
        flat: the pinned shard while it is open for writing.
        pending: slots whose gradient this backward has yet to bring.
        exists: whether there is a shard.
        begun: whether its step has begun under backward.
        scales: for a slot, what its gradient has yet to be multiplied by.
    """

    kind: str = GRAD
    arrived: dict[int, int] = field(default_factory=dict)
    backward: int = 0
    flat: torch.Tensor | None = None
    pending: set[int] = field(default_factory=set)
    exists: bool = False
    begun: bool = False
    scales: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def dtype_in(self, part: Part) -> torch.dtype:
        """What their shard is stored in."""
        return part.compute_dtype if self.kind in (GRAD, OWN_GRAD) else part.sum_dtype

    def hand_over(self, part: Part, positions: Iterable[int], inverses: Sequence[torch.Tensor]) -> PartGradients:
        """What a step of some slots takes, whose gradients have yet to be multiplied by ``inverses``, too."""
        kept = frozenset(positions)
        return PartGradients(part, self.kind, kept, {i: (*inverses, *self.scales.get(i, ())) for i in kept})

    def is_untouched(self, part: Part, placeholders: Placeholders) -> bool:
        """Whether nobody has discarded, replaced or scaled any of them since it came."""
        return not self.scales and all(placeholders.is_on(part.slots[position]) for position in self.arrived)
