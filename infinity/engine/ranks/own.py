"""What there is of a rank's own gradients, until all ranks have put theirs together."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from infinity.engine.arrived import Arrived
from infinity.engine.unit import Part


@dataclass(slots=True)
class OwnGradients(Arrived):
    """This rank's own gradients of a part since they were last reduced.

    Attributes:
        is_complete: whether this backward has brought all there can be.
    """

    is_complete: bool = False


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
