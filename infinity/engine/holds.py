"""``Holds``: the units that a backward keeps gathered, and which of them it is reading.

Holds are soft: a hold says that a unit is likely to be read again in this backward. Only what a running forward needs,
or a node of the graph that has unpacked a saved tensor and still runs, is really in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from infinity.engine.unit import Unit


class Holds:
    """What one backward holds. Belongs to the thread that runs autograd's hooks."""

    def __init__(self) -> None:
        self._held: dict[int, Unit] = {}  # by index, the latest last
        self._reading: dict[int, tuple[Any, list[Unit]]] = {}  # by graph task: the latest node and its units

    def __len__(self) -> int:
        return len(self._held)

    def add(self, unit: Unit) -> None:
        """Hold a unit; it is now the latest."""
        unit.held_by.add(self)
        self._held.pop(unit.index, None)
        self._held[unit.index] = unit

    def remove(self, unit: Unit) -> bool:
        """Let a unit go; whether it was held."""
        unit.held_by.discard(self)
        return self._held.pop(unit.index, None) is not None

    def drain(self) -> Iterator[Unit]:
        """Let every unit go, the latest first."""
        while self._held:
            unit = next(reversed(self._held.values()))
            self.remove(unit)
            yield unit

    def note_read(self, unit: Unit) -> None:
        """The node that runs now reads a unit until it has run."""
        self.end_reads()
        node = torch._C._current_autograd_node()
        self._reading.setdefault(torch._C._current_graph_task_id(), (node, []))[1].append(unit)
        unit.num_readers += 1

    def end_reads(self) -> None:
        """Forget nodes that have run: any but the one that runs, and all of backwards inside the one that runs."""
        task, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        for other in list(self._reading):
            if other > task or (other == task and self._reading[other][0] is not node):
                self._forget(other)

    def forget_reads(self) -> None:
        """No node reads anything any more."""
        for task in list(self._reading):
            self._forget(task)

    def _forget(self, task: int) -> None:
        for unit in self._reading.pop(task)[1]:
            unit.num_readers -= 1
