"""Ranks of which one is killed again and again end as if that had never been: a short form of `bench/kill_ranks.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "kill_ranks.py"


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "options"), [("7", []), ("1", ["--torchrun"])], ids=["forked", "torchrun"])
def test_ranks_that_are_killed_go_on_bit_for_bit(kills: str, options: list[str], tmp_path: Path) -> None:
    document = tmp_path / "kills.json"
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    command: list[str | Path] = [
        sys.executable, SCRIPT, "--kills", kills, "--steps", "10", "--seed", "5", "--nvme", nvme, "--json", document,
        *options,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(document.read_text(encoding="utf-8"))
    assert outcome["wrong"] == []
    assert outcome["num_kills"] == int(kills)
    assert outcome["num_lives"] == outcome["num_kills"] + outcome["num_runs"]
    assert list(nvme.iterdir()) == []
