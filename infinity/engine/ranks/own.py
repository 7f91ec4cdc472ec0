"""What there is of a rank's own gradients, until all ranks have put theirs together."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from infinity.engine.unit import OWN_GRAD, Part


@dataclass(slots=True, eq=False)
class OwnGradients:
    """This rank's own gradients of a part since they were last reduced.

    Attributes:
        kind: the kind of shard: in the dtype that computes, or in that of sums.
        arrived: for each slot that has one, the backward that brought the latest.
        flat: the pinned shard while it is open for writing.
        pending: slots whose gradient this backward has yet to bring.
        exists: whether there is a shard.
        backward: the backward that began it.
        is_complete: whether this backward has brought all there can be.
    """

    kind: str
    arrived: dict[int, int] = field(default_factory=dict)
    flat: torch.Tensor | None = None
    pending: set[int] = field(default_factory=set)
    exists: bool = False
    backward: int = 0
    is_complete: bool = False

    def dtype_in(self, part: Part) -> torch.dtype:
        """What the shard is stored in."""
        return part.compute_dtype if self.kind == OWN_GRAD else part.sum_dtype


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A part that is being reduced.

    Attributes:
        part: the whole part.
        own: this rank's gradients.
        done: the slots of which any rank has a gradient, and the shard's bytes; ``None`` where there are none.
    """

    part: Part
    own: OwnGradients
    done: Future[tuple[set[int], torch.Tensor | None]]

    @property
    def num_bytes(self) -> int:
        """The size of the shard."""
        return self.part.num_bytes(self.own.dtype_in(self.part))
