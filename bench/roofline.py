"""Is a step as fast as the slower of the arithmetic and the disk, and does every byte of host memory save disk traffic?

All state lives on NVMe. Plain PyTorch and engines with different host budgets train the same model on the same data in
turns, round by round, so that a drift of the machine hits all alike; the disk is measured in every round too, through
the same tier. Three amounts of work are trained: one whose arithmetic takes less time than the disk, one that takes
about as long, one that takes more than twice as long. The roofline is

    max(plain step, NVMe bytes of a step at the disk's bandwidth for that mix of reads and writes)

Then come a sweep of host budgets from the smallest possible to all state (time and NVMe bytes, ``--plot FILE``), the
peak of memory of each way in a process of its own, and, since it takes long, only with ``--linear`` a model of about
1B parameters against this one with the same budgets in bytes.

What an engine moved is compared, under "x least", with what no policy could undercut with its order of uses and its
host budget (``infinity/store/optimum.py``).

Every target has a name, a value and a bar. The exit code is 1 if one is missed. Losses are compared bitwise.

    python bench/roofline.py --nvme DIR [--json FILE] [--plot FILE] [--quick] [--linear]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib_checks import Check, report, require_room
from lib_roofline import (
    LARGE_PARAMETERS,
    QUARTER,
    QUICK_SWEEP,
    SWEEP,
    WORK_NAMES,
    Phase,
    Setup,
    choose_works,
    phase_document,
    run_linear,
    run_memory,
    run_phase,
)
from lib_roofline_report import print_linear, print_memory, print_phase, write_plot
from lib_training import machine
from lib_work import GB, add_model_flags, end_on_sigterm, parse_flags, parse_work, shape_fields

from infinity.train.model import GPTShape

SHAPE = GPTShape(num_layers=12, hidden_size=896, num_heads=14, seq_length=128, vocab_size=256)
NOISE = 1.05
"""What a smaller budget may be faster by before time counts as not falling."""


def table_checks(document: dict[str, Any]) -> list[Check]:
    """Bars of the table: quarter and full budgets on each work."""
    by_key = {(row["work"], row["name"]): row for row in document["rows"]}
    checks = []
    for work in WORK_NAMES:
        quarter, full, plain = by_key[work, "25%"], by_key[work, "100%"], by_key[work, "plain"]
        checks.append(Check(f"{work}: 25% budget, step / roofline", quarter["over_roofline"], "<=", 1.15))
        if work == WORK_NAMES[-1]:
            compute = plain["step_seconds"]["median"] / max(quarter["disk_seconds"], 1e-9)
            checks.append(Check(f"{work}: plain step / disk time (that the next one counts)", compute, ">=", 2.0))
            checks.append(Check(f"{work}: 25% budget, step / plain", quarter["over_plain"]["median"], "<=", 1.05))
        checks.append(Check(f"{work}: budget >= state, step / plain", full["over_plain"]["median"], "<=", 1.03))
    return checks + same_loss_checks("table", document)


def sweep_checks(document: dict[str, Any], phase: Phase) -> list[Check]:
    """Bars of the sweep: time and bytes fall, budgets are spent, and what nothing resident costs."""
    measured = next(iter(phase.measured.values()))
    names = [row["name"] for row in document["rows"] if row["name"] != "plain"]
    pairs = list(itertools.combinations(names, 2))
    slower = max(statistics.median(measured[more].over(measured[less])) for less, more in pairs)
    rows = {row["name"]: row for row in document["rows"]}
    moved = {name: rows[name]["read_bytes"] + rows[name]["written_bytes"] for name in names}
    heavier = max((moved[more] + 1) / (moved[less] + 1) for less, more in pairs)
    least = rows[names[0]]
    checks = [
        Check("sweep: time with a larger budget / with a smaller, the worst pair", slower, "<=", NOISE),
        Check("sweep: NVMe bytes with a larger budget / with a smaller, the worst pair", heavier, "<=", 1.01),
        Check("smallest budget: read per parameter and step", least["read_bytes_per_parameter"], "<=", 12.1, "B"),
        Check("smallest budget: written per parameter and step", least["written_bytes_per_parameter"], "<=", 12.1, "B"),
    ]
    checks += [
        Check(f"sweep: {name} budget, resident after 3 steps / budget", share, ">=", 0.95)
        for name, share in phase.used_shares.items()
    ]
    return checks + same_loss_checks("sweep", document)


def same_loss_checks(phase: str, document: dict[str, Any]) -> list[Check]:
    """Every loss of every engine is plain PyTorch's, bit by bit."""
    worst = min(row["same_losses"] for row in document["rows"])
    return [Check(f"{phase}: losses bitwise equal to plain's", worst, ">=", 1.0, "of all")]


def linear_checks(document: dict[str, Any]) -> list[Check]:
    """Cost grows linearly, memory not at all."""
    small, large = document["rows"]["small"], document["rows"]["large"]

    def ratio(value: str) -> float:
        return float(large[value] / small[value])

    pools = max(large["peak_pool_bytes"][name] / peak for name, peak in small["peak_pool_bytes"].items())
    rss = [row["peak_rss_bytes"] - row["activation_bytes"] for row in (small, large)]
    return [
        Check("1B / 120M: time per parameter", ratio("nanoseconds_per_parameter"), "<=", 1.15),
        Check("1B / 120M: pools' peak", pools, "<=", 1.0),
        Check("1B / 120M: peak RSS less activations", rss[1] / rss[0], "<=", 1.05),
    ]


