"""The same training in ordinary PyTorch, all state in memory: what infinity's numbers are compared with, bit by bit."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.compiled import check_compiling, compile_forward
from infinity.engine.precision import precision_of
from infinity.engine.summary import Summary
from infinity.engine.wrap import find_blocks
from infinity.trace import Recorder, StepStats, TierUsage
from infinity.train.data import Batch


class PlainTrainer:
    """AdamW on fp32 parameters, or on fp32 masters of bf16 or fp16 parameters; has the methods of ``infinity.Engine``.

    Args:
        module: the model, real.
        learning_rate: AdamW's.
        config: its precision, loss scale, ``max_grad_norm`` and what is to be compiled count.
        device: where it computes.
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
        config: Config,
        device: torch.device,
    ) -> None:
        check_compiling(config, device)
        self.module = module.to(device)
        self._device = device
        for block in find_blocks(module, config.units, setting="compile").values() if config.compile else ():
            block.forward = compile_forward(block, config.compile_backend)
        self.max_grad_norm = config.max_grad_norm
        self.masters = list(module.parameters())
        self.mixed: list[tuple[nn.Parameter, nn.Parameter]] = []  # each bf16 parameter and its fp32 master
        self.scaler = torch.amp.GradScaler(
            device.type,
            init_scale=config.initial_loss_scale,
            growth_interval=config.loss_scale_window,
            enabled=config.precision == "fp16",
        )
        self.num_skipped_steps = 0
        self._sums_alike = config.accumulation_dtype == "same"
        precision = precision_of(config)
        precision.check(module)
        for index, (name, parameter) in enumerate(module.named_parameters()):
            compute = precision.compute_dtype(parameter.dtype, name)
            if compute != parameter.dtype:
                self.masters[index] = nn.Parameter(parameter.detach().clone())
                self.mixed.append((parameter, self.masters[index]))
                parameter.data = parameter.data.to(compute)
        self.optimizer = torch.optim.AdamW(self.masters, lr=learning_rate)
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        # Parameter, gradient and two moments in fp32; or these four of the master, the parameter and its gradient.
        num_mixed = sum(parameter.numel() for parameter, _ in self.mixed)
        self.state_bytes = self.num_parameters * 16 + num_mixed * 4

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.module(tokens, targets)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of ``loss`` to those of the step."""
        self.scaler.scale(loss).backward()
        if not self._sums_alike:
            self._take_gradients()

    def _take_gradients(self) -> None:
        """Add gradients in 16 bits to those of the masters in fp32."""
        for parameter, master in self.mixed:
            assert parameter.grad is not None
            master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
            parameter.grad = None

    def accumulate(
        self, micro_batches: Iterable[Batch], compute_loss: Callable[[Batch], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Forward and backward of each micro-batch, which begins with a seed of its own; the losses."""
        micro_batches = list(micro_batches)
        seeds = torch.randint(2**63 - 1, (len(micro_batches),)).tolist()
        losses, devices = [], [] if self._device.type == "cpu" else [self._device]
        with torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"):
            for micro_batch, seed in zip(micro_batches, seeds, strict=True):
                torch.manual_seed(seed)
                loss = compute_loss(micro_batch)
                self.backward(loss)
                losses.append(loss.detach())
        return losses

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters and drop the gradients."""
        if self._sums_alike:
            self._take_gradients()
        self.scaler.unscale_(self.optimizer)
        if self.max_grad_norm is not None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        self.scaler.step(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        self.num_skipped_steps += self.scaler.get_scale() < before
        self.optimizer.zero_grad()
        for parameter, master in self.mixed:
            parameter.copy_(master)

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """The fp32 weights by name."""
        return {name: m.detach() for (name, _), m in zip(self.module.named_parameters(), self.masters, strict=True)}

    def usage(self) -> dict[str, TierUsage]:
        """Nothing: there are no tiers."""
        return {}

    def summary(self) -> Summary | None:
        """Nothing: there are no budgets."""
        return None

    def collective_bytes(self) -> dict[str, int]:
        """Nothing: there are no other ranks."""
        return {}

    def close(self) -> None:
        """Nothing to close."""
