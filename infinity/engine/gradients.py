"""``GradientSink``: takes each gradient off its parameter as soon as autograd has made it, and keeps it as a shard.

A gradient lives on ``param.grad`` only from autograd's accumulation to the hook right after it. The sink copies it into
the gradient shard of its part, in host memory, and the shard may then move to NVMe like any other until the step.

The dtype of sums: one backward's gradients are kept in the parameter's dtype, exactly as autograd made them. When a
second backward arrives before the step and the optimizer steps in a wider dtype, the shard is promoted to that dtype
(which is exact) and gradients are added in order of arrival: ``((g1 + g2) + g3)`` in fp32 under ``bf16``.

Called on the thread that runs autograd's hooks; one backward runs at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from infinity.engine.prefetch import TRAINING, PrefetchScheduler
from infinity.engine.unit import GRAD, GRAD_SUM, Part
from infinity.errors import ModelError
from infinity.store.loop import LoopThread
from infinity.store.order import Use
from infinity.store.shard import ShardKey
from infinity.store.store import TieredStore


@dataclass(slots=True)
class _Gradients:
    """The gradients of one part since the last step.

    Attributes:
        kind: ``GRAD`` in the compute dtype, ``GRAD_SUM`` in the step dtype.
        arrived: for each slot that has a gradient, the backward that brought the latest.
        backward: the backward that began the shard of this kind.
        flat: the pinned shard while it is open for writing.
        pending: slots whose gradient this backward has yet to bring.
    """

    kind: str = GRAD
    arrived: dict[int, int] = field(default_factory=dict)
    backward: int = 0
    flat: torch.Tensor | None = None
    pending: set[int] = field(default_factory=set)


class GradientSink:
    """The gradients of all parts between two steps.

    Args:
        loop: the loop thread.
        store: where the shards go.
        scheduler: learns when gradients arrive.
        parts: all parts.
    """

    def __init__(
        self, loop: LoopThread, store: TieredStore, scheduler: PrefetchScheduler, parts: Sequence[Part]
    ) -> None:
        self._loop = loop
        self._store = store
        self._scheduler = scheduler
        self._parts = parts
        self._gradients: dict[int, _Gradients] = {}
        self._backward = 1

    def arrive(self, part: Part, position: int, gradient: torch.Tensor) -> None:
        """Take the gradient of the part's slot at ``position``: the slot's shape, the part's compute dtype.

        Raises:
            ModelError: the gradient is sparse, or the parameter got two gradients in one backward under a wider sum.
            BudgetError: the part's gradients do not fit in host memory.
            StorageError: gradients of an earlier backward could not be read back.
        """
        slot = part.slots[position]
        if gradient.layout is not torch.strided:
            raise ModelError(
                f"parameter {slot.name}: got a gradient of layout {gradient.layout}, expected a dense one; "
                "build its module with sparse=False"
            )
        gradients = self._gradients.setdefault(part.index, _Gradients(backward=self._backward))
        if gradients.flat is None:
            self._open(part, gradients)
        assert gradients.flat is not None
        view = slot.view(gradients.flat)
        before = gradients.arrived.get(position)
        if before is None:
            view.copy_(gradient)
        elif before == self._backward and gradients.kind == GRAD_SUM:
            raise ModelError(
                f"parameter {slot.name}: got two gradients in one backward, which would be added in "
                f"{part.step_dtype} where PyTorch adds them in {part.compute_dtype}; "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        else:
            view.add_(gradient.to(view.device))
        gradients.arrived[position] = self._backward
        gradients.pending.discard(position)
        if not gradients.pending:
            self._close(part, gradients)

    def end_backward(self) -> None:
        """A backward is over, completely or not: let every open shard go. What comes next is another backward."""
        for index, gradients in self._gradients.items():
            if gradients.flat is not None:
                self._close(self._parts[index], gradients)
        self._backward += 1

    def discard(self) -> None:
        """Forget every gradient (``zero_grad``)."""
        self.end_backward()
        gradients, self._gradients = self._gradients, {}
        self._loop.run(self._delete(self._parts[i].key(g.kind) for i, g in gradients.items()))

    def take(self) -> dict[int, tuple[str, frozenset[int]]]:
        """Hand the gradients over to a step: for each part its kind of shard and the slots that have a gradient.

        The receiver deletes the shards.
        """
        self.end_backward()
        gradients, self._gradients = self._gradients, {}
        return {index: (g.kind, frozenset(g.arrived)) for index, g in gradients.items()}

    def _open(self, part: Part, gradients: _Gradients) -> None:
        self._loop.call_soon(self._scheduler.touch, Use.GRADIENT, part.index)
        widen = part.step_dtype != part.compute_dtype and gradients.kind == GRAD
        if not gradients.arrived:
            flat = self._put(part, GRAD, part.compute_dtype)
        elif widen and gradients.backward != self._backward:
            flat = self._promote(part, gradients)
        else:
            dtype = part.compute_dtype if gradients.kind == GRAD else part.step_dtype
            flat = self._fetch(part, gradients.kind, dtype)
        gradients.flat = flat
        gradients.pending = {i for i, slot in enumerate(part.slots) if slot.param.requires_grad}

    def _close(self, part: Part, gradients: _Gradients) -> None:
        gradients.flat = None
        gradients.pending = set()
        self._loop.call_soon(self._release, part, gradients.kind)

    def _promote(self, part: Part, gradients: _Gradients) -> torch.Tensor:
        narrow = self._fetch(part, GRAD, part.compute_dtype)
        wide = self._put(part, GRAD_SUM, part.step_dtype)
        for position in gradients.arrived:
            slot = part.slots[position]
            slot.view(wide).copy_(slot.view(narrow))
        del narrow
        gradients.kind = GRAD_SUM
        self._loop.call_soon(self._release, part, GRAD)
        self._loop.run(self._delete([part.key(GRAD)]))
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
