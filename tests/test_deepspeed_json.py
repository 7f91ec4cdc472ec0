"""DeepSpeed's JSON configurations: documented kinds train or are refused by name; no key is ignored in silence."""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deepspeed_table
from deepspeed_training import ROOM, train, train_plainly, under, weights_of
from infinity import Config, ConfigError
from infinity.deepspeed_json import read_deepspeed
from infinity.deepspeed_json.document import check
from infinity.deepspeed_json.keys import KEY_OF, KEYS, SECTIONS
from infinity.deepspeed_json.scheduling import SchedulerSpec
from infinity.integrations.deepspeed.log import _said
from parity import assert_same, tiny_scale

__all__ = ["tiny_scale"]

_HERE = Path(__file__).parent
CONFIGURATIONS = sorted(path.stem for path in (_HERE / "deepspeed_configs").glob("*.json"))
REFUSED = {
    "apex_amp": "amp",
    "autotuning": "autotuning",
    "bert_lamb": "optimizer.type",
    "compression": "compression_training",
    "curriculum": "curriculum_learning",
    "data_efficiency": "data_efficiency",
    "elastic": "elasticity",
    "hybrid_engine": "hybrid_engine",
    "monitored": "tensorboard",
    "one_bit_adam": "optimizer.type",
    "progressive_layer_drop": "progressive_layer_drop",
    "quantize_training": "quantize_training",
    "sparse_attention": "sparse_attention",
    "tensor_parallel": "tensor_parallel",
    "zero_one_adam": "optimizer.type",
    "zeropp": "zero_optimization.zero_quantized_weights",
}
"""Which of the configurations are refused, and by which key."""


_EIGHTH = 0.125
"""Gradients of a logit are up to 1, which DeepSpeed's first loss scale makes more than fp16 holds."""


def configuration(name: str, nvme: Path) -> dict[str, Any]:
    """As it is in its file, but for the directory."""
    text = (_HERE / "deepspeed_configs" / f"{name}.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text.replace("/local_nvme", str(nvme)))
    return document


def leaves(section: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """All keys, dotted; sections that are looked at no further as one."""
    for name, value in section.items():
        dotted = f"{path}.{name}" if path else name
        if isinstance(value, Mapping) and dotted in SECTIONS and dotted not in KEY_OF:
            yield from leaves(value, dotted)
        else:
            yield dotted


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with values at dotted keys."""
    document: dict[str, Any] = {}
    for dotted, value in flat.items():
        section, names = document, dotted.split(".")
        for name in names[:-1]:
            section = section.setdefault(name, {})
        section[names[-1]] = value
    return document


def _at(document: Mapping[str, Any], dotted: str) -> Any:
    return functools.reduce(lambda section, name: section[name], dotted.split("."), document)


@pytest.fixture(autouse=True, scope="module")
def leave_group() -> Iterator[None]:
    """``initialize`` makes a default group, as DeepSpeed does; other test files begin without one."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_there_are_configurations_of_many_kinds() -> None:
    assert len(CONFIGURATIONS) >= 35
    assert set(REFUSED) < set(CONFIGURATIONS)


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in REFUSED])
def test_a_documented_configuration_trains(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configuration(name, tmp_path)
    asked = read_deepspeed(config, fields=ROOM)
    assert sorted(note.key for note in asked.notes if note.what != "default") == sorted(
        key for key in leaves(asked.document)
    )
    assert {note.key for note in asked.notes} >= set(leaves(config)) - {"optimizer.params", "scheduler.params"}
    _said.clear()
    if asked.optimizer is None:
        config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}  # the script's own, here by the same way
    with caplog.at_level(logging.INFO, logger="infinity.deepspeed"), under(config) as engine:
        losses, weights = train(engine, 2, times=_EIGHTH), weights_of(engine)
        assert engine.skipped_steps == 0
    said = [record.getMessage() for record in caplog.records]
    for note in asked.notes:
        assert len([each for each in said if each.startswith(f"{note.key} ")]) == 1, note.key
    expected, plain = train_plainly(config, 2, times=_EIGHTH)
    assert_same(losses, expected, "losses")
    assert_same(weights, plain.outcome(None).weights, "weights")


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_asks_for_something_else_is_refused_by_the_key(name: str, tmp_path: Path) -> None:
    config = configuration(name, tmp_path)
    with pytest.raises(ConfigError, match=rf"configuration: {re.escape(REFUSED[name])} = "), under(config):
        pass


