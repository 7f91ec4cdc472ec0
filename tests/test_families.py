"""Families of models under every optimizer, precision, schedule and budget, in pairs: the bits of plain PyTorch.

The table is in ``parity_table.py`` and listed in ``docs/parity.md``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import families
import infinity
import parity_models as models
from covering import Pair, Row, covering_array, pairs_of
from infinity.trace import READ, WRITE
from parity import Parity, build, tiny_scale
from parity_table import (
    AXES,
    AXES_HF,
    CASES,
    CASES_HF,
    DOCUMENT,
    NEVER,
    OPTIMIZERS,
    SCHEDULES,
    document,
    full_cross,
    name_of,
    run,
)

__all__ = ["tiny_scale"]


@pytest.mark.parametrize("row", CASES, ids=name_of)
def test_a_case_of_the_table(row: Row, tmp_path: Path) -> None:
    run(families.FAMILIES, row, tmp_path)


@pytest.mark.parametrize("row", list(full_cross("parametrized", "AdamW")), ids=name_of)
def test_every_combination_for_one_family(row: Row, tmp_path: Path) -> None:
    run(families.FAMILIES, row, tmp_path)


@pytest.mark.parametrize(("axes", "cases"), [(AXES, CASES), (AXES_HF, CASES_HF)], ids=["own", "transformers"])
def test_the_table_covers_every_pair_that_may_meet(axes: dict[str, tuple[str, ...]], cases: list[Row]) -> None:
    assert all(list(row) == list(axes) for row in cases)
    covered = {pair for row in cases for pair in itertools.combinations(row.items(), 2)}
    assert covered == set(pairs_of(axes)) - set(NEVER)


def test_what_may_never_meet_is_in_the_axes() -> None:
    assert set(NEVER) <= {*pairs_of(AXES), *pairs_of(AXES_HF)}


def test_a_covering_array_goes_round_what_is_not_allowed() -> None:
    axes = {"a": "01", "b": "01", "c": "012"}
    never: set[Pair] = {(("a", "0"), ("c", "0")), (("b", "1"), ("c", "1"))}
    rows = covering_array(axes, lambda pair: pair not in never)
    covered = {pair for row in rows for pair in itertools.combinations(row.items(), 2)}
    assert covered == set(pairs_of(axes)) - never
    assert {"a": "0", "b": "1", "c": "2"} in rows


def test_a_pair_that_no_row_can_have_is_an_error() -> None:
    never: set[Pair] = {(("a", "0"), ("c", "0")), (("b", "1"), ("c", "1"))}
    with pytest.raises(ValueError, match=r"no row can have both \('a', '0'\) and \('b', '1'\)"):
        covering_array({"a": "01", "b": "01", "c": "01"}, lambda pair: pair not in never)


def test_the_document_lists_the_table() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run python tests/parity_table.py"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("budgets", ["smallest", "blockwise"])
def test_experts_without_tokens_have_no_gradient_and_move_no_bytes(budgets: str, schedule: str, tmp_path: Path) -> None:
    """From the third step on: in the first, training takes every unit to be used, and an order is a step old."""
    adamw = OPTIMIZERS["AdamW"]
    model, optimizer = build(families.MoE, adamw)
    assert isinstance(model, families.MoE)
    config = getattr(Parity(families.MoE, adamw, lambda trainer: None), budgets)(tmp_path, **SCHEDULES[schedule](1))
    moved: Counter[int] = Counter()
    used: set[int] = set()
    with infinity.initialize(model, optimizer, config) as engine:
        for step in range(7):
            engine.backward(engine(*models.tokens(0)))
            chosen = model.mixture.chosen
            for index, expert in enumerate(model.mixture.experts):
                assert all((param.grad is None) == (index not in chosen) for param in expert.parameters())
            engine.step()
            engine.synchronize()
            used |= chosen
            assert engine.last_step is not None
            for index in range(8 if step > 2 else 0):
                unit = engine.last_step.units.get(f"mixture.experts.{index}")
                moved[index] += sum(sum(kinds.values()) for kinds in unit.moved_bytes.values()) if unit else 0
        state = engine.optimizer.state_dict()["state"]
    assert used < set(range(8))
    assert [index for index in set(range(8)) - used if moved[index]] == []
    assert [index for index in chosen if not moved[index]] == []
    names = [name for name, _ in model.named_parameters()]
    assert {names[i].split(".")[2] for i in state if names[i].startswith("mixture.experts")} == {*map(str, used)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("budgets", ["smallest", "half"])
def test_a_frozen_base_is_parameters_only_and_written_once(budgets: str, precision: str, tmp_path: Path) -> None:
    """When it first leaves memory; after that, what is on NVMe is never out of date."""
    adamw = OPTIMIZERS["AdamW"]
    config = getattr(Parity(families.lora_gpt, adamw, lambda trainer: None, precision), budgets)(tmp_path)
    with infinity.initialize(*build(families.lora_gpt, adamw), config) as engine:
        engine.recorder.keep_steps = 6
        for step in range(6):
            engine.backward(engine(*models.tokens(step)))
            engine.step()
        engine.synchronize()
        frozen = {(engine.unit_names[part.unit], part.position) for part in engine._parts if not part.stepped}
        base: Counter[tuple[str, str, Any]] = Counter()
        trained: Counter[tuple[str, str, Any]] = Counter()
        for span in (span for trace in engine.recorder.steps for span in trace.spans if span.track in (READ, WRITE)):
            place = span.args["unit"], span.args["part"]
            (base if place in frozen else trained)[span.track, span.name, place] += 1
    assert {kind for _, kind, _ in base} == {"param"}
    assert {num for (track, _, _), num in base.items() if track == WRITE} == {1}
    assert max(num for (track, kind, _), num in trained.items() if track == WRITE and kind == "state.exp_avg") > 2
    if budgets == "smallest":
        assert min(num for (track, _, _), num in base.items() if track == READ) >= 6
