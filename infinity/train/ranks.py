"""``Ranks``: the processes that train one model together, as the command sees them; one alone is one of them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.config import Config
from infinity.engine.collectives import Collectives
from infinity.engine.meeting import open_process_group, started_as_ranks
from infinity.rank_paths import nvme_for_rank, refuse_shared_paths


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks call the same methods in the same order.

    Attributes:
        rank: this rank's number.
        num_ranks: how many there are.
        local_rank: this rank's number within its host.
        hosts: of each rank, the name of its machine.
        transport: the way between them, in words; empty where there is but one.
        collectives: what they do together; ``None`` where there is but one.
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    hosts: tuple[str, ...] = ()
    transport: str = ""
    collectives: Collectives | None = None

    @property
    def speaks(self) -> bool:
        """Whether this one shows and writes what is the same for all."""
        return self.rank == 0

    @property
    def device(self) -> torch.device | None:
        """This rank's; ``None`` where there is but one, which may take any."""
        return None if self.collectives is None else self.collectives.device

    @property
    def host(self) -> str:
        """The name of this rank's machine."""
        return self.hosts[self.rank] if self.hosts else socket.gethostname()

    def exchange(self, fact: Any, phase: str) -> list[Any]:
        """What each rank has to say, in their order: small, and such that JSON holds it.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        return [fact] if self.collectives is None else self.collectives.exchange(fact, phase)

    def mean(self, value: float, phase: str) -> float:
        """The mean over ranks; the same on each.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        return sum(float(each) for each in self.exchange(value, phase)) / self.num_ranks

    def any(self, word: object, phase: str) -> bool:
        """Whether one of them says yes.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        return any(self.exchange(bool(word), phase))

    def on_this_host(self, fact: Any, phase: str) -> list[Any]:
        """What each rank of this rank's machine has to say.

        Raises:
            RanksError: another rank has ended or did not come in time.
        """
        facts = self.exchange(fact, phase)
        return (
            [fact for fact, host in zip(facts, self.hosts, strict=True) if host == self.host] if self.hosts else facts
        )

    def own_file(self, path: Path) -> Path:
        """This rank's own of files that each writes: ``trace.json`` is ``trace.rank3.json`` for rank 3 of several."""
        return path if self.num_ranks == 1 else path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")

    def own_paths(self, config: Config) -> tuple[Path, ...]:
        """This rank's directories on NVMe.

        Raises:
            ConfigError: two ranks of one host would have the same.
        """
        own = nvme_for_rank(config, self.rank, self.num_ranks, self.local_rank, self.host).nvme
        paths = self.exchange([str(path) for path in own], "telling each other where state is kept")
        refuse_shared_paths(self.hosts or (self.host,), paths)
        return own


ALONE = Ranks()


@contextlib.contextmanager
def open_ranks(device: torch.device, *, timeout_seconds: float) -> Iterator[Ranks]:
    """Meet the other ranks, where torchrun or alike has started several.

    Args:
        device: its type; on accelerators each rank takes its own.
        timeout_seconds: how long the ranks may be apart.

    Raises:
        RanksError: not all came.
    """
    if not started_as_ranks():
        yield ALONE
        return
    collectives = open_process_group(device, timeout_seconds=timeout_seconds, patience_seconds=timeout_seconds)
    try:
        yield Ranks(
            rank=collectives.rank,
            num_ranks=collectives.num_ranks,
            local_rank=collectives.local_rank,
            hosts=tuple(collectives.hosts),
            transport=collectives.transport,
            collectives=collectives,
        )
    finally:
        collectives.close()
