"""The formulas of what each stage keeps and moves."""

from __future__ import annotations

import pytest
import torch

from infinity.config import Config
from infinity.engine.budget import Plan, plan_for
from infinity.engine.traffic import DIVIDED, Flow, Moved, State, Work, kept, moved, sent_bytes, state_for, state_of
from infinity.train.model import GPT, GPTShape

P = 1 << 20
BF16 = state_for(P, compute_dtype=torch.bfloat16)
N = 4


def test_the_state_of_a_parameter() -> None:
    assert State(2 * P, 4 * P, 8 * P, 2 * P, 4 * P) == BF16
    assert BF16.num_bytes == 16 * P
    assert state_for(P, compute_dtype=torch.bfloat16, in_planes=True).num_bytes == 14 * P
    assert state_for(P, compute_dtype=torch.float32) == State(4 * P, 0, 8 * P, 4 * P, 4 * P, step_reads_params=True)


def plan(precision: str, **fields: object) -> Plan:
    with torch.device("meta"):
        model = GPT(GPTShape(num_layers=2, hidden_size=64, num_heads=2, seq_length=16, vocab_size=256))
    params = list(model.parameters())
    config = Config(device="cpu", precision=precision, **fields)
    return plan_for(model, set(params), dict.fromkeys(params, ("exp_avg", "exp_avg_sq")), config, torch.device("cpu"))


@pytest.mark.parametrize("fields", [{}, {"ram": "1MiB", "nvme": "."}, {"optimizer_states": "int8"}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_state_of_a_plan_is_all_that_it_plans(precision: str, fields: dict[str, object]) -> None:
    planned = plan(precision, **fields)
    state = state_of(planned.parts, planned.format_of, planned.state_format_of)
    assert state.num_bytes == planned.state_bytes
    elements = sum(part.num_elements for part in planned.parts)
    assert state.params == state.grads == elements * (4 if precision == "fp32" else 2)
    assert state.grad_sums == 4 * elements
    in_planes = precision == "bf16" and "ram" in fields
    assert state.step_reads_params is (precision == "fp32" or in_planes)


def per_parameter(stage: int, num_ranks: int = N) -> dict[str, float]:
    return {kind: size / P for kind, size in kept(BF16, stage, num_ranks).items()}


def test_what_a_rank_keeps() -> None:
    whole = {"parameters": 2.0, "master weights": 4.0, "optimizer states": 8.0, "gradients": 2.0}
    stepped = {"parameters": 0.5, "master weights": 1.0, "optimizer states": 2.0}
    assert per_parameter(0) == per_parameter(3, 1) == per_parameter(1, 1) == whole
    assert per_parameter(1) == {**stepped, "gathered parameters": 2.0, "gradients": 2.0}
    assert per_parameter(2) == {**stepped, "gathered parameters": 2.0, "gradients": 0.5}
    assert per_parameter(3) == {**stepped, "gradients": 0.5}
    assert [len(DIVIDED[stage]) for stage in range(4)] == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("stage", "all_gather", "reduce_scatter"),
    [(0, 2 * 3, 2 * 3), (1, 2 * 3 + 2, 2 * 3), (2, 2, 2 * 3), (3, 2 * 6, 2 * 3)],
)
def test_what_a_rank_sends(stage: int, all_gather: int, reduce_scatter: int) -> None:
    """Three micro-batches, each gathering everything twice."""
    step = moved(BF16, stage, N, Work(num_gathers=6, num_reductions=3))
    share = 3 / 4 * P
    assert step.sent == {"all-gather": all_gather * share, "reduce-scatter": reduce_scatter * share}
    assert moved(BF16, stage, 1, Work()).sent == {}


def test_sums_travel_in_their_dtype_and_once() -> None:
    step = moved(BF16, 2, 2, Work(num_gathers=2, num_reductions=1, reduces_sums=True))
    assert step.sent == {"all-gather": P, "reduce-scatter": 2 * P}


@pytest.mark.parametrize(
    ("stage", "read", "written", "to_device"),
    [
        (0, 6 * 2 + 4 + 8 + 2, 2 + 4 + 8 + 2, 6 * 2),
        (1, 0.5 + 5 * 2 + 1 + 2 + 2, 0.5 + 2 + 1 + 2 + 2, 0.5 + 5 * 2),
        (2, 0.5 + 5 * 2 + 1 + 2 + 0.5, 0.5 + 2 + 1 + 2 + 0.5, 0.5 + 5 * 2),
        (3, 6 * 0.5 + 1 + 2 + 0.5, 0.5 + 1 + 2 + 0.5, 6 * 0.5),
    ],
)
def test_what_a_rank_moves_through_its_own_tiers(stage: int, read: float, written: float, to_device: float) -> None:
    step = moved(BF16, stage, N, Work(num_gathers=6, num_reductions=3))
    assert (step.nvme_read, step.nvme_written) == (read * P, written * P)
    assert (step.to_device, step.from_device) == (to_device * P, 2 * 3 * P)


def test_planes_are_read_by_a_step_as_parameters_are() -> None:
    planes = state_for(P, compute_dtype=torch.bfloat16, in_planes=True)
    assert moved(planes, 3, 1, Work()).nvme_read == (2 * 2 + 2 + 2 + 8 + 2) * P
    assert moved(planes, 3, 1, Work()).to_device == 2 * 2 * P


def test_what_stays_in_host_memory_is_what_moves_most() -> None:
    step = Moved({}, {"a": Flow(100, 100, 100), "b": Flow(50, 200, 50), "c": Flow(0, 0, 0)}, 0, 0)
    assert step.beyond(0) == (step.nvme_read, step.nvme_written) == (300, 150)
    assert step.beyond(25) == (200, 125)
    assert step.beyond(100) == (50, 50)
    assert step.beyond(150) == step.beyond(1000) == (0, 0)


def test_uneven_slices_are_padded() -> None:
    assert [sent_bytes(10, ranks) for ranks in (1, 2, 3, 4)] == [0, 5, 8, 9]
