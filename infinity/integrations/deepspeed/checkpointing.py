"""``deepspeed.checkpointing``: recomputation by PyTorch's own checkpoint, the kind that is not reentrant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch.utils.checkpoint

from infinity.integrations.deepspeed.log import not_needed
from infinity.integrations.deepspeed.unsupported import refuse_name

_NEEDS = {
    "partition_activations": "there is no model parallelism, so there are no copies of activations to divide",
    "contiguous_checkpointing": "memory for what is kept comes from torch's allocator, which does not fragment over it",
    "num_checkpoints": "it sizes the buffers of contiguous_checkpointing",
    "synchronize": "it is for timing; engine.infinity.last_step has the times of a step",
    "profile": "engine.infinity.last_step has the times of a step",
    "mpu_": "there is no model parallelism",
    "deepspeed_config": "initialize() reads its activation_checkpointing",
}
_configured = False


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function, keeping its inputs only; backward computes it again, with the same random numbers.

    Args:
        function: what to run.
        args: its arguments.

    Returns:
        What it returns.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Take DeepSpeed's settings; what is given is reported as not needed, with the reason.

    What is kept goes to host memory and NVMe by ``activation_bytes`` in ``initialize``, or by ``cpu_checkpointing`` in
    the configuration: it belongs to an engine and its budgets, and not to the process.
    """
    global _configured
    _configured = True
    given = {
        "mpu_": mpu_,
        "deepspeed_config": deepspeed_config,
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "synchronize": synchronize,
        "profile": profile,
    }
    for name, value in given.items():
        if value:
            not_needed(f"checkpointing.configure({name}=...)", _NEEDS[name])
    if checkpoint_in_cpu:
        not_needed(
            "checkpointing.configure(checkpoint_in_cpu=True)",
            "give activation_bytes='40GiB' to initialize(), and what is kept goes to host memory and NVMe",
        )


def is_configured() -> bool:
    """Whether ``configure`` was called; ``checkpoint`` works without."""
    return _configured


def reset() -> None:
    """Nothing is kept from one step to the next."""


def __getattr__(name: str) -> NoReturn:
    known = ("checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset")
    megatron = {"get_cuda_rng_tracker", "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed"}
    reason = "it is for model parallelism; torch.manual_seed is all that one model needs" if name in megatron else None
    refuse_name("deepspeed.checkpointing", name, known, reason)
