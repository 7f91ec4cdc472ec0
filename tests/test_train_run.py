from __future__ import annotations

import io
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from rich.console import Console
from torch import nn

from infinity.config import Config
from infinity.console.interrupt import StopRequest
from infinity.errors import BudgetError, ConfigError, DirectoryError, DiskFullError
from infinity.trace import Recorder, RouteStats, StepStats, TierUsage, UnitStats
from infinity.train.failures import DivergedError
from infinity.train.model import GPT
from infinity.train.plain import PlainTrainer
from infinity.train.report import RunReport
from infinity.train.run import run
from infinity.train.settings import TrainSettings

MIB = 1 << 20
DOCUMENTED_KEYS = {
    "params",
    "state_bytes",
    "losses",
    "eval_losses",
    "step_seconds",
    "tokens_per_second",
    "peak",
    "nvme",
    "stall_seconds",
    "units",
    "config",
    "steps",
    "by_unit",
    "stalls",
}


class TieredTrainer(PlainTrainer):
    """Trains in ordinary PyTorch and reports tiers as an engine does; calls a hook at each forward and at close."""

    def __init__(self, module: nn.Module, config: Config, on_forward: Callable[[int], None]) -> None:
        super().__init__(module, learning_rate=1e-2, config=config, device=torch.device("cpu"))
        self.unit_names = ("embedding", "blocks.0")
        self.recorder = Recorder()
        self.on_forward = on_forward
        self.num_forwards = 0
        self.num_updates = 0
        self.on_close: Callable[[], None] = lambda: None
        self.closed = False

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert not self.closed
        self.num_forwards += 1
        self.on_forward(self.num_forwards)
        return super().__call__(tokens, targets)

    def step(self) -> None:
        assert self.recorder is not None
        with self.recorder.span("optimizer", "step", unit="blocks.0", part=0):
            super().step()
        self.num_updates += 1
        assert self.recorder.end_step().step == self.num_updates
        self.last_step = StepStats(
            step=self.num_updates,
            seconds=2.0,
            stall_seconds=0.5,
            optimizer_seconds=0.25,
            nvme_read_bytes=3_000_000_000 + self.num_updates,
            nvme_written_bytes=1_000_000_000 + self.num_updates,
            num_gathers=4,
            num_stalls=1,
            compute_seconds=1.25,
            stalls={"read": 0.5, "optimizer": 0.25},
            overlap_share=0.5,
            roofline_seconds=1.5,
            achieved=0.75,
            routes={
                "nvme_read": RouteStats(3_000_000_000, 1.0, 3.0, 3.5),
                "nvme_write": RouteStats(1_000_000_000, 0.25, 4.0, 5.0),
            },
            units={
                "embedding": UnitStats(forward_seconds=0.25),
                "blocks.0": UnitStats(stalls={"read": 0.5}, moved_bytes={"nvme_read": {"param": 10}}),
            },
        )

    def usage(self) -> dict[str, TierUsage]:
        assert not self.closed
        return {
            "device": TierUsage(used_bytes=10 * MIB, peak_bytes=30 * MIB, budget_bytes=32 * MIB),
            "host": TierUsage(used_bytes=20 * MIB, peak_bytes=90 * MIB, budget_bytes=96 * MIB),
            "nvme": TierUsage(used_bytes=70_000_000, peak_bytes=80_000_000, budget_bytes=0),
        }

    def close(self) -> None:
        self.on_close()
        self.closed = True


