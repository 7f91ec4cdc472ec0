"""Optimizer states in fewer bytes: how close they come, what they cost, and that models still train with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity import Config, ConfigError
from infinity.engine.budget import plan_for
from infinity.engine.codecs import BLOCK_ELEMENTS, Blockwise, Codec, Rounded
from infinity.engine.unit import PARAM, SCRATCH
from parity import CPU, assert_same, same_bits
from parity import tiny_scale as tiny_scale

WIDTH = 96
NUM_LARGE, NUM_SMALL = WIDTH * WIDTH, WIDTH


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def there_and_back(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(values.numel() * codec.code_bytes, dtype=torch.uint8)
    scales = torch.empty(codec.num_scales(values.numel()))
    codec.encode(values, codes, scales)
    out = torch.full_like(values, torch.nan)
    codec.decode(codes, scales, out)
    return out


def largest_of_block(values: torch.Tensor) -> torch.Tensor:
    """For each element, the largest magnitude of its block."""
    blocks = values.abs().split(BLOCK_ELEMENTS)
    return torch.cat([block.max().expand(block.numel()) for block in blocks]) if values.numel() else values


# Codes


def test_rounded_is_bf16() -> None:
    values = torch.randn(5000)
    assert same_bits(there_and_back(Rounded(), values), values.bfloat16().float())


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_byte_is_as_close_as_its_codes_are_dense(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 255, 256, 257, 4096, (1 << 15) + 256, (1 << 16) + 300]))
    magnitude = 10.0 ** data.draw(st.integers(-30, 30))
    spread = data.draw(st.sampled_from([0.1, 1.0, 4.0]))
    unsigned = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    values = (
        magnitude * torch.randn(size, generator=generator) * torch.exp(spread * torch.randn(size, generator=generator))
    )
    values = values.abs() if unsigned else values
    got, largest = there_and_back(Blockwise(), values), largest_of_block(values)
    relative = values.abs() / largest
    # Codes of a power of ten lie 0.9 of it apart, divided by their number: 64 in the largest, half in the next.
    powers = torch.ceil(torch.log10(relative.clamp_min(1e-7))).clamp(-6, 0)
    steps = 0.9 * 10.0**powers / (64 * 2.0**powers * (2 if unsigned else 1))
    allowed = largest * (torch.maximum(steps, torch.tensor(2e-6)) * 0.55 + relative / 1000)
    assert bool(((got - values).abs() <= allowed).all())
    if unsigned:
        assert same_bits(got.max(), values.max()), "the largest is exact"
        assert bool(((got > 0) == (values > 0)).all()), "nothing but zero becomes zero"


def test_zeros_and_what_is_no_number() -> None:
    zeros = torch.zeros(600)
    zeros[300:] = -0.0
    assert bool((there_and_back(Blockwise(), zeros) == 0).all())
    mixed = torch.ones(1024)
    mixed[3], mixed[300], mixed[600], mixed[601] = torch.nan, torch.inf, -1.0, 0.0
    got = there_and_back(Blockwise(), mixed)
    assert bool(got[:512].isnan().any())
    assert not bool(got[512:].isnan().any())
    assert bool((got[512:] == mixed[512:]).logical_or(mixed[512:] == -1.0).all())


# Under the engine


def train(tmp_path: Path, **fields: Any) -> tuple[list[float], dict[str, Any], infinity.Engine]:
    """Losses of 30 steps towards a fixed map, the optimizer's state, and the (closed) engine."""
    torch.manual_seed(0)
    model, inputs = Net(), torch.randn(64, WIDTH)
    targets = torch.tanh(inputs @ torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = Config(**{"device": "cpu", "nvme": tmp_path, "hbm": "1MiB", "ram": "1MiB", **fields})
    losses = []
    with infinity.initialize(model, optimizer, config) as engine:
        for _ in range(30):
            loss = (engine(inputs).float() - targets).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        state = engine.optimizer.state_dict()
        for usage in engine.usage().values():
            assert usage.peak_bytes <= usage.budget_bytes
        assert engine._store.nvme is not None
        assert not any(key.kind.startswith(SCRATCH) for key in engine._store.nvme.versions.live)
    return losses, state, engine


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_train_as_with_whole_states(precision: str, tmp_path: Path) -> None:
    full, state, _ = train(tmp_path, precision=precision)
    assert full[-1] < full[0] / 4
    for optimizer_states in ("bf16", "int8"):
        losses, packed, _ = train(tmp_path, precision=precision, optimizer_states=optimizer_states)
        assert losses != full
        assert abs(losses[-1] - full[-1]) < 0.1 * full[-1]
        for index, states in packed["state"].items():
            assert {name: value.dtype for name, value in states.items()} == {
                name: value.dtype for name, value in state["state"][index].items()
            }
            assert states["exp_avg"].shape == state["state"][index]["exp_avg"].shape
            assert states["step"] == 30


def test_the_smallest_budgets_suffice(tmp_path: Path) -> None:
    for optimizer_states in ("bf16", "int8"):
        with pytest.raises(infinity.BudgetError) as error:
            train(tmp_path, optimizer_states=optimizer_states, hbm=1, ram=1)
        hbm, ram = (int(part.split("=")[1].split(" ")[0]) for part in str(error.value).split("do: ")[1].split(", "))
        losses, _, engine = train(tmp_path, optimizer_states=optimizer_states, hbm=hbm, ram=ram)
        assert losses[-1] < losses[0] / 4
        assert engine.last_step is not None


def test_bytes() -> None:
    """One part: a weight that is packed, and a bias whose states are kept as they are."""
    model = nn.Linear(WIDTH, WIDTH)
    params = list(model.parameters())

    def sizes(**fields: Any) -> tuple[dict[str, int], int]:
        config = Config(device="cpu", nvme=".", **fields)
        plan = plan_for(model, set(params), dict.fromkeys(params, ("exp_avg",)), config, CPU)
        (part,) = plan.parts
        assert part.num_elements == 3 * 4096
        return plan.shard_bytes(part), plan.step_bytes(part)

    full, full_step = sizes()
    assert full["state.exp_avg"] == full[PARAM] == 4 * 3 * 4096
    bf16, bf16_step = sizes(optimizer_states="bf16")
    assert bf16["state.exp_avg"] == 2 * 3 * 4096 + 4096
    int8, int8_step = sizes(optimizer_states="int8")
    assert int8["state.exp_avg"] == 3 * 4096 + 4096
    assert 4 * (NUM_LARGE / BLOCK_ELEMENTS + NUM_SMALL) <= 4096
    scratch = 10 * 4096
    assert scratch - 4096 < 4 * (NUM_LARGE + NUM_SMALL) <= scratch
    assert bf16_step == full_step - full["state.exp_avg"] + bf16["state.exp_avg"] + scratch
    assert int8_step == full_step - full["state.exp_avg"] + int8["state.exp_avg"] + scratch


@pytest.mark.parametrize("optimizer_states", ["bf16", "int8"])
def test_states_from_before_are_packed_and_small_ones_kept(optimizer_states: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, WIDTH)).square().sum().backward()
    optimizer.step()
    before = {index: state["momentum_buffer"].clone() for index, state in enumerate(optimizer.state.values())}
    config = Config(
        device="cpu",
        nvme=tmp_path,
        hbm="1MiB",
        ram="1MiB",
        optimizer_states=optimizer_states,
    )
    with infinity.initialize(model, optimizer, config) as engine:
        state = {index: each["momentum_buffer"] for index, each in engine.optimizer.state_dict()["state"].items()}
        codec = {"bf16": Rounded, "int8": Blockwise}[optimizer_states]()
        assert_same(state[0].reshape(-1), there_and_back(codec, before[0].reshape(-1)), "weight")
        assert_same(state[1], before[1], "bias")


def test_states_of_other_dtypes_are_kept_as_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    plain = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    config = Config(device="cpu", nvme=tmp_path, hbm="1MiB", ram="2MiB", optimizer_states="int8")
    inputs = torch.randn(4, WIDTH, dtype=torch.float64)
    ours, theirs = (torch.optim.Adam(each.parameters()) for each in (model, plain))
    with infinity.initialize(model, ours, config) as engine:
        for _ in range(2):
            engine.backward(engine(inputs).square().mean())
            engine.step()
            theirs.zero_grad()
            plain(inputs).square().mean().backward()
            theirs.step()
        assert_same(dict(engine.state_dict()), dict(plain.state_dict()), "weights")


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer_states: .*'full', 'bf16' or 'int8'"):
        Config(optimizer_states="int4")
