"""Each rank has its own directories for what it keeps on NVMe."""

from __future__ import annotations

import pytest

from infinity import Config, ConfigError
from infinity.rank_paths import nvme_for_rank, refuse_shared_paths

GIVEN = ("/mnt/a", "/mnt/b-{local_rank}/{host}", "/mnt/{rank}/{rank}")


def paths(*given: str, rank: int, num_ranks: int = 16, per_host: int = 8) -> list[str]:
    config = Config(nvme=given, stage=1)
    own = nvme_for_rank(config, rank, num_ranks, rank % per_host, f"node{rank // per_host}")
    assert own == config.model_copy(update={"nvme": own.nvme})
    return [str(path) for path in own.nvme]


def test_placeholders_are_replaced_and_other_paths_are_parents() -> None:
    assert paths(*GIVEN, rank=11) == ["/mnt/a/rank-11", "/mnt/b-3/node1", "/mnt/11/11"]


def test_one_rank_has_the_paths_themselves() -> None:
    assert paths(*GIVEN, rank=0, num_ranks=1) == ["/mnt/a", "/mnt/b-0/node0", "/mnt/0/0"]


def test_a_rank_finds_its_directory_again_among_more() -> None:
    assert paths("/mnt/a", rank=2, num_ranks=4) == paths("/mnt/a", rank=2, num_ranks=4000)


def test_without_nvme_there_is_nothing_to_replace() -> None:
    assert nvme_for_rank(Config(), 1, 2, 1, "here") == Config()


def refuse(*given: str, num_ranks: int = 16, per_host: int = 8) -> None:
    refuse_shared_paths(
        [f"node{rank // per_host}" for rank in range(num_ranks)],
        [paths(*given, rank=rank, num_ranks=num_ranks, per_host=per_host) for rank in range(num_ranks)],
    )


@pytest.mark.parametrize("given", [GIVEN, ("/mnt/{rank}",), ("/mnt/{local_rank}",), ("/mnt",), ()])
def test_paths_that_no_two_ranks_share(given: tuple[str, ...]) -> None:
    refuse(*given)


def test_a_directory_for_each_host_does_for_one_rank_on_each() -> None:
    refuse("/mnt/{host}", per_host=1)


def test_two_ranks_of_one_host_with_one_directory_are_named() -> None:
    with pytest.raises(ConfigError, match=r"ranks 0 and 1 are both on host node0 and would both use /mnt/node0; put "):
        refuse("/mnt/{rank}", "/mnt/{host}")


def test_no_path_of_a_rank_is_any_path_of_another() -> None:
    with pytest.raises(ConfigError, match="ranks 0 and 1 are both on host here and would both use /mnt/1"):
        refuse_shared_paths(["here", "here"], [["/mnt/0", "/mnt/1"], ["/mnt/1", "/mnt/2"]])
