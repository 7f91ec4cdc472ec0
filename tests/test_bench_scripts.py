"""The scripts of ``bench/``: what they make of figures and flags, their worker processes, and small runs of them."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import activations
import compare_deepspeed
import large_model
import pytest
import roofline
import torch
from compare_deepspeed import SIZES, Pair, peer_settings, size_checks
from lib_checks import Check, print_checks, require_room
from lib_disk import Bandwidth, median_bandwidth
from lib_roofline import WORK_NAMES, Measured, Phase
from lib_training import Runner, Sample, make_engine, make_plain, num_parameters, smallest_budgets
from lib_work import Work, batches, parse_work, work_of_tokens
from lib_worker import Worker, WorkerError, peak_rss_bytes, reset_peak_rss

from infinity.config import Config
from infinity.errors import BudgetError
from infinity.train.model import GPTShape

_BENCH = Path(roofline.__file__).parent
_TINY = GPTShape(num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=32)
_TINY_FLAGS = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16", "--vocab", "32"]
_ANSWER_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _same_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("text", ["8", "8x", "0x8", "8x0", "-1x8", "8x8x8", "8X8", ""])
def test_work_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected BATCHxSEQ"):
        parse_work(text)


def test_work_is_read_as_it_is_written() -> None:
    assert str(parse_work("8x128")) == "8x128"
    assert parse_work("8x128").num_tokens == 1024


@pytest.mark.parametrize(
    ("num_tokens", "work"),
    [(3, "1x8"), (21, "1x24"), (127, "1x128"), (128, "1x128"), (300, "2x128"), (1000, "8x128")],
)
def test_so_many_tokens_become_one_short_sequence_or_whole_ones(num_tokens: float, work: str) -> None:
    assert str(work_of_tokens(num_tokens, 128)) == work


def test_the_same_seed_gives_the_same_tokens_and_targets_follow_them() -> None:
    work = Work(2, 8)
    first, again = batches(work, 32), batches(work, 32)
    for _ in range(2):
        tokens, targets = next(first)
        assert torch.equal(tokens, next(again)[0])
        assert tokens.shape == targets.shape == (2, 8)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_a_mix_goes_both_ways_as_far_as_it_can() -> None:
    disk = Bandwidth(read=2.0, write=1.0, both=4.0)
    assert disk.seconds(1e9, 1e9) == pytest.approx(0.5)
    assert disk.seconds(3e9, 1e9) == pytest.approx(0.5 + 1.0)
    assert disk.seconds(1e9, 3e9) == pytest.approx(0.5 + 2.0)
    assert disk.seconds(0, 0) == 0


def test_the_median_is_taken_of_each_direction() -> None:
    measured = [Bandwidth(1, 9, 5), Bandwidth(2, 8, 50), Bandwidth(3, 1, 6)]
    assert median_bandwidth(measured) == Bandwidth(2, 8, 6)


def test_a_bar_is_met_exactly_or_missed() -> None:
    assert Check("time", 1.15, "<=", 1.15).met
    assert not Check("time", 1.1501, "<=", 1.15).met
    assert Check("times", 2.0, ">=", 2.0).met
    missed = Check("times", 1.5, ">=", 2.0)
    assert not missed.met
    assert missed.missed_by == pytest.approx(0.25)
    assert missed.as_dict()["met"] is False


def test_what_is_missed_is_said_with_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    print_checks([Check("step / plain", 1.2, "<=", 1.0), Check("losses", 1.0, ">=", 1.0)])
    printed = capsys.readouterr().out
    assert "1 of 2 targets met" in printed
    assert "missed by 20.0%: step / plain" in printed


@pytest.mark.parametrize(("disk", "memory", "word"), [(1e18, 1, "disk"), (1, 1e18, "memory")])
def test_too_little_room_is_refused_before_anything_is_written(
    tmp_path: Path, disk: float, memory: float, word: str
) -> None:
    with pytest.raises(SystemExit, match=f"too little .*{word}"):
        require_room(tmp_path, disk_bytes=disk, memory_bytes=memory)
    assert not list(tmp_path.iterdir())


class _Trainer:
    """Counts its calls; the loss is their number."""

    last_step = None

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls.append("forward")
        return torch.tensor(float(self.calls.count("forward")))

    def backward(self, loss: torch.Tensor) -> None:
        self.calls.append("backward")

    def step(self) -> None:
        self.calls.append("step")


def test_steps_that_settle_are_trained_and_not_counted() -> None:
    trainer = _Trainer()
    runner = Runner("fake", trainer)  # type: ignore[arg-type]
    source = batches(Work(1, 4), 8)
    samples = runner.train([next(source) for _ in range(3)], num_settling=1)
    assert len(samples) == 2
    assert runner.losses == [1.0, 2.0, 3.0]
    assert trainer.calls == ["forward", "backward", "step"] * 3


def test_plain_and_engine_start_from_the_same_weights_and_take_the_same_steps(tmp_path: Path) -> None:
    config = Config(device="cpu", hbm="8MiB", ram="8MiB", nvme=str(tmp_path), precision="bf16")
    with make_engine(_TINY, config) as engine:
        runners = [Runner("plain", make_plain(_TINY, "bf16")), Runner("engine", engine)]
        for runner in runners:
            source = batches(Work(1, 16), _TINY.vocab_size)
            runner.train([next(source) for _ in range(3)])
        assert runners[0].losses == runners[1].losses
        assert len(set(runners[0].losses)) == 3


def test_the_smallest_budgets_train_and_half_of_either_does_not(tmp_path: Path) -> None:
    config = Config(device="cpu", nvme=str(tmp_path), precision="bf16")
    hbm, ram = smallest_budgets(_TINY, config)
    with make_engine(_TINY, config.model_copy(update={"hbm": hbm, "ram": ram})) as engine:
        assert engine.num_parameters == num_parameters(_TINY)
    for less in ({"hbm": hbm // 2 - 1, "ram": ram}, {"hbm": hbm, "ram": ram // 2}):
        with pytest.raises(BudgetError):
            make_engine(_TINY, config.model_copy(update=less))


_WORKER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from lib_worker import serve

def answer(request):
    print("a library talks")
    os.write(1, b"and writes to the descriptor")
    if request.get("fail"):
        raise ValueError("no such step")
    if request.get("die"):
        sys.stderr.write("last words\\n")
        os._exit(3)
    if request.get("sleep"):
        time.sleep(600)
    return {"twice": 2 * request["number"]}

serve(lambda: {"pid": os.getpid()}, answer)
"""


