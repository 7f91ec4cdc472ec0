"""Which parameters are gathered together, which are stepped together, and where each lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import parity_models as models
from infinity import Config, ConfigError
from infinity.config import Precision
from infinity.engine.budget import plan_for
from infinity.engine.partition import lay_out_units
from infinity.engine.precision import precision_of
from infinity.engine.standin import StandIn
from infinity.engine.unit import GRAD, GRAD_SUM, MASTER, PARAM, PART_ALIGNMENT, SLOT_ALIGNMENT, Unit, UnitState
from infinity.engine.wrap import UnitPlan, plan_units
from parity_models import GPT, WIDTH

CPU = torch.device("cpu")
MIB = 1 << 20
PAGE = 4096 * 4
"""Bytes of the smallest part in fp32."""


class Layer(nn.Module):
    def __init__(self, width: int = 8, *inner: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.inner = nn.ModuleList(inner)


class Stage(nn.Module):
    """Mostly layers of its own."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.down = nn.Linear(4, 4)
        self.layers = nn.Sequential(*(Layer() for _ in range(num_layers)))


def units_of(model: nn.Module, units: Any = "auto", max_unit_bytes: int = 64 * MIB) -> dict[str, UnitPlan]:
    return {plan.name: plan for plan in plan_units(model, units, max_unit_bytes=max_unit_bytes)}


def test_blocks_the_rest_and_tied_weights() -> None:
    units = units_of(GPT())
    assert list(units) == ["(tied) tokens", "(rest)", "blocks.0", "blocks.1"]
    assert [name for name, _ in units["(tied) tokens"].triggers] == ["tokens", "head"]
    assert [name for name, _ in units["(tied) tokens"].params] == ["tokens.weight"]
    assert [name for name, _ in units["(rest)"].params] == ["positions.weight", "norm.weight", "norm.bias"]
    block = units["blocks.0"]
    assert block.triggers[0][0] == "blocks.0", "the outermost comes first"
    owners = ("", ".norm", ".qkv", ".out", ".mlp.0", ".mlp.1", ".mlp.3")
    assert {name for name, _ in block.triggers} == {f"blocks.0{owner}" for owner in owners}


def test_large_modules_outside_blocks_stand_alone() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(40_000, 8), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 40_000)})
    assert list(units_of(model)) == ["tokens", "(rest)", "head"]


def test_parameters_on_the_root() -> None:
    assert units_of(models.ViT())["(rest)"].triggers[0][0] == ""
    model = nn.Linear(1024, 1024)
    assert list(units_of(model)) == ["(root)"]


def test_stages_and_experts_are_opened() -> None:
    assert [*units_of(nn.ModuleList([Stage(), Stage()]))] == [
        "(rest)", *(f"{stage}.layers.{layer}" for stage in range(2) for layer in range(3))
    ]  # fmt: skip
    experts = nn.ModuleList(Layer(4, *(Layer(16) for _ in range(4))) for _ in range(2))
    assert "1.inner.3" in units_of(experts)


def test_a_block_that_leaves_no_room_for_another_is_opened() -> None:
    model = nn.ModuleList(Layer(64) for _ in range(2))
    num_bytes = sum(param.numel() * 4 for param in model[0].parameters())
    assert list(units_of(model, max_unit_bytes=num_bytes)) == ["0", "1"]
    assert not {"0", "1"} & units_of(model, max_unit_bytes=num_bytes - 1).keys()


def test_the_rest_comes_in_runs_no_larger_than_a_block_may_be() -> None:
    model = nn.ModuleDict({str(index): nn.Linear(15, 16) for index in range(8)})  # 1 KiB each
    units = units_of(model, max_unit_bytes=3000)
    assert len(units) > 2
    for plan in units.values():
        assert sum(param.numel() * 4 for _, param in plan.params) <= 3000 + 1024


