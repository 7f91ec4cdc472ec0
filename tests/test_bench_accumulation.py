"""``bench/accumulation.py``: its bars, its flags, and a run of a tiny model that leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accumulation
import pytest


def document(**param_bytes: int) -> dict[str, Any]:
    rows = [
        {"schedule": schedule, "micro_batches": count, "param_bytes": param_bytes[f"{schedule}_{count}"]}
        for schedule in accumulation.SCHEDULES
        for count in accumulation.COUNTS
    ]
    return {"rows": rows, "same_losses": True}


def test_parameters_are_to_be_read_once_per_step() -> None:
    good = {"horizontal_1": 10, "horizontal_4": 40, "horizontal_16": 160}
    good |= {"vertical_1": 10, "vertical_4": 10, "vertical_16": 10}
    assert all(check.met for check in accumulation.checks_of(document(**good)))
    worse = accumulation.checks_of(document(**good | {"vertical_16": 30}) | {"same_losses": False})
    assert [check.met for check in worse] == [False, False, False]


@pytest.mark.parametrize("flags", [["--heads", "3"], ["--work", "1x64"], ["--nvme", "/nowhere"]])
def test_flags_that_are_refused(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        accumulation.parse(["--nvme", str(tmp_path), *flags])


def test_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(accumulation, "COUNTS", (1, 2, 3))
    nvme, result = tmp_path / "nvme", tmp_path / "result.json"
    nvme.mkdir()
    flags = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "8", "--work", "1x8", "--rounds", "1"]
    accumulation.main(["--nvme", str(nvme), *flags, "--json", str(result)])
    written = json.loads(result.read_text())
    assert [(row["micro_batches"], row["schedule"]) for row in written["rows"]] == [
        (count, schedule) for count in (1, 2, 3) for schedule in accumulation.SCHEDULES
    ]
    assert written["same_losses"]
    assert "needs about" in capsys.readouterr().out
    assert list(nvme.iterdir()) == []
