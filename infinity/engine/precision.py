"""Which dtype each kind of state has, as one object per precision behind one contract.

``fp32``: parameters keep the dtype the model gave them and the optimizer steps them as they are.
``bf16``: parameters, buffers and floating-point inputs are bf16; the optimizer steps fp32 master weights, which are the
    original values, and the new parameters are their rounding. A gradient arrives in bf16, as autograd made it; a step
    of one backward steps its exact fp32 image, and several backwards are summed in fp32, in order of arrival.
``fp16``: the same with fp16; the loss is scaled (``scaling.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from infinity.config import Precision as PrecisionName


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a run.

    Attributes:
        compute: the dtype of floating-point parameters, buffers and inputs; ``None`` leaves them as they are.
        step: the dtype in which the optimizer steps them; ``None`` leaves them as they are.
    """

    compute: torch.dtype | None = None
    step: torch.dtype | None = None

    @property
    def has_master(self) -> bool:
        """Whether the optimizer steps master weights beside the parameters."""
        return self.step is not None

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in forward and backward of what the model made in ``dtype``."""
        return self.compute if self.compute is not None and dtype.is_floating_point else dtype

    def step_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the optimizer steps it, and in which several backwards' gradients are summed."""
        return self.step if self.step is not None and dtype.is_floating_point else dtype

    def cast_inputs(self, inputs: Any) -> Any:
        """The inputs of the model's forward as its arithmetic wants them; any nesting of containers."""
        if self.compute is None:
            return inputs

        def cast(leaf: Any) -> Any:
            return leaf.to(self.compute) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

        return pytree.tree_map(cast, inputs)


_PRECISIONS: dict[PrecisionName, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(compute=torch.bfloat16, step=torch.float32),
    "fp16": Precision(compute=torch.float16, step=torch.float32),
}


def precision_of(name: PrecisionName) -> Precision:
    """The dtypes that ``Config.precision`` names."""
    return _PRECISIONS[name]
