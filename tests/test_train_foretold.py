"""After a run: what a plan says of a step, beside what was measured."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from infinity.config import Config
from infinity.console.interrupt import StopRequest
from infinity.trace import RouteStats, StepStats, UnitStats
from infinity.train.foretold import FEWEST_STEPS, NUM_SETTLING, Foretold, foretell
from infinity.train.history import History
from infinity.train.run import run
from infinity.train.settings import TrainSettings

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 2, "seq": 16, "batch": 2, "eval_every": 0}
NUM_STEPS = NUM_SETTLING + FEWEST_STEPS
ROUTES = {"nvme_read": RouteStats(10_000, 0.01, 0.001, 0.002), "nvme_write": RouteStats(10_000, 0.01, 0.001, 0.001)}


def history_of(num_steps: int = NUM_STEPS, **fields: Any) -> History:
    """Steps of two seconds, three quarters of which are forward and backward; the first took twice as long."""
    history = History(tokens_per_step=32)
    for number in range(1, num_steps + 1):
        factor = 2.0 if number <= NUM_SETTLING else 1.0
        stats = StepStats(
            number, 2.0 * factor, 0.0, 0.0, 0, 0, 4, 0, compute_seconds=2.0 * factor,
            units={"all": UnitStats(0.5 * factor, 1.0 * factor, 0.5 * factor)},
        )  # fmt: skip
        history.note_stats(dataclasses.replace(stats, **fields))
    return history


def foretold(history: History, config: Config | None = None, **others: Any) -> Foretold | None:
    return foretell(
        TrainSettings(**SMALL), config or Config(device="cpu"), history, **{
            "state_bytes": 1_600_000, "device": CPU, "num_ranks": 1, **others
        },
    )  # fmt: skip


def test_in_memory_a_step_is_as_long_as_what_it_computes() -> None:
    found = foretold(history_of())
    assert found is not None
    assert found.measured_seconds == 2.0
    assert found.predicted_seconds == pytest.approx(2.0, rel=0.2), "arithmetic of settled steps, and the optimizer's"
    assert (found.predicted_read_bytes, found.predicted_written_bytes) == (0, 0)
    assert "measured (" in str(found)
    assert "read" not in str(found)


def test_the_disk_is_as_fast_as_the_run_saw_it(tmp_path: Path) -> None:
    config = Config(device="cpu", nvme=[str(tmp_path)], hbm="500kB", ram="700kB")
    found = foretold(history_of(routes=ROUTES, nvme_read_bytes=3_000_000, nvme_written_bytes=2_000_000), config)
    assert found is not None
    assert found.predicted_seconds > found.predicted_written_bytes / 1e6 > 0
    assert (found.measured_read_bytes, found.measured_written_bytes) == (3_000_000, 2_000_000)
    assert "read" in str(found)
    assert "written" in str(found)


def test_nothing_is_said_where_there_is_nothing_to_compare() -> None:
    assert foretold(history_of(NUM_STEPS - 1)) is None
    assert foretold(history_of(), num_ranks=2) is None
    assert foretold(history_of(), device=torch.device("cuda")) is None
    assert foretold(history_of(commit_seconds=0.5)) is None
    assert foretold(history_of(units={})) is None


def test_a_run_ends_with_its_plan(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    shown = io.StringIO()
    with StopRequest() as stop:
        report = run(
            TrainSettings(**SMALL, steps=NUM_STEPS, data=tmp_path / "text.txt"),
            Config(device="cpu", nvme=[str(tmp_path / "nvme")], hbm="500kB", ram="700kB"),
            Console(file=shown, width=120),
            stop,
        )
    found = report.foretold
    assert isinstance(found, Foretold)
    assert "planned step" in shown.getvalue()
    assert report.as_document()["foretold"] == dataclasses.asdict(found)
    assert found.predicted_written_bytes == pytest.approx(found.measured_written_bytes, rel=0.5)
