"""The parity matrix of the training command: bitwise equal losses with infinity and without it.

For fp32 and bf16, with and without recomputation, one and four micro-batches: a plain run, and runs with everything on
NVMe, half of the state in RAM and all of it, at prefetch 0, 1 and 4. Each compares ``losses``, ``eval_losses`` and the
bytes of the saved weights. Prints a line for each and exits non-zero if any differs.

    python bench/bitwise.py --nvme DIR [--steps 20]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from infinity.__main__ import main as infinity

BUDGETS = {"nvme": ("1MiB", "1536KiB"), "half": ("1MiB", "7MiB"), "ram": ("8MiB", "64MiB")}


def train(work: Path, flags: list[str]) -> tuple[dict[str, Any], bytes]:
    """Run the command; returns its document and the saved weights."""
    document, weights = work / "run.json", work / "run.safetensors"
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        infinity(["train", *flags, "--json", str(document), "--save", str(weights)])
    if not document.exists():
        raise SystemExit(said.getvalue())
    result: dict[str, Any] = json.loads(document.read_text())
    content = weights.read_bytes()
    document.unlink()
    weights.unlink()
    return result, content


def main() -> None:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    num_wrong = num_runs = 0
    with tempfile.TemporaryDirectory(dir=arguments.nvme) as directory:
        work = Path(directory)
        for precision, recompute, accumulate in itertools.product(("fp32", "bf16"), (False, True), (1, 4)):
            common = [
                *("--precision", precision, "--accumulate", str(accumulate), "--steps", str(arguments.steps)),
                *("--layers", "4", "--hidden", "128", "--heads", "4", "--seq", "32", "--batch", "2"),
                *("--eval-every", "10", "--data-limit", "1MiB", "--recompute" if recompute else "--no-recompute"),
            ]
            plain, weights = train(work, [*common, "--plain"])
            for (name, (hbm, ram)), prefetch in zip(BUDGETS.items(), (0, 1, 4), strict=True):
                flags = ["--nvme", str(work), "--hbm", hbm, "--ram", ram, "--prefetch", str(prefetch)]
                run, saved = train(work, [*common, *flags])
                same = run["losses"] == plain["losses"] and run["eval_losses"] == plain["eval_losses"]
                same = same and saved == weights and len(run["losses"]) == arguments.steps
                moved = sum(run["nvme"]["read_bytes"]) / 1e6
                print(
                    f"{precision} recompute={recompute!s:5} accumulate={accumulate} {name:4} prefetch={prefetch} "
                    f"NVMe read {moved:6.1f} MB  {'bitwise equal' if same else 'DIFFERS'}",
                    flush=True,
                )
                num_runs += 1
                num_wrong += not same
    print(f"{num_runs - num_wrong} of {num_runs} equal")
    if num_wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
