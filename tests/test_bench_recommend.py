from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.bench.recommend import TRAFFIC, closing_words, recommend
from infinity.bench.results import Report, Result, Run
from infinity.config import Config

KIB, MIB = 1 << 10, 1 << 20
READ, WRITE, BOTH = "nvme->host", "host->nvme", "nvme<->host"


def result(route: str, gb_s: float | list[float], block_mib: int = 4, queue_depth: int = 8, **others: Any) -> Result:
    rates = gb_s if isinstance(gb_s, list) else [gb_s]
    runs = [Run(10**9, 1 / rate, others.get("cpu_s_per_gb", 0.01)) for rate in rates]
    others.pop("cpu_s_per_gb", None)
    return Result(
        route, others.pop("backend", "threads"), block_mib * MIB, queue_depth, 1 << 30, runs, verified=True, **others
    )


def setting(read: float, write: float, both: float | None, block_mib: int, depth: int, **others: Any) -> list[Result]:
    rates = {READ: read, WRITE: write} | ({} if both is None else {BOTH: both})
    return [result(route, rate, block_mib, depth, **others) for route, rate in rates.items()]


def report(*results: Result, nvme: tuple[str, ...] = ("/mnt/a",), machine: dict[str, Any] | None = None) -> Report:
    return Report(machine or {}, nvme, results, [], 1.0)


def chosen(*results: Result) -> tuple[str, int, int]:
    fields = recommend(report(*results))
    return fields["io_backend"], fields["io_block_bytes"] // MIB, fields["io_num_threads"]


# Settings to train with.


def test_the_recommendation_is_a_config(tmp_path: Path) -> None:
    fields = recommend(report(*setting(2.0, 1.0, 1.5, 8, 4), nvme=(str(tmp_path),)))
    assert fields == {
        "nvme": [str(tmp_path)],
        "io_backend": "threads",
        "io_num_threads": 4,
        "io_block_bytes": 8 * MIB,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields, allow_nan=False))
    for config in (Config.from_dict(fields), Config.from_json(file)):
        assert (config.io_backend, config.io_num_threads, config.io_block_bytes) == ("threads", 4, 8 * MIB)
        assert config.nvme == (tmp_path,)


def test_directories_are_absolute() -> None:
    fields = recommend(report(*setting(2.0, 1.0, 1.5, 8, 4), nvme=("here/../there",)))
    assert fields["nvme"] == [os.path.join(os.getcwd(), "there")]  # noqa: PTH109, PTH118


def test_both_at_once_weighs_most() -> None:
    assert chosen(*setting(3.0, 3.0, 1.0, 4, 8), *setting(2.0, 1.0, 2.0, 8, 4)) == ("threads", 8, 4)
    assert chosen(*setting(3.0, 1.0, 2.0, 4, 8), *setting(1.0, 3.0, 2.0, 8, 4)) == ("threads", 4, 8)


def test_within_noise_what_is_cheaper_is_taken() -> None:
    fast = setting(2.0, 2.0, 2.0, 4, 8, cpu_s_per_gb=0.03)
    cheap = {"cpu_s_per_gb": 0.01, "backend": "aiofiles"}
    assert chosen(*fast, *setting(1.97, 1.97, 1.97, 4, 8, **cheap)) == ("aiofiles", 4, 8)
    assert chosen(*fast, *setting(1.9, 1.9, 1.9, 4, 8, **cheap)) == ("threads", 4, 8)
    noisy = [result(route, [1.8, 2.0, 2.2], cpu_s_per_gb=0.03) for route in (READ, WRITE, BOTH)]
    assert chosen(*noisy, *setting(1.9, 1.9, 1.9, 4, 8, **cheap)) == ("aiofiles", 4, 8)


def test_more_than_enough_in_flight_is_a_cost() -> None:
    much = setting(2.0, 2.0, 2.0, 8, 8, cpu_s_per_gb=0.008)
    assert chosen(*much, *setting(1.99, 1.99, 1.99, 4, 8)) == ("threads", 4, 8)
    assert chosen(*much, *setting(1.7, 1.7, 1.7, 4, 8)) == ("threads", 8, 8)
    little = setting(2.0, 2.0, 2.0, 1, 4, cpu_s_per_gb=0.05)
    assert chosen(*little, *setting(2.0, 2.0, 2.0, 8, 4)) == ("threads", 8, 4)


