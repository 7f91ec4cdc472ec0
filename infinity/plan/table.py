"""A plan as tables for a person."""

from __future__ import annotations

from rich.table import Table

from infinity.console.formats import format_bytes
from infinity.plan.estimate import TooSmallError
from infinity.plan.result import Plan


def as_tables(plan: Plan) -> list[Table]:
    """What is kept, what moves, how long it takes."""
    return [_kept(plan), _step(plan)]


def _kept(plan: Plan) -> Table:
    summary = plan.summary
    several = summary.num_ranks > 1
    table = Table(title=f"infinity plan: {plan.name}, {summary.num_parameters:,} parameters")
    table.add_column(no_wrap=True)
    for column in ("bytes", "budget", "needed at least", "remains"):
        table.add_column(column, justify="right")
    for kind, size in summary.kept.items():
        table.add_row(f"{kind}, 1/{summary.num_ranks}" if summary.is_slice(kind) else kind, format_bytes(size))
    table.add_row(
        "all state" + (" of a rank" if several else ""), format_bytes(sum(summary.kept.values())), end_section=True
    )
    for name, tier in summary.tiers.items():
        budget = "" if tier.budget is None else format_bytes(tier.budget)
        least = {"device": plan.smallest["hbm"], "host": plan.smallest["ram"]}.get(name, tier.needed)
        remains = format_bytes(tier.remains) + (" on disk" if tier.budget is None else "")
        table.add_row(name, format_bytes(tier.holds), budget, format_bytes(least), remains)
    return table


def _step(plan: Plan) -> Table:
    table = Table(title="one step" + (" of a rank" if plan.summary.num_ranks > 1 else ""), show_header=False)
    table.add_row("tokens", f"{plan.num_tokens:,}")
    most = "" if plan.simulated else "at most "
    for route, num_bytes in plan.moved.items():
        if num_bytes or route.startswith("nvme"):
            table.add_row(route.replace("nvme", "NVMe"), most * route.startswith("nvme") + format_bytes(num_bytes))
    for name, seconds in plan.busy.items():
        if seconds:
            table.add_row({"pcie": "PCIe"}.get(name, name), f"{seconds:.3g} s", end_section=name == "network")
    table.add_row("predicted step", f"{plan.seconds:.3g} s, {plan.tokens_per_second:,.0f} tokens/s")
    table.add_row("bottleneck", plan.bottleneck)
    if plan.tokens_to_hide_disk:
        table.add_row("hides the disk", f"{plan.tokens_to_hide_disk:,} tokens per step and more")
    needed = plan.ranks_needed
    table.add_row("ranks needed", "more than were tried" if needed is None else f"{needed}")
    if (wear := plan.wear) is not None:
        life = "nothing is written" if wear.days is None else f"{wear.days:,.0f} days, {wear.steps:,.0f} steps"
        table.add_row(f"to {format_bytes(wear.endurance_bytes)} written", life)
        table.add_row("written per day", format_bytes(wear.written_bytes_per_day))
    table.caption = f"speeds: {plan.machine.source}; MB = 1e6 bytes, GB = 1e9 bytes"
    return table


def shortage_table(error: TooSmallError, budgets: dict[str, int]) -> Table:
    """What budgets lack."""
    table = Table(title="infinity plan: too little memory")
    for column in ("", "budget", "smallest", "short by"):
        table.add_column(column, justify="left" if not column else "right")
    for name, smallest in error.smallest.items():
        table.add_row(
            name, format_bytes(budgets[name]), f"{format_bytes(smallest)} ({smallest})", format_bytes(error.short[name])
        )
    return table
