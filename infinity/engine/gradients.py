"""``GradientSink``: takes each gradient off its parameter as soon as autograd has made it, and keeps it as a shard.

A gradient lives on ``param.grad`` only from autograd's accumulation to the hook right after it. The sink copies it into
the gradient shard of its part, in host memory, and the shard may then move to NVMe like any other until the step.

What stands on ``param.grad`` afterwards is a placeholder: true about shape and dtype, NaN to read, and an error to
write (at once, or at the step where PyTorch did not see it), so that code which clips or scales gradients by hand fails
instead of finding none. It is also the truth about discarding: whoever sets ``param.grad = None``
(``model.zero_grad()``, a loop of the user's) has discarded the gradient, and whoever puts a tensor there has replaced
it, exactly as in plain PyTorch.

The dtype of sums: one backward's gradients are kept in the parameter's dtype, exactly as autograd made them. When a
second backward arrives before the step and the optimizer steps in a wider dtype, the shard is promoted to that dtype
(which is exact) and gradients are added in order of arrival: ``((g1 + g2) + g3)`` in fp32 under ``bf16``.

Memory: a shard is pinned from the first to the last gradient that one backward brings it. Where that is too much at
once (parameters that get none, or late ones), the others are let go and pinned again when they are needed; and nothing
is pinned while backward waits for a unit (``let_go``), which the deadlock argument in ``store/pool.py`` asks for.

A gradient on the CPU passes through the C library's heap. In the first backward much is allocated beside gradients that
stays or outlives them, in the places that others have just left, so the next ones need new room: holes of up to a third
of all gradients. They are given back as they come (``HEAP``); later backwards find their places and leave hardly any.

Where the number of backwards in a step is known, the last of them makes gradients *final*: those of a part are so when
each of its parameters that requires one has got its own. ``take_final`` then hands the part over to a step that begins
under the rest of this backward. No other gradient may come for it, and nobody may discard or replace what it had. Where
steps begin on trial, they are undone first (``undo``).

Called on the thread that runs autograd's hooks; one backward runs at a time. Several may take turns (``backwards.py``):
then whoever hands over has nothing open, and each gradient comes when those of all backwards before it have come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from infinity.engine.arrived import Arrived
from infinity.engine.backwards import Backwards
from infinity.engine.norms import Norms
from infinity.engine.placeholders import Placeholders, refuse_away, refuse_sparse
from infinity.engine.prefetch import TRAINING, PrefetchScheduler
from infinity.engine.scaling import Scaling
from infinity.engine.unit import GRAD, GRAD_SUM, Part, PartGradients, Slot, Unit
from infinity.errors import BudgetError, EngineStateError, ModelError
from infinity.io.memory import HEAP
from infinity.store.loop import LoopThread
from infinity.store.order import Use
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore


class GradientSink:
    """The gradients of all parts between two steps.

    Args:
        loop: the loop thread.
        store: where the shards go.
        scheduler: learns when gradients arrive.
        parts: all parts.
        norms: takes the norm of each gradient while it is at hand.
        scaling: what is to be undone on gradients before they are stepped.
        num_backwards: how many backwards there are in a step, if its sub-groups are to be stepped under the last.
        on_trial: whether steps that begin under backward can be undone, by ``undo``.

    Attributes:
        backwards: which backward runs.
        undo: undoes what has begun on trial, if anything; ``reclaim`` is then called.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        scheduler: PrefetchScheduler,
        parts: Sequence[Part],
        *,
        norms: Norms[Any],
        scaling: Scaling,
        num_backwards: int | None = None,
        on_trial: bool = False,
    ) -> None:
        self._loop = loop
        self._store = store
        self._scheduler = scheduler
        self._parts = parts
        self._norms = norms
        self._scaling = scaling
        self._gradients: dict[int, Arrived] = {}
        self._open_parts: dict[int, Part] = {}
        self._placeholders = Placeholders()
        self._on_trial = on_trial
        self.backwards = Backwards(num_backwards, is_binding=not on_trial)
        self.undo: Callable[[], None] = lambda: None

    def begin_several(self, count: int) -> range:
        """So many backwards take turns from now on. Returns their numbers, for ``switch``: the order of their sums."""
        self.end_backward()
        return self.backwards.begin_several(count)

    def switch(self, backward: int) -> None:
        """Another of several backwards runs: what comes from now on is its."""
        self.let_go()
        self.backwards.current = backward

    def end_several(self) -> None:
        """All that took turns are over, completely or not."""
        self.let_go()
        self.backwards.end_several()

    def take_final(self, unit: Unit) -> list[PartGradients]:
        """Hand over the parts of a unit whose gradients are final, as ``take`` does; none outside a last backward."""
        taken = []
        for part in [self._parts[whole.index] for whole in unit.parts] if self.backwards.is_final else ():
            gradients = self._gradients.get(part.index)
            if gradients is None or gradients.begun or gradients.flat is not None:
                continue
            positions = {i for i, slot in enumerate(part.slots) if slot.param.requires_grad}
            is_untouched = gradients.is_untouched(part, self._placeholders)
            if is_untouched and all(gradients.arrived.get(i) == self.backwards.last for i in positions):
                gradients.begun = True
                taken.append(self._hand_over(part, gradients, gradients.arrived))
        return taken

    def reclaim(self) -> None:
        """What had begun on trial has been undone: all gradients that were handed over wait again."""
        for gradients in self._gradients.values():
            gradients.begun = False

    def expect(self, part: Part, position: int) -> None:
        """Autograd is about to accumulate the gradient of a slot: what the user left on ``param.grad`` is honoured."""
        self._scaling.refuse_foreign(part.slots[position].name)
        self._expect(part, position)

    def _expect(self, part: Part, position: int) -> None:
        self._refuse_more(part, slot := part.slots[position])
        self._placeholders.refuse_change(slot)
        if self._placeholders.is_on(slot):
            slot.param.grad = None
        elif (gradients := self._gradients.get(part.index)) is not None:
            gradients.arrived.pop(position, None)

    def arrive(self, part: Part, position: int, gradient: torch.Tensor) -> None:
        """Take the gradient of the part's slot at ``position``: the slot's shape, the part's compute dtype.

        Raises:
            ModelError: the gradient is sparse, or the parameter got two gradients in one backward under a wider sum.
            BudgetError: the part's gradients do not fit in host memory.
            StorageError: gradients of an earlier backward could not be read back.
        """
        self._take(part, position, gradient)
        self.backwards.note_gradient()

    def _take(self, part: Part, position: int, gradient: torch.Tensor) -> None:
        slot = part.slots[position]
        refuse_sparse(slot, gradient)
        gradients = self._gradients.setdefault(part.index, Arrived(backward=self.backwards.current))
        if gradients.flat is None:
            self._open(part, gradients)
        assert gradients.flat is not None
        view = slot.view(gradients.flat)
        before = gradients.arrived.get(position)
        gradient = gradient.detach()
        scales = gradients.scales.pop(position, ())
        if before is None:
            view.copy_(gradient)
        elif before == self.backwards.current and gradients.kind == GRAD_SUM:
            raise ModelError(
                f"parameter {slot.name}: got two gradients in one backward, which would be added in "
                f"{part.sum_dtype} where PyTorch adds them in {part.compute_dtype}; use torch.utils.checkpoint with "
                "use_reentrant=False, or accumulation_dtype='same'"
            )
        else:
            if scales and view.dtype != part.step_dtype:
                raise EngineStateError(
                    f"parameter {slot.name}: got another gradient after clipping, when sums are in {view.dtype} "
                    "(accumulation_dtype='same') and clipping is in fp32; clip after the last backward"
                )
            for scale in scales:
                view.mul_(scale)
            view.add_(gradient.to(view.device))
        total = gradient if before is None else view
        self._norms.note(part, position, total, num_backwards=self.backwards.position)
        gradients.arrived[position] = self.backwards.current
        if slot not in self._placeholders and gradient.device.type == "cpu":
            HEAP.use(gradient.nbytes)
        self._placeholders.put(part, slot)
        gradients.pending.discard(position)
        if not gradients.pending:
            self._close(part, gradients)

    def replace(self, part: Part, position: int, gradient: torch.Tensor) -> None:
        """Put a gradient (the slot's shape, the dtype that is stepped) in the place of what a slot has, if anything.

        Raises:
            EngineStateError: its step may have begun. Others as for ``arrive``.
        """
        self._refuse_more(part, slot := part.slots[position])
        self.let_go()
        gradients = self._gradients.setdefault(part.index, Arrived(backward=self.backwards.current))
        if part.sum_dtype == part.compute_dtype or gradients.kind == GRAD_SUM:
            gradients.flat = self._pin(part, gradients)
        elif gradients.exists:
            gradients.flat = self._promote(part, gradients, GRAD_SUM)
        else:
            gradients.flat, gradients.kind = self._put(part, GRAD_SUM, part.sum_dtype), GRAD_SUM
        gradients.exists = True
        self._open_parts[part.index] = part
        for inverse in self._scaling.inverses:
            gradient = gradient / inverse
        slot.view(gradients.flat).copy_(slot.take(gradient))
        self._scaling.forget()
        self._norms.forget(part, position)
        gradients.scales.pop(position, None)
        gradients.arrived[position] = self.backwards.current
        self._placeholders.put(part, slot)
        self._close(part, gradients)

    def let_go(self, *, but: Part | None = None) -> None:
        """Unpin every open shard but one; the next gradient of its part pins it again."""
        for part in [part for part in self._open_parts.values() if part is not but]:
            self._close(part, self._gradients[part.index])

    def complete(self) -> None:
        """All gradients of the backward that runs have come."""
        self.let_go()

    def end_backward(self) -> None:
        """A backward is over, completely or not: let every open shard go. What comes next is another backward."""
        self.let_go()
        self.backwards.end()

    def clear_placeholders(self) -> None:
        """Take the placeholders off the parameters; what the user has put there stays."""
        self._placeholders.clear()

    def discard(self) -> None:
        """Forget every gradient (``zero_grad``)."""
        self.end_backward()
        self.clear_placeholders()
        gradients, self._gradients = self._gradients, {}
        self.backwards.end_step()
        self._norms.end_step()
        self._loop.run(self._delete(self._parts[i].key(g.kind) for i, g in gradients.items()))

    def waiting(self) -> list[PartGradients]:
        """What a step would take now, with what has begun on trial: parts in order. Raises as ``take``."""
        self.end_backward()
        self._refuse_changes()
        self._take_users()
        return self._waiting()

    @property
    def are_scaled(self) -> bool:
        """Whether any has been clipped, or scaled otherwise than by the loss scale."""
        return any(each.scales for each in self._gradients.values())

    def scale(self, part: Part, position: int, scale: torch.Tensor) -> None:
        """Have a gradient that waits multiplied by ``scale``, a tensor of no dimensions on the CPU, before its step."""
        self._gradients[part.index].scales.setdefault(position, []).append(scale)

    def take(self) -> list[PartGradients]:
        """Hand the gradients over to a step: parts in order. The receiver deletes the shards.

        Raises:
            ModelError: a gradient was changed in place while it was away; nothing is lost but what was changed.
        """
        self.end_backward()
        self._refuse_changes()
        self.backwards.end_step()
        self._take_users()
        taken = [each for each in self._waiting() if not self._gradients[each.part.index].begun]
        gradients, self._gradients = self._gradients, {}
        self._norms.end_step()
        for index, each in gradients.items():
            for slot in (self._parts[index].slots[position] for position in each.arrived):
                if self._placeholders.is_on(slot):
                    slot.param.grad = None
        handed_over = {each.part.index for each in taken}
        others = ((i, each) for i, each in gradients.items() if not each.begun and i not in handed_over)
        if discarded := [self._parts[i].key(each.kind) for i, each in others]:
            self._loop.run(self._delete(discarded))
        return taken

    def _waiting(self) -> list[PartGradients]:
        waiting = []
        for index, each in sorted(self._gradients.items()):
            part = self._parts[index]
            kept = [position for position in each.arrived if self._placeholders.is_on(part.slots[position])]
            if kept:
                waiting.append(self._hand_over(part, each, kept))
        return waiting

    def _hand_over(self, part: Part, gradients: Arrived, positions: Iterable[int]) -> PartGradients:
        return gradients.hand_over(part, positions, self._scaling.inverses)

    def _take_users(self) -> None:
        """Take gradients that the user has put onto parameters by hand; they are of no backward."""
        for part in self._parts:
            for position, slot in enumerate(part.slots if part.stepped else ()):
                gradient = slot.param.grad
                if gradient is not None and not self._placeholders.is_on(slot):
                    refuse_away(slot, gradient)
                    self._expect(part, position)
                    self._take(part, position, slot.take(gradient))
        self.let_go()

    def _refuse_changes(self) -> None:
        items = self._gradients.items()
        if any(g.begun and not g.is_untouched(self._parts[i], self._placeholders) for i, g in items):
            self.undo()
        for index, gradients in self._gradients.items():
            for position in sorted(gradients.arrived):
                slot = self._parts[index].slots[position]
                self._placeholders.refuse_change(slot)
                if gradients.begun and not self._placeholders.is_on(slot):
                    raise EngineStateError(
                        f"parameter {slot.name}: its gradient was discarded or replaced between backward and step(), "
                        "when its step had begun under backward; do so before the last backward, or leave "
                        "accumulation_steps unset"
                    )

    def _refuse_more(self, part: Part, slot: Slot) -> None:
        gradients = self._gradients.get(part.index)
        has_begun = gradients is not None and gradients.begun
        if self._on_trial:
            if has_begun:
                self.undo()
        elif has_begun or self.backwards.is_complete:
            num_backwards = self.backwards.num_in_step
            raise EngineStateError(
                f"parameter {slot.name}: got another gradient after backward {num_backwards} of "
                f"accumulation_steps={num_backwards}, under which its step may have begun; call step() first, "
                "set accumulation_steps to the number of backwards in a step, or leave it unset"
            )

    def _open(self, part: Part, gradients: Arrived) -> None:
        self._loop.call_soon(self._scheduler.touch, Use.GRADIENT, part.index)
        try:
            gradients.flat = self._pin(part, gradients)
        except BudgetError:
            self.let_go(but=part)
            gradients.flat = self._pin(part, gradients)
        gradients.exists = True
        self._open_parts[part.index] = part
        gradients.pending = {i for i, slot in enumerate(part.slots) if slot.param.requires_grad}

    def _pin(self, part: Part, gradients: Arrived) -> torch.Tensor:
        if not gradients.exists:
            return self._put(part, gradients.kind, gradients.dtype_in(part))
        if gradients.kind == GRAD_SUM:
            return self._fetch(part, GRAD_SUM, part.sum_dtype)
        if part.sum_dtype != part.compute_dtype and gradients.backward != self.backwards.current:
            return self._promote(part, gradients, GRAD_SUM)
        return self._fetch(part, GRAD, part.compute_dtype)

    def _close(self, part: Part, gradients: Arrived) -> None:
        gradients.flat = None
        gradients.pending = set()
        del self._open_parts[part.index]
        HEAP.make_room()
        self._loop.call_soon(self._release, part, gradients.kind)

    def _promote(self, part: Part, gradients: Arrived, kind: str) -> torch.Tensor:
        """Have them in a shard of another kind, in the dtype of sums; pinned."""
        before, narrow = gradients.kind, self._fetch(part, gradients.kind, part.compute_dtype)
        try:
            wide = self._put(part, kind, part.sum_dtype)
        except BudgetError:
            self._loop.call_soon(self._release, part, before)
            raise
        for position in gradients.arrived:
            slot = part.slots[position]
            slot.view(wide).copy_(slot.view(narrow))
        del narrow
        gradients.kind = kind
        self._loop.call_soon(self._release, part, before)
        self._loop.run(self._delete([part.key(before)]))
        return wide

    def _put(self, part: Part, kind: str, dtype: torch.dtype) -> torch.Tensor:
        lease = self._loop.run(self._store.put(part.key(kind), part.num_bytes(dtype), owner=TRAINING))
        return lease.tensor.view(dtype)

    def _fetch(self, part: Part, kind: str, dtype: torch.dtype) -> torch.Tensor:
        return self._loop.run(self._store.fetch(part.key(kind), owner=TRAINING, update=True)).tensor.view(dtype)

    def _release(self, part: Part, kind: str) -> None:
        self._store.release(part.key(kind), owner=TRAINING, dirty=True)

    async def _delete(self, keys: Iterable[ShardKey]) -> None:
        for key in keys:
            await self._store.delete(key)
