"""``ReducedGradients``: gradients that are averaged over ranks before they wait for their step.

    autograd ─▶ own gradients of the whole part (host) ─▶ lane: reduce-scatter ─▶ this rank's slice ─▶ ``GradientSink``
                    │ engine.no_sync(): more are added       (stages 0 and 1: and all-gather)

A part is reduced as soon as its last gradient has come, under the rest of backward. So that all ranks reduce in the
same order whatever comes first on each, they keep to one order: that in which parts were complete on rank 0 in the
backward before. What is complete sooner waits. Parts that have had no gradient, or not all, come at the end, and count
as zero where others have some: what a data-dependent branch leaves out on one rank is no error here.

What is in the parts between reductions is this rank's own and of no use to a step, so a step after backwards in
``no_sync`` only is refused.

Memory: ``own`` shards are like others, and let go where backward waits. Those being reduced are pinned by the lane, so
many only as ``in_flight_bytes`` allows: who waits for room must never wait for what only itself can take in.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from infinity.engine.arrived import Arrived
from infinity.engine.collectives import Collectives
from infinity.engine.gradients import GradientSink
from infinity.engine.placeholders import refuse_sparse
from infinity.engine.ranks.lane import Lane
from infinity.engine.ranks.own import OwnGradients, Reduction
from infinity.engine.unit import GRAD_SUM, OWN_GRAD, OWN_GRAD_SUM, Part, PartGradients
from infinity.errors import BudgetError, EngineStateError, ModelError
from infinity.io.memory import HEAP
from infinity.store.pool import Lease

_LANE = "lane"


class ReducedGradients(GradientSink):
    """A sink for several ranks. Its own parts are those whose gradients wait here: slices, or whole ones.

    Args:
        whole: all parts, whole.
        stored: all parts as this rank steps them.
        lane: runs the collectives, and no others but in the order of the program.
        collectives: the lane's.
        names: of the units.
        widens: whether gradients are moved between ranks in the dtype of sums.
        in_flight_bytes: what may be pinned for reductions.
        arguments: as for ``GradientSink``.
    """

    def __init__(
        self,
        *arguments: Any,
        whole: Sequence[Part],
        stored: Sequence[Part],
        lane: Lane,
        collectives: Collectives,
        names: Sequence[str],
        widens: bool,
        in_flight_bytes: int,
        **others: Any,
    ) -> None:
        super().__init__(*arguments, **others)
        self._whole = whole
        self._stored = stored
        self._lane = lane
        self._collectives = collectives
        self._names = names
        self._widens = widens
        self._in_flight_bytes = in_flight_bytes
        self._own: dict[int, OwnGradients] = {}
        self._open_own: dict[int, Part] = {}
        self._reductions: deque[Reduction] = deque()
        self._order = [part.index for part in reversed(whole) if part.stepped]
        self._completed: list[int] = []
        self._num_reduced = 0  # of this backward, along the order
        self._is_open = False  # a backward that counts has brought a gradient
        self._own_since: int | None = None  # the first backward of which there are own gradients
        self._is_whole = self._parts[0].num_elements == whole[0].num_elements

    # Autograd's thread

    def expect(self, part: Part, position: int) -> None:
        """See ``GradientSink``."""
        own = self._own.get(part.index)
        if own is not None and position in own.arrived and not self._placeholders.is_on(part.slots[position]):
            del own.arrived[position]  # discarded since
        super().expect(self._parts[part.index], position)

    def arrive(self, part: Part, position: int, gradient: torch.Tensor) -> None:
        """Take a gradient of this rank's: as ``GradientSink.arrive``, of a whole part."""
        slot = part.slots[position]
        refuse_sparse(slot, gradient)
        if self._own_since is None:
            self._own_since = self.backwards.current
        own = self._own.setdefault(part.index, self._new_own(part))
        if own.flat is None:
            self._open_whole(part, own)
        assert own.flat is not None
        view, gradient = slot.view(own.flat), gradient.detach()
        before = own.arrived.get(position)
        if before is None:
            view.copy_(gradient)
        elif before == self.backwards.current and view.dtype != gradient.dtype:
            raise ModelError(
                f"parameter {slot.name}: got two gradients in one backward, which would be added in {view.dtype} where "
                f"PyTorch adds them in {gradient.dtype}; use torch.utils.checkpoint with use_reentrant=False"
            )
        else:
            view.add_(gradient.to(view.device))
        own.arrived[position] = self.backwards.current
        if slot not in self._placeholders and gradient.device.type == "cpu":
            HEAP.use(gradient.nbytes)
        self._placeholders.put(part, slot)
        self.backwards.note_gradient()
        self._is_open = self._is_open or self._is_reduced
        own.pending.discard(position)
        if not own.pending:
            own.is_complete = True
            self._completed.append(part.index)
            self._close_whole(part, own)
            self._reduce_complete()
        self._take_in(0)

    @property
    def _is_reduced(self) -> bool:
        """Whether the backward that runs is one after which ranks have the same gradients."""
        return self.backwards.position > 0

    def take_final(self, unit: Any) -> list[PartGradients]:
        """See ``GradientSink``: none before the backward is complete, a moment that is the same on all ranks."""
        return [] if self._is_open else super().take_final(unit)

    def let_go(self, *, but: Part | None = None) -> None:
        """See ``GradientSink``."""
        super().let_go(but=but)
        for part in list(self._open_own.values()):
            self._close_whole(part, self._own[part.index])

    def complete(self) -> None:
        """Reduce what has not been, and wait until all ranks have the gradients of this backward.

        Raises:
            RanksError: another rank has ended, has failed or does something else.
            StorageError: a shard could not be read or written.
        """
        self.let_go()
        if self._is_open:
            again = [index for index in self._order[: self._num_reduced] if index in self._own]
            for index in [*self._order[self._num_reduced :], *again]:
                self._reduce(self._whole[index])
            agreed = self._lane.submit("end of backward", functools.partial(self._agree, list(self._completed)))
            while self._reductions:
                self._take_in_first()
            with self._lane.awaited():
                self._order = self._loop.wait(agreed)
            self._is_open = False
            self._own_since = None
        super().complete()

    def end_backward(self) -> None:
        """See ``GradientSink``."""
        super().end_backward()
        self._completed.clear()
        self._num_reduced = 0
        self._is_open = False
        for own in self._own.values():
            own.is_complete = False

    # Between backwards

    def discard(self) -> None:
        """See ``GradientSink``."""
        super().discard()
        own, self._own = self._own, {}
        self._own_since = None
        keys = [self._whole[index].key(each.kind) for index, each in own.items() if each.exists]
        if keys:
            self._loop.run(self._delete(keys))

    def waiting(self) -> list[PartGradients]:
        """See ``GradientSink``.

        Raises:
            EngineStateError: the last backward was in ``no_sync``.
        """
        self._refuse_own()
        return super().waiting()

    def take(self) -> list[PartGradients]:
        """See ``GradientSink``.

        Raises:
            EngineStateError: the last backward was in ``no_sync``.
        """
        self._refuse_own()
        return super().take()

    def _refuse_own(self) -> None:
        if any(own.arrived for own in self._own.values()):
            raise EngineStateError(
                "the last backward was inside engine.no_sync(), so that gradients are this rank's own; run the last "
                "backward of a step outside, or discard them with zero_grad()"
            )

    def _hand_over(self, part: Part, gradients: Arrived, positions: Iterable[int]) -> PartGradients:
        stored = self._stored[part.index]
        taken = super()._hand_over(stored, gradients, positions)
        if stored.num_elements == part.num_elements:
            return taken
        return PartGradients(stored, taken.kind, taken.present, taken.scales, whole=part)

    # Own gradients

    def _new_own(self, part: Part) -> OwnGradients:
        return OwnGradients(OWN_GRAD_SUM if self._sums_wider(part) else OWN_GRAD)

    def _sums_wider(self, part: Part) -> bool:
        """Whether what is reduced is in the dtype of sums: decided for all parts alike, however units are divided."""
        are_several = self._own_since is not None and self._own_since != self.backwards.current
        return (self._widens or are_several) and part.sum_dtype != part.compute_dtype

    def _open_whole(self, part: Part, own: OwnGradients) -> None:
        self._take_in(part.num_bytes(part.sum_dtype))
        try:
            own.flat = self._pin_whole(part, own)
        except BudgetError:
            self.let_go()
            own.flat = self._pin_whole(part, own)
        own.exists = True
        own.is_complete = False
        self._open_own[part.index] = part
        come = {i for i, backward in own.arrived.items() if backward == self.backwards.current}
        own.pending = {i for i, slot in enumerate(part.slots) if slot.param.requires_grad} - come

    def _pin_whole(self, part: Part, own: OwnGradients) -> torch.Tensor:
        if not own.exists:
            own.backward = self.backwards.current
            return self._put(part, own.kind, own.dtype_in(part))
        is_wider = part.sum_dtype != part.compute_dtype and own.kind == OWN_GRAD
        if not is_wider or own.backward == self.backwards.current:
            return self._fetch(part, own.kind, own.dtype_in(part))
        return self._promote(part, own, OWN_GRAD_SUM)

    def _close_whole(self, part: Part, own: OwnGradients) -> None:
        own.flat = None
        own.pending = set()
        del self._open_own[part.index]
        HEAP.make_room()
        self._loop.call_soon(self._release, part, own.kind)

    # Reductions

    def _reduce_complete(self) -> None:
        """Reduce what comes next in the order, as far as it is complete."""
        while self._is_reduced and self._num_reduced < len(self._order):
            index = self._order[self._num_reduced]
            own = self._own.get(index)
            if own is None or not own.is_complete:
                return
            self._reduce(self._whole[index])
            self._num_reduced += 1

    def _name(self, part: Part) -> str:
        return f"gradients of unit {self._names[part.unit]}, part {part.position}"

    def _reduce(self, part: Part) -> None:
        own = self._own.pop(part.index, None) or self._new_own(part)
        ready: Future[Lease] | None = None
        if own.exists:
            self._take_in(part.num_bytes(own.dtype_in(part)))
            ready = self._loop.submit(self._store.fetch(part.key(own.kind), owner=_LANE, update=True))
        done = self._lane.submit(
            self._name(part),
            functools.partial(self._run, part, own, ready, widens=self._sums_wider(part)),
            ready=ready,
        )
        self._reductions.append(Reduction(part, own, done))

    def _run(
        self, part: Part, own: OwnGradients, ready: Future[Lease] | None, *, widens: bool
    ) -> tuple[set[int], torch.Tensor | None]:
        """On the lane."""
        phase = self._name(part)
        wide = len(part.slots)
        is_wide = widens or own.kind == OWN_GRAD_SUM
        facts = self._collectives.unite([*own.arrived, *([wide] if is_wide else [])], wide + 1, phase=phase)
        present = facts - {wide}
        if not present:
            return present, None
        flat = None if ready is None else ready.result().tensor.view(own.dtype_in(part))
        if flat is None or (wide in facts and own.kind == OWN_GRAD):
            flat = self._make(part, own, flat, OWN_GRAD_SUM if wide in facts else OWN_GRAD)
        for position in present - set(own.arrived):
            part.slots[position].view(flat).zero_()
        self._collectives.reduce_in_place(flat, factor=1 / self._collectives.job_size, phase=phase)
        if self._is_whole:
            self._collectives.gather_in_place(flat, phase=phase)
            return present, flat
        return present, flat.view(self._collectives.num_ranks, -1)[self._collectives.rank]

    def _make(self, part: Part, own: OwnGradients, narrow: torch.Tensor | None, kind: str) -> torch.Tensor:
        """Memory for a part of which this rank has no gradients, or has them in a narrower dtype than others."""
        before, own.kind = own.kind, kind
        dtype = own.dtype_in(part)
        lease = self._loop.submit(self._store.put(part.key(kind), part.num_bytes(dtype), owner=_LANE)).result()
        flat = lease.tensor.view(dtype)
        own.exists = True
        if narrow is not None:
            for position in own.arrived:
                slot = part.slots[position]
                slot.view(flat).copy_(slot.view(narrow))
            self._loop.submit(self._drop(part, before)).result()
        return flat

    def _agree(self, completed: Sequence[int]) -> list[int]:
        """On the lane: the order of the next backward is that of rank 0 in this one."""
        new: list[int] | None = None
        if self._collectives.job_rank == 0:
            seen = set(completed)
            order = [*completed, *(index for index in self._order if index not in seen)]
            new = order if order != self._order else None
        said = self._collectives.exchange(new, "end of backward")
        return list(said[0]) if said[0] is not None else self._order

    def _take_in(self, room_bytes: int) -> None:
        """Take in what has been reduced; wait for it where there are more bytes than may be in flight beside others."""
        while self._reductions:
            in_flight_bytes = sum(each.num_bytes for each in self._reductions)
            must_wait = room_bytes and in_flight_bytes + room_bytes > self._in_flight_bytes
            if not (must_wait or self._reductions[0].done.done()):
                return
            self._take_in_first()

    def _take_in_first(self) -> None:
        reduction = self._reductions[0]
        with self._lane.awaited():
            present, reduced = self._loop.wait(reduction.done)
        self._reductions.popleft()
        part, own = self._parts[reduction.part.index], reduction.own
        if reduced is not None and own.kind == OWN_GRAD_SUM:
            self._expect_wide(part)
        for position in sorted(present):
            assert reduced is not None
            self._take(part, position, part.slots[position].view(reduced))
        super().let_go()  # before the lane is waited for again, which may need the room
        if own.exists:
            self._loop.run(self._drop(reduction.part, own.kind))

    def _expect_wide(self, part: Part) -> None:
        """What comes for a part is in the dtype of sums, and is to stay so."""
        if part.index not in self._gradients:
            self._gradients[part.index] = Arrived(kind=GRAD_SUM, backward=self.backwards.current)

    async def _drop(self, part: Part, kind: str) -> None:
        self._store.release(part.key(kind), owner=_LANE)
        await self._store.delete(part.key(kind))
