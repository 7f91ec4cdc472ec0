"""A plan as tables for a person."""

from __future__ import annotations

from rich.table import Table

from infinity.console.formats import format_bytes, format_figure
from infinity.plan.estimate import TooSmallError
from infinity.plan.result import Plan


def as_tables(plan: Plan) -> list[Table]:
    """What is kept where, what the budgets leave, what moves and how long it takes."""
    return [_kept(plan), _tiers(plan), _step(plan)]


def _kept(plan: Plan) -> Table:
    summary = plan.summary
    several = summary.num_ranks > 1
    columns = {"in memory": "host", "on NVMe": "nvme"} if plan.placed and "nvme" in summary.tiers else {}
    table = Table(title=f"infinity plan: {plan.name}")
    table.add_column(f"{summary.num_parameters:,} parameters", no_wrap=True)
    for column in ("bytes", *columns):
        table.add_column(column, justify="right")
    for kind, size in summary.kept.items():
        sizes = [size, *(plan.placed[tier].get(kind, 0) for tier in columns.values())]
        name = f"{kind}, 1/{summary.num_ranks}" if summary.is_slice(kind) else kind
        table.add_row(name, *(format_bytes(each) if each else "-" for each in sizes))
    totals = [sum(summary.kept.values()), *(sum(plan.placed[tier].values()) for tier in columns.values())]
    table.add_row("all state" + (" of a rank" if several else ""), *map(format_bytes, totals))
    if columns:
        table.caption = "where it is when a step ends; gradients: of what is still to be stepped"
    return table


def _tiers(plan: Plan) -> Table:
    table = Table(title="budgets" + (" of a rank" if plan.summary.num_ranks > 1 else ""))
    for column in ("", "budget", "holds", "needed at least", "remains"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, tier in plan.summary.tiers.items():
        least = {"device": plan.smallest["hbm"], "host": plan.smallest["ram"]}.get(name, tier.needed)
        remains = "" if tier.budget is None else format_bytes(tier.remains)
        budget = "" if tier.budget is None else format_bytes(tier.budget)
        table.add_row(name, budget, format_bytes(tier.holds), format_bytes(least), remains)
    return table


def _step(plan: Plan) -> Table:
    several = plan.summary.num_ranks > 1
    table = Table(title="one step" + (" of a rank" if several else ""), show_header=False)
    table.add_row("tokens", f"{plan.num_tokens:,}")
    most = "" if plan.simulated else "at most "
    for route, num_bytes in plan.moved.items():
        if num_bytes or route.startswith("nvme"):
            table.add_row(route.replace("nvme", "NVMe"), most * route.startswith("nvme") + format_bytes(num_bytes))
    for name, seconds in plan.busy.items():
        if seconds:
            table.add_row({"pcie": "PCIe"}.get(name, name), f"{format_figure(seconds)} s")
    table.add_section()
    table.add_row("predicted step", f"{format_figure(plan.seconds)} s")
    table.add_row("speed", f"{format_figure(plan.tokens_per_second)} tokens/s" + (" of all ranks" if several else ""))
    table.add_row("bottleneck", plan.bottleneck)
    if plan.tokens_to_hide_disk:
        table.add_row("disk is hidden from", f"{plan.tokens_to_hide_disk:,} tokens per step on")
    needed = plan.ranks_needed
    table.add_row("ranks needed", "more than were tried" if needed is None else f"{needed}")
    if (wear := plan.wear) is not None:
        life = "nothing is written"
        if wear.days is not None and wear.steps is not None:
            life = f"{format_figure(wear.days)} days, {wear.steps:,.0f} steps"
        table.add_row(f"until {format_bytes(wear.endurance_bytes)} are written", life)
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
    needed = error.ranks_needed
    table.caption = "more ranks do not help" if needed is None else f"on {needed} ranks these budgets do"
    return table
