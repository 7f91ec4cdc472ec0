"""``Holds``: the units that backward keeps gathered, and which of them it could do without.

Holds are soft: a hold says that a unit is likely to be read again in this backward. Only what a running forward needs,
or a node of the graph that has unpacked a saved tensor and still runs, is really in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from infinity.engine.unit import Unit


class Holds:
    """What backward holds. Belongs to the thread that runs autograd's hooks."""

    def __init__(self) -> None:
        self._held: dict[int, Unit] = {}  # by index, the latest last
        self._reading: dict[int, tuple[Any, list[Unit]]] = {}  # by backward: the latest node and its units

    def __len__(self) -> int:
        return len(self._held)

    def add(self, unit: Unit) -> None:
        """Hold a unit; it is now the latest."""
        unit.held_for_backward = True
        self._held.pop(unit.index, None)
        self._held[unit.index] = unit

    def remove(self, unit: Unit) -> bool:
        """Let a unit go; whether it was held."""
        unit.held_for_backward = False
        return self._held.pop(unit.index, None) is not None

    def drain(self) -> Iterator[Unit]:
        """Let every unit go, the latest first."""
        while self._held:
            unit = next(reversed(self._held.values()))
            self.remove(unit)
            yield unit

    def forget_reads(self) -> None:
        """No node reads anything any more."""
        self._reading.clear()

    def note_read(self, unit: Unit) -> None:
        """The node that runs now reads a unit until it has run."""
        task, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        known = self._reading.get(task)
        if known is None or known[0] is not node:
            self._reading[task] = (node, [unit])
        else:
            known[1].append(unit)

    def spare(self) -> list[Unit]:
        """What no forward and no node is using now."""
        task, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        in_use = {
            unit.index
            for other, (latest, units) in self._reading.items()
            if other != task or latest is node
            for unit in units
        }
        return [unit for unit in self._held.values() if not unit.forward_depth and unit.index not in in_use]
