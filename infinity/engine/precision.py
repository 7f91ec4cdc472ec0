"""Which dtype each kind of state has, as one object per precision behind one contract.

``fp32``: parameters keep the dtype the model gave them and the optimizer steps them as they are.
``bf16``: parameters, buffers and floating-point inputs are bf16; the optimizer steps fp32 master weights, which are the
    original values, and the new parameters are their rounding. A gradient arrives in bf16, as autograd made it; a step
    of one backward steps its exact fp32 image, and several backwards are summed in fp32 (or, if so asked, in bf16), in
    order of arrival.
``fp16``: the same with fp16; the loss is scaled (``scaling.py``).
"""

from __future__ import annotations

import dataclasses
import fnmatch
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.config import Config
from infinity.config import Precision as PrecisionName
from infinity.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a run.

    Attributes:
        compute: the dtype of floating-point parameters, buffers and inputs; ``None`` leaves them as they are.
        step: the dtype in which the optimizer steps them; ``None`` leaves them as they are.
        sums: the dtype in which gradients of several backwards are summed; ``None``: that of the gradients.
        keep: patterns of names of parameters and buffers that are left as they are all the same.
    """

    compute: torch.dtype | None = None
    step: torch.dtype | None = None
    sums: torch.dtype | None = None
    keep: tuple[str, ...] = ()

    @property
    def has_master(self) -> bool:
        """Whether the optimizer steps master weights beside the parameters."""
        return self.step is not None

    def compute_dtype(self, dtype: torch.dtype, name: str) -> torch.dtype:
        """The dtype in forward and backward of the parameter or buffer ``name`` that the model made in ``dtype``."""
        return self.compute if self.compute is not None and self._changes(dtype, name) else dtype

    def step_dtype(self, dtype: torch.dtype, name: str) -> torch.dtype:
        """The dtype in which the optimizer steps it."""
        return self.step if self.step is not None and self._changes(dtype, name) else dtype

    def sum_dtype(self, dtype: torch.dtype, name: str) -> torch.dtype:
        """The dtype in which gradients of several backwards are summed."""
        return self.sums if self.sums is not None and self._changes(dtype, name) else self.compute_dtype(dtype, name)

    def _changes(self, dtype: torch.dtype, name: str) -> bool:
        return dtype.is_floating_point and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.keep)

    def check(self, model: nn.Module) -> None:
        """Refuse patterns that keep nothing: a misspelt one would change numbers in silence.

        Raises:
            ConfigError: it names the pattern.
        """
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        for pattern in self.keep:
            if not fnmatch.filter(names, pattern):
                raise ConfigError(
                    f"keep_fp32: no parameter or buffer of the {type(model).__name__} has a name like {pattern!r}; "
                    f"there are, for example, {', '.join(names[:3])}"
                )

    def cast_inputs(self, inputs: Any) -> Any:
        """The inputs of the model's forward as its arithmetic wants them; any nesting of containers."""
        if self.compute is None:
            return inputs

        def cast(leaf: Any) -> Any:
            return leaf.to(self.compute) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

        return pytree.tree_map(cast, inputs)


_PRECISIONS: dict[PrecisionName, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(compute=torch.bfloat16, step=torch.float32, sums=torch.float32),
    "fp16": Precision(compute=torch.float16, step=torch.float32, sums=torch.float32),
}


def precision_of(config: Config) -> Precision:
    """The dtypes that a configuration asks for."""
    precision = dataclasses.replace(_PRECISIONS[config.precision], keep=config.keep_fp32)
    return dataclasses.replace(precision, sums=None) if config.accumulation_dtype == "same" else precision