def test_one_block_at_a_time_is_taken_only_where_there_is_no_other() -> None:
    one = setting(2.0, 2.0, 2.0, 32, 1, cpu_s_per_gb=0.005)
    assert chosen(*one, *setting(1.9, 1.9, 1.9, 32, 2)) == ("threads", 32, 2)
    assert chosen(*one) == ("threads", 32, 1)


def test_a_setting_measured_on_more_routes_comes_first() -> None:
    assert chosen(result(READ, 9.0, 1, 1), *setting(2.0, 2.0, 2.0, 8, 4)) == ("threads", 8, 4)
    assert chosen(*setting(9.0, 9.0, None, 1, 1), *setting(2.0, 2.0, 2.0, 8, 4)) == ("threads", 8, 4)
    assert chosen(result(WRITE, 9.0, 1, 1), result(READ, 1.0, 8, 4)) == ("threads", 8, 4)


def test_neither_peers_nor_single_directories_are_recommended() -> None:
    assert chosen(
        *setting(9.0, 9.0, 9.0, 1, 1, reference=True),
        *setting(9.0, 9.0, 9.0, 2, 2, path="/mnt/a"),
        *setting(2.0, 2.0, 2.0, 8, 4),
    ) == ("threads", 8, 4)


def test_a_mixture_of_backends_is_left_to_the_engine() -> None:
    assert chosen(*setting(2.0, 2.0, 2.0, 8, 4, backend="threads+uring"))[0] == "auto"


def test_without_nvme_nothing_is_recommended() -> None:
    assert recommend(report(result("memcpy", 9.0))) == {}
    assert recommend(report()) == {}


def test_directories_are_weighed_by_their_speed_in_training() -> None:
    nvme = ("/mnt/a", "/mnt/b")
    together = setting(3.0, 3.0, 3.0, 8, 4)
    alone = [*setting(1.0, 1.0, 1.0, 8, 4, path="/mnt/a"), *setting(3.0, 2.0, 3.0, 8, 4, path="/mnt/b")]
    assert recommend(report(*together, *alone, nvme=nvme))["nvme_weights"] == [0.333, 1.0]
    assert "nvme_weights" not in recommend(report(*together, *alone[:3], nvme=nvme))
    assert "nvme_weights" not in recommend(report(*together, *alone[:3], nvme=nvme[:1]))


figures = st.floats(1e-3, 100)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([READ, WRITE, BOTH, "memcpy"]),
            st.lists(figures, min_size=1, max_size=3),
            st.sampled_from([1, 4, 64]),
            st.sampled_from([1, 8, 64]),
            st.sampled_from([None, "/mnt/a", "/mnt/b"]),
            figures,
        ),
        max_size=20,
    )
)
def test_any_figures_give_a_setting_that_was_measured(drawn: list[Any]) -> None:
    results = [
        result(route, rates, block, depth, path=path, cpu_s_per_gb=cpu)
        for route, rates, block, depth, path, cpu in drawn
    ]
    of = report(*results, nvme=("/mnt/a", "/mnt/b"))
    fields = recommend(of)
    settings = {(r.block_bytes, r.queue_depth) for r in results if r.route != "memcpy" and r.path is None}
    assert bool(fields) == bool(settings)
    if fields:
        assert (fields["io_block_bytes"], fields["io_num_threads"]) in settings
        weights = fields.pop("nvme_weights", [1.0])
        assert max(weights) == 1.0
        assert min(weights) > 0
        Config.from_dict(fields)
    assert bool(closing_words(of)) == bool(settings)


# What a step moves.


