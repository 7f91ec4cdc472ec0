"""Jobs of ranks that are about the harness itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lib_kill_child import Scenario, entries, live, summary

from infinity import RanksError
from ranks_harness import Rank


def sums(rank: Rank, *, value: float) -> dict[str, Any]:
    """A collective in the default group, made from torchrun's variables."""
    dist.init_process_group("gloo")
    total = torch.tensor([value * (rank.index + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return {"total": total, "files": [each.name for each in rank.directory.iterdir()], "pid": os.getpid()}


def fails_on_one(rank: Rank, *, how: str, which: int) -> None:
    """All meet, and wait for one that does not come back."""
    dist.init_process_group("gloo")
    if rank.index == which:
        if how == "raise":
            raise ZeroDivisionError("of this rank")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        _sleep_for_ever()
    dist.all_reduce(torch.zeros(1))


def _sleep_for_ever() -> None:
    while True:
        time.sleep(1.0)


def live_and_pause(
    rank: Rank, *, scenario: dict[str, Any], nvme: str, num_steps: int, pause_at: int = -1, durable: bool = True
) -> dict[str, Any]:
    """Train as ``lib_kill_child`` does; before a step all wait until there is a file ``go-on``, and say so."""

    def before_step(step: int) -> None:
        if step == pause_at:
            (rank.directory / f"paused-{rank.index}").touch()
            while not (rank.directory / "go-on").exists():
                time.sleep(0.01)

    diary, error, began = rank.directory / f"diary-{rank.index}", "", time.monotonic()
    options: dict[str, Any] = {"durable": durable, "rank": rank.index, "before_step": before_step}
    try:
        live(Scenario(**scenario), [Path(nvme)], num_steps, diary, **options)
    except RanksError as caught:
        error = str(caught)
    told = {"error": error, "seconds": time.monotonic() - began, "host": os.uname().nodename}
    return told | {"began": entries(diary)[0]["began"], "seen": {str(k): v for k, v in summary(entries(diary)).items()}}
