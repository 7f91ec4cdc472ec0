"""Every combination of the parity table over ranks (``tests/ranks_parity.py``), of which tests run a covering part.

1-4 ranks, stages, budgets, precisions, accumulation, clipping, optimizers and schedules: losses, norms, weights,
optimizer states and random numbers of each rank against plain PyTorch on as many ranks, bit by bit. Cases that have
the same numbers are run by the same processes, against one reference; where one fails, each is run on its own. Prints
a line for each reference, and exits non-zero if any case differs.

    python bench/parity_ranks.py [--ranks 1 2 3 4] [--sample 0.1] [--seed 0]
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from covering import Row
from parity_table import name_of
from ranks_harness import JobError, RankServer
from ranks_parity import full_cross, reference_of

_SECONDS = 600.0


def batches(ranks: set[str], sample: float, seed: int) -> Iterator[list[Row]]:
    """Cases of the same numbers."""
    draw = random.Random(seed)
    rows = [row for row in full_cross() if row["ranks"] in ranks and draw.random() < sample]
    for _, group in itertools.groupby(sorted(rows, key=reference_of), reference_of):
        yield list(group)


def differing(server: RankServer, rows: list[Row]) -> list[str]:
    """What is said of each case that is not as it must be."""
    num_ranks = int(rows[0]["ranks"])
    try:
        server.run("ranks_parity:compare", num_ranks, rows=rows, seconds=_SECONDS)
    except JobError as error:
        if len(rows) > 1:
            return [said for row in rows for said in differing(server, [row])]
        return [f"{name_of(rows[0])}: {error}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="*", default=["1", "2", "3", "4"])
    parser.add_argument("--sample", type=float, default=1.0, help="the part of all cases that is run, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    num_cases, wrong = 0, []
    with RankServer("ranks_parity") as server:
        for rows in batches(set(arguments.ranks), arguments.sample, arguments.seed):
            began = time.monotonic()
            found = differing(server, rows)
            num_cases += len(rows)
            wrong += found
            verdict = f"{len(found)} DIFFER" if found else "bitwise equal"
            print(f"{'-'.join(reference_of(rows[0])):40s} {len(rows):3d} cases, {verdict}", end="")
            print(f" ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{num_cases - len(wrong)} of {num_cases} equal")
    for each in wrong:
        print(f"\n{each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
