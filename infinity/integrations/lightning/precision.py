"""``EnginePrecision``: what takes the place of Lightning's precision plugin, so that one side decides about dtypes.

Lightning's plugins convert the model, scale the loss and hand a closure to the optimizer; the engine does the first two
itself, and takes no closures. What is left of ``Trainer(precision=...)`` is what it says about ``Config.precision``:

================  ==================================================================================================
``"32-true"``     the default: ``Config.precision``, whatever it is.
``"bf16-true"``   ``Config(precision="bf16")``, with fp32 master weights; inputs are converted.
``"16-true"``     ``Config(precision="fp16")``, with fp32 master weights and a scaled loss; inputs are converted.
``"bf16-mixed"``  fp32 parameters in an autocast region, as in Lightning; with ``Config(precision="bf16")`` as above.
``"16-mixed"``    as ``"16-true"``.
================  ==================================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from infinity.engine.engine import Engine
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision as _Base
else:
    _Base = object  # ``bind`` gives it that of the package


class EnginePrecision(_Base):
    """Leads backward, clipping and steps to the engine.

    Args:
        name: what ``Trainer(precision=...)`` is.
        engine: returns the engine.
    """

    plain_backward: Callable[..., None]  # LightningModule's

    def __init__(self, name: str, engine: Callable[[], Engine]) -> None:
        self.precision = name  # type: ignore[assignment]
        self._engine = engine

    @property
    def _dtype(self) -> torch.dtype:
        """What parameters compute in."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._engine().config.precision, torch.float32)

    def convert_input(self, data: Any) -> Any:
        """Convert floating-point tensors to what parameters compute in, where that is less than fp32."""
        dtype = self._dtype
        if dtype == torch.float32:
            return data
        return apply_to_collection(
            data, torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each
        )

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Autocast, where fp32 parameters are to compute in bf16; else new tensors are of the parameters' dtype."""
        dtype, before = self._dtype, torch.get_default_dtype()
        if dtype == torch.float32 and self.precision == "bf16-mixed":
            device_type = self._engine().config.torch_device().type
            with torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=False):
                yield
            return
        torch.set_default_dtype(before if dtype == torch.float32 else dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward from the loss, through the module's own ``backward`` if it has one.

        Raises:
            ConfigError: the loss is to be scaled, and the module's own ``backward`` or arguments are in the way.
        """
        engine = self._engine()
        is_plain = getattr(type(model), "backward", None) is self.plain_backward
        if is_plain and not args and not kwargs.keys() - {"retain_graph"}:
            engine.backward(tensor, retain_graph=bool(kwargs.get("retain_graph")))
            return
        if engine.config.precision == "fp16":
            what = "arguments of manual_backward()" if is_plain else f"{type(model).__name__}.backward()"
            raise ConfigError(
                f"{what}: under precision='fp16' the engine scales the loss and runs backward itself; leave them out, "
                "or use another precision"
            )
        model.backward(tensor, *args, **kwargs)

    def optimizer_step(  # type: ignore[override]  # as that of Lightning's own
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run what makes the gradients, then step.

        Returns:
            What the closure returned, as optimizers do.
        """
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def clip_gradients(
        self, optimizer: Any, clip_val: int | float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clip the optimizer's gradients, by their norm or one by one.

        Raises:
            ConfigError: the algorithm is neither.
            EngineStateError: steps begin under backward (``Config.accumulation_steps``).
        """
        engine = self._engine()
        if clip_val <= 0:
            return
        params = list(self.main_params(optimizer))
        if gradient_clip_algorithm == "value":
            clip_values(engine, params, float(clip_val))
        elif gradient_clip_algorithm == "norm":
            engine.clip_grad_norm_(clip_val, parameters=params)
        else:
            raise ConfigError(f"gradient_clip_algorithm: expected 'norm' or 'value', got {gradient_clip_algorithm!r}")


def clip_values(engine: Engine, params: list[Any], limit: float) -> None:
    """What ``torch.nn.utils.clip_grad_value_`` does, with gradients that are away; each is read and written.

    Under fp16, one that is not finite stays, so that its step is skipped.
    """
    keeps_infinite = engine.config.precision == "fp16"
    for param in dict.fromkeys(params):
        gradient = engine.values.grad(param)
        if gradient is not None and not (keeps_infinite and not bool(gradient.isfinite().all())):
            engine.values.set_grad(param, gradient.clamp_(-limit, limit))
