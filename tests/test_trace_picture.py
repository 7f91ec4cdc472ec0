"""The picture of a trace: from the file that a run writes to a PNG, or one line that says what is wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fakes_trace import MIB, FakeClock, record_step
from infinity.trace import Recorder, write_trace

SCRIPT = Path(__file__).parents[1] / "bench" / "trace_picture.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trace_picture", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names in annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    clock = FakeClock()
    recorder = Recorder(clock=clock, keep_steps=2)
    for _ in range(2):
        recorder.record("training", "outside", clock.now, clock.now + 0.01)
        record_step(recorder, clock)
    file = tmp_path / "trace.json"
    write_trace(file, recorder.steps)
    return file


def test_a_step_is_read_as_it_was_recorded(script: ModuleType, trace: Path) -> None:
    step = script.read_step(trace, None)
    assert step.name == "step 2"
    assert step.seconds == pytest.approx(0.32)
    assert list(step.rows) == ["read", "training", "stall", "optimizer", "write"]
    assert [len(threads) for threads in step.rows.values()] == [1, 1, 1, 1, 2]
    # What a step shares with its neighbours counts as far as it lies in it; what is no computing does not.
    assert step.busy_seconds("read") == pytest.approx(7 * 0.02)
    assert step.busy_seconds("training") == pytest.approx(4 * 0.06)
    assert step.busy_seconds("write") == pytest.approx(4 * 0.01)
    assert script.read_step(trace, 1).name == "step 1"
    read_bytes = sum(event["args"]["num_bytes"] for thread in step.rows["read"] for event in thread)
    assert read_bytes == 7 * 32 * MIB


def test_the_picture_shows_every_row_and_names_what_has_room(script: ModuleType, trace: Path) -> None:
    figure = script.draw(script.read_step(trace, None))
    [axes] = figure.axes
    words = [text.get_text() for text in axes.texts]
    assert [word for word in words if word in script.TITLES.values()] == [
        "NVMe reads",
        "training",
        "waits",
        "optimizer",
        "NVMe writes",
    ]
    assert words.count("0") == words.count("3") == 3  # forward, backward, optimizer
    assert "disk" in words
    header = " ".join(text.get_text() for text in figure.texts)
    assert "step 2, 0.32 s: forward 0.08 s, backward 0.16 s, waits 0.02 s, optimizer 0.16 s" in header
    assert "0.23 GB read, 0.27 GB written" in header


def test_the_command_writes_a_png(script: ModuleType, trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "trace.png"
    assert script.main([str(trace), str(picture), "--step", "1"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("{", [], "expected a trace of infinity train --trace"),
        ("[]", [], "expected a trace of infinity train --trace"),
        (json.dumps({"traceEvents": [{"ph": "X"}]}), [], "expected a trace of infinity train --trace"),
        (json.dumps({"traceEvents": []}), [], "expected at least one step, got none"),
        (None, ["--step", "7"], "expected step 7, got step 1, step 2"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    script: ModuleType,
    trace: Path,
    content: str | None,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        trace.write_text(content)
    assert script.main([str(trace), str(trace.with_suffix(".png")), *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not trace.with_suffix(".png").exists()


def test_a_picture_that_cannot_be_written_is_one_line(
    script: ModuleType, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: list[Any] = [str(trace), str(tmp_path / "missing" / "x.png")]
    assert script.main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "No such file or directory" in line
