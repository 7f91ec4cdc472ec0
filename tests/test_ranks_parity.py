"""Training on 1-4 ranks in every stage gives the numbers of plain PyTorch on as many ranks, to the last bit."""

from __future__ import annotations

import itertools

import pytest

from covering import Row, pairs_of
from parity_table import name_of
from ranks_harness import RankServer, ranks
from ranks_parity import AXES, CASES, NEVER, allows_layout, hybrid_cases

__all__ = ["ranks"]


@pytest.mark.parametrize("row", CASES, ids=name_of)
def test_a_case_of_the_table(row: Row, ranks: RankServer) -> None:
    for told in ranks.run("ranks_parity:compare", int(row["ranks"]), rows=[row]):
        assert max(told["clip_ulps"], default=0) <= 2, "the exact norm is not near that of torch.nn.utils"


@pytest.mark.parametrize("row", hybrid_cases(), ids=name_of)
def test_copies_of_the_state_stay_the_same(row: Row, ranks: RankServer) -> None:
    ranks.run("ranks_parity:compare", 4, rows=[row])


def test_the_table_covers_every_pair_that_may_meet_on_every_number_of_ranks_in_every_stage() -> None:
    never = {(("ranks", "1"), ("stage", stage)) for stage in AXES["stage"] if not allows_layout("1", stage)}
    covered = {pair for row in CASES for pair in itertools.combinations(row.items(), 2)}
    assert covered == set(pairs_of(AXES)) - set(NEVER) - never
    for layout in itertools.product("234", "0123"):
        met = {item for row in CASES if (row["ranks"], row["stage"]) == layout for item in row.items()}
        assert len(met) == 2 + sum(len(AXES[axis]) for axis in AXES if axis not in {"ranks", "stage"})


@pytest.mark.parametrize("backwards", ["1", "3-no_sync"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_reference_is_distributed_data_parallel(num_ranks: int, backwards: str, ranks: RankServer) -> None:
    """A sum of two has one order only; of more, another order is another rounding."""
    same = num_ranks <= 2
    assert (
        ranks.run("ranks_parity:anchor", num_ranks, backwards=backwards) == [{"same": same, "close": True}] * num_ranks
    )
