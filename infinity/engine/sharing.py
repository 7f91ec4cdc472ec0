"""What micro-batches that take turns share without knowing it: settings of the process, and the model as an object.

``ProcessSettings`` are PyTorch's and Python's settings that a context manager of the user's may change for a while
(``sdpa_kernel``, ``backends.mkldnn.flags``, ``detect_anomaly``, ``catch_warnings``). They are the process's, so each
micro-batch takes its own along, as it does with random generators.

``ModelState`` finds what cannot be taken along: a parameter exchanged for the time of a call
(``torch.func.functional_call``), a module switched to ``eval()``, a parameter frozen for one micro-batch. Others would
compute with it, so it is refused where one would hand over. Values that a module keeps in attributes cannot be seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.errors import EngineStateError

_SDPA = ("flash", "mem_efficient", "math", "cudnn")


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings of the process at some time."""

    default_dtype: torch.dtype
    anomaly: tuple[bool, bool]
    deterministic: tuple[bool, bool]
    matmul_precision: str
    mkldnn: bool
    cudnn: tuple[bool, bool, bool]
    sdpa: Sequence[bool]
    sdpa_order: Sequence[int]
    filters: Any
    showwarning: Any

    @classmethod
    def now(cls) -> ProcessSettings:
        """Those in force."""
        sdpa = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _SDPA]
        return cls(
            torch.get_default_dtype(),
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            torch.get_float32_matmul_precision(),
            torch._C._get_mkldnn_enabled(),
            (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
            sdpa,
            torch._C._get_sdp_priority_order(),
            warnings.filters,
            warnings.showwarning,
        )

    def restore(self) -> None:
        """Put them in force again, as far as others are."""
        now = ProcessSettings.now()
        if now.default_dtype != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if now.anomaly != self.anomaly:
            torch.set_anomaly_enabled(*self.anomaly)
        if now.deterministic != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        if now.matmul_precision != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        if now.mkldnn != self.mkldnn:
            torch._C._set_mkldnn_enabled(self.mkldnn)
        if now.cudnn != self.cudnn:
            cudnn = torch.backends.cudnn
            cudnn.enabled, cudnn.benchmark, cudnn.deterministic = self.cudnn
        for name, before, after in zip(_SDPA, now.sdpa, self.sdpa, strict=True):
            if before != after:
                getattr(torch.backends.cuda, f"enable_{name}_sdp")(after)
        if now.sdpa_order != self.sdpa_order:
            torch._C._set_sdp_priority_order(list(self.sdpa_order))
        if now.filters is not self.filters:
            warnings.filters = self.filters
            getattr(warnings, "_filters_mutated", lambda: None)()  # a cache of what they say
        warnings.showwarning = self.showwarning


class ModelState:
    """A model as it was when micro-batches began to take turns.

    Args:
        model: the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._training = {name: module.training for name, module in self._modules.items()}
        self._params = {name: tuple(module._parameters.values()) for name, module in self._modules.items()}
        self._wanted = {param: param.requires_grad for param in model.parameters()}

    def check(self) -> None:
        """Refuse to hand over a model that is another one for the time being.

        Raises:
            EngineStateError: it is; says what differs.
        """
        for name, module in self._modules.items():
            if module.training != self._training[name]:
                self._refuse(name, "was switched between train() and eval()")
            if tuple(map(id, module._parameters.values())) != tuple(map(id, self._params[name])):
                self._refuse(name, "has other parameters for the time being (torch.func.functional_call, parametrize)")
        for param, wanted in self._wanted.items():
            if param.requires_grad != wanted:
                owner = next(name for name, params in self._params.items() if any(each is param for each in params))
                self._refuse(owner, "has a parameter whose requires_grad was changed")

    def buffers(self) -> list[tuple[int, int]]:
        """What tells whether a buffer has been changed or exchanged meanwhile."""
        return [
            (id(buffer), buffer._version)
            for module in self._modules.values()
            for buffer in module._buffers.values()
            if buffer is not None and not buffer.is_inference()
        ]

    def refuse_buffers(self, before: list[tuple[int, int]]) -> None:
        """Refuse buffers that a recomputation changes: in which order all change them then is another.

        Raises:
            EngineStateError: there is one.
        """
        if self.buffers() != before:
            raise EngineStateError(
                "a buffer (of BatchNorm, spectral_norm, …) was changed when a block was recomputed in backward; with "
                "micro-batches that take turns, buffers would change in another order than one after the other: set "
                "accumulation='horizontal'"
            )

    def _refuse(self, name: str, what: str) -> None:
        raise EngineStateError(
            f"module {name or 'model'} {what} inside compute_loss, while micro-batches take turns: the others would "
            "run with it too; set accumulation='horizontal'"
        )
