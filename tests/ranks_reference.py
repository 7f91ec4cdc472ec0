"""``DataParallel``: what training on several ranks is compared with, in plain PyTorch.

In fp32 it is ``DistributedDataParallel`` with a communication hook: each rank's gradient times ``1 / num_ranks``, and
the sum in the order of ranks. In bf16 it is the reference of ``parity.py`` with fp32 masters, on every rank, between
which gradients are summed alike: what is moved is bf16, the sum is taken in fp32 and rounded to bf16 once.

Three things are not what ``DistributedDataParallel`` does by itself. Several backwards outside ``no_sync`` each reduce
their own gradients, which are then added up, where it reduces the sum so far each time anew (the same but for the
rounding). In bf16, gradients of backwards in ``no_sync`` are summed in fp32 and, with that of the backward after
them, reduced in fp32. And the norm of all gradients is the exact one, rounded to fp32 once, if there are several ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parity import Outcome, Plain


def mean_over_ranks(gradient: torch.Tensor, num_sharing: int) -> torch.Tensor:
    """The mean of all ranks' gradients, of its dtype: each times ``1 / num_ranks``, summed in the order of ranks.

    Args:
        gradient: this rank's.
        num_sharing: so many ranks are summed first, and then these sums.
    """
    num_ranks = dist.get_world_size()
    mine = gradient * (1 / num_ranks)
    theirs = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(theirs, mine)
    sums = [_sum(theirs[start : start + num_sharing]) for start in range(0, num_ranks, num_sharing)]
    return _sum(sums)


def _sum(gradients: list[torch.Tensor]) -> torch.Tensor:
    """In their order, in fp32, rounded once."""
    total = gradients[0].float()
    for each in gradients[1:]:
        total = total + each
    return total.to(gradients[0].dtype)


def exact_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all elements (fp32) together: squares are exact in fp64, their sum is rounded once."""
    squares = [gradient.double().square().flatten() for gradient in gradients]
    return torch.tensor(math.sqrt(math.fsum(torch.cat(squares).tolist())), dtype=torch.float32)


def num_ulps(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many fp32 numbers lie from one to the other."""
    return abs(int(one.view(torch.int32)) - int(other.view(torch.int32)))


class DataParallel(Plain):
    """Plain PyTorch on the ranks of the default group.

    Args:
        model: this rank's; it gets the values of rank 0.
        optimizer: of the model's parameters.
        precision: as in ``Config``: ``"fp32"`` or ``"bf16"``.
        max_grad_norm: as in ``Config``.
        num_sharing: how many ranks share the state where others have copies, as ``Config.shard_ranks``.
        has_own_order: sum as ``DistributedDataParallel`` does by itself, in fp32.

    Attributes:
        clip_ulps: in each step, how far the exact norm was from that of ``torch.nn.utils.clip_grad_norm_``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: str,
        max_grad_norm: float | None = None,
        *,
        num_sharing: int | None = None,
        has_own_order: bool = False,
    ) -> None:
        with torch.no_grad():
            for each in (*model.parameters(), *model.buffers()):
                dist.broadcast(each, 0)
        super().__init__(model, optimizer, precision, max_grad_norm=max_grad_norm)
        self.module = model
        self.clip_ulps: list[int] = []
        self._num_sharing = num_sharing or dist.get_world_size()
        self._is_syncing = True
        self._num_local = 0
        self._own: dict[nn.Parameter, torch.Tensor] = {}
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        if precision == "fp32":
            self.model = DistributedDataParallel(model, find_unused_parameters=True)
            if not has_own_order:
                self.model.register_comm_hook(self._num_sharing, _hook)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up."""
        with self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else contextlib.nullcontext():
            self._is_syncing = False
            try:
                yield
            finally:
                self._is_syncing = True

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if isinstance(self.model, DistributedDataParallel):
            if self._is_syncing:
                self._add({param: _taken(param) for param in self.module.parameters() if param.grad is not None})
            return
        for param in self.masters:
            if param.grad is not None:
                before, gradient = self._own.get(param), _taken(param)
                self._own[param] = gradient if before is None else before.float() + gradient
        self._num_local += 1
        if self._is_syncing:
            self._reduce()

    def _reduce(self) -> None:
        """What each rank has summed up; a parameter without a gradient here counts as zero, if others have one."""
        trained = [param for param in self.masters if param.requires_grad]
        present = torch.tensor([float(param in self._own) for param in trained])
        dist.all_reduce(present)
        dtype = torch.float32 if self._num_local > 1 else trained[0].dtype
        for param, num_present in zip(trained, present.tolist(), strict=True):
            if num_present:
                mine = self._own.get(param, torch.zeros_like(param)).to(dtype)
                self._add({param: mean_over_ranks(mine.contiguous(), self._num_sharing)})
        self._own.clear()
        self._num_local = 0

    def _add(self, gradients: dict[nn.Parameter, torch.Tensor]) -> None:
        for param, gradient in gradients.items():
            self._sums[param] = self._sums[param] + gradient if param in self._sums else gradient.float()

    def _take_gradients(self) -> None:
        for param, gradient in self._sums.items():
            self.masters.get(param, param).grad = gradient
        self._sums.clear()

    def clip(self, max_norm: float, norm_type: float = 2.0, params: Any = ()) -> torch.Tensor:
        if dist.get_world_size() == 1:
            return super().clip(max_norm, norm_type, params)
        assert norm_type == 2.0
        self._take_gradients()
        stepped = [self.masters.get(param, param) for param in params or self.module.parameters()]
        gradients = [param.grad for param in stepped if param.grad is not None]
        self._grad_norm = exact_norm(gradients)
        self.clip_ulps.append(num_ulps(self._grad_norm, torch.nn.utils.get_total_norm(gradients)))
        torch.nn.utils.clip_grads_with_norm_(stepped, max_norm, self._grad_norm)
        return self._grad_norm

    def outcome(self, returned: Any) -> Outcome:
        self.model, wrapped = self.module, self.model
        try:
            return super().outcome(returned)
        finally:
            self.model = wrapped


def _hook(num_sharing: int, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(mean_over_ranks(bucket.buffer(), num_sharing))
    return done


_hook.__annotations__.clear()  # torch would read them, and expects no names


def _taken(param: nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    gradient, param.grad = param.grad, None
    return gradient