def test_every_key_of_deepspeed_is_honoured_or_not_needed_or_refused_by_name() -> None:
    lines = (_HERE / "deepspeed_keys.txt").read_text(encoding="utf-8").splitlines()
    theirs = [line for line in lines if not line.startswith("#")]
    assert len(theirs) > 340
    for dotted in theirs:
        around = {dotted.rsplit(".", count)[0] for count in range(dotted.count(".") + 1)}
        refusal, told = "", set()
        try:
            told = {note.key for note in check(nested({dotted: True}))}
        except ConfigError as error:
            refusal = str(error)
        assert "unknown key" not in refusal
        told |= {name for name in around if f": {name} = " in refusal}
        assert len(told) == 1, dotted
        assert told <= around, dotted


def test_a_key_is_in_the_table_once() -> None:
    assert len(KEY_OF) == len(KEYS)
    assert not SECTIONS & {key.name for key in KEYS if not key.is_open}


def test_the_page_is_of_this_table() -> None:
    page = deepspeed_table.DOCUMENT.read_text(encoding="utf-8")
    assert page == deepspeed_table.text(), "stale: run python tests/deepspeed_table.py"


_SCHEDULES = json.loads((_HERE / "deepspeed_schedules.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", _SCHEDULES, ids=lambda case: case["type"])
def test_schedules_are_deepspeeds(case: dict[str, Any]) -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.5}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    schedule = SchedulerSpec(case["type"], case["params"]).make(optimizer)
    for number, (rates, momenta) in enumerate(zip(case["lr"], case["momentum"], strict=True)):
        if number:
            optimizer.step()
            schedule.step()
        for group, rate, momentum in zip(optimizer.param_groups, rates, momenta, strict=True):
            assert math.isclose(group["lr"], rate, rel_tol=1e-12), number
            assert math.isclose(group["betas"][0], momentum, rel_tol=1e-12), number


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, (64, 4, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, (64, 8, 2)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, (32, 4, 2)),
        ({"train_batch_size": 64}, (64, 16, 1)),
        ({"train_micro_batch_size_per_gpu": 4}, (16, 4, 1)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}, (64, 4, 4)),
        ({}, (None, None, 1)),
    ],
)
def test_batch_sizes_complete_each_other(given: dict[str, Any], expected: tuple[int | None, int | None, int]) -> None:
    asked = read_deepspeed(given, num_ranks=4, fields=ROOM)
    assert (asked.train_batch_size, asked.micro_batch_size, asked.accumulation_steps) == expected


