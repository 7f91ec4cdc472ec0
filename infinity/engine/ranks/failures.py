"""What is said when ranks fail, or do different things."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from infinity.errors import InfinityError, RanksError


def disagreement(doing: list[list[str]]) -> str:
    """What ranks that should do the same are about to do."""
    for rank, (_, failure) in enumerate(doing):
        if failure:
            return f"rank {rank} has failed: {failure}"
    first = doing[0][0]
    rank, other = next((rank, what) for rank, (what, _) in enumerate(doing) if what != first)
    return (
        f"ranks do different things: rank 0 is at {first!r}, rank {rank} at {other!r}. All ranks must run the same "
        "modules in the same order; where data decides which modules run (a mixture of experts), name the module "
        "around them in Config(units=...), so that they are gathered together"
    )


def different_values(said: Sequence[Sequence[Mapping[str, str]]]) -> str:
    """What differs first between the hyper-parameters of ranks: of each, the values of its groups by name."""
    for rank, groups in enumerate(said):
        for index, (first, other) in enumerate(zip(said[0], groups, strict=False)):
            for name in {**first, **other}:
                if first.get(name) != other.get(name):
                    return (
                        f"optimizer group {index} has {name}={first.get(name)} on rank 0 and {name}={other.get(name)} "
                        f"on rank {rank}; all ranks must step alike: feed a scheduler that looks at the loss "
                        "(ReduceLROnPlateau) with the mean over ranks"
                    )
    return f"the optimizers have {[len(groups) for groups in said]} groups; build the same on all ranks"


@contextlib.contextmanager
def named_errors(rank: int, num_ranks: int, phase: str, seconds: float | None = None) -> Iterator[None]:
    """Say in an error which rank it was and what it was doing."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, InfinityError):
            raise
        said = str(error).strip().partition("\n")[0].partition(". This is typically")[0]
        whole = str(error).lower()
        if "connection closed" in whole or "connection reset" in whole or "broken pipe" in whole:
            why = "another rank has ended, or closed its engine; see what it said"
        elif "failed to pass monitoredbarrier" in whole:
            why = "a rank has ended or did not come in time; see what it said"
        elif "timed out" in whole or "timeout" in whole:
            why = "not all ranks came in time" + (f" ({seconds:g} s)" if seconds else "")
        elif "address already in use" in whole or "eaddrinuse" in whole:
            why = "the port is taken; give another --master-port"
        else:
            why = "failed"
        raise RanksError(f"rank {rank} of {num_ranks}, {phase}: {why} ({said})") from error
