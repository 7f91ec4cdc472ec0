"""In which order a step touches units, as far as the model's structure tells.

Modules are taken to run in the order in which the model holds them, each once, inside those that hold them; backward
the other way round. A tied weight is gathered by each module that has it, and its gradient comes with the first of
them. What structure does not tell (a branch, a module called twice) is not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from infinity.engine.unit import Unit


@dataclass(frozen=True, slots=True)
class Visit:
    """A module that needs a unit begins, or ends.

    Attributes:
        unit: which.
        begins: else it ends.
        reads_backward: whether its backward reads the unit's parameters.
        gradients: elements of the gradients that come from its backward, by the unit's part, the first to come first;
            where it begins.
        is_last: whether these are the last of the unit in a backward.
        share: of the arithmetic of all visits.
    """

    unit: Unit
    begins: bool
    reads_backward: bool = True
    gradients: tuple[tuple[int, int], ...] = ()
    is_last: bool = False
    share: float = 0.0


def visits(model: nn.Module, units: Sequence[Unit]) -> list[Visit]:
    """One forward: which units are needed from when to when.

    Args:
        model: the user's model.
        units: its units.
    """
    by_module: dict[int, list[Unit]] = {}
    for unit in units:
        for _, module in unit.triggers:
            by_module.setdefault(id(module), []).append(unit)
    place = {slot.param: (unit.index, part.position) for unit in units for part in unit.parts for slot in part.slots}
    inside: dict[int, int] = {}
    seen: set[int] = set()
    known: set[nn.Parameter] = set()  # whose gradients come from a module before, or one around
    has_gradient = False  # whether what a module gets needs a gradient

    def walk(module: nn.Module) -> Iterator[Visit]:
        nonlocal has_gradient
        if id(module) in seen:
            return
        seen.add(id(module))
        # A module inside one that has gathered the same unit gathers nothing.
        needed = [unit for unit in by_module.get(id(module), []) if not inside.get(unit.index)]
        # An embedding's backward reads no weight, nor does that of a first layer without anything below it.
        is_leaf = not any(True for _ in module.children())
        reads = (has_gradient or not is_leaf) and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for unit in needed:
            inside[unit.index] = inside.get(unit.index, 0) + 1
            params = [param for param in module.parameters() if place[param][0] == unit.index]
            comes: Counter[int] = Counter()
            for param in params:
                if param.requires_grad and param not in known:
                    comes[place[param][1]] += param.numel()
            known.update(params)
            work = sum(param.numel() for param in params if param.dim() > 1) if reads or not is_leaf else 0
            yield Visit(unit, True, reads, tuple(sorted(comes.items(), reverse=True)), share=float(work))
        for child in module.children():
            yield from walk(child)
        has_gradient = has_gradient or any(param.requires_grad for param in module.parameters())
        for unit in needed:
            inside[unit.index] -= 1
            yield Visit(unit, False, reads)

    return _completed(list(walk(model)))


def _completed(found: Sequence[Visit]) -> list[Visit]:
    """Mark the visit that brings the last gradients of each unit, and share out the arithmetic."""
    total = sum(visit.share for visit in found) or 1.0
    seen: set[int] = set()
    marked = []
    for visit in found:
        is_last = bool(visit.gradients) and visit.unit.index not in seen
        seen |= {visit.unit.index} if visit.gradients else set()
        marked.append(replace(visit, is_last=is_last, share=visit.share / total))
    return marked
