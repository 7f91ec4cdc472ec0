"""Where ranks part, or one of them ends, all others end with an error that says what happened, within seconds."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest
import torch

from ranks_failures import BAD_STEP
from ranks_harness import RankServer, ranks

__all__ = ["ranks"]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_run_different_units_are_told_which(stage: int, num_ranks: int, ranks: RankServer) -> None:
    for told in ranks.run("ranks_failures:part_ways", num_ranks, stage=stage, where="forward"):
        assert "all-gather of unit left" in told["error"]
        assert f"rank {num_ranks - 1} at 'all-gather of unit right'" in told["error"]
        assert told["seconds"] < 10


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_wait_on_different_lanes_end_with_what_each_waits_for(stage: int, ranks: RankServer) -> None:
    """One waits to gather, the other for values: nobody would come, and both are told long before time is up."""
    for told in ranks.run("ranks_failures:part_ways", stage=stage, where="state_dict", timeout_seconds=60.0):
        assert "the ranks wait for each other at different points" in told["error"]
        assert "rank 0 at 'all-gather of unit first'" in told["error"]
        assert "rank 1 at 'reading first.0.weight'" in told["error"]
        assert told["seconds"] < 20


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_with_another_backward_is_told_by_the_step_of_the_others(stage: int, ranks: RankServer) -> None:
    for told in ranks.run("ranks_failures:part_ways", stage=stage, where="backward"):
        assert "ranks do different things: rank 0 is at 'step 3', rank 1 at 'gradients of unit" in told["error"]
        assert told["seconds"] < 10


@pytest.mark.parametrize(("how", "expected"), [("rate", "lr=0.1 on rank 0 and lr=0.05 on rank 1"), ("skip", "step 3")])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_not_all_take_alike_is_taken_by_none(
    stage: int, how: str, expected: str, ranks: RankServer
) -> None:
    for told in ranks.run("ranks_failures:step_otherwise", stage=stage, how=how):
        assert expected in told["error"]
        assert told["num_steps"] == 2


@pytest.mark.parametrize("stage", [0, 3])
def test_of_values_that_ranks_load_those_of_rank_0_count(stage: int, ranks: RankServer) -> None:
    assert ranks.run("ranks_failures:load_own", stage=stage) == [{"same": True}] * 2


def test_who_leaves_an_engine_is_missed_at_once_and_all_may_have_another(ranks: RankServer) -> None:
    first, second = ranks.run("ranks_failures:live_twice")
    assert "another rank has ended, or closed its engine" in first["error"]
    assert second["error"] == ""
    assert first["loss"] > 0


def test_groups_of_ranks_train_side_by_side_in_one_directory(ranks: RankServer) -> None:
    weights = [told["first.0.weight"] for told in ranks.run("ranks_failures:train_side_by_side", 4)]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("phase", ["forward", "backward", "step", "between"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_that_ends_ends_all_others(stage: int, phase: str, how: str, ranks: RankServer) -> None:
    dead = (stage + len(phase)) % 3
    options: dict[str, Any] = {"dead": dead, "stage": stage, "phase": phase, "how": how, "fields": {}}
    job = ranks.start("ranks_failures:die", 3, **options)
    ended = job.end()
    others = [each.result for rank, each in enumerate(ended) if rank != dead]
    assert ended[dead].code == (1 if how == "raise" else -signal.SIGKILL), job.story(ended)
    assert how == "kill" or "of the rank that fails" in ended[dead].said
    assert all(others), job.story(ended)
    for told in others:
        check_told(told, phase)


def check_told(told: dict[str, Any], phase: str) -> None:
    assert told["error"]
    assert told["step"] in {BAD_STEP, BAD_STEP + 1}
    assert told["seconds"] < 10
    doing = {"forward": "all-gather of unit|gradients of unit", "backward": "gradients of unit"}
    assert re.search(f"rank [0-2] of 3, ({doing.get(phase, 'all-gather of unit|gradients of unit')})", told["error"])