@pytest.fixture
def _worker(tmp_path: Path) -> Iterator[Worker]:
    command = [sys.executable, "-c", _WORKER, str(_BENCH)]
    with Worker(command, tmp_path / "log.txt", seconds=_ANSWER_SECONDS) as worker:
        yield worker


def test_a_worker_answers_whatever_its_libraries_print(_worker: Worker, tmp_path: Path) -> None:  # noqa: PT019
    assert _worker.ready["pid"] > 0
    assert [_worker.ask({"number": n}, seconds=_ANSWER_SECONDS) for n in (1, 2)] == [{"twice": 2}, {"twice": 4}]
    assert "a library talks" in (tmp_path / "log.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("request_", "seconds", "words"),
    [
        ({"fail": True}, _ANSWER_SECONDS, "ValueError: no such step"),
        ({"die": True}, _ANSWER_SECONDS, r"(?s)worker ended.*last words"),
        ({"sleep": True}, 0.2, "did not answer within 0 s"),
    ],
)
def test_a_worker_that_fails_is_an_error_that_says_how(
    _worker: Worker,  # noqa: PT019
    request_: dict[str, Any],
    seconds: float,
    words: str,
) -> None:
    with pytest.raises(WorkerError, match=words):
        _worker.ask(request_, seconds=seconds)
    _worker.close(at_once=True)


def test_a_worker_that_cannot_start_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="no such module"):
        Worker([sys.executable, "-c", "raise SystemExit('no such module')"], tmp_path / "log", seconds=_ANSWER_SECONDS)


def test_the_peak_of_memory_is_forgotten_when_asked() -> None:
    memory = torch.ones(64 << 20, dtype=torch.uint8)
    with_it = peak_rss_bytes()
    del memory
    assert peak_rss_bytes() > with_it - (16 << 20)  # the kernel counts in batches
    reset_peak_rss()
    assert peak_rss_bytes() < with_it - (32 << 20)


def _measured(seconds: float, num_bytes: int = 0) -> Measured:
    return Measured([[Sample(seconds, num_bytes, num_bytes)]] * 3)


def _row(name: str, work: str = WORK_NAMES[0], **figures: Any) -> dict[str, Any]:
    row = {
        "name": name, "work": work, "same_losses": 1.0, "over_roofline": 1.0, "over_plain": {"median": 1.0},
        "step_seconds": {"median": 2.0}, "disk_seconds": 1.0, "read_bytes": 100, "written_bytes": 100,
        "read_bytes_per_parameter": 12.0, "written_bytes_per_parameter": 12.0,
    }  # fmt: skip
    return row | figures


def _missed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.met]


