"""A small run of ``bench/export.py``: the peak of memory is measured, and every value compared."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from pathlib import Path

import export as bench
import pytest
import torch

import infinity


@pytest.fixture(autouse=True)
def _same_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_a_small_state_is_exported_within_its_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    flags = ["--directory", str(tmp_path), "--size", "64MiB", "--ram", "100MiB", "--log", str(log)]
    assert bench.main(flags) == 0
    printed = capsys.readouterr().out
    assert "65 parameters compared, 0 differ" in printed
    assert "2 of 2 targets met" in printed
    assert list(tmp_path.iterdir()) == [log]


def test_a_value_that_differs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = bench.layouts_of(1 << 22)
    values = {
        slot.name: bench.values_of(layout)[slot.offset :].as_strided(slot.shape, slot.stride, slot.offset).clone()
        for layout in layouts
        for slot in layout.slots
    }
    monkeypatch.setattr(infinity, "open_weights", lambda path: values)
    assert bench.num_different(layouts, tmp_path) == 0
    values["unit3.2"][-1, -1] = torch.nextafter(values["unit3.2"][-1, -1], torch.tensor(1.0))
    del values["unit5.0"]
    values["another"] = torch.zeros(1)
    with pytest.raises(KeyError):
        bench.num_different(layouts, tmp_path)
    values["unit5.0"] = torch.zeros(1)
    assert bench.num_different(layouts, tmp_path) == 3


@pytest.mark.parametrize("flags", [[], ["--directory", "none"], ["--directory", ".", "--size", "1MiB"]])
def test_flags_that_cannot_be_used(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(flags)


def test_large_and_small_parameters() -> None:
    layouts = bench.layouts_of(1 << 28)
    sizes = [layout.num_elements for layout in layouts]
    assert 0.95 < sum(sizes) / (1 << 28) <= 1
    assert sizes[0] > 3 * sizes[1]
    assert {layout.weights for layout in layouts} == {"planes", "master"}
    assert isinstance(bench.parse(["--directory", "."]), argparse.Namespace)
