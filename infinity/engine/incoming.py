"""Tensors that users hand over as values: told apart from what cannot be one, before anything changes."""

from __future__ import annotations

import torch

from infinity.errors import ModelError


def check_tensor(what: str, value: object, shape: torch.Size | None = None) -> torch.Tensor:
    """``value``, if it is a dense tensor that has values.

    Args:
        what: names it in the error.
        value: what the user gave.
        shape: which it must have, if that is known.

    Raises:
        ModelError: it is not; says what was expected and what came.
    """
    if not isinstance(value, torch.Tensor):
        got = type(value).__name__
    elif value.is_meta:
        got = "one on the meta device, which has no values"
    elif value.layout is not torch.strided:
        got = f"one of layout {value.layout}; give value.to_dense()"
    elif value.is_quantized:
        got = "a quantized one; give value.dequantize()"
    elif type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        got = f"a {type(value).__name__}; give a plain tensor of all its values"
    elif shape is not None and value.shape != shape:
        got = f"one of shape {tuple(value.shape)}"
    else:
        return value
    expected = "a tensor" if shape is None else f"a tensor of shape {tuple(shape)}"
    raise ModelError(f"{what}: expected {expected}, got {got}")
