"""``WeightWriter``: changes weights wherever they are, between steps.

A change goes the way of an optimizer step: the part's weights are pinned, read, changed and written run by run, and the
unit's gathered copy is dropped. So it needs no more host memory than a step.

Belongs to the training thread.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

import torch

from infinity.engine.formats import Compute, FormatOf, OpenWeights, Run
from infinity.engine.unit import Part, Unit
from infinity.store.loop import LoopThread
from infinity.store.store import TieredStore

_OWNER = "values"

Change = Callable[[torch.Tensor], None]
"""Changes one weight in place: the slot's shape, the dtype that is stepped."""


def copy_of(value: torch.Tensor) -> Change:
    """The change to ``value``: the weight's shape, any dtype and device."""

    def copy(weight: torch.Tensor) -> None:
        weight.copy_(value.detach())

    return copy


class WeightWriter:
    """Changes weights of parts, wherever they are.

    Args:
        loop: the loop thread.
        store: the shards.
        invalidate: drops what was gathered of a unit that has changed.
        units: all units.
        format_of: how the weights of each part are stored.
        compute: runs arithmetic off the loop.
        fail: told what a change has failed with half-way, when the state is whole no more.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        invalidate: Callable[[int], Awaitable[None]],
        units: Sequence[Unit],
        *,
        format_of: FormatOf,
        compute: Compute,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._loop = loop
        self._store = store
        self._fail = fail
        self._invalidate = invalidate
        self._units = units
        self._format_of = format_of
        self._compute = compute

    def change(self, changes: Iterable[tuple[Part, int, Change]]) -> None:
        """Change weights, each named by part and slot; those of a part together.

        Raises:
            StorageError: a shard could not be read or written.
        """
        by_part: dict[int, tuple[Part, dict[int, Change]]] = {}
        for part, position, change in changes:
            by_part.setdefault(part.index, (part, {}))[1][position] = change
        for part, of_part in by_part.values():
            self._loop.run(self._change(part, of_part))
            self._units[part.unit].version += 1

    async def _change(self, part: Part, changes: Mapping[int, Change]) -> None:
        weights = self._format_of(part).open(self._store, part, _OWNER)
        pinned = changed = False
        try:
            await weights.pin()
            pinned = True
            runs = iter(weights.runs)
            while (misfit := await self._compute(lambda: _change_runs(part, weights, runs, changes))) is not None:
                await weights.widen(self._compute)
                await self._compute(functools.partial(weights.write, *misfit))
            changed = True
        except BaseException as error:
            if pinned:
                self._fail(error)
            raise
        finally:
            await weights.release(changed=changed)
            await self._invalidate(part.unit)  # last: the unit may have been gathered ahead meanwhile


def _change_runs(
    part: Part, weights: OpenWeights, runs: Iterator[Run], changes: Mapping[int, Change]
) -> tuple[Run, torch.Tensor] | None:
    """Change run after run; one whose weights do not fit as they are stored is returned."""
    for run in runs:
        flat = weights.read(run)
        for position in run.positions:
            if position in changes:
                changes[position](run.view(part.slots[position], flat))
        if not weights.write(run, flat):
            return run, flat
    return None
