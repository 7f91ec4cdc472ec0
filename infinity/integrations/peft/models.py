"""Which models there are adapters of: PEFT's, whose base is not quantised."""

from __future__ import annotations

from typing import Any

from peft import PeftModel

from infinity.engine.engine import Engine
from infinity.errors import ModelError


def adapted_model(engine: Engine, what: str) -> Any:
    """The model of an engine, which is one of PEFT's.

    Args:
        engine: whose.
        what: is asked of it; for the message.

    Raises:
        ModelError: it is none, or its base is quantised.
    """
    model: Any = engine.module
    if not isinstance(model, PeftModel):
        raise ModelError(
            f"{what}: expected an engine whose model is from peft.get_peft_model(), got a {type(model).__name__}"
        )
    base = model.get_base_model()
    method = getattr(base, "quantization_method", None)
    names = [name for name, param in base.named_parameters() if not param.dtype.is_floating_point]
    if method is not None or names:
        found = f"quantization_method={getattr(method, 'value', method)}" if method is not None else names[0]
        raise ModelError(
            f"{what}: the base of this model is quantised ({found}), which is not supported; load it without a "
            "quantization_config: the engine reads it from disk, so it needs no smaller memory"
        )
    return model


def check_adapter(model: Any, name: str, what: str) -> None:
    """Refuse the name of an adapter that there is not.

    Raises:
        ModelError: the message tells those that there are.
    """
    if name not in model.peft_config:
        there = ", ".join(map(repr, model.peft_config))
        raise ModelError(f"{what}: there is no adapter {name!r}; this model has {there}")