AUTO: dict[str, Any] = {"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}


def test_auto_is_the_default_or_what_is_said() -> None:
    bare = read_deepspeed(AUTO, fields=ROOM)
    assert {note.key: note.what for note in bare.notes if note.value == "auto"} == {
        "train_batch_size": "default",
        "optimizer.params.lr": "default",
    }
    told = read_deepspeed(AUTO, fields=ROOM, auto={"train_batch_size": 12, "optimizer.params.lr": 0.5})
    assert (told.train_batch_size, dict(told.optimizer.params if told.optimizer else {})) == (12, {"lr": 0.5})
    assert AUTO["train_batch_size"] == "auto", "the caller's dictionary was changed"


def test_what_the_fields_of_config_get(tmp_path: Path) -> None:
    zero = {"stage": 3, "mics_shard_size": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    document = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": "2",  # DeepSpeed's tuner writes numbers so
        "gradient_clipping": "0.5",
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp16"},
        "fp16": {"enabled": "true", "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3},
        "zero_optimization": zero,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    config = Config.from_deepspeed(path, device="cpu", hbm="1MiB")
    assert (config.stage, config.shard_ranks, config.nvme, config.hbm) == (3, 2, (tmp_path,), 1 << 20)
    assert (config.accumulation_steps, config.max_grad_norm, config.precision) == (2, 0.5, "fp16")
    assert (config.reduction_dtype, config.accumulation_dtype) == ("fp32", "same")
    assert (config.loss_scale, config.initial_loss_scale) == ("dynamic", 4096.0)
    assert (config.loss_scale_window, config.loss_scale_hysteresis, config.min_loss_scale) == (500, 3, 1.0)
    assert Config.from_deepspeed(document, device="cpu", stage=1).stage == 1


def _adamw(**params: Any) -> dict[str, Any]:
    return {"type": "AdamW", "params": params}


def _deep(num_sections: int) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for _ in range(num_sections):
        section = {"a": section}
    return section


def _warmup(**params: Any) -> dict[str, Any]:
    return {"type": "WarmupLR", "params": params}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"train_batch_size": 10, "gradient_accumulation_steps": 4}, "10 and 2 x 4 x 1 = 8"),
        ({"train_batch_size": 0}, "train_batch_size: expected a whole number of 1 or more, got 0"),
        ({"train_batch_size": 8.5}, "train_batch_size: expected a whole number"),
        ({"train_batch_size": True}, "train_batch_size: expected a number, got True"),
        ({"train_batch_size": [8]}, r"train_batch_size: expected a number, got \[8\]"),
        ({"gradient_clipping": "some"}, "gradient_clipping: expected a number, got 'some'"),
        ({"gradient_clipping": -1}, "gradient_clipping: expected a number of 0 or more"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: expected a number of 0 or more, got nan"),
        ({"train_batchsize": 8}, "unknown key 'train_batchsize'; did you mean 'train_batch_size'"),
        ({"zero_optimization": {"stge": 3}}, "unknown key 'zero_optimization.stge'; did you mean 'stage'"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: expected 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": 3}, "zero_optimization: expected a section"),
        ({"fp16": True}, "fp16: expected a section"),
        ({"fp16": {"enabled": "maybe"}}, "fp16.enabled: expected true or false, got 'maybe'"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
        ({"zero_optimization": {"stage": {"a": 1}}}, "zero_optimization.stage: expected a value, got a section"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "offload_param.device: expected one of none"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.nvme_path: expected a directory"),
        ({"optimizer": {"type": "AdamV"}}, "optimizer.type = 'AdamV'.*did you mean 'Adam'"),
        ({"optimizer": {"type": "AdamW", "params": {"learning": 1}}}, "optimizer.params.learning: .* has no such"),
        (
            {"optimizer": {"params": {"lr": 1}}},
            "optimizer.type: expected a name, to go with optimizer.params, got None",
        ),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, "optimizer.params: expected a section"),
        ({"scheduler": {"type": "Warmup"}}, "scheduler.type = 'Warmup': expected one of.*did you mean 'WarmupLR'"),
        (
            {"scheduler": {"type": "WarmupDecayLR"}},
            "scheduler.type = 'WarmupDecayLR': expected total_num_steps in scheduler",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 1}}}, "scheduler.params.warmup: .* no such argument"),
        ([], "expected a dictionary or a path, got list"),
        ({"stage": 3}, "unknown key 'stage'; did you mean 'zero_optimization.stage'"),
        ({"fp16.enabled": True}, "unknown key 'fp16.enabled'"),
        (
            {"zero_optimization": {"offload_param.device": "cpu"}},
            "unknown key 'zero_optimization.offload_param.device'",
        ),
        ({"flops_profiler": {"enabled": True, "top": 1}}, "unknown key 'flops_profiler.top'"),
        ({"autotuning": _deep(5000)}, "autotuning: nested deeper than 32 sections"),
        ({"optimizer": _adamw(lr=-1)}, "optimizer.params of AdamW: Invalid learning rate"),
        ({"optimizer": _adamw(lr="fast")}, "optimizer.params of AdamW: "),
        ({"optimizer": _adamw(lr=True)}, "optimizer.params.lr: expected a number, got True"),
        ({"optimizer": _adamw(betas=[0.9])}, "optimizer.params of AdamW: "),
        ({"optimizer": _adamw(amsgrad="yes")}, "optimizer.params.amsgrad: expected true or false, got 'yes'"),
        ({"optimizer": _adamw(bias_correction="false")}, "optimizer.params.bias_correction = 'false': leave it out"),
        ({"optimizer": _adamw(max_grad_norm=1.0)}, "optimizer.params.max_grad_norm = 1.0: use gradient_clipping"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type = 'Lion': torch.optim has no Lion"),
        ({"optimizer": {"type": "Muon"}}, r"optimizer.type = 'Muon': .*torch.optim.Muon and an AdamW"),
        ({"scheduler": _warmup(warmup_num_steps="many")}, "scheduler.params of WarmupLR: "),
        ({"scheduler": _warmup(warmup_num_steps=0)}, "scheduler.params of WarmupLR: warmup_num_steps: expected more"),
        ({"scheduler": _warmup(warmup_max_lr="nan")}, "scheduler.params.warmup_max_lr: expected finite numbers"),
        ({"scheduler": _warmup(warmup_type="cosine")}, "scheduler.params of WarmupLR: warmup_type: expected 'log'"),
        (
            {"optimizer": {"type": "LBFGS"}, "scheduler": _warmup(warmup_max_lr=[0.1, 0.2])},
            "scheduler.params of WarmupLR for 2 groups of parameters: LBFGS",
        ),
        ({"fp16": {"enabled": True, "loss_scale": 1e300}}, "configuration: fp16.loss_scale: "),
        ({"fp16": {"enabled": True, "initial_scale_power": 500}}, "fp16.initial_scale_power: expected .* 0 to 126"),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "bf16.enabled and bfloat16.enabled differ"),
        ({"compile": {"deepcompile": True}}, "compile = {...} is not supported: give the field compile=True"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel = {...} is not supported"),
    ],
)
def test_what_is_wrong_is_said_of_its_key(document: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_deepspeed(document, fields=ROOM)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not valid JSON"),
        (b"{'stage': 3}", "not valid JSON"),
        (b'{"train_batch_size": 8, // comment\n}', "not valid JSON: .* comments and names without quotes"),
        (b'{"train_batch_size": 8, "train_batch_size": 9}', "'train_batch_size' stands there more than once"),
        (b'{"gradient_clipping": NaN}', "NaN is not allowed"),
        (b'{"train_batch_size": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[8]", "expected an object, got list"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_configuration(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        Config.from_deepspeed(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="Is a directory"):
        Config.from_deepspeed(tmp_path)


_VALUES = st.sampled_from(
    [
        *(True, False, None, 0, 1, 3, -1, 0.5, 5e8, float("nan"), float("inf"), 10**400, [], [1]),
        *("5e8", "auto", "", "cpu", "none", "fp32", "bf16", "AdamW", "WarmupLR"),
        *({}, {"enabled": True}, {"enabled": False}, {"lr": 0.1}),
    ]
)


def test_what_asks_for_nothing_is_taken() -> None:
    document = {
        "steps_per_print": float("inf"),  # as Accelerate has it
        "compile": {"deepcompile": False, "free_activation": True},
        "tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}},
        "bfloat16": {"enabled": True},
    }
    asked = read_deepspeed(document, fields=ROOM)
    assert (asked.steps_per_print, asked.config.precision) == (0, "bf16")
    assert {note.key: note.why for note in asked.notes if note.what == "not needed"} == {
        "compile": "it asks for nothing",
        "tensor_parallel": "it asks for nothing",
    }


def test_a_config_alone_tells_what_became_of_the_keys_once(caplog: pytest.LogCaptureFixture) -> None:
    document = {"zero_optimization": {"stage": 2, "overlap_comm": "told-by-this-test"}, "optimizer": {"type": "Rprop"}}
    for _ in range(2):
        with caplog.at_level(logging.INFO, logger="infinity.deepspeed"):
            assert Config.from_deepspeed(document, device="cpu").stage == 2
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    keys = [message.partition(" = ")[0] for _, message in said]
    assert sorted(keys) == ["optimizer", "optimizer.type", "zero_optimization.overlap_comm", "zero_optimization.stage"]
    warned = [message for level, message in said if level == logging.WARNING]
    assert len(warned) == 1
    assert "optimizer = Rprop: Config.from_deepspeed() leaves it to you" in warned[0]


_TAKEN = [
    (dotted, _at(document, dotted))
    for name in CONFIGURATIONS
    for document in [configuration(name, Path("/nvme"))]
    for dotted in leaves(document)
    if name not in REFUSED
]
"""Keys of configurations that train, with their values."""


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(_TAKEN), max_size=12))
def test_keys_of_several_configurations_go_together_or_one_of_them_is_named(pairs: list[tuple[str, Any]]) -> None:
    flat, refusal, told = dict(pairs), "", set()
    try:
        told = {note.key for note in read_deepspeed(nested(flat), fields=ROOM).notes}
    except ConfigError as error:
        refusal = str(error)
    if refusal:
        assert any(dotted in refusal for dotted in flat), refusal
    else:
        assert told >= set(flat) - {"optimizer.params", "scheduler.params"}


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(KEY_OF)), _VALUES, max_size=4))
def test_any_keys_with_any_values_are_taken_or_refused_by_name(flat: dict[str, Any]) -> None:
    document = nested(flat)
    refusal = ""
    try:
        told = {note.key for note in read_deepspeed(document, fields=ROOM).notes}
    except ConfigError as error:
        refusal = str(error)
    if refusal:
        assert any(name in refusal for dotted in flat for name in {dotted, dotted.rpartition(".")[0]} - {""})
    else:
        assert told >= {dotted for dotted, value in flat.items() if not isinstance(value, dict)}