def test_the_table_holds_each_work_against_its_bars() -> None:
    rows = [_row(name, work) for work in WORK_NAMES for name in ("plain", "25%", "100%")]
    assert not _missed(roofline.table_checks({"rows": rows}))
    by_key = {(row["work"], row["name"]): row for row in rows}
    by_key["balanced", "25%"]["over_roofline"] = 1.2
    by_key["few tokens", "100%"]["over_plain"] = {"median": 1.04}
    by_key["many tokens", "25%"]["disk_seconds"] = 1.5
    by_key["many tokens", "plain"]["same_losses"] = 0.99
    assert _missed(roofline.table_checks({"rows": rows})) == [
        "few tokens: budget >= state, step / plain",
        "balanced: 25% budget, step / roofline",
        "many tokens: plain step / disk time (that the next one counts)",
        "table: losses bitwise equal to plain's",
    ]


def test_the_sweep_demands_that_time_and_bytes_fall_and_that_budgets_are_spent() -> None:
    seconds = {"plain": 1.0, "least": 3.0, "25%": 2.0, "100%": 1.0}
    phase = Phase({"few": {name: _measured(value) for name, value in seconds.items()}}, [], {"25%": 0.96}, {})
    rows = [_row("plain"), _row("least"), _row("25%", read_bytes=50), _row("100%", read_bytes=0, written_bytes=0)]
    assert not _missed(roofline.sweep_checks({"rows": rows}, phase))
    phase.measured["few"]["25%"] = _measured(3.3)
    phase.used_shares["25%"] = 0.9
    rows[2]["read_bytes"] = 300
    rows[1]["written_bytes_per_parameter"] = 14.0
    missed = _missed(roofline.sweep_checks({"rows": rows}, phase))
    assert len(missed) == 4
    assert missed[0].startswith("sweep: time")
    assert missed[1].startswith("sweep: NVMe bytes")
    assert missed[2].startswith("smallest budget: written")
    assert missed[3].startswith("sweep: 25% budget, resident")


