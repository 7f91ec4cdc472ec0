"""Saved weights, the status line and the figures, each by itself."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from rich.console import Console

from infinity.console.formats import format_bytes, format_seconds
from infinity.console.interrupt import StopRequest
from infinity.errors import StorageError
from infinity.trace import StepStats, TierUsage, UnitStats
from infinity.train.history import History
from infinity.train.live import Display, status_lines
from infinity.train.report import format_waits
from infinity.train.save import save_weights


class OneAtATime(Mapping[str, torch.Tensor]):
    """Weights that are made on access and fail after the first few."""

    def __init__(self, names: list[str], num_good: int) -> None:
        self.names, self.num_good = names, num_good
        self.fetched: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        if len(self.fetched) == self.num_good:
            raise StorageError("read failed", path="shard")
        self.fetched.append(name)
        return torch.full((2, 3), float(len(self.fetched)), dtype=torch.bfloat16)

    def __iter__(self) -> Any:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def test_weights_are_fetched_once_each(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    weights = OneAtATime(names, 3)
    file = tmp_path / "w.safetensors"
    size_bytes = save_weights(file, weights, dict.fromkeys(names, torch.Size((2, 3))))
    assert weights.fetched == names
    assert file.stat().st_size == size_bytes
    assert {name: tensor[1, 2].item() for name, tensor in safetensors.torch.load_file(file).items()} == {
        "a": 1.0,
        "b": 2.0,
        "c": 3.0,
    }


def test_a_failed_save_keeps_the_former_file_and_leaves_none_behind(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    file = tmp_path / "w.safetensors"
    file.write_text("former")
    with pytest.raises(StorageError, match="read failed"):
        save_weights(file, OneAtATime(names, 2), dict.fromkeys(names, torch.Size((2, 3))))
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    assert file.read_text() == "former"


def make_history(**figures: Any) -> History:
    return History(tokens_per_step=1000, **figures)


def test_the_status_says_where_a_run_stands_and_where_its_time_goes() -> None:
    stats = StepStats(
        step=3,
        seconds=2.0,
        stall_seconds=0.4,
        optimizer_seconds=0.1,
        nvme_read_bytes=3_000_000_000,
        nvme_written_bytes=1_000_000_000,
        num_gathers=4,
        num_stalls=1,
        compute_seconds=1.4,
        stalls={"read": 0.4, "optimizer": 0.1},
        overlap_share=0.875,
        achieved=0.75,
    )
    history = make_history(
        losses=[3.0, 2.0, 1.5], step_seconds=[2.0, 2.0, 2.0], step_stats=[stats], eval_steps=[0], eval_losses=[5.5]
    )
    usage = {
        "device": TierUsage(25_000_000, 30_000_000, 33_554_432),
        "host": TierUsage(0, 0, 0),
        "nvme": TierUsage(504_000_000, 504_000_000, 608_000_000),
    }
    lines = status_lines(history, usage, num_steps=33)
    assert lines == [
        "step 3/33 · loss 1.5000 · held-out 5.5000 · 500 tokens/s · ETA 1:00",
        "device 25/33.6 MB · nvme 504/608 MB · nvme read 1.50 + write 0.50 GB/s",
        "computing 70% · waiting 25% (disk 20%, optimizer 5%) · NVMe 88% under compute · 75% of the roofline",
    ]
    assert max(map(len, lines)) <= 100
    assert status_lines(make_history(), {}, num_steps=33) == ["step 0/33"]


def test_without_nvme_nothing_is_said_of_it() -> None:
    stats = StepStats(1, 2.0, 0.0, 0.0, 0, 0, 4, 0, compute_seconds=1.0, achieved=0.5)
    history = make_history(losses=[3.0], step_seconds=[2.0], step_stats=[stats])
    assert status_lines(history, {}, num_steps=2)[1:] == ["computing 50% · waiting 0% · 50% of the roofline"]


def test_waits_are_told_by_cause_as_far_as_they_show() -> None:
    def step(**stalls: float) -> StepStats:
        return StepStats(1, 2.0, 0.0, 0.0, 0, 0, 0, 0, stalls=stalls)

    assert format_waits([]) == "0%"
    assert format_waits([step()]) == "0%"
    assert format_waits([step(room=0.001, read=0.5)]) == "25% (disk 25%)"
    assert format_waits([step(room=0.01, read=0.5), step(optimizer=1.0)], digits=1) == (
        "37.8% (disk 12.5%, memory 0.2%, optimizer 25.0%)"
    )


def test_a_history_keeps_units_as_sums() -> None:
    history = make_history()
    for seconds in (1.0, 2.0):
        unit = UnitStats(forward_seconds=seconds, stalls={"read": seconds})
        history.note_stats(StepStats(1, 2.0, 0.0, 0.0, 0, 0, 0, 0, units={"blocks.0": unit}))
    assert history.unit_stats == {"blocks.0": UnitStats(forward_seconds=3.0, stalls={"read": 3.0})}
    assert [step.units for step in history.step_stats] == [{}, {}]


def test_plain_lines_come_now_and_then() -> None:
    printed, now = io.StringIO(), [0.0]
    display = Display(Console(file=printed), num_steps=100, stop=StopRequest(), clock=lambda: now[0])
    history = make_history()
    with display:
        for step in range(1, 101):
            now[0] += 1.0
            history.losses.append(1.0)
            history.step_seconds.append(1.0)
            if step == 53:
                history.eval_losses.append(2.0)
            display.update(history, {})
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in printed.getvalue().splitlines()]
    assert steps == [1, *range(6, 52, 5), 53, *range(58, 100, 5), 100]


def test_figures_for_people() -> None:
    assert [format_bytes(size) for size in (0, 999, 1000, 33_554_432, 608_000_000, 1.5e9, 2e13)] == [
        "0 B",
        "999 B",
        "1 kB",
        "33.6 MB",
        "608 MB",
        "1.5 GB",
        "20 TB",
    ]
    assert [format_seconds(seconds) for seconds in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]
