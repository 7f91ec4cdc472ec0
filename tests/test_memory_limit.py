"""A state ten times the budgets trains inside a hard memory limit, and more model takes no more memory.

The formula, for a process that trains with budgets ``hbm`` and ``ram``:

    peak RSS <= base + hbm + ram + activations + overhead

where ``base`` is a process that has imported the same modules, ``activations`` are what autograd keeps from forward to
backward (about 16 activations of hidden size and the attention's and MLP's wider ones, per block, in fp32), and
``overhead`` (allocator slack, thread stacks, one part's temporaries, Python's objects) does not depend on the size of
the state.

Growth is measured with glibc's threshold for mappings of their own at 256 KiB. As it comes, glibc keeps freed blocks of
up to 32 MiB in its heap, where small objects that outlive them pin holes: two runs of the same size differed by 20 MiB
of those, with it by 1 MiB, and what the engine itself keeps per block is then seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cgroups import NoCgroupError, memory_cgroup

MIB = 1 << 20
HIDDEN, HEADS, SEQ, BATCH = 256, 4, 32, 1
HBM, RAM = 7 * MIB, 6 * MIB
SLACK = 600 * MIB


def train(layers: int, nvme: Path, procs: Path | None = None, **environment: str) -> dict[str, Any]:
    """Run the command in a subprocess that has joined the cgroup of ``procs``; returns its JSON document."""
    arguments = {
        "nvme": nvme, "layers": layers, "hidden": HIDDEN, "heads": HEADS, "seq": SEQ, "batch": BATCH, "steps": 3,
        "eval-every": 0, "hbm": HBM, "ram": RAM, "data-limit": "1MiB", "json": "-",
    }  # fmt: skip
    flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    join = "" if procs is None else f"open({str(procs)!r}, 'w').write(str(os.getpid()));"
    command = f"import os, sys; {join} from infinity.__main__ import main; main(['train', *sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", command, *flags],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-4000:]}"
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def activation_bytes(layers: int) -> int:
    """What autograd keeps from forward to backward, generously."""
    per_token = 16 * HIDDEN + 3 * 4 * HIDDEN
    return 4 * BATCH * SEQ * per_token * layers + 4 * BATCH * SEQ * 256 * 4


@pytest.mark.slow
def test_state_of_ten_times_the_budgets_trains_in_a_cgroup_of_budgets_and_600_mib(tmp_path: Path) -> None:
    try:
        with memory_cgroup(HBM + RAM + SLACK) as procs:
            result = train(11, tmp_path, procs)
    except NoCgroupError as reason:
        pytest.skip(f"needs a memory cgroup: {reason}")
    assert result["state_bytes"] >= 10 * (HBM + RAM)
    assert len(result["losses"]) == 3
    assert 0 < result["peak"]["device"] <= HBM
    assert 0 < result["peak"]["host"] <= RAM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_beyond_budgets_and_activations_does_not_grow_with_the_model(tmp_path: Path) -> None:
    def overhead(layers: int) -> int:
        result = train(layers, tmp_path, MALLOC_MMAP_THRESHOLD_=str(256 << 10))
        return int(result["peak"]["rss"]) - HBM - RAM - activation_bytes(layers)

    small, large = overhead(11), overhead(44)
    # 33 blocks more are 425 MB of state; what they may add is Python's objects, 0.2 MB per block.
    assert large - small <= 12 * MIB, f"overhead grew from {small / MIB:.0f} to {large / MIB:.0f} MiB"
