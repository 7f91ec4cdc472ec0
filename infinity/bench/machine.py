"""The machine as figures of a benchmark name it, and how fast its device computes."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import psutil
import torch

from infinity.io.open import Choice
from infinity.machine.host import host_facts
from infinity.machine.memory import cpu_name
from infinity.machine.paths import PathFacts


def machine_document(facts: Sequence[PathFacts], choices: Sequence[Choice], device: str) -> dict[str, Any]:
    """The machine as JSON holds it.

    Args:
        facts: of each directory.
        choices: of each directory, which I/O backend and why.
        device: name of the device tier.
    """
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "ram": psutil.virtual_memory().total,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        **asdict(host_facts()),
        "paths": [
            {**asdict(fact), "backend": choice.name, "direct": choice.direct, "reasons": list(choice.reasons)}
            for fact, choice in zip(facts, choices, strict=True)
        ],
    }


def matmul_tflops(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.15) -> float:
    """How many 1e12 operations per second the device multiplies matrices at: the best of what fits the time.

    Args:
        device: where; torch's own setting of threads and of reduced precision holds.
        dtype: of the matrices.
        seconds: about how long; a slow device takes at least three products.
    """
    size = 512 if device.type == "cpu" else 4096
    left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    best = float("inf")
    end = time.perf_counter() + seconds
    num_done = 0
    while num_done < 3 or time.perf_counter() < end:
        _synchronize(device)
        began = time.perf_counter()
        torch.mm(left, right, out=product)
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
        num_done += 1
    return 2 * size**3 / best / 1e12


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
