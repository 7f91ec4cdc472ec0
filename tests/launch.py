"""Start a script as several ranks, as torchrun does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from dataclasses import dataclass

PREAMBLE = """
import json, os, sys, time
import torch
torch.set_num_threads(1)
rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank ended, and what it said."""

    status: int
    output: str
    complaints: str


def run_ranks(script: str, num_ranks: int = 2, *, seconds: float = 120.0, **environment: str) -> list[Ended]:
    """Run ``script`` in ``num_ranks`` processes, in which warnings are errors; each has ``rank`` and ``num_ranks``."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PREAMBLE + textwrap.dedent(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **environment,
            },
        )
        for rank in range(num_ranks)
    ]
    said: list[tuple[str, str]] = []
    try:
        said.extend(rank.communicate(timeout=seconds) for rank in ranks)
    finally:
        for rank in ranks[len(said) :]:
            rank.kill()
            rank.communicate()
    return [Ended(rank.returncode, *words) for rank, words in zip(ranks, said, strict=True)]


def outputs(ended: list[Ended]) -> list[str]:
    """What ranks printed that all ended well."""
    for number, rank in enumerate(ended):
        assert rank.status == 0, f"rank {number} ended with {rank.status}:\n{rank.output}\n{rank.complaints}"
    return [rank.output for rank in ended]
