"""Damaged and forged states come to the values that were written or to a typed error; more inputs:
``bench/fuzz_state.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from state_fuzzer import StateFuzzer

INPUTS = {
    "manifest, damaged": 1500,
    "manifest, forged": 400,
    "tensors, damaged": 200,
    "tensors, forged": 100,
    "data, damaged": 60,
    "data, another": 40,
}


@pytest.mark.parametrize("kind", INPUTS)
def test_what_is_read_is_what_was_written_or_an_error(kind: str, tmp_path: Path) -> None:
    fuzzer = StateFuzzer(tmp_path, seed=7)
    assert set(INPUTS) == set(fuzzer.kinds)
    fuzzer.run(INPUTS[kind], kind)
    assert sum(fuzzer.outcomes.values()) == INPUTS[kind]
    errors = sum(count for (_, outcome), count in fuzzer.outcomes.items() if outcome != "values")
    assert errors > INPUTS[kind] // 4, "nothing is damaged"