class Harness:
    """Runs with a ``TieredTrainer`` in the engine's place and keeps what was printed."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.printed = io.StringIO()
        self.stop = StopRequest()
        self.on_forward: Callable[[int], None] = lambda _: None
        self.on_close: Callable[[], None] = lambda: None
        self.trainer: TieredTrainer | None = None

    def _make_trainer(self, settings: TrainSettings, config: Config, device: torch.device) -> TieredTrainer:
        torch.manual_seed(settings.seed)
        self.trainer = TieredTrainer(GPT(settings.shape()), config, self.on_forward)
        self.trainer.on_close = self.on_close
        return self.trainer

    def run(self, config: Config | None = None, *, terminal: bool = False, **flags: Any) -> RunReport:
        settings = small_settings(self.data, **flags)
        console = Console(file=self.printed, width=100, force_terminal=terminal)
        with self.stop:
            return run(
                settings,
                config or Config(hbm=32 * MIB, ram=96 * MIB),
                console,
                self.stop,
                make_trainer=self._make_trainer,
            )


def small_settings(data: Path, **flags: Any) -> TrainSettings:
    defaults = {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 2, "steps": 3, "eval_every": 2}
    return TrainSettings(**{**defaults, "data": data, **flags})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "text"
    file.write_bytes(b"all work and no play makes jack a dull boy. " * 50)
    return file


@pytest.fixture
def harness(data: Path) -> Harness:
    return Harness(data)


def test_the_document_holds_the_documented_figures(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    report = harness.run(json=file)
    document = json.loads(file.read_text())
    assert document.keys() >= DOCUMENTED_KEYS
    assert harness.trainer is not None
    assert document["params"] == harness.trainer.num_parameters == 34176
    assert document["state_bytes"] == harness.trainer.state_bytes
    assert document["losses"] == report.history.losses
    assert len(document["losses"]) == len(document["step_seconds"]) == 3
    assert document["eval_steps"] == [0, 2, 3]
    assert document["eval_losses"] == report.history.eval_losses
    assert document["tokens_per_second"] == pytest.approx(3 * 32 / sum(document["step_seconds"]))
    assert document["peak"].keys() >= {"device", "host", "rss"}
    assert (document["peak"]["device"], document["peak"]["host"]) == (30 * MIB, 90 * MIB)
    assert document["peak"]["rss"] > 50 * MIB
    assert document["nvme"]["read_bytes"] == [3_000_000_001, 3_000_000_002, 3_000_000_003]
    assert document["nvme"]["written_bytes"] == [1_000_000_001, 1_000_000_002, 1_000_000_003]
    assert document["stall_seconds"] == 1.5
    assert document["units"] == ["embedding", "blocks.0"]
    assert document["stalls"] == {"read": 1.5, "optimizer": 0.75}
    assert [step["step"] for step in document["steps"]] == [1, 2, 3]
    step = document["steps"][1]
    assert step["stalls"] == {"read": 0.5, "optimizer": 0.25}
    assert (step["compute_seconds"], step["overlap_share"], step["roofline_seconds"]) == (1.25, 0.5, 1.5)
    assert step["achieved"] == 0.75
    assert step["routes"]["nvme_write"] == {
        "moved_bytes": 1_000_000_000,
        "busy_seconds": 0.25,
        "gb_s": 4.0,
        "best_gb_s": 5.0,
    }
    assert "units" not in step
    assert document["by_unit"]["embedding"]["forward_seconds"] == 0.75
    assert document["by_unit"]["blocks.0"]["moved_bytes"] == {"nvme_read": {"param": 30}}
    assert Config.from_dict(document["config"]) == Config(hbm=32 * MIB, ram=96 * MIB)
    assert document["stopped_by"] is None
    assert harness.trainer.closed


def test_losses_in_the_document_are_exactly_the_fp32_values(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    harness.run(json=file, accumulate=1)
    for loss in json.loads(file.read_text())["losses"]:
        assert torch.tensor(loss, dtype=torch.float32).item() == loss


@pytest.mark.parametrize(
    ("flags", "poisoned_at", "losses", "evals", "step"),
    [
        ({"eval_every": 0}, 2, 2, 0, 2),
        ({"eval_every": 0, "accumulate": 2}, 2, 1, 0, 1),
        ({"eval_every": 1, "eval_batches": 1}, 1, 0, 1, 0),
        ({"eval_every": 1, "eval_batches": 1}, 3, 1, 2, 1),
    ],
    ids=["loss", "second micro-batch", "first evaluation", "evaluation"],
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_document_valid(
    flags: dict[str, Any], poisoned_at: int, losses: int, evals: int, step: int, value: float,
    harness: Harness, tmp_path: Path,
) -> None:  # fmt: skip
    def poison(number: int) -> None:
        assert harness.trainer is not None
        if number == poisoned_at:
            with torch.no_grad():
                harness.trainer.module.get_parameter("norm.weight").fill_(value)

    harness.on_forward = poison
    figures, weights = tmp_path / "figures.json", tmp_path / "weights.safetensors"
    with pytest.raises(
        DivergedError, match=rf"diverged: the loss is (nan|inf) at step {step} of 9; .* not written; low"
    ):
        harness.run(json=figures, save=weights, steps=9, **flags)
    assert not weights.exists()
    assert harness.trainer is not None
    assert harness.trainer.closed
    document = json.loads(figures.read_text(), parse_constant=pytest.fail)
    assert document["diverged_at_step"] == step
    assert document["saved"] is None
    assert len(document["losses"]) == losses
    assert len(document["eval_losses"]) == evals
    assert [*document["losses"], *document["eval_losses"]].count(None) == 1
    assert f"{step} of 9" in harness.printed.getvalue()


def test_a_run_that_goes_well_says_so(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    harness.run(json=file)
    assert json.loads(file.read_text())["diverged_at_step"] is None


def test_the_table_says_where_the_time_went(harness: Harness) -> None:
    harness.run()
    printed = harness.printed.getvalue()
    table = {key: text for line in printed.splitlines() if line.count("│") == 3 for key, text in [cells(line)]}
    assert table["NVMe read"] == "3.0 GB per step at 3.00 GB/s, busy 50% of the time"
    assert table["NVMe written"] == "1.0 GB per step at 4.00 GB/s, busy 12% of the time"
    assert table["NVMe under compute"] == "50% of its busy time"
    assert table["computing"] == "62.5% of the time"
    assert table["waiting"] == "37.5% (disk 25.0%, optimizer 12.5%)"
    assert table["waited longest for"] == "blocks.0, 0.500 s per step"
    assert table["roofline"] == "75% achieved (median step; at least 1.500 s)"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:3]]


@pytest.mark.parametrize(("num_steps", "shown"), [(1, [3]), (2, [2, 3]), (9, [1, 2, 3])])
def test_a_trace_shows_the_last_steps(harness: Harness, tmp_path: Path, num_steps: int, shown: list[int]) -> None:
    file = tmp_path / "trace.json"
    harness.run(trace=file, trace_steps=num_steps)
    events = json.loads(file.read_text(), parse_constant=pytest.fail)["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "steps"] == [f"step {number}" for number in shown]
    assert sum(event["name"] == "step blocks.0" for event in events) == len(shown)
    said = "step 3" if num_steps == 1 else f"steps {shown[0]} to 3"
    assert f"trace: {file}, {said}; open it with ui.perfetto.dev" in harness.printed.getvalue()


def test_the_trace_of_a_run_that_was_stopped_before_its_first_step_is_empty(harness: Harness, tmp_path: Path) -> None:
    harness.on_forward = lambda _: signal.raise_signal(signal.SIGTERM)
    file = tmp_path / "trace.json"
    harness.run(trace=file)
    assert [event["ph"] for event in json.loads(file.read_text())["traceEvents"]] == ["M"]
    assert "without a step, since none was completed" in harness.printed.getvalue()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"trace": "x", "plain": True}, "--trace: .* give it without --plain"),
        ({"trace": "-"}, "--trace: expected a file, got -"),
        ({"trace_steps": 0}, "--trace-steps: .* greater than or equal to 1"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(flags: dict[str, Any], message: str, data: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        small_settings(data, **flags)


NO_MEMORY = [
    lambda: torch.empty(1 << 60),
    lambda: torch.empty((1 << 40, 1 << 40)),
    lambda: bytearray(1 << 62),
    lambda: np.empty(1 << 55),
    lambda: raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
]


def raising(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("allocate", NO_MEMORY)
def test_memory_that_is_not_to_be_had_is_one_error_that_says_what_to_lower(
    harness: Harness, tmp_path: Path, allocate: Callable[[], object]
) -> None:
    harness.on_forward = lambda number: None if number < 3 else void(allocate())
    nvme = tmp_path / "nvme"
    with pytest.raises(
        BudgetError, match=r"out of memory \(.+\): .*lower --batch 2 .*--seq 16 .* or give --recompute or --act"
    ):
        harness.run(Config(nvme=nvme))
    assert harness.trainer is not None
    assert harness.trainer.closed
    assert not nvme.exists()


def void(_: object) -> None:
    pass


def test_an_error_that_is_not_of_memory_stays_what_it_is(harness: Harness) -> None:
    harness.on_forward = lambda _: raising(RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        harness.run()


def test_the_loop_with_tiers_and_without_gives_the_same_losses(harness: Harness, data: Path) -> None:
    tiered = harness.run(lr=1e-2, accumulate=2)
    settings = small_settings(data, lr=1e-2, accumulate=2, plain=True)
    with StopRequest() as stop:
        plain = run(settings, Config(), Console(file=io.StringIO()), stop)
    assert plain.history.losses == tiered.history.losses
    assert plain.history.eval_losses == tiered.history.eval_losses
    assert plain.as_document()["nvme"] == {"read_bytes": [0, 0, 0], "written_bytes": [0, 0, 0]}


def test_the_learning_rate_warms_up_and_stays(harness: Harness) -> None:
    seen = []

    def note(_: int) -> None:
        assert harness.trainer is not None
        seen.append(harness.trainer.optimizer.param_groups[0]["lr"])

    harness.on_forward = note
    harness.run(eval_every=0, steps=6, lr=0.1, warmup=4)
    assert seen == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    seen.clear()
    harness.run(eval_every=0, steps=2, lr=0.1, warmup=0)
    assert seen == [0.1, 0.1]


def test_evaluation_neither_trains_nor_changes_the_training(harness: Harness) -> None:
    with_evaluation = harness.run(eval_every=1).history
    assert harness.trainer is not None
    assert harness.trainer.module.training
    without = harness.run(eval_every=0).history
    assert without.losses == with_evaluation.losses
    assert without.eval_losses == []
    assert with_evaluation.eval_steps == [0, 1, 2, 3]


def test_a_first_signal_ends_the_run_after_the_step_in_progress(harness: Harness, tmp_path: Path) -> None:
    harness.on_forward = lambda number: signal.raise_signal(signal.SIGINT) if number == 2 else None
    file = tmp_path / "figures.json"
    report = harness.run(eval_every=0, steps=50, json=file)
    assert harness.trainer is not None
    assert harness.trainer.num_updates == report.history.num_steps == 2
    assert harness.trainer.closed
    assert harness.stop.exit_code == 130
    assert report.stopped_by == "SIGINT"
    assert "2 of 50" in harness.printed.getvalue()
    assert "weights were not saved: this run keeps no checkpoint" in harness.printed.getvalue()
    assert json.loads(file.read_text())["stopped_by"] == "SIGINT"


def test_a_signal_before_the_first_step_ends_the_evaluation_too(harness: Harness) -> None:
    harness.on_forward = lambda _: signal.raise_signal(signal.SIGTERM)
    report = harness.run(eval_batches=5)
    assert harness.trainer is not None
    assert harness.trainer.num_forwards == 1
    assert report.history.num_steps == 0
    assert report.history.eval_losses == []
    assert harness.stop.exit_code == 143


def test_a_second_signal_ends_the_run_at_once_and_still_closes(harness: Harness, tmp_path: Path) -> None:
    def twice(_: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    harness.on_forward = twice
    weights = tmp_path / "weights.safetensors"
    with pytest.raises(KeyboardInterrupt):
        harness.run(save=weights)
    assert harness.trainer is not None
    assert harness.trainer.closed
    assert harness.trainer.num_updates == 0
    assert not weights.exists()


def test_no_signal_cuts_closing_short(harness: Harness) -> None:
    def impatient() -> None:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)

    harness.on_close = impatient
    harness.run()
    assert harness.trainer is not None
    assert harness.trainer.closed
    assert harness.stop.exit_code == 130


def test_an_error_in_the_middle_closes_and_removes_what_was_created(harness: Harness, tmp_path: Path) -> None:
    def fail(number: int) -> None:
        if number == 4:
            raise DiskFullError("write failed", path="shard")

    harness.on_forward = fail
    directory = tmp_path / "nvme"
    with pytest.raises(DiskFullError):
        harness.run(Config(nvme=directory))
    assert harness.trainer is not None
    assert harness.trainer.closed
    assert not directory.exists()


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop
        assert stop.exit_code == 0
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_last_component_of_an_nvme_path_is_created_and_removed(harness: Harness, tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    seen: list[int] = []
    harness.on_forward = lambda _: seen.append(new.stat().st_mode & 0o777)
    harness.run(Config(nvme=[new, old]))
    assert set(seen) == {0o700}
    assert not new.exists()
    assert old.exists()
    assert f"created {new}" in harness.printed.getvalue()
    assert str(old) not in harness.printed.getvalue()


def test_a_created_directory_that_is_not_empty_stays(harness: Harness, tmp_path: Path) -> None:
    new = tmp_path / "new"
    harness.on_forward = lambda _: (new / "precious").touch()
    harness.run(Config(nvme=new))
    assert [file.name for file in new.iterdir()] == ["precious"]


def test_a_missing_parent_of_an_nvme_path_is_refused(harness: Harness, tmp_path: Path) -> None:
    first = tmp_path / "first"
    with pytest.raises(DirectoryError, match=r"--nvme: directory .*typo does not exist"):
        harness.run(Config(nvme=[first, tmp_path / "typo" / "x"]))
    assert not first.exists()
    assert harness.trainer is None


@pytest.mark.parametrize(("flag", "name"), [("json", "x.json"), ("save", "x.safetensors"), ("trace", "x")])
def test_results_that_could_not_be_written_are_refused_before_training(
    harness: Harness, tmp_path: Path, flag: str, name: str
) -> None:
    missing: dict[str, Any] = {flag: tmp_path / "missing" / name}
    directory: dict[str, Any] = {flag: tmp_path}
    with pytest.raises(ConfigError, match=rf"--{flag}: directory .* does not exist"):
        harness.run(**missing)
    with pytest.raises(ConfigError, match=rf"--{flag}: .* is a directory"):
        harness.run(**directory)
    assert harness.trainer is None


def test_weights_in_a_directory_that_takes_no_files_are_refused_before_training(harness: Harness) -> None:
    with pytest.raises(
        ConfigError, match=r"--save: /proc/weights.safetensors cannot be written \(.+\); give another path"
    ):
        harness.run(save="/proc/weights.safetensors")
    assert harness.trainer is None


def test_weights_never_take_the_place_of_a_device(harness: Harness) -> None:
    with pytest.raises(ConfigError, match="--save: /dev/null is not a regular file"):
        harness.run(save="/dev/null")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saved_weights_are_the_fp32_ones(harness: Harness, tmp_path: Path, precision: str) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_text("older")
    harness.run(Config(precision=precision), save=file)
    assert harness.trainer is not None
    loaded = safetensors.torch.load_file(file)
    expected = harness.trainer.state_dict()
    assert loaded.keys() == expected.keys()
    for name, weight in expected.items():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], weight), name
    assert "weights were not saved" not in harness.printed.getvalue()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text", "weights.safetensors"]


def test_on_a_terminal_one_line_is_drawn_again_and_again(harness: Harness) -> None:
    harness.run(terminal=True)
    printed = harness.printed.getvalue()
    assert "\x1b[" in printed
    assert "step 3/3 · loss" in printed.replace("\n", " ")
    assert "infinity train" in printed