def test_weights_tied_inside_one_block_are_the_blocks() -> None:
    first, second = Layer(), Layer()
    model = nn.ModuleList([first, second])
    first.second.weight = first.first.weight
    assert list(units_of(model)) == ["0", "1"]
    second.second.weight = first.first.weight
    assert list(units_of(model)) == ["(tied) 0.first", "0", "1"]
    assert [name for name, _ in units_of(model)["(tied) 0.first"].triggers] == ["0.first", "0.second", "1.second"]


def test_class_names() -> None:
    units = units_of(GPT(), ("Sequential", "Embedding"))
    assert [*units] == ["(tied) tokens", "positions", "(rest)", "blocks.0.mlp", "blocks.1.mlp"]
    with pytest.raises(ConfigError, match=r"no module of class 'Blocks'; expected classes .*, such as Block"):
        units_of(GPT(), ("Blocks",))
    with pytest.raises(ConfigError, match=r"no module of class 'Xyzzy'; .* such as Block, Dropout, Embedding"):
        units_of(GPT(), ("Xyzzy",))


@st.composite
def module_trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """Any nesting of containers and leaves, some of them shared, some weights tied."""
    leaves: list[nn.Linear] = []

    def make(depth: int) -> nn.Module:
        kind = draw(st.sampled_from(["linear", "relu", "list", "sequential", "layer", "again"][: 6 if depth else 2]))
        if kind == "again" and leaves:
            return draw(st.sampled_from(leaves))
        if kind in ("list", "sequential"):
            children = [make(depth - 1) for _ in range(draw(st.integers(1, 3)))]
            return nn.ModuleList(children) if kind == "list" else nn.Sequential(*children)
        if kind == "layer":
            return Layer(draw(st.sampled_from([4, 8])), *(make(depth - 1) for _ in range(draw(st.integers(0, 2)))))
        if kind == "relu":
            return nn.ReLU()
        leaves.append(
            nn.Linear(4, draw(st.sampled_from([1, 4])), dtype=draw(st.sampled_from([torch.float32, torch.half])))
        )
        if len(leaves) > 1 and draw(st.booleans()) and leaves[0].weight.shape == leaves[-1].weight.shape:
            leaves[-1].weight = leaves[0].weight
        return leaves[-1]

    root = nn.Module()
    root.tree = make(depth)
    root.extra = nn.Linear(4, 4)
    return root


@settings(max_examples=60, deadline=None)
@given(model=module_trees(), max_unit_bytes=st.sampled_from([1, 100, 600, 64 * MIB]))
def test_every_parameter_is_in_one_unit_which_all_its_owners_trigger(model: nn.Module, max_unit_bytes: int) -> None:
    plans = plan_units(model, "auto", max_unit_bytes=max_unit_bytes)
    names = [name for plan in plans for name, _ in plan.params]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    unit_of = {param: plan for plan in plans for _, param in plan.params}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                assert module in [trigger for _, trigger in unit_of[param].triggers]
    for plan in plans:
        assert len({id(module) for _, module in plan.triggers}) == len(plan.triggers)


def lay_out(
    model: nn.Module,
    *,
    precision: Precision = "fp32",
    sub_group_bytes: int = MIB,
    largest_bytes: int = 0,
    frozen: Sequence[str] = (),
) -> list[Unit]:
    stepped = {param for name, param in model.named_parameters() if name not in frozen}
    plans = plan_units(model, "auto", max_unit_bytes=64 * MIB)
    states = dict.fromkeys(stepped, ("exp_avg", "exp_avg_sq"))
    dtypes = precision_of(Config(device="cpu", precision=precision))
    return lay_out_units(
        plans, stepped, dtypes, CPU, states=states, sub_group_bytes=sub_group_bytes, largest_bytes=largest_bytes
    )


