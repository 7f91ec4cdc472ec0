"""Where each rank's state is on NVMe: its own directories, which no other rank of its host has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.fields import PLACEHOLDERS


def nvme_for_rank(config: Config, rank: int, num_ranks: int, local_rank: int, host: str) -> Config:
    """The configuration with the ``nvme`` directories of one rank.

    A path's placeholders are replaced. A path without any is a parent: rank 7 of several has ``rank-7`` in it. A rank's
    number has the same digits among any number of ranks, so that a state is found again by more or fewer.

    Args:
        config: the same on all ranks.
        rank: this rank's number.
        num_ranks: how many there are; one alone has the paths themselves.
        local_rank: this rank's number within its host.
        host: the name of its machine.
    """
    values = dict(zip(PLACEHOLDERS, (str(rank), str(local_rank), host), strict=True))
    paths = tuple(_own_path(path, values, f"rank-{rank}" if num_ranks > 1 else "") for path in config.nvme)
    return config.model_copy(update={"nvme": paths})


def refuse_shared_paths(hosts: Sequence[str], paths: Sequence[Sequence[str]]) -> None:
    """See that no two ranks of one host have a directory in common.

    Args:
        hosts: of each rank, the name of its machine.
        paths: of each rank, its ``nvme`` directories after ``nvme_for_rank``.

    Raises:
        ConfigError: two have; it names both, and the directory.
    """
    owners: dict[tuple[str, str], int] = {}
    for rank, (host, own) in enumerate(zip(hosts, paths, strict=True)):
        for path in own:
            other = owners.setdefault((host, path), rank)
            if other != rank:
                raise ConfigError(
                    f"nvme: ranks {other} and {rank} are both on host {host} and would both use {path}; put {{rank}} "
                    "into the path, or give a path without placeholders, in which each rank makes its own directory"
                )


def _own_path(path: Path, values: dict[str, str], directory: str) -> Path:
    text = str(path)
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return path / directory if text == str(path) else Path(text)
