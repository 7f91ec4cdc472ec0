"""Budgets where a configuration has none: DeepSpeed knows devices, not bytes."""

from __future__ import annotations

import os

import torch

from infinity.machine.memory import available_memory_bytes

_LEAST = 64 << 20
_NVME_SHARE, _RAM_SHARE, _ARENA_SHARE, _DEVICE_SHARE = 4, 2, 8, 2


def default_budgets(device: torch.device, *, on_nvme: bool) -> dict[str, int]:
    """``hbm`` and ``ram`` of this rank, in bytes.

    Of the host memory that is available now, for all ranks of the machine: a half for ``ram``, a quarter where state
    may live on NVMe; and an eighth for ``hbm`` where the device is the CPU. Of an accelerator's free memory a half,
    beside which activations and kernels have theirs.

    Args:
        device: where arithmetic runs.
        on_nvme: whether there are directories for what does not fit.
    """
    num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    host = available_memory_bytes() // num_ranks
    if device.type == "cpu":
        hbm = host // _ARENA_SHARE
    else:
        hbm = torch.accelerator.get_memory_info(device)[0] // _DEVICE_SHARE
    return {"hbm": max(_LEAST, hbm), "ram": max(_LEAST, host // (_NVME_SHARE if on_nvme else _RAM_SHARE))}