def measure(arguments: argparse.Namespace, scratch: Path) -> tuple[dict[str, Any], list[Check]]:
    """All phases; the document and the bars."""
    setup = Setup(arguments, scratch)
    shares = QUICK_SWEEP if arguments.quick else SWEEP
    sweep_budgets = {"least" if share == 0 else f"{share:.0%}": setup.budget(share) for share in shares}
    table_budgets = {"25%": setup.budget(QUARTER), "100%": setup.budget(1.0)}
    works = choose_works(setup) if arguments.work is None else dict(zip(WORK_NAMES, arguments.work, strict=True))
    few, balanced, many = works.values()
    num_engines = len(sweep_budgets)
    if arguments.linear:
        num_engines = max(num_engines, 2 + LARGE_PARAMETERS // setup.num_parameters)
    table_memory = setup.memory_bytes(list(table_budgets.values()), many)
    sweep_memory = setup.memory_bytes(list(sweep_budgets.values()), few)
    require_room(scratch, disk_bytes=setup.file_bytes(num_engines), memory_bytes=max(table_memory, sweep_memory))
    document: dict[str, Any] = {
        "machine": machine(),
        "model": shape_fields(setup.shape),
        "parameters": setup.num_parameters,
        "state_bytes": setup.state_bytes,
        "precision": setup.precision,
        "fused_adamw": setup.fused,
        "hbm_bytes": int(setup.config(1).hbm),
        "rounds": setup.num_rounds,
        "steps_per_round": setup.num_steps,
    }
    print(
        f"{setup.num_parameters / 1e6:.1f}M parameters, {setup.precision}, state {setup.state_bytes / GB:.2f} GB; "
        f"{setup.num_rounds} rounds of {setup.num_steps} steps after one that does not count; median (least-largest)"
    )
    table = run_phase(setup, works, table_budgets)
    document["table"] = phase_document(setup, table, works, table_budgets)
    print_phase("Plain PyTorch and host budgets of 25% and 100% of the state", document["table"])
    checks = table_checks(document["table"])
    sweep_works = {WORK_NAMES[0]: few}
    sweep = run_phase(setup, sweep_works, sweep_budgets)
    document["sweep"] = phase_document(setup, sweep, sweep_works, sweep_budgets)
    print_phase("Host budgets from the smallest possible to all state", document["sweep"])
    checks += sweep_checks(document["sweep"], sweep)
    log = scratch / "workers.log"
    memory_budgets = table_budgets | {"least": setup.least_bytes}
    if arguments.quick:
        memory_budgets = {"25%": table_budgets["25%"]}
    document["memory"] = run_memory(setup, balanced, memory_budgets, log)
    print_memory(document["memory"])
    if arguments.linear:
        document["linear"] = run_linear(setup, few, log)
        print_linear(document["linear"])
        checks += linear_checks(document["linear"])
    if arguments.plot is not None:
        write_plot(document["sweep"], setup.state_bytes, arguments.plot)
    return document, checks


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory on the disk to measure")
    add_model_flags(parser, SHAPE)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--hbm", default="128MiB", help="device budget of every engine")
    parser.add_argument("--work", type=lambda text: [parse_work(one) for one in text.split(",")],
                        help="BATCHxSEQ,BATCHxSEQ,BATCHxSEQ: few, balanced, many tokens; default: chosen by "
                        "time")  # fmt: skip
    parser.add_argument("--unfused", action="store_true", help="AdamW as a loop over tensors, PyTorch's default")
    parser.add_argument("--rounds", type=int, help="default 5, quick 2")
    parser.add_argument("--steps", type=int, help="counted steps of each turn; default 2, quick 1")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and budgets: a look, no figures of record")
    parser.add_argument("--linear", action="store_true", help="also about 1B parameters against this model")
    parser.add_argument("--json", type=Path, help="write the document here")
    parser.add_argument("--plot", type=Path, help="write the picture of the sweep here (.png; needs matplotlib)")
    arguments = parse_flags(parser, argv)
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 5)
    arguments.steps = arguments.steps or (1 if arguments.quick else 2)
    if arguments.work is not None:
        if len(arguments.work) != len(WORK_NAMES):
            parser.error(f"--work: expected {len(WORK_NAMES)} of BATCHxSEQ, got {len(arguments.work)}")
        if any(work.seq_length > arguments.seq for work in arguments.work):
            parser.error(f"--work: sequences longer than --seq {arguments.seq}")
    if arguments.plot is not None and arguments.plot.suffix.lower() != ".png":
        parser.error(f"--plot: expected a file name that ends in .png, got {arguments.plot}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print; 0 where every target is met, else 1."""
    arguments = parse(argv)
    end_on_sigterm()
    with tempfile.TemporaryDirectory(dir=arguments.nvme, prefix="infinity-roofline-") as scratch:
        document, checks = measure(arguments, Path(scratch))
    return report(document, checks, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
