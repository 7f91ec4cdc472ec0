"""``bench/commit.py``: its bars, its flags, and a run of a tiny model that leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import commit
import pytest


def document(*, beside: float = 1.0, extra: float = 1.0, seconds: float = 0.5) -> dict[str, Any]:
    def row(budget: str) -> dict[str, Any]:
        over = {"every step": {"median": beside}, "checked reads": {"median": 1.0}}
        written = {"off": 100.0, "every step": 100.0 * extra}
        shown = {"budget": budget, "over_off": over, "written_bytes": written, "same_losses": True}
        return {**shown, "commit_seconds": {"median": seconds}}

    saved = {"seconds": {"median": 1.0}}
    return {"rows": [row(budget) for budget in commit.SHARES], "torch_save": saved, "deepspeed": saved}


def test_what_is_missed_is_found() -> None:
    assert all(check.met for check in commit.checks_of(document()))
    for slow, num_missed in (({"beside": 1.2}, 3), ({"extra": 1.1}, 1), ({"seconds": 1.5}, 6)):
        missed = [check for check in commit.checks_of(document(**slow)) if not check.met]
        assert len(missed) == num_missed, slow


@pytest.mark.parametrize("flags", [["--heads", "3"], ["--work", "1x999"], ["--nvme", "/nowhere"]])
def test_flags_that_are_refused(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        commit.parse(["--nvme", str(tmp_path), *flags])


def test_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(commit, "SHARES", {"least": 0.0})
    nvme, result = tmp_path / "nvme", tmp_path / "result.json"
    nvme.mkdir()
    flags = ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "8", "--vocab", "64", "--work", "1x8"]
    commit.main(["--nvme", str(nvme), *flags, "--rounds", "1", "--steps", "1", "--json", str(result)])
    written = json.loads(result.read_text())
    [row] = written["rows"]
    assert row["same_losses"]
    assert row["commit_bytes"] > 0
    assert "skipped" in written["deepspeed"]
    assert "needs about" in capsys.readouterr().out
    assert list(nvme.iterdir()) == []
