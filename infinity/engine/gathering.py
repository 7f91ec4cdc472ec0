"""``Gatherer``: gathers units for whoever needs them, and lets go those that nobody does.

Holds of backwards are soft: where a demand finds no room, every unit that is not in use is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from infinity.engine.gradients import GradientSink
from infinity.engine.lent import signals_after
from infinity.engine.passage import Passage, in_backward
from infinity.engine.prefetch import PrefetchScheduler
from infinity.engine.saved import SavedTensors
from infinity.engine.turns import Turns
from infinity.engine.unit import Unit, UnitState
from infinity.errors import BudgetError, ModelError


class Gatherer:
    """Which units are gathered. Belongs to the thread that runs the hooks.

    Args:
        units: all units.
        scheduler: gathers and releases.
        gradients: holds no host memory while a unit is waited for.
        saved: told which memory is whose.
        check: called before a forward gathers; raises where there must be none.
        on_release: called with each unit that has been released.

    Attributes:
        passage: what runs.
        turns: who runs when.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        scheduler: PrefetchScheduler,
        gradients: GradientSink,
        saved: SavedTensors,
        check: Callable[[], None],
        before_gather: Callable[[Unit], None],
        on_release: Callable[[Unit], None],
    ) -> None:
        self.passage = Passage()
        self.turns = Turns()
        self._units = units
        self._scheduler = scheduler
        self._gradients = gradients
        self._saved = saved
        self._check = check
        self._before_gather = before_gather
        self._on_release = on_release

    def bind(self, unit: Unit) -> None:
        """Gather a released unit and make its parameters views of its memory.

        Raises:
            BudgetError: it does not fit beside what is in use.
            ModelError: a parameter was changed while it was away.
            StorageError: a shard could not be read.
        """
        if not in_backward():
            self._check()
        self._before_gather(unit)
        refuse_change(unit.changed_parameter())
        written = unit.written_parameter()
        if written is not None:
            unit.restore()
            raise ModelError(
                f"parameter {written} was written, converted or replaced while its value was away, and the change "
                "would be lost; set values and dtypes before initialize(), and use precision= for computing in bf16"
            )
        self._gradients.let_go()  # whoever waits for a unit holds no host memory
        try:
            buffer = self._gather(unit)
        except BudgetError as error:
            others = [other for other in self._units if other.state is UnitState.GATHERED]
            raise BudgetError(
                f"hbm is too small for what is in use at the same time: unit {unit.name} ({unit.num_bytes} bytes)"
                + "".join(f", unit {other.name} ({other.num_bytes} bytes)" for other in others)
                + f"; raise hbm to at least {unit.num_bytes + sum(other.num_bytes for other in others)}"
                + (", or set accumulation='horizontal'" if self.turns.is_shared else "")
            ) from error
        with signals_after():
            unit.bind(buffer)
            self._saved.add(unit)

    def _gather(self, unit: Unit) -> torch.Tensor:
        try:
            return self._scheduler.gather(unit, in_backward=in_backward())
        except BudgetError:
            if not self._give_up():
                raise
            return self._scheduler.gather(unit, in_backward=in_backward())

    def _give_up(self) -> bool:
        """Release what no forward and no node is using now; whether there was anything."""
        self.passage.holds.end_reads()
        spare = [unit for unit in self._saved.gathered if not unit.is_in_use]
        for unit in spare:
            for holds in list(unit.held_by):
                holds.remove(unit)
        self.release(spare)
        return bool(spare)

    def release_idle(self, units: Iterable[Unit]) -> None:
        """Release those of ``units`` that nobody would keep.

        Raises:
            ModelError: a parameter was changed in place while it was gathered.
        """
        idle = [unit for unit in units if unit.is_idle]
        changed = next((name for unit in idle if (name := unit.changed_parameter()) is not None), None)
        self.release(unit for unit in idle if not self.turns.keeps(unit))
        refuse_change(changed)

    def release(self, units: Iterable[Unit]) -> None:
        """Release those of ``units`` that are idle, whoever wanted them kept."""
        for unit in units:
            if unit.is_idle:
                with signals_after():
                    self._saved.remove(unit)
                    unit.unbind()
                    self._scheduler.release(unit)
                    self._on_release(unit)

    def release_all(self) -> None:
        """Release every unit, whoever uses it: after an interrupt."""
        for unit in self._units:
            unit.forget_users()
            if unit.state is UnitState.GATHERED:
                with signals_after():
                    unit.unbind()
        self._scheduler.release_all()


def refuse_change(name: str | None) -> None:
    """Refuse a parameter that was changed in place.

    Raises:
        ModelError: there is one.
    """
    if name is not None:
        raise ModelError(
            f"parameter {name} was changed in place, but the engine keeps its value elsewhere and would lose the "
            "change; initialise the model before infinity.initialize(), and for what forward changes use a buffer"
        )
