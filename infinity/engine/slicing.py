"""What of a model's state a rank has: ZeRO's stages (Rajbhandari et al., 2020), as one rule for each kind of shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.engine.unit import GATHERED, OWN_GRAD, OWN_GRAD_SUM, Part


@dataclass(frozen=True, slots=True)
class Slicing:
    """Which slice a rank has of which kinds of state.

    Attributes:
        rank: this one.
        num_ranks: how many share the state.
        stage: 0: all state is whole on every rank. 1: of master weights and optimizer states each has its slice, and of
            parameters between a step and the next gather. 2: of gradients too. 3: of parameters always.
    """

    rank: int = 0
    num_ranks: int = 1
    stage: int = 3

    @property
    def cuts_states(self) -> bool:
        """Whether what is stepped is a slice, and units are all-gathered."""
        return self.num_ranks > 1 and self.stage >= 1

    @property
    def cuts_gradients(self) -> bool:
        """Whether gradients that wait for their step are a slice."""
        return self.num_ranks > 1 and self.stage >= 2

    @property
    def keeps_gathered(self) -> bool:
        """Whether a gathered unit is kept until it changes."""
        return self.cuts_states and self.stage < 3

    def stored(self, whole: Part) -> Part:
        """A part as this rank steps and stores it."""
        return whole.cut(self.rank, self.num_ranks) if self.cuts_states else whole

    def beside(self, whole: Part) -> dict[str, int]:
        """The shards that a part may have because there are other ranks: bytes by kind."""
        if self.num_ranks == 1:
            return {}
        sizes = {}
        if whole.stepped:
            sizes[OWN_GRAD] = whole.param_bytes
            if whole.sum_dtype != whole.compute_dtype:
                sizes[OWN_GRAD_SUM] = whole.num_bytes(whole.sum_dtype)
        if self.keeps_gathered:
            sizes[GATHERED] = whole.param_bytes
        return sizes

    def own_bytes(self, parts: Sequence[Part]) -> int:
        """Host memory for a rank's own gradients of whole parts at the same time, before they are reduced."""
        if self.num_ranks == 1:
            return 0
        sizes = [[size for kind, size in self.beside(part).items() if kind != GATHERED] for part in parts]
        return sum(map(max, filter(None, sizes))) + max((min(each) for each in sizes if len(each) > 1), default=0)


ALONE = Slicing()
"""All of it, since there is no other rank."""