@settings(max_examples=40, deadline=None)
@given(
    model=module_trees(),
    precision=st.sampled_from(["fp32", "bf16"]),
    sub_group_bytes=st.sampled_from([1, 500, MIB]),
    data=st.data(),
)
def test_layouts_keep_every_value(
    model: nn.Module, precision: Precision, sub_group_bytes: int, data: st.DataObject
) -> None:
    names = [name for name, _ in model.named_parameters()]
    frozen = data.draw(st.lists(st.sampled_from(names), unique=True))
    units = lay_out(model, precision=precision, sub_group_bytes=sub_group_bytes, frozen=frozen)
    parts = [part for unit in units for part in unit.parts]
    assert [part.index for part in parts] == list(range(len(parts)))
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    for unit in units:
        buffer = torch.full((unit.num_bytes,), 255, dtype=torch.uint8)
        unit.bind(buffer)
        assert unit.state is UnitState.GATHERED
        for slot in unit.slots:
            slot.param.data.copy_(values[slot.name])
        for slot in unit.slots:
            assert slot.param.data_ptr() % 128 == buffer.data_ptr() % 128
            expected = values[slot.name].to(slot.param.dtype)
            assert torch.equal(slot.param, expected), f"{slot.name} was overwritten by a neighbour"
        unit.unbind()
        for slot in unit.slots:
            assert slot.param.shape == values[slot.name].shape
            assert slot.param.isnan().all()
    for part in parts:
        assert part.num_elements % PART_ALIGNMENT == 0
        assert part.start % 4096 == 0
        assert len({slot.param.dtype for slot in part.slots}) == 1
        assert part.stepped == (part.slots[0].name not in frozen)
        assert all(slot.offset % SLOT_ALIGNMENT == 0 for slot in part.slots)
        item_bytes = (part.step_dtype if part.stepped else part.compute_dtype).itemsize
        assert len(part.slots) == 1 or sum(s.num_elements for s in part.slots) * item_bytes <= sub_group_bytes


@pytest.mark.parametrize(
    ("largest_bytes", "sizes"),
    [
        (0, [128, 16384, 128, 16384, 1024, 1024]),  # none: sub_group_bytes holds as it is
        (MIB, [128 + 16384 + 128, 16384, 1024 + 1024]),
        (16 * (128 + 16384), [128 + 16384, 128 + 16384, 1024 + 1024]),  # as far as that suffices
    ],
)
def test_sub_groups_may_be_as_large_as_the_largest_parameter_with_what_is_beside_it(
    largest_bytes: int, sizes: list[int]
) -> None:
    model = nn.Module()
    model.norm = nn.Parameter(torch.ones(128))
    model.first = nn.Linear(128, 128)
    model.second = nn.Linear(128, 128, bias=False)
    model.others = nn.ParameterList([torch.ones(1024), torch.ones(1024)])
    parameter_bytes = 16  # itself, its gradient, two states
    (unit,) = lay_out(model, sub_group_bytes=128 * parameter_bytes, largest_bytes=largest_bytes)
    assert [sum(slot.num_elements for slot in part.slots) for part in unit.parts] == sizes


