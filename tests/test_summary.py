"""What is told of a model's state before training: the engine's figures, and their table."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import infinity
from infinity.config import Config
from infinity.engine.summary import Summary, TierSummary
from infinity.engine.traffic import kept, state_of
from infinity.errors import EngineStateError
from infinity.train.sizes import summary_table

MIB = 1 << 20


def test_the_summary_of_an_engine(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)))
    config = Config(device="cpu", hbm="4MiB", ram="1MiB", nvme=tmp_path, precision="bf16")
    with infinity.initialize(model, torch.optim.AdamW(model.parameters()), config) as engine:
        summary, plan = engine.summary(), engine._plan
        state = state_of(plan.parts, plan.format_of, plan.state_format_of)
        assert summary.kept == kept(state, 0, 1)
        assert sum(summary.kept.values()) == engine.state_bytes
        assert (summary.num_parameters, summary.num_ranks, summary.stage) == (engine.num_parameters, 1, 0)
        device, host, nvme = (summary.tiers[name] for name in ("device", "host", "nvme"))
        assert (device.budget, device.holds + device.remains) == (4 * MIB, 4 * MIB)
        assert device.holds == state.params
        assert (host.budget, host.holds, host.remains) == (MIB, MIB, 0)
        assert nvme.holds == nvme.needed == engine.state_bytes - MIB
        assert nvme.remains > 0
        assert device.needed == max(unit.num_bytes for unit in plan.units)
        assert 0 < host.needed <= MIB
    with pytest.raises(EngineStateError):
        engine.summary()


def shown(summary: Summary) -> list[str]:
    printed = io.StringIO()
    Console(file=printed, width=120).print(summary_table(summary))
    return printed.getvalue().splitlines()


def test_the_table_says_what_is_divided_and_what_remains() -> None:
    tiers = {
        "device": TierSummary(32_000_000, 2_000_000, 10_000_000, 22_000_000),
        "nvme": TierSummary(None, 5_000_000, 5_000_000, 9_000_000_000),
    }
    lines = shown(Summary(1234567, 4, 2, {"gathered parameters": 7_000_000, "gradients": 3_000_000}, tiers))
    said = "\n".join(lines)
    assert "state on each of 4 ranks" in said
    assert "gradients, 1/4" in said
    assert "gathered parameters, 1/4" not in said
    [everything] = [line for line in lines if "all of it" in line]
    assert "10 MB" in everything
    [device] = [line for line in lines if "device" in line]
    assert [cell.strip() for cell in device.split("│")[1:-1]] == ["device", "10 MB", "32 MB", "2 MB", "22 MB"]
    assert "9 GB on disk" in said
    assert "1,234,567 parameters; stage 2 divides master weights, optimizer states, gradients" in " ".join(said.split())
    alone = "\n".join(shown(Summary(1000, 1, 0, {"gradients": 3_000_000}, {})))
    assert "1,000 parameters" in alone
    assert "stage" not in alone
