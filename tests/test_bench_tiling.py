"""``bench/tiling.py``: a small run, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiling

FLAGS = ["--layers", "2", "--hidden", "32", "--heads", "2", "--work", "2x8", "--hbm", "256KiB", "--ram", "1MiB"]


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "document.json"
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    flags = ["--nvme", str(nvme), *FLAGS, "--vocab", "4096", "--rounds", "2", "--steps", "1", "--json", str(document)]
    tiling.main(flags)
    assert not list(nvme.iterdir())
    written = json.loads(document.read_text())
    untiled, same_ram, tiles = written["rows"]
    assert "(tied) token_embedding 512KiB" in written["refusal"]
    assert "infinity.tile_large_layers(model, 65536)" in written["refusal"]
    assert untiled["device_peak_bytes"] >= 512 << 10
    for row in (same_ram, tiles):
        assert row["device_peak_bytes"] <= row["hbm"] == 256 << 10
        assert 0 <= row["largest_loss_difference"] < 1e-5
    assert tiles["host_peak_bytes"] <= tiles["ram"] == 1 << 20
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_budgets_that_suffice_without_tiles_show_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="the model fits --hbm and --ram without tiles; give less"):
        tiling.main(["--nvme", str(tmp_path), *FLAGS, "--vocab", "256"])
