"""Tries whether two processes of this machine can meet and exchange tensors, as ranks do: ``meet_here``.

Each is this file as a program: a process of its own, since a process has one default group.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

_NUM_RANKS = 2
_MEETING_SECONDS = 20.0
_PATIENCE_SECONDS = 60.0
"""For the whole: importing torch takes seconds, on a busy machine many."""


def meet_here(*, seconds: float = _PATIENCE_SECONDS) -> tuple[float | None, str | None]:
    """Let two processes meet over gloo, and add up.

    Args:
        seconds: when to give up.

    Returns:
        How long the two took once they had begun, and ``None``; or ``None``, and what went wrong.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **inherited,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(_NUM_RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(_NUM_RANKS)
    ]
    deadline = time.monotonic() + seconds
    try:
        said = [rank.communicate(timeout=max(0.1, deadline - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        return None, f"two processes did not meet within {seconds:g} s"
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for rank, (_, complaints) in zip(ranks, said, strict=True):
        if rank.returncode != 0:
            lines = complaints.strip().splitlines() or [f"a process ended with {rank.returncode}"]
            return None, lines[-1]
    return max(float(output) for output, _ in said), None


def main() -> None:
    """Be one of the two, and print how many seconds it took."""
    import torch

    from infinity.engine.meeting import open_process_group

    began = time.perf_counter()
    collectives = open_process_group(torch.device("cpu"), timeout_seconds=_MEETING_SECONDS)
    rank, output = int(os.environ["RANK"]), torch.empty(2 * _NUM_RANKS)
    collectives.all_gather_into(output, torch.full((2,), float(rank)))
    expected = torch.arange(_NUM_RANKS, dtype=torch.float32).repeat_interleave(2)
    if not torch.equal(output, expected):
        sys.exit(f"gloo gathered {output.tolist()} where {expected.tolist()} was sent")
    collectives.barrier()
    collectives.close()
    sys.stdout.write(f"{time.perf_counter() - began}\n")


if __name__ == "__main__":
    main()
