"""Training that is killed again and again ends as if it had never been: a short form of `bench/kill_loop.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "kill_loop.py"


@pytest.mark.slow
def test_training_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    document = tmp_path / "kills.json"
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    command: list[str | Path] = [
        sys.executable, SCRIPT, "--kills", "10", "--steps", "12", "--seed", "5", "--nvme", nvme, "--json", document
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(document.read_text(encoding="utf-8"))
    assert outcome["wrong"] == []
    assert outcome["num_kills"] == 10
    assert outcome["num_lives"] == outcome["num_kills"] + outcome["num_runs"]
    assert list(nvme.iterdir()) == []
