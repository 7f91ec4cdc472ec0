"""What is told before training begins: how large the state is, where it is, and what is left of the budgets."""

from __future__ import annotations

from rich.table import Table

from infinity.console.formats import format_bytes
from infinity.engine.summary import Summary


def summary_table(summary: Summary) -> Table:
    """A summary for a person: of rank 0, to which the others are alike."""
    several = summary.num_ranks > 1
    table = Table(title=f"state on each of {summary.num_ranks} ranks" if several else "state")
    table.add_column(no_wrap=True)
    for column in ("bytes", "budget", "needed at least", "remains"):
        table.add_column(column, justify="right")
    for kind, size in summary.kept.items():
        table.add_row(f"{kind}, 1/{summary.num_ranks}" if summary.is_slice(kind) else kind, _size(size))
    table.add_row("all of it", _size(sum(summary.kept.values())), end_section=True)
    for name, tier in summary.tiers.items():
        free = " on disk" if tier.budget is None else ""
        table.add_row(name, _size(tier.holds), _size(tier.budget), _size(tier.needed), _size(tier.remains) + free)
    divided = f"; stage {summary.stage} divides {', '.join(summary.divided) or 'nothing'}" if several else ""
    table.caption = f"{summary.num_parameters:,} parameters{divided}"
    return table


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)
