"""The same training in ordinary PyTorch, all state in memory: what infinity's numbers are compared with, bit by bit."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from infinity.config import Precision
from infinity.trace import Recorder, StepStats, TierUsage


class PlainTrainer:
    """AdamW on fp32 parameters, or on fp32 masters of bf16 parameters; has the methods of ``infinity.Engine``.

    Args:
        module: the model, real.
        learning_rate: AdamW's.
        precision: as in ``Config``.
        device: where it computes.
        max_grad_norm: as in ``Config``.
    """

    last_step: StepStats | None = None
    recorder: Recorder | None = None
    unit_names: Sequence[str] = ()
    grad_norm: torch.Tensor | None = None

    def __init__(
        self,
        module: nn.Module,
        *,
        learning_rate: float,
        precision: Precision,
        device: torch.device,
        max_grad_norm: float | None = None,
    ) -> None:
        self.module = module.to(device)
        self.max_grad_norm = max_grad_norm
        self.masters = list(module.parameters())
        self.mixed: list[tuple[nn.Parameter, nn.Parameter]] = []  # each bf16 parameter and its fp32 master
        if precision == "bf16":
            self.masters = [nn.Parameter(parameter.detach().clone()) for parameter in module.parameters()]
            self.mixed = list(zip(module.to(torch.bfloat16).parameters(), self.masters, strict=True))
        self.optimizer = torch.optim.AdamW(self.masters, lr=learning_rate)
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        # fp32: parameter, gradient, two moments; bf16: these four of the master, the parameter and its gradient.
        self.state_bytes = self.num_parameters * (20 if self.mixed else 16)

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.module(tokens, targets)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of ``loss`` to those of the step, for masters in fp32."""
        torch.autograd.backward(loss)
        for parameter, master in self.mixed:
            assert parameter.grad is not None
            master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters and drop the gradients."""
        if self.max_grad_norm is not None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for parameter, master in self.mixed:
            parameter.copy_(master)

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """The fp32 weights by name."""
        return {name: m.detach() for (name, _), m in zip(self.module.named_parameters(), self.masters, strict=True)}

    def usage(self) -> dict[str, TierUsage]:
        """Nothing: there are no tiers."""
        return {}

    def close(self) -> None:
        """Nothing to close."""
