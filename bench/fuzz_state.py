"""Reads more than 100,000 damaged and forged states: each must come to the values that were written, or a typed error.

Manifests, tensors and data files are damaged at random, and manifests and tensors forged with checksums that are right.
The inputs are those of ``tests/test_manifest_fuzz.py``, with other seeds.

    python bench/fuzz_state.py [--inputs 100000] [--seed 1] [--directory DIR]

Prints what came of each kind, and exits with 1 at the first input that came to anything else.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from state_fuzzer import FoundError, StateFuzzer

SHARES = {
    "manifest, damaged": 0.75,
    "manifest, forged": 0.10,
    "tensors, damaged": 0.08,
    "tensors, forged": 0.03,
    "data, damaged": 0.025,
    "data, another": 0.015,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Try all kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="where states of 200 kB are written; in memory it is fastest")
    arguments = parser.parse_args(argv)
    total, num_values = 0, 0
    for kind, share in SHARES.items():
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="infinity-fuzz-") as directory:
            fuzzer = StateFuzzer(Path(directory), arguments.seed)
            begun = time.perf_counter()
            try:
                fuzzer.run(math.ceil(arguments.inputs * share), kind)
            except FoundError as error:
                print(f"FOUND: {error}")
                return 1
            outcomes = {outcome: count for (_, outcome), count in fuzzer.outcomes.most_common()}
            total += sum(outcomes.values())
            num_values += outcomes.get("values", 0)
            words = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.items())
            print(
                f"{kind:18} {sum(outcomes.values()):7} inputs in {time.perf_counter() - begun:6.1f} s: {words}",
                flush=True,
            )
    print(
        f"{total} inputs: {num_values} gave the values that were written or forged, {total - num_values} a typed error"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