def test_strides_and_odd_shapes() -> None:
    model = nn.Module()
    conv = model.conv = nn.Conv2d(4, 8, 3)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    model.transposed = nn.Parameter(torch.randn(3, 5).t())
    model.sliced = nn.Parameter(torch.randn(6, 8)[:, ::2])
    model.empty = nn.Parameter(torch.empty(0, 4))
    model.scalar = nn.Parameter(torch.tensor(2.0))
    model.number = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    strides = {slot.name: slot.stride for unit in lay_out(model) for slot in unit.slots}
    assert strides["conv.weight"] == conv.weight.stride()
    assert not conv.weight.is_contiguous()
    assert strides["transposed"] == (1, 5)
    assert strides["sliced"] == (4, 1), "what is not dense becomes contiguous"
    for unit in lay_out(model):
        unit.bind(torch.zeros(unit.num_bytes, dtype=torch.uint8))
        for slot in unit.slots:
            slot.param.data.copy_(values[slot.name])
        assert all(torch.equal(slot.param, values[slot.name]) for slot in unit.slots)
        unit.unbind()
    assert torch.equal(model.number, torch.zeros(2, dtype=torch.int64)), "integers have no NaN"
    assert model.scalar.isnan()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_arithmetic_of_budgets(precision: str) -> None:
    """Two layers of one part each: every size as a formula in pages."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)))
    params = list(model.parameters())
    config = Config(device="cpu", precision=precision, nvme=".")
    plan = plan_for(model, set(params), dict.fromkeys(params, ("exp_avg", "exp_avg_sq")), config, CPU)
    compute = PAGE if precision == "fp32" else PAGE // 2
    shards = {PARAM: compute, GRAD: compute, "state.exp_avg": PAGE, "state.exp_avg_sq": PAGE}
    if precision == "bf16":
        shards |= {MASTER: PAGE, GRAD_SUM: PAGE}
    assert [plan.shard_bytes(part) for part in plan.parts] == [shards, shards]
    masters = PAGE if precision == "bf16" else 0
    gradient = max(compute, masters)
    assert plan.smallest_hbm(model)[0] == compute
    assert plan.smallest_ram(uploads=False) == compute + masters + gradient + 2 * PAGE
    assert plan.smallest_ram(uploads=True) == plan.smallest_ram(uploads=False) + compute
    assert plan.state_bytes == 2 * (2 * compute + masters + 2 * PAGE)
    assert plan.nvme_bytes == 2 * sum(shards.values())
    hbm, ram = plan.needs(model, config.model_copy(update={"nvme": ()}), CPU)
    backward = gradient + (compute if precision == "bf16" else 0)
    assert (hbm, ram) == (compute, 2 * (compute + masters + gradient + 2 * PAGE) + backward)


def test_the_device_budget_is_for_the_units_on_the_worst_path() -> None:
    model = models.ViT()
    params = list(model.parameters())
    config = Config(device="cpu")
    plan = plan_for(model, set(params), dict.fromkeys(params, ()), config, CPU)
    sizes = {unit.name: unit.num_bytes for unit in plan.units}
    assert math.isclose(plan.smallest_hbm(model)[0], sizes["(rest)"] + max(sizes["blocks.0"], sizes["blocks.1"]))
    assert [unit.name for unit in plan.smallest_hbm(model)[1]] == ["(rest)", "blocks.0"]


def test_what_the_optimizer_does_not_hold_has_only_parameters() -> None:
    units = lay_out(nn.Linear(8, 8), frozen=["bias"], precision="bf16")
    weight, bias = units[0].parts
    assert (weight.stepped, bias.stepped) == (True, False)
    assert bias.state_names == {}
    assert list(weight.state_names) == ["exp_avg", "exp_avg_sq"]


def test_placeholders_are_made_once_and_again_only_where_one_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Size] = []
    real = StandIn.__init__

    def count(stand_in: StandIn, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        made.append(shape)
        real(stand_in, shape, dtype, device)

    monkeypatch.setattr(StandIn, "__init__", count)
    model = nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.LayerNorm(2)})
    (unit,) = lay_out(model)
    buffer = torch.zeros(unit.num_bytes, dtype=torch.uint8)
    for _ in range(3):
        unit.bind(buffer)
        assert not any(slot.is_away for slot in unit.slots)
        unit.unbind()
        assert unit.written_parameter() is None
        assert all(slot.is_away for slot in unit.slots)
    assert len(made) == 4
    with torch.inference_mode():
        unit.bind(buffer)
        unit.unbind()
    assert not any(param.is_inference() for param in model.parameters())
    bias = model.get_parameter("norm.bias")
    for write in (lambda: bias.data.zero_(), lambda: setattr(bias, "data", torch.ones(2))):
        write()
        assert unit.written_parameter() == "norm.bias"
        unit.restore()
        assert unit.written_parameter() is None
        assert bias.isnan().all()
