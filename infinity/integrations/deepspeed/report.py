"""What is said at start: stage, what is partitioned, parameters, bytes of each tier, what remains."""

from __future__ import annotations

from infinity.engine.engine import Engine
from infinity.engine.summary import Summary


def start_report(engine: Engine, *, trained: int) -> str:
    """The report of this rank, several lines.

    Args:
        engine: which.
        trained: elements of the parameters that are stepped, of all ranks together.
    """
    summary = engine.summary()
    ranks = "1 rank" if summary.num_ranks == 1 else f"{summary.num_ranks} ranks"
    config = engine.config
    how = f"ZeRO stage {config.stage}, {config.precision}, {ranks}, on {config.torch_device()}"
    lines = [
        f"infinity with DeepSpeed's interface: {how}",
        f"  partitioned among ranks: {_partitioned(summary)}",
        f"  parameters: {summary.num_parameters:,} in all, {trained:,} trained",
    ]
    for kind, size in summary.kept.items():
        share = f", 1/{summary.num_ranks} of them" if summary.num_ranks > 1 and summary.is_slice(kind) else ""
        lines.append(f"  {kind} on each rank: {readable(size)}{share}")
    where = {"device": "device (hbm)", "host": "host memory (ram)", "nvme": f"NVMe ({_directories(engine)})"}
    for name, tier in summary.tiers.items():
        budget = "" if tier.budget is None else f" of {readable(tier.budget)}"
        lines.append(
            f"  {where[name]}: holds {readable(tier.holds)}{budget}, {readable(tier.remains)} remain"
            + ("" if tier.budget is None else f"; needs at least {readable(tier.needed)}")
        )
    return "\n".join(lines)


def readable(num_bytes: int) -> str:
    """Bytes for a person, in powers of 1024, to three digits or so."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if round(size) < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def _partitioned(summary: Summary) -> str:
    if summary.num_ranks == 1:
        return "nothing, there is one rank"
    return ", ".join(summary.divided) or "nothing (stage 0)"


def _directories(engine: Engine) -> str:
    return ", ".join(str(path) for path in engine.config.nvme)
