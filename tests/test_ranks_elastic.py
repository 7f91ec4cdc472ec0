"""A checkpoint of any number of ranks and any stage goes on at any other, exactly, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks_harness import RankServer, ranks

__all__ = ["ranks"]

ROUTE = [(1, 3), (4, 3), (2, 3), (3, 3), (3, 1), (3, 3), (2, 2), (4, 0), (1, 3)]
"""Ranks and stage: 1 to 4, 4 to 2, 2 to 3, stage 3 to 1, and back."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_state_goes_round_exactly(precision: str, tmp_path: Path, ranks: RankServer) -> None:
    source, first = None, None
    for number, (num_ranks, stage) in enumerate(ROUTE):
        target = str(tmp_path / f"{number}")
        options = {"stage": stage, "precision": precision, "source": source, "target": target}
        told = ranks.run("ranks_elastic:pass_on", num_ranks, **options)
        first = first or told[0]
        assert first["num_steps"] == 2
        assert first["num_states"] == 7
        assert told == [first] * num_ranks, (num_ranks, stage)
        source = target
