"""The vertical schedule: a unit runs all micro-batches before the next unit does, forward and back.

Each micro-batch has a thread and a passage of its own (``relay.py``, ``passage.py``); it hands over where it is about
to need a unit that is not gathered. So micro-batch ``m`` runs a unit right after ``m - 1`` has, while it is there, and
at the end of a lap, when all have run it, it is let go. Parameters then move once per step and not once per
micro-batch; the price is that the activations of all micro-batches live at once.

Guarantees
    * *The same numbers.* Each micro-batch computes what it computes alone: it has its own state of the random
      generators, and the settings of the calling thread. Gradients of a parameter are summed in the order of the
      micro-batches, whatever the order in which backwards come to it: one that is early waits, before autograd touches
      ``param.grad``, until each one before it has brought its own, can bring none any more, or has ended. Buffers that
      a unit changes in forward change in the same order as horizontally.
    * *No deadlock.* A micro-batch waits for earlier ones only, so the first living one never waits for another.
    * *Budgets.* A micro-batch that hands over keeps gathered what its forwards use. It does so only where all that
      resting ones use leaves room for any path through the model, as start-up counted it (``engine/budget.py``); where
      not, it goes on and gathers beside them. So whoever runs finds room, and models whose micro-batches take
      different ways only gather more often.

Where a forward is inside an autocast region, it does not hand over: the region's cache of casts is the process's, and
which casts are shared decides bits. (The backward of such a model is still vertical.)

What compute_loss changes for a while in the process's settings it takes along; what it changes so in the model itself,
or in buffers when a block is recomputed, is refused (``sharing.py``).

What cannot be seen: Python state that units share and that depends on the order of calls; generators of one's own,
``random`` and ``numpy.random``, which are drawn from in another order; and a lock that one holds while it hands over,
for which the next waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from infinity.engine.gradients import GradientSink
from infinity.engine.hooks import ModuleHooks
from infinity.engine.passage import Passage
from infinity.engine.randomness import Generators, States
from infinity.engine.relay import Relay
from infinity.engine.sharing import ModelState, ProcessSettings
from infinity.engine.thread_state import CallerState
from infinity.engine.turns import Turns, refuse_inner_backward
from infinity.engine.unit import Part, Unit, UnitState
from infinity.errors import EngineStateError


@dataclass(slots=True, eq=False)
class _Member:
    """One micro-batch.

    Attributes:
        backward: the number of its backward.
        states: those of its random generators while it rests.
        passage: what the hooks know of it.
        num_uses: for each unit that its forward has used, how often.
        without_graph: units that it has used without recording a graph: for a reentrant checkpoint, perhaps.
        lent: units whose other uses meanwhile are not seen.
        settings: those of the process while it rests.
        delivered: the slots whose gradient it has brought, as part and position, and whether the latest came of a
            backward inside its own: that of a reentrant checkpoint.
        is_in_backward: whether its forward is over.
        has_ended: whether all is.
    """

    backward: int
    states: States
    passage: Passage = field(default_factory=Passage)
    num_uses: dict[int, int] = field(default_factory=dict)
    without_graph: set[int] = field(default_factory=set)
    lent: set[int] = field(default_factory=set)
    delivered: dict[tuple[int, int], bool] = field(default_factory=dict)
    settings: ProcessSettings = field(default_factory=ProcessSettings.now)
    is_in_backward: bool = False
    has_ended: bool = False

    def has_done(self, part: Part, position: int) -> bool:
        """Whether it will bring no gradient of a slot from now on."""
        if self.has_ended:
            return True
        num_uses = self.num_uses.get(part.unit, 0)
        if self.is_in_backward and not num_uses:
            return True
        came_inside = self.delivered.get((part.index, position))
        if came_inside is None:
            return False
        # A reentrant checkpoint brings the gradients of each recomputation by itself.
        if part.unit in self.lent:
            return not (self.without_graph or came_inside)
        return num_uses == 1 or not (part.unit in self.without_graph or came_inside)


@dataclass(frozen=True, slots=True)
class Room:
    """Device memory, as far as whoever hands over has to think of it.

    Attributes:
        budget_bytes: all of it.
        path_bytes: the most that one path through the model needs.
        on_every_path: the units that are in use as long as the model's forward runs, counted in ``path_bytes``.
    """

    budget_bytes: int
    path_bytes: int
    on_every_path: frozenset[int]

    def is_left_beside(self, units: Sequence[Unit]) -> bool:
        """Whether any path fits beside ``units``."""
        beside = sum(unit.num_bytes for unit in units if unit.index not in self.on_every_path)
        return not beside or beside + self.path_bytes <= self.budget_bytes


class _VerticalTurns(Turns):
    """Who runs when, while micro-batches take turns."""

    is_shared = True

    def __init__(
        self,
        members: Sequence[_Member],
        units: Sequence[Unit],
        room: Room,
        hooks: ModuleHooks,
        gradients: GradientSink,
        generators: Generators,
        model: ModelState,
    ) -> None:
        self._model = model
        self._buffers: list[tuple[int, int]] = []
        self._members = members
        self._units = units
        self._room = room
        self._hooks = hooks
        self._gradients = gradients
        self._generators = generators
        self._kept: dict[int, Unit] = {}
        self.relay = Relay(len(members), pause=self._pause, resume=self._resume, end_lap=self.release_kept)

    def before_gather(self, unit: Unit) -> None:
        """Let the others use what is gathered now."""
        self.relay.check()
        if unit.state is UnitState.GATHERED or torch._C._is_any_autocast_enabled():
            return
        self._members[self.relay.current].passage.holds.end_reads()
        if self._room.is_left_beside([other for other in self._units if other.is_in_use]):
            self._hand_over()

    def before_gradient(self, part: Part, position: int) -> None:
        """Let earlier micro-batches bring theirs first."""
        self.relay.check()
        number, slot = self.relay.current, part.slots[position]
        if not self._members[number].is_in_backward:
            refuse_inner_backward(slot.name)
        while not all(member.has_done(part, position) for member in self._members[:number]):
            self._hand_over()
        if any((part.index, position) in member.delivered for member in self._members[number + 1 :]):
            raise EngineStateError(
                f"parameter {slot.name}: its gradient of micro-batch {number} came after that of a later one, so that "
                "the sum would not be that of the horizontal schedule; set accumulation='horizontal'"
            )

    def after_gradient(self, part: Part, position: int) -> None:
        """Whoever waits for it may go on."""
        member = self._members[self.relay.current]
        came_inside = member.passage.backward_task != torch._C._current_graph_task_id()
        member.delivered[part.index, position] = came_inside

    def note_use(self, unit: Unit, *, is_lent: bool) -> None:
        """Remember which gradients may come of it."""
        member = self._members[self.relay.current]
        if is_lent:
            member.lent.add(unit.index)
        member.num_uses[unit.index] = member.num_uses.get(unit.index, 0) + 1
        if not torch.is_grad_enabled():
            member.without_graph.add(unit.index)

    def keeps(self, unit: Unit) -> bool:
        """Until all have had their turn."""
        self._kept[unit.index] = unit
        return True

    def release_kept(self) -> None:
        """All have had their turn."""
        kept, self._kept = self._kept, {}
        self._hooks.release(kept.values())

    def begin_backward(self, number: int) -> None:
        """The forward of a micro-batch is over."""
        self._members[number].is_in_backward = True
        self._buffers = self._model.buffers()

    def _hand_over(self) -> None:
        self._model.check()
        self.relay.hand_over()

    def _pause(self, number: int) -> None:
        member = self._members[number]
        member.states, member.settings = self._generators.states(), ProcessSettings.now()
        member.passage.holds.end_reads()
        if member.is_in_backward:
            self._model.refuse_buffers(self._buffers)

    def _resume(self, number: int) -> None:
        member = self._members[number]
        self._generators.restore(member.states)
        member.settings.restore()
        self._buffers = self._model.buffers()
        self._gradients.switch(member.backward)
        self._hooks.switch(member.passage)


class Vertical:
    """Runs micro-batches by turns.

    Args:
        units: all units.
        room: device memory.
        hooks: the model's.
        gradients: takes the gradients.
        generators: the random generators that a model draws from.
        device: where it computes.
        model: the user's.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        room: Room,
        hooks: ModuleHooks,
        gradients: GradientSink,
        generators: Generators,
        device: torch.device,
        model: nn.Module,
    ) -> None:
        self._model = model
        self._units = units
        self._room = room
        self._hooks = hooks
        self._gradients = gradients
        self._generators = generators
        self._device = device

    def run(
        self,
        states: Sequence[States],
        forward: Callable[[int], torch.Tensor],
        backward: Callable[[int, torch.Tensor], None],
    ) -> tuple[int, BaseException] | None:
        """Run forward and backward of each micro-batch; the first that failed, and with what.

        Args:
            states: of the random generators, at the beginning of each micro-batch.
            forward: computes the loss of one.
            backward: runs backward of one from its loss.
        """
        numbers = self._gradients.begin_several(len(states))
        members = [_Member(number, state) for number, state in zip(numbers, states, strict=True)]
        turns = _VerticalTurns(
            members, self._units, self._room, self._hooks, self._gradients, self._generators, ModelState(self._model)
        )
        settings = ProcessSettings.now()
        caller = CallerState.of_caller(self._device)

        def both(number: int) -> None:
            loss = forward(number)
            turns.begin_backward(number)
            backward(number, loss)

        def run(number: int) -> None:
            try:
                caller.run(lambda: both(number))
            finally:
                members[number].has_ended = True

        own, alone = self._hooks.switch(Passage()), self._hooks.take_turns(turns)
        try:
            turns.relay.run(run)
        finally:
            settings.restore()
            self._hooks.take_turns(alone)
            turns.release_kept()
            self._hooks.switch(own)
            for member in members:
                member.passage.remove_leaf_hooks()
            if not turns.relay.is_over:
                self._hooks.begin_final_steps()
            self._gradients.end_several()
        return turns.relay.failure
