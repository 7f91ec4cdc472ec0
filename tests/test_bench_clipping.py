"""``bench/clipping.py``: which steps it clips, its bar, its flags, and a run of a tiny model that leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import clipping
import pytest


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 0), (0.1, 10), (0.5, 50), (1.0, 100)])
def test_as_many_steps_are_clipped_as_wanted(rate: float, expected: int) -> None:
    clipped = [clipping.is_clipped(step, rate) for step in range(100)]
    assert sum(clipped) == expected
    assert not clipped[0] or rate == 1.0


def test_other_numbers_miss_the_bar() -> None:
    assert [check.met for check in clipping.checks_of({"rows": [{"same": True}, {"same": True}]})] == [True]
    assert [check.met for check in clipping.checks_of({"rows": [{"same": True}, {"same": False}]})] == [False]


@pytest.mark.parametrize("flags", [["--heads", "3"], ["--work", "1x640"], ["--nvme", "/nowhere"]])
def test_flags_that_are_refused(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        clipping.parse(["--nvme", str(tmp_path), *flags])


def test_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(clipping, "RATES", (0.0, 0.5))
    nvme, result = tmp_path / "nvme", tmp_path / "result.json"
    nvme.mkdir()
    flags = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "8", "--vocab", "64", "--work", "1x8"]
    flags += ["--rounds", "1", "--steps", "3", "--json", str(result)]
    assert clipping.main(["--nvme", str(nvme), *flags]) == 0
    rows = json.loads(result.read_text())["rows"]
    assert [(row["rate"], row["speculation"]) for row in rows] == [
        (rate, mode) for rate in (0.0, 0.5) for mode in clipping.MODES
    ]
    assert all(row["same"] for row in rows)
    assert "needs about" in capsys.readouterr().out
    assert list(nvme.iterdir()) == []
