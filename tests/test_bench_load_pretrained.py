"""A small run of ``bench/load_pretrained.py``: the peak of memory is measured, and every weight compared."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

pytest.importorskip("transformers", reason="needs Hugging Face transformers")

import load_pretrained as bench
from load_pretrained import MIB, Sample

from infinity.integrations.transformers import from_pretrained


@pytest.fixture(autouse=True)
def _same_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_a_checkpoint_that_is_larger_than_the_budget_is_streamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.txt"
    flags = ["--directory", str(tmp_path), "--size", "192MiB", "--hbm", "160MiB", "--ram", "96MiB", "--log", str(log)]
    assert bench.main(flags) == 0
    printed = capsys.readouterr().out
    assert "3 of 3 targets met" in printed
    assert "66, 0 differ" in log.read_text()
    assert list(tmp_path.iterdir()) == [log], "all else is deleted"


@pytest.mark.parametrize("num_bytes", [64 * MIB, 200 * MIB, 2048 * MIB])
def test_the_model_has_the_size_that_is_asked_for(num_bytes: int) -> None:
    shapes = bench.shapes_of(bench.config_of(num_bytes))
    total = 2 * sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
    assert abs(total - num_bytes) < 0.2 * num_bytes


def test_the_files_are_those_of_the_model(tmp_path: Path) -> None:
    config = {**bench.config_of(64 * MIB), "num_hidden_layers": 1}
    num_bytes = bench.write_checkpoint(tmp_path / "model", config)
    model, info = from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    assert num_bytes == 2 * sum(param.numel() for param in model.parameters())
    file_of = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(file_of.values())) == bench.NUM_FILES
    for file in set(file_of.values()):
        with safe_open(tmp_path / "model" / file, framework="pt") as opened:
            assert set(opened.keys()) == {name for name, its in file_of.items() if its == file}


def test_memory_over_time_shows_every_peak() -> None:
    samples = [Sample(second, (700 if second == 17 else 100 + second) * MIB, second * 1000) for second in range(40)]
    lines = bench.picture(samples, num_rows=8)
    assert len(lines) == 9
    assert sum(" 700 " in line and "#" * 40 in line for line in lines) == 1
    assert lines[-1].split()[:2] == ["39.0", "139"]
    assert len(bench.picture(samples[:1])) == 2


@pytest.mark.parametrize("flags", [[], ["--directory", "none"], ["--directory", ".", "--size", "1MiB"]])
def test_flags_that_cannot_be_used(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(flags)
