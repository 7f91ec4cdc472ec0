"""``Progress``: what DeepSpeed counts, and what goes along with a checkpoint beside model and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.errors import ModelError

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class Progress:
    """Tracked by the engine, so every commit and checkpoint has it.

    Args:
        lr_scheduler: the one that ``engine.step()`` steps; ``None``: there is none.

    Attributes:
        global_steps: optimizer steps, skipped ones included.
        global_samples: samples of these steps, of all ranks.
        micro_steps: calls of ``engine.step()``.
        skipped_steps: those of ``global_steps`` in which an fp16 gradient overflowed.
        micro_batches: of the step that has begun; not kept, since no checkpoint is made between them.
        client_state: the user's, for a checkpoint that is being written, or of the one that was loaded last.
        takes_scheduler: whether the scheduler's state is loaded.
    """

    def __init__(self, lr_scheduler: Any) -> None:
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.micro_batches = 0
        self.client_state: dict[str, Any] = {}
        self.takes_scheduler = True
        self._lr_scheduler = lr_scheduler

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        scheduler = self._lr_scheduler
        return {
            "counters": {name: getattr(self, name) for name in _COUNTERS},
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "client_state": self.client_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ModelError: the checkpoint has no state of a scheduler, and there is one to load it into.
        """
        scheduler = self._lr_scheduler
        if scheduler is not None and self.takes_scheduler:
            if state["lr_scheduler"] is None:
                raise ModelError(
                    "load_checkpoint(): the checkpoint was saved without a learning-rate scheduler, and this engine "
                    "has one; give load_lr_scheduler_states=False to begin its schedule anew"
                )
            scheduler.load_state_dict(state["lr_scheduler"])
        for name in _COUNTERS:
            setattr(self, name, state["counters"][name])
        self.micro_batches = 0
        self.client_state = dict(state["client_state"])
