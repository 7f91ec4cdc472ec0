"""The stack of saved-tensor hooks, of which PyTorch calls only the innermost.

To hand a tensor on to the hooks below our own, these must be known. PyTorch 2.8 and newer say which they are. Before,
they can still be *used*: our own are taken off for the moment in which a node of our making saves the tensor, so that
PyTorch itself has the hooks below pack it, or keeps it if there are none; the node later unpacks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
Hooks = tuple[Pack, Unpack]

innermost_hooks: Callable[[bool], Hooks | None] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)


class _Save(torch.autograd.Function):
    """A node that saves a tensor and is never run."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return root.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("this node is not part of any graph")


def push(hooks: Hooks) -> None:
    """Put ``hooks`` in force."""
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def pop() -> None:
    """Take the innermost hooks off."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def hooks_below(own: Hooks) -> Hooks | None:
    """What hands a tensor on to the hooks that are in force before ``own`` are pushed; ``None`` when there are none.

    If these are ``own`` already, ``own`` comes back (from PyTorch 2.8 on).
    """
    if innermost_hooks is not None:
        return innermost_hooks(False)

    def pack(tensor: torch.Tensor) -> Any:
        pop()
        try:
            with torch.enable_grad():
                # Detached: a saved output would keep its own node alive for ever.
                root = torch.empty(0, requires_grad=True)
                return _Save.apply(root, tensor.detach())  # type: ignore[no-untyped-call]
        finally:
            push(own)

    def unpack(output: Any) -> torch.Tensor:
        (tensor,) = output.grad_fn.saved_tensors
        return tensor  # type: ignore[no-any-return]

    return pack, unpack
