"""``Trainer``: the calls that training makes, the same with infinity and without it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.utils.deterministic
from torch import nn

import infinity
from infinity.config import Config
from infinity.engine.meeting import started_as_ranks
from infinity.engine.summary import Summary
from infinity.errors import BudgetError, ConfigError
from infinity.trace import Recorder, StepStats, TierUsage
from infinity.train.data import Batch
from infinity.train.model import GPT
from infinity.train.plain import PlainTrainer
from infinity.train.settings import TrainSettings


class Trainer(Protocol):
    """What ``run`` needs of an ``infinity.Engine``; ``PlainTrainer`` has it too."""

    @property
    def module(self) -> nn.Module:
        """The model, for ``train()`` and ``eval()``."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What steps; its ``param_groups`` count as they are at each step."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, master weights, gradients and optimizer states."""

    @property
    def unit_names(self) -> Sequence[str]:
        """What is gathered together; empty without tiers."""

    @property
    def last_step(self) -> StepStats | None:
        """The figures of the last step; ``None`` before the first, or without tiers."""

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of the last step's gradients before they were clipped; ``None`` where they are not."""

    @property
    def num_skipped_steps(self) -> int:
        """Steps that changed nothing, because a gradient had overflowed in fp16."""

    @property
    def recorder(self) -> Recorder | None:
        """Where it records what it does; ``None`` without tiers."""

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss, an fp32 scalar; see ``GPT.forward``."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of ``loss`` to those of the step, in fp32."""

    def accumulate(
        self, micro_batches: Iterable[Batch], compute_loss: Callable[[Batch], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Forward and backward of each micro-batch; the losses.

        Raises:
            MicroBatchError: one failed; plain PyTorch raises what it failed with itself.
        """

    def step(self) -> object:
        """Update the parameters and drop the gradients."""

    def usage(self) -> dict[str, TierUsage]:
        """What each tier holds, by name; empty without tiers."""

    def summary(self) -> Summary | None:
        """What the state takes on this rank, and what it leaves of each budget; ``None`` without tiers."""

    def collective_bytes(self) -> Mapping[str, int]:
        """What this rank has sent to others so far, by kind of collective; empty without others."""

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """The fp32 weights by name, each fetched when it is asked for."""

    def close(self) -> None:
        """Give back all memory and files."""


MakeTrainer = Callable[[TrainSettings, Config, torch.device], Trainer]


def make_trainer(settings: TrainSettings, config: Config, device: torch.device) -> Trainer:
    """The model with the weights that ``settings.seed`` gives, and what trains it: the engine or ordinary PyTorch.

    Raises:
        ConfigError: the configuration counts other backwards in a step than the settings.
        InfinityError: the engine refuses the configuration.
    """
    torch.manual_seed(settings.seed)
    config = _with_accumulation(config, settings)
    if settings.plain and started_as_ranks():
        raise ConfigError("--plain: ordinary PyTorch trains in one process here; start it without torchrun")
    if settings.plain:
        return PlainTrainer(
            GPT(dataclasses.replace(settings.shape(), recompute=config.recompute)),
            learning_rate=settings.learning_rate,
            config=_for_plain(config),
            device=device,
        )
    with infinity.deferred_init():
        model = GPT(settings.shape())
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    try:
        return infinity.initialize(model, optimizer, config)
    except BudgetError as error:
        if config.nvme:
            raise
        raise BudgetError(
            f"{error}\nGive a directory on a fast disk, --nvme DIR (for example --nvme /tmp/infinity), or enough "
            "memory, --ram SIZE; or train without infinity, --plain"
        ) from error


def _with_accumulation(config: Config, settings: TrainSettings) -> Config:
    """The configuration with the number of backwards in a step, which this command knows."""
    if config.accumulation_steps not in (None, settings.num_micro_batches):
        raise ConfigError(
            f"--accumulation-steps: got {config.accumulation_steps}, but --accumulate makes a step of "
            f"{settings.num_micro_batches} backwards; give --accumulate alone"
        )
    return config.model_copy(update={"accumulation_steps": settings.num_micro_batches})


def _for_plain(config: Config) -> Config:
    """The configuration, if ordinary PyTorch can do the same."""
    for name in ("loss_scale", "loss_scale_hysteresis", "min_loss_scale"):
        value = getattr(config, name)
        if value != Config.model_fields[name].default:
            raise ConfigError(
                f"--{name.replace('_', '-')}: got {value} with --plain, but PyTorch's GradScaler has no such setting"
            )
    return config


@contextlib.contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Have an accelerator use kernels that give the same bits every time; those of the CPU do anyway."""
    if device.type == "cpu":
        yield
        return
    memory: Any = torch.utils.deterministic  # its one attribute is a property that type checkers do not see
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS demands it, before its first use
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


def parameter_shapes(settings: TrainSettings) -> dict[str, torch.Size]:
    """The shape of each parameter by name, found without memory for any of them."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in GPT(settings.shape()).named_parameters()}
