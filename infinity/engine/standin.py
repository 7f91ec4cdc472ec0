"""What stands in for values that are away: placeholders of the true shape that read as NaN and take no memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from infinity.errors import ModelError


class StandIn:
    """What a parameter or its gradient holds while its value is away: made once, so that a release costs an assignment.

    Attributes:
        tensor: the placeholder, of the parameter's shape.
    """

    __slots__ = ("_address", "_blank", "_memory", "tensor")

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, kind: type[torch.Tensor] = torch.Tensor
    ) -> None:
        value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
        with torch.inference_mode(False):  # else the parameter would become a tensor that no training may use
            element = torch.full((), value, dtype=dtype, device=device)
            self.tensor = torch.Tensor._make_subclass(kind, element.expand(shape))
        self._address = self.tensor.data_ptr()
        self._memory: memoryview | None = None  # elsewhere a read would wait for the device
        self._blank = b""
        if device.type == "cpu":
            self._memory = element.view(1).view(torch.uint8).numpy().data
            self._blank = self._memory.tobytes()

    def is_in(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` still holds it, unwritten: a write through ``.data`` leaves no other trace."""
        return tensor.data_ptr() == self._address and (self._memory is None or self._memory.tobytes() == self._blank)


class AwayGradient(torch.Tensor):
    """What stands on ``param.grad`` once the gradient is away: NaN to read, and an error in clear words to write.

    PyTorch itself refuses most writes, since all elements share memory, in words that name neither the gradient nor a
    repair. The others (a fill, an assignment to ``.data``, a gradient of one element) show in version and address.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func`` as on plain tensors, and refuse changes."""
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            away = [each for each in given if isinstance(each, cls)]
            before = [(each._version, each.data_ptr()) for each in away]
            try:
                result = func(*args, **(kwargs or {}))
            except RuntimeError as error:
                if "single memory location" not in str(error):
                    raise
                raise _change_of_gradient(func) from error
            if before != [(each._version, each.data_ptr()) for each in away]:
                raise _change_of_gradient(func)
            if isinstance(result, torch.Tensor) and any(_share(result, each) for each in given):
                return result.as_subclass(cls)  # a view, or what .data and detach() give
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()


def _change_of_gradient(func: Callable[..., Any]) -> ModelError:
    name = getattr(func, "__name__", "an operator")
    if name.startswith("_amp_"):
        return ModelError(
            "torch.amp.GradScaler was to take the scale off a gradient that is away; the engine scales the loss "
            "itself: set precision='fp16' in Config, call engine.backward(loss) and engine.step(), and leave the "
            "GradScaler out"
        )
    return ModelError(
        f"{name}() was to change a gradient in place that is away: gradients leave "
        "param.grad as soon as backward has made them, so that torch.nn.utils.clip_grad_norm_, clip_grad_value_ and "
        "loops over param.grad find none; clip their norm with engine.clip_grad_norm_() or max_grad_norm in Config, "
        "discard them with zero_grad(set_to_none=True), change or clip each in param.register_hook(), where it is"
    )


def _share(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return other.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