def test_cost_by_size_subtracts_activations_and_compares_the_worst_pool() -> None:
    small = {
        "nanoseconds_per_parameter": 10.0, "peak_rss_bytes": 1100, "activation_bytes": 100,
        "peak_pool_bytes": {"device": 10, "host": 20},
    }  # fmt: skip
    large = small | {"peak_rss_bytes": 2000, "activation_bytes": 1000}
    assert not _missed(roofline.linear_checks({"rows": {"small": small, "large": large}}))
    large |= {"activation_bytes": 900, "peak_pool_bytes": {"device": 10, "host": 21}}
    missed = _missed(roofline.linear_checks({"rows": {"small": small, "large": large}}))
    assert missed == ["1B / 120M: pools' peak", "1B / 120M: peak RSS less activations"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--nvme"),
        (["--nvme", "missing"], "not a directory"),
        (["--nvme", ".", "--heads", "5"], "multiple of --heads 5"),
        (["--nvme", ".", "--work", "1x8,1x8"], "expected 3"),
        (["--nvme", ".", "--work", "1x8,1x8,nothing"], "BATCHxSEQ"),
        (["--nvme", ".", "--work", "1x8,1x8,1x256"], "longer than --seq 128"),
        (["--nvme", ".", "--plot", "figure.pdf"], ".png"),
    ],
)
def test_roofline_refuses_flags_it_cannot_use(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        roofline.parse(flags)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_roofline_measures_a_tiny_model_and_leaves_nothing(tmp_path: Path) -> None:
    nvme, document_file, picture = tmp_path / "nvme", tmp_path / "figures.json", tmp_path / "figures.png"
    nvme.mkdir()
    flags = ["--nvme", str(nvme), *_TINY_FLAGS, "--hbm", "2MiB", "--work", "1x8,1x16,2x16", "--quick", "--rounds", "1"]
    code = roofline.main([*flags, "--json", str(document_file), "--plot", str(picture)])
    document = json.loads(document_file.read_text(encoding="utf-8"))
    assert code == (0 if all(check["met"] for check in document["checks"]) else 1)
    assert not list(nvme.iterdir())
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = document["table"]["rows"] + document["sweep"]["rows"]
    assert len(rows) == 9 + 4
    assert {row["same_losses"] for row in rows} == {1.0}
    assert all(row["step_seconds"]["median"] > 0 for row in rows)
    least = next(row for row in rows if row["name"] == "least")
    assert least["read_bytes_per_parameter"] > 8
    assert least["written_bytes_per_parameter"] > 8
    assert 0 < least["least_bytes"] <= 1.1 * (least["read_bytes"] + least["written_bytes"])
    peaks = document["memory"]
    assert set(peaks) == {"plain", "25%"}
    assert all(row["peak_rss_bytes"] > 50 << 20 for row in peaks.values())


@pytest.mark.parametrize(("label", "parameters"), [("122M", 122e6), ("351M", 351e6), ("1.1B", 1.1e9)])
def test_sizes_are_what_they_are_called(label: str, parameters: float) -> None:
    assert num_parameters(SIZES[label]) == pytest.approx(parameters, rel=0.01)


def test_the_large_model_has_three_billion_parameters() -> None:
    assert num_parameters(large_model.SHAPE) == pytest.approx(3e9, rel=0.01)


def test_deepspeeds_buffers_hold_the_largest_parameter_and_every_setting_uses_nvme(tmp_path: Path) -> None:
    shape = SIZES["122M"]
    largest = 4 * shape.hidden_size**2
    settings = peer_settings(shape, num_parameters(shape), tmp_path)
    for setting in settings.values():
        zero = setting["zero_optimization"]
        assert zero["offload_optimizer"]["device"] == "nvme"
        assert zero["sub_group_size"] >= largest
        assert zero["offload_optimizer"]["buffer_count"] >= 4  # parameter, gradient, two moments
        if "offload_param" in zero:
            assert zero["offload_param"]["buffer_size"] >= largest
    assert len({json.dumps(setting, sort_keys=True) for setting in settings.values()}) == len(settings)


def _pair(setting: str, peer: float, rss: int, *, failure: str | None = None) -> Pair:
    return Pair(setting, [[1.0]] * 3, [[peer]] * 3, [5.0, 4.0], rss, failure=failure)


def test_deepspeeds_fastest_setting_counts_for_time_and_its_leanest_for_memory() -> None:
    pairs = [_pair("fast", 2.5, 3000), _pair("lean", 4.0, 1500), _pair("broken", 0.1, 1, failure="it crashed")]
    checks = size_checks("122M", pairs, 1000, [5.0, 4.01, 3.0])
    assert not _missed(checks)
    assert statistics.median(pairs[0].peer_seconds) == 2.5
    assert checks[0].value == pytest.approx(2.5)
    assert "fast" in checks[0].name
    assert len(_missed(size_checks("122M", pairs, 1600, [5.0, 4.0]))) == 2
    assert _missed(size_checks("122M", pairs, 900, [5.0, 4.5])) == ["122M: losses apart, at most"]
    assert _missed(size_checks("122M", [pairs[2]], 1000, [5.0])) == ["122M: DeepSpeed's settings that run"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nvme", "missing"], "not a directory"),
        (["--nvme", ".", "--sizes", "122M,7B"], "got '7B'"),
        (["--nvme", ".", "--sizes", "2x30x4"], "multiple of HEADS"),
        (["--nvme", ".", "--work", "1x256"], "at most 128"),
    ],
)
def test_compare_deepspeed_refuses_flags_it_cannot_use(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        compare_deepspeed.parse(flags)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_without_a_compiler_the_comparison_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compare_deepspeed.main(["--nvme", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    assert "skipped: no C++ compiler (no-such-compiler) on PATH" in capsys.readouterr().out


def test_a_tiny_model_trains_below_the_bar_of_the_large_one(tmp_path: Path) -> None:
    nvme, log = tmp_path / "nvme", tmp_path / "log.txt"
    nvme.mkdir()
    flags = ["--nvme", str(nvme), *_TINY_FLAGS, "--hbm", "2MiB", "--ram", "4MiB", "--log", str(log)]
    assert large_model.main(flags) == 0
    assert not list(nvme.iterdir())
    lines = log.read_text(encoding="utf-8").splitlines()
    assert sum("step 2: " in line for line in lines) == 3
    assert "the bar is 4 GiB" in lines[-1]


def test_a_peak_above_the_bar_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_model, "BAR_BYTES", 1 << 20)
    flags = ["--nvme", str(tmp_path), *_TINY_FLAGS, "--hbm", "2MiB", "--ram", "4MiB", "--log", str(tmp_path / "log")]
    assert large_model.main(flags) == 1


@pytest.mark.slow
def test_activations_are_measured_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "document.json"
    flags = [*_TINY_FLAGS, "--seq", "64", "--batch", "8", "--hbm", "1MiB", "--ram", "1MiB", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["activations", "--nvme", str(tmp_path), *flags, "--json", str(document)])
    activations.main()
    rows = {row["name"]: row for row in json.loads(document.read_text())["rows"]}
    assert all(row["same_losses"] and row["peak_bytes"] > 0 for row in rows.values())
    moved = {name for name, row in rows.items() if row["pool_bytes"].get("activations")}
    assert moved == {"offload", "recompute, offload"}
    assert list(tmp_path.iterdir()) == [document]
