"""``deepspeed.comm``: who this process is, and how ranks meet. All else is ``torch.distributed``'s, after that."""

from __future__ import annotations

import datetime
from typing import Any, NoReturn

import torch

from infinity.config import Config
from infinity.engine.meeting import ensure_default_group, place, wait_for_all
from infinity.integrations.deepspeed.log import not_needed
from infinity.integrations.deepspeed.unsupported import refuse_name

DEFAULT_PORT = 29500
_TIMEOUT = datetime.timedelta(minutes=10)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: datetime.timedelta = _TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make the default group of ``torch.distributed`` from what torchrun says; of this process alone without it.

    Args:
        dist_backend: not needed: the device's own library is taken; ``"gloo"`` means the CPU.
        auto_mpi_discovery: not needed: start with torchrun.
        distributed_port: not needed: torchrun chooses it.
        verbose: taken for DeepSpeed's sake.
        timeout: how long ranks may be apart.
        init_method: not needed, as ``rank`` and ``world_size``: call ``torch.distributed.init_process_group`` before.
        dist_init_required: ``False``: make none.
        config: not needed.
        rank: see ``init_method``.
        world_size: see ``init_method``.

    Raises:
        RanksError: not all came.
    """
    if dist_init_required is False:
        return
    if distributed_port != DEFAULT_PORT:
        not_needed(f"distributed_port={distributed_port}", "torchrun chooses the port (--master-port)")
    if init_method is not None or rank >= 0 or world_size >= 0:
        not_needed(
            "init_method, rank and world_size",
            "torchrun says them; a group made by torch.distributed.init_process_group before is used",
        )
    device = torch.device("cpu") if dist_backend == "gloo" else Config().torch_device()
    ensure_default_group(device, seconds=timeout.total_seconds())


def get_rank(group: None = None) -> int:
    """This process's number among all ranks; 0 alone."""
    return place().rank


def get_world_size(group: None = None) -> int:
    """How many ranks there are; 1 alone."""
    return place().num_ranks


def get_local_rank() -> int:
    """This process's number within its host; 0 alone."""
    return place().local_rank


def barrier(group: None = None) -> None:
    """Wait until all ranks have come here.

    Raises:
        RanksError: one has ended or did not come in time.
    """
    wait_for_all()


_OF_TORCH = frozenset(
    {
        "ReduceOp",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_to_all_single",
        "broadcast",
        "broadcast_object_list",
        "destroy_process_group",
        "gather",
        "get_global_rank",
        "is_available",
        "is_initialized",
        "new_group",
        "recv",
        "reduce",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    }
)


def __getattr__(name: str) -> NoReturn:
    known = ("barrier", "get_local_rank", "get_rank", "get_world_size", "init_distributed")
    reason = f"it is torch's own: call torch.distributed.{name}" if name in _OF_TORCH else None
    refuse_name("deepspeed.comm", name, known, reason)
