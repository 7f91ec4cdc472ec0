"""infinity.plan: bytes are the engine's own, time follows from the given speeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.summary import Summary
from infinity.errors import BudgetError, ConfigError, ModelError
from infinity.plan.estimate import TooSmallError
from infinity.plan.result import Plan
from infinity.trace import TierUsage
from infinity.train.model import GPT, GPTShape

SHAPE = GPTShape(num_layers=3, hidden_size=64, num_heads=2, seq_length=16, vocab_size=256)
PAGE = 4096


class Tied(nn.Module):
    """An embedding that is the head, and blocks of which the first is frozen."""

    def __init__(self, *, freezes: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        )
        self.head = nn.Linear(64, 256, bias=False)
        self.head.weight = self.embedding.weight
        if freezes:
            self.blocks[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.blocks(self.embedding(tokens)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


MODELS: dict[str, Any] = {"gpt": lambda: GPT(SHAPE), "tied": Tied, "frozen": lambda: Tied(freezes=True)}


def plan(source: nn.Module | str | Path | None = None, /, **settings: Any) -> Plan:
    """A plan with nothing measured: one second of arithmetic per step, and an optimizer that goes through 1 GB/s."""
    given = {"device": "cpu", "compute_seconds": 1.0, "optimizer_speed": 1e9, **settings}
    root: Any = infinity  # the package of that name can be called, which no type checker sees
    made: Plan = root.plan(source, **{key: value for key, value in given.items() if value is not None})
    return made


def least(model: nn.Module, **settings: Any) -> dict[str, int]:
    """The smallest budgets, as the plan of ample ones tells them."""
    return dict(plan(model, **{**settings, "hbm": "1GiB", "ram": "1GiB"}).smallest)


def train(
    name: str, optimizer: str, num_steps: int, accumulate: int, **fields: Any
) -> tuple[Summary, dict[str, TierUsage], list[int]]:
    """What an engine said of itself when it had trained, and the bytes that each step moved."""
    torch.manual_seed(0)
    model = MODELS[name]()
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    config = infinity.Config(device="cpu", accumulation_steps=accumulate, **fields)
    moved = []
    with infinity.initialize(model, made, config) as engine:
        for _ in range(num_steps):
            for _ in range(accumulate):
                tokens = torch.randint(0, 256, (2, 16))
                engine.backward(engine(tokens, tokens))
            engine.step()
            assert engine.last_step is not None
            moved.append(engine.last_step.nvme_read_bytes + engine.last_step.nvme_written_bytes)
        engine.synchronize()
        return engine.summary(), dict(engine.usage()), moved


COMBINATIONS = [
    ("gpt", "AdamW", 1, {"precision": "fp32"}),
    ("gpt", "SGD", 2, {"precision": "bf16", "prefetch": 0}),
    ("tied", "RMSprop", 1, {"precision": "bf16", "recompute": True}),
    ("frozen", "Adafactor", 2, {"precision": "fp32", "overlap": False}),
]


@pytest.mark.parametrize(("name", "optimizer", "accumulate", "fields"), COMBINATIONS)
@pytest.mark.parametrize("share", [0.0, 1.7], ids=["least", "all"])
def test_bytes_are_those_of_the_engine(
    tmp_path: Path, name: str, optimizer: str, accumulate: int, fields: dict[str, Any], share: float
) -> None:
    model = MODELS[name]()
    settings = {"optimizer": optimizer, "accumulate": accumulate, "nvme": [str(tmp_path)], **fields}
    budgets = least(model, **settings)
    state = sum(plan(model, **settings).summary.kept.values())
    budgets["ram"] = max(budgets["ram"], int(share * state))
    planned = plan(model, **settings, **budgets)
    summary, usage, moved = train(name, optimizer, 3, accumulate, nvme=[str(tmp_path)], **fields, **budgets)
    assert planned.summary.kept == summary.kept
    assert planned.summary.num_parameters == summary.num_parameters
    for tier, own in planned.summary.tiers.items():
        other = summary.tiers[tier]
        assert (own.budget, own.needed, own.holds) == (other.budget, other.needed, other.holds), tier
    assert (sum(planned.moved.values()) == 0) == (sum(moved) == 0) == bool(share)
    if not share:  # one buffer after the other is full
        assert planned.peaks == {tier: usage[tier].peak_bytes for tier in ("device", "host")}
    assert sum(planned.placed["host"].values()) <= budgets["ram"]
    placed = {kind: sum(tier.get(kind, 0) for tier in planned.placed.values()) for kind in summary.kept}
    assert placed["parameters"] == summary.kept["parameters"]
    if name != "frozen":  # what is frozen gets no states, though the budgets have room for them
        assert placed.get("optimizer states") == summary.kept.get("optimizer states")


def test_the_smallest_budgets_train_and_less_does_not(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nvme": [str(tmp_path)], "precision": "bf16"}
    model = MODELS["gpt"]()
    budgets = least(model, **settings)
    _, usage, moved = train("gpt", "AdamW", 2, 1, **settings, **budgets)
    assert usage["host"].peak_bytes <= budgets["ram"]
    assert min(moved) > 0
    for name in budgets:
        less = {**budgets, name: budgets[name] - PAGE}
        with pytest.raises(BudgetError):
            train("gpt", "AdamW", 1, 1, **settings, **less)
        with pytest.raises(TooSmallError, match="too small") as error:
            plan(model, **settings, **less)
        assert error.value.smallest == budgets
        assert error.value.short[name] == PAGE


def test_a_plan_makes_nothing_and_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    model = MODELS["tied"]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    planned = plan(model, nvme=[str(tmp_path / "absent")], ram="600kB", hbm="200kB")
    assert list(tmp_path.iterdir()) == []
    assert {name for name, _ in model.named_parameters()} == before.keys() - {"head.weight"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.blocks[0][0]._forward_pre_hooks
    with infinity.deferred_init():
        deferred = MODELS["tied"]()
    assert plan(deferred, nvme=[str(tmp_path / "absent")], ram="600kB", hbm="200kB") == planned, "to the last bit"


def test_in_memory_a_step_takes_its_arithmetic_and_the_optimizers() -> None:
    planned = plan(layers=2, hidden=64, heads=2, optimizer_speed=1e8)
    state = sum(planned.summary.kept.values())
    machine, num_parts = planned.machine, 5
    assert planned.busy["optimizer"] == pytest.approx(state / 1e8, abs=num_parts * 1e-3)
    known = 1.0 + planned.busy["optimizer"] + machine.step_seconds
    assert known <= planned.seconds <= known + 4 * num_parts * machine.gather_seconds
    assert (planned.bottleneck, planned.busy["disk"], planned.tokens_to_hide_disk) == ("compute", 0.0, 0)
    assert plan(layers=2, hidden=64, heads=2, optimizer_speed=1e5).bottleneck == "optimizer arithmetic"


def test_on_a_slow_disk_a_step_takes_what_the_disk_does(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nvme": [str(tmp_path)], "layers": 2, "hidden": 64, "heads": 2, "seq": 16, "batch": 2}
    settings |= {"ram": "700kB", "hbm": "500kB", "compute_seconds": 0.01, "optimizer_speed": 1e12}
    slow = plan(**settings, read=1e6, write=1e6, mixed=1e6, endurance="1TB")
    read, written = slow.moved["nvme read"], slow.moved["nvme write"]
    alone = (read + written) / 1e6  # one direction at a time, or both at half the speed each
    assert written > 0
    assert slow.seconds == pytest.approx(alone, rel=0.05)
    assert slow.bottleneck == "disk, both ways"
    assert slow.tokens_to_hide_disk == pytest.approx(slow.busy["disk"] / 0.01 * 32, abs=1)
    assert slow.wear is not None
    assert slow.wear.steps == pytest.approx(1e12 / written)
    assert slow.wear.days == pytest.approx(1e12 / written * slow.seconds / 86400)
    twice = plan(**settings, read=2e6, write=2e6, mixed=2e6)
    assert twice.seconds == pytest.approx(slow.seconds / 2, rel=0.15)
    reads = plan(**settings, read=1e5, write=1e9, mixed=1e9)
    assert reads.bottleneck in ("disk, reads", "disk, both ways")
    assert reads.seconds >= reads.moved["nvme read"] / 1e5


def test_operations_are_counted_from_the_matrices() -> None:
    flops = 1e9
    planned = plan(layers=2, hidden=64, heads=2, seq=32, batch=2, compute_seconds=None, flops=flops)
    matrices = 2 * 12 * 64 * 64 + 256 * 64  # four of attention, eight of the MLP, the head
    expected = 6 * 64 * (matrices + 2 * 64 * 32) / flops
    assert planned.busy["compute"] == pytest.approx(expected, rel=0.01)
    recomputed = plan(layers=2, hidden=64, heads=2, seq=32, batch=2, compute_seconds=None, flops=flops, recompute=True)
    assert recomputed.busy["compute"] == pytest.approx(expected * 8 / 6, rel=0.01)


def test_ranks_needed_is_the_least_number_whose_budgets_do() -> None:
    settings: dict[str, Any] = {"layers": 4, "hidden": 128, "heads": 2, "hbm": "4MiB", "ram": "5MB"}
    with pytest.raises(TooSmallError) as error:
        plan(**settings)
    needed = error.value.ranks_needed
    assert needed is not None
    assert needed > 1
    assert f"these budgets do on {needed} ranks" in str(error.value)
    planned = plan(**settings, ranks=needed)
    assert (planned.ranks_needed, planned.summary.num_ranks, planned.simulated) == (needed, needed, False)
    with pytest.raises(TooSmallError):
        plan(**settings, ranks=needed - 1)


def test_what_ranks_send_is_by_the_formulas() -> None:
    planned = plan(layers=2, hidden=256, heads=2, ranks=4, network="1MB/s", hbm="64MiB")
    params = 4 * planned.summary.num_parameters
    assert planned.moved["reduce-scatter"] == pytest.approx(params * 3 / 4, rel=0.05)
    assert planned.moved["all-gather"] == pytest.approx(params * 3 / 4, rel=0.05)
    assert planned.bottleneck == "network"
    assert planned.tokens_per_second == pytest.approx(4 * planned.num_tokens / planned.seconds)


def test_an_accelerator_that_is_not_here_is_planned_too() -> None:
    planned = plan(layers=2, hidden=64, heads=2, device="cuda", pcie="1MB/s", hbm="200kB", compute_seconds=0.01)
    params = 4 * planned.summary.num_parameters
    assert planned.moved["host to device"] >= params
    assert planned.moved["device to host"] == pytest.approx(params, rel=0.01)  # gradients
    assert planned.bottleneck == "PCIe"
    with pytest.raises(ConfigError, match=r"--flops: needed, since cuda is not here"):
        plan(layers=2, hidden=64, heads=2, device="cuda", compute_seconds=None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layer": 3}, "did you mean 'layers'"),
        ({"optimizer": "Adamm"}, "--optimizer: expected a class of torch.optim"),
        ({"parameters": "7e9"}, "--parameters: expected together with --layers and --hidden"),
        ({"hidden": 65}, "--hidden: expected a multiple of --heads"),
        ({"read": "fast"}, "--read: expected bytes per second"),
        ({"endurance": "-1TB"}, "--endurance"),
        ({"model": "nowhere:Class"}, "--model: nowhere:Class cannot be found"),
        ({"model": "infinity"}, "--model: expected package.module:Class"),
        ({"hf": "absent.json"}, "absent.json"),
        ({"bench": "absent.json"}, "--bench: absent.json"),
        ({"ram": "many"}, "ram"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(**settings)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_that_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ModelError, match="has no parameters"):
        plan(nn.ReLU())
    with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module or the path of a config\.json, got int"):
        plan(5)  # type: ignore[arg-type]