class _Layers(nn.Module):
    """No biases: each would be padded to 4096 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()) for _ in range(60))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()


@pytest.mark.parametrize("precision", list(TRAFFIC))
def test_the_engine_moves_what_is_said(precision: str, tmp_path: Path) -> None:
    """Where little more than one of sixty sub-groups has room, hardly anything stays.

    Some of what is read ahead is displaced and read again. Under bf16 two planes are written, two bytes less than with
    masters, to which a part falls back that has no room for a step in planes.
    """
    traffic, model, num_steps = TRAFFIC[precision], _Layers(), 3
    num_parameters = sum(param.numel() for param in model.parameters())
    little = num_parameters // 60 * 24
    config = Config(device="cpu", hbm=MIB, ram=little, nvme=tmp_path, precision=precision, prefetch=1)
    with infinity.initialize(model, torch.optim.AdamW(model.parameters()), config) as engine:
        before = engine._store.statistics()
        for step in range(2 + num_steps):
            if step == 2:
                engine.synchronize()
                before = engine._store.statistics()
            engine.backward(engine(torch.randn(4, 256)))
            engine.step()
        engine.synchronize()
        after = engine._store.statistics()
    read = (after.read_bytes - before.read_bytes) / num_parameters / num_steps
    written = (after.written_bytes - before.written_bytes) / num_parameters / num_steps
    assert 0.9 * traffic.read_bytes < read <= 1.25 * traffic.read_bytes
    assert 0.85 * traffic.written_bytes < written <= traffic.written_bytes
    assert traffic.written_bytes <= traffic.read_bytes


# What it means, in words.

_ALL = (result(READ, 2.0), result(WRITE, 1.0), result(BOTH, 1.6))


def test_the_words_by_hand() -> None:
    # fp32: 8 bytes at 2 GB/s and 32 at 1.6 take 4 + 20 = 24 ns for a parameter, 168 s for 7e9;
    # 24e-9 x 1e12 / 6 = 4000 tokens. bf16: 2 at 2 and 32 at 1.6: 21 ns, 147 s, 3500 tokens.
    assert closing_words(report(*_ALL)) == (
        "Your NVMe reads 2.00 GB/s, writes 1.00 GB/s and does both at once at 1.60 GB/s. A model of 7 billion "
        "parameters in fp32 keeps 112 GB there and moves at most 280 GB per step (24 bytes read and 16 written per "
        "parameter), which takes 2.8 minutes: hiding it behind arithmetic takes at least 4,000 tokens per step for "
        "each TFLOP/s that your device reaches (400,000 at 100 TFLOP/s). The same in bf16 keeps 140 GB there and moves "
        "at most 238 GB per step (18 bytes read and 16 written per parameter), which takes 2.5 minutes: hiding it "
        "behind arithmetic takes at least 3,500 tokens per step for each TFLOP/s that your device reaches (350,000 at "
        "100 TFLOP/s). This takes AdamW, nothing kept in host memory between uses (what stays there is not moved), and "
        "6 operations per parameter and token; the number of tokens does not depend on the size of the model."
    )


def test_tokens_are_counted_for_the_device_where_its_rate_is_known() -> None:
    words = closing_words(report(*_ALL, machine={"tflops": {"fp32": 0.25, "bf16": 2.0}}))
    assert "at least 1,000 tokens per step at this device's 0.25 TFLOP/s. The same in bf16" in words
    assert "at least 7,000 tokens per step at this device's 2.00 TFLOP/s." in words
    assert "each TFLOP/s" not in words
    slow = closing_words(report(*_ALL, machine={"tflops": {"fp32": 0.012, "bf16": 0.25}}))
    assert "at least 48 tokens per step at this device's 0.012 TFLOP/s." in slow
    for unknown in (None, 0.25, {}, {"fp32": 0}, {"fp32": float("nan")}, {"fp32": "fast"}):
        assert "4,000 tokens per step for each TFLOP/s" in closing_words(report(*_ALL, machine={"tflops": unknown}))


def test_without_both_at_once_reads_and_writes_follow_one_another() -> None:
    # 24 bytes at 2 GB/s and 16 at 1: 28 ns, 196 s, 4666.7 tokens.
    words = closing_words(report(*_ALL[:2]))
    assert "reads 2.00 GB/s and writes 1.00 GB/s." in words
    assert "takes 3.3 minutes: hiding it behind arithmetic takes at least 4,700 tokens" in words


def test_the_optimizers_own_time_is_said() -> None:
    # 16 bytes for each of 7e9 parameters at 4 GB/s.
    assert "AdamW itself steps such a model in 28 s here." in closing_words(report(*_ALL, result("optimizer", 4.0)))


def test_what_is_not_known_is_not_said() -> None:
    assert closing_words(report(result("memcpy", 9.0))) == ""
    assert closing_words(report(result(READ, 2.0))) == "Your NVMe reads 2.00 GB/s."
    assert closing_words(report(result(WRITE, 2.0))) == "Your NVMe writes 2.00 GB/s."


@pytest.mark.parametrize(
    ("gb_s", "duration", "tokens"),
    [
        (0.001, "78 hours", "6.7 million"),
        (0.1, "47 minutes", "67,000"),
        (100.0, "2.8 s", "67"),
        (1e5, "0.0028 s", "1"),
    ],
)
def test_any_scale_is_said_in_fitting_words(gb_s: float, duration: str, tokens: str) -> None:
    words = closing_words(report(*(result(route, gb_s) for route in (READ, WRITE, BOTH))))
    assert re.search(rf"takes {re.escape(duration)}: .*? at least {re.escape(tokens)} tokens", words), words
