"""``Accumulation``: forward and backward of the micro-batches of a step, in one of two schedules.

*Horizontal*: one micro-batch after the other, forward and back. *Vertical* (``vertical.py``): one unit after the other,
each with all micro-batches. Both give each micro-batch a state of the random generators of its own, so they draw the
same numbers, and plain PyTorch does if it seeds alike:

    seeds = torch.randint(2**63 - 1, (len(micro_batches),)).tolist()
    states = torch.get_rng_state()  # and that of the accelerator
    for micro_batch, seed in zip(micro_batches, seeds):
        torch.manual_seed(seed)
        compute_loss(micro_batch).backward()
    torch.set_rng_state(states)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from infinity.config import Config
from infinity.engine.gradients import GradientSink
from infinity.engine.hooks import ModuleHooks
from infinity.engine.randomness import Generators, States
from infinity.engine.thread_state import obstacle
from infinity.engine.turns import Turns, refuse_inner_backward
from infinity.engine.unit import Part, Unit
from infinity.errors import EngineStateError, MicroBatchError, ModelError

Schedule = Literal["horizontal", "vertical"]
Failure = tuple[int, BaseException]


@dataclass(frozen=True, slots=True)
class AccumulationInfo:
    """How the latest ``engine.accumulate()`` ran.

    Attributes:
        schedule: ``"horizontal"`` or ``"vertical"``.
        reason: why, in words.
        num_micro_batches: how many there were.
    """

    schedule: Schedule
    reason: str
    num_micro_batches: int


class Runner(Protocol):
    """A schedule."""

    def run(
        self,
        states: Sequence[States],
        forward: Callable[[int], torch.Tensor],
        backward: Callable[[int, torch.Tensor], None],
    ) -> Failure | None:
        """Run all micro-batches; the first that failed, and with what. See ``Vertical.run``."""


class _OneByOne(Turns):
    """One micro-batch after the other."""

    def __init__(self) -> None:
        self.is_in_backward = False

    def before_gradient(self, part: Part, position: int) -> None:
        """Refuse what no backward of ours has brought."""
        if not self.is_in_backward:
            refuse_inner_backward(part.slots[position].name)


class Horizontal:
    """Runs micro-batches one after the other, in the calling thread.

    Args:
        hooks: the model's.
        generators: the random generators that a model draws from.
    """

    def __init__(self, hooks: ModuleHooks, generators: Generators) -> None:
        self._hooks = hooks
        self._generators = generators

    def run(
        self,
        states: Sequence[States],
        forward: Callable[[int], torch.Tensor],
        backward: Callable[[int, torch.Tensor], None],
    ) -> Failure | None:
        """See ``Runner``."""
        turns = _OneByOne()
        alone = self._hooks.take_turns(turns)
        try:
            for index, state in enumerate(states):
                self._generators.restore(state)
                turns.is_in_backward = False
                try:
                    loss = forward(index)
                    turns.is_in_backward = True
                    backward(index, loss)
                    del loss
                except Exception as error:
                    return index, error
        finally:
            self._hooks.take_turns(alone)
        return None


class Accumulation:
    """Chooses the schedule, and runs it.

    Args:
        config: says which; and, for ``"auto"``, how much memory there is for units, and whether activations are kept.
        horizontal: one schedule.
        vertical: the other.
        units: all units.
        hooks: the model's.
        gradients: takes the gradients.
        generators: the random generators that a model draws from.

    Attributes:
        last: how the latest one ran.
    """

    def __init__(
        self,
        config: Config,
        horizontal: Runner,
        vertical: Runner,
        units: Iterable[Unit],
        hooks: ModuleHooks,
        gradients: GradientSink,
        generators: Generators,
    ) -> None:
        self.last: AccumulationInfo | None = None
        self._choice = config.accumulation
        self._runners: dict[Schedule, Runner] = {"horizontal": horizontal, "vertical": vertical}
        self._all_stay = sum(unit.num_bytes for unit in units) <= config.hbm
        self._keeps_activations = not (config.recompute or config.activation_bytes)
        self._hooks = hooks
        self._gradients = gradients
        self._generators = generators
        self._is_running = False

    def refuse_inside(self, what: str) -> None:
        """Refuse what may not come between micro-batches.

        Raises:
            EngineStateError: they are running.
        """
        if self._is_running:
            raise EngineStateError(
                f"{what}() was called inside the compute_loss of accumulate(), which runs backward itself; "
                "return the loss, and call it after accumulate() has returned"
            )

    def run(
        self,
        micro_batches: Sequence[Any],
        compute_loss: Callable[[Any], torch.Tensor],
        backward: Callable[[torch.Tensor], None],
        discard: Callable[[], None],
    ) -> list[torch.Tensor]:
        """The detached losses, in order.

        Args:
            micro_batches: at least one.
            compute_loss: of a micro-batch.
            backward: from a loss.
            discard: forgets all gradients; called if one fails.

        Raises:
            EngineStateError: there are too many, or gradients are disabled.
            MicroBatchError: one failed.
        """
        self._check(micro_batches)
        count = len(micro_batches)
        schedule, reason = self._choose(count)
        losses: dict[int, torch.Tensor] = {}

        def forward(index: int) -> torch.Tensor:
            loss = compute_loss(micro_batches[index])
            _check_loss(loss)
            return loss

        def finish(index: int, loss: torch.Tensor) -> None:
            backward(loss)
            losses[index] = loss.detach()

        states = self._generators.draw(count)
        after = self._generators.states()
        self._is_running, is_complete = True, False
        try:
            failure = self._runners[schedule].run(states, forward, finish)
            is_complete = failure is None
        finally:
            self._is_running = False
            self._generators.restore(after)
            if not is_complete:
                self._hooks.recover()
                discard()
        if failure is not None:
            index, error = failure
            if not isinstance(error, Exception):  # SystemExit and the like: no failure of training
                raise error
            raise MicroBatchError(
                f"micro-batch {index} of {count} ({schedule} schedule) failed: {type(error).__name__}: {error}; the "
                "gradients of this step have been discarded",
                index=index,
            ) from error
        self.last = AccumulationInfo(schedule, reason, count)
        return [losses[index] for index in range(count)]

    def _check(self, micro_batches: Sequence[Any]) -> None:
        self.refuse_inside("accumulate")
        if not torch.is_grad_enabled():
            raise EngineStateError(
                "accumulate() was called while gradients are disabled, so there is no backward: call it outside "
                "torch.no_grad() and torch.inference_mode()"
            )
        if not micro_batches:
            raise ModelError("accumulate() got no micro-batches, expected at least one")
        self._gradients.backwards.refuse_more(len(micro_batches))

    def _choose(self, count: int) -> tuple[Schedule, str]:
        if self._choice == "horizontal":
            return "horizontal", "as configured"
        if count == 1:
            return "horizontal", "there is one micro-batch"
        if self._choice == "auto" and self._all_stay:
            return "horizontal", "hbm holds all units, so that their parameters move once per step anyway"
        if self._choice == "auto" and self._keeps_activations:
            return "horizontal", (
                "vertically, the activations of all micro-batches would live at once; set recompute or "
                "activation_bytes in Config, or accumulation='vertical' where there is memory for them"
            )
        in_the_way = obstacle()
        if in_the_way is not None:
            return "horizontal", in_the_way
        if self._choice == "vertical":
            return "vertical", "as configured"
        return "vertical", "hbm does not hold all units, so that their parameters would move for each micro-batch"


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        if isinstance(loss, torch.Tensor):
            got = f"a tensor of shape {tuple(loss.shape)} that {'requires' if loss.requires_grad else 'has'} "
            got += "a gradient" if loss.requires_grad else "no graph behind it"
        else:
            got = type(loss).__name__
        raise ModelError(
            f"compute_loss returned {got}; expected the loss of its micro-batch: a tensor of one element that requires "
            "a gradient"
        )
