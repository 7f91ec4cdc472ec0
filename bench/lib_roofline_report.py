"""The figures of ``roofline.py`` for a person: tables, and the picture of the sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib_work import GB


def print_phase(title: str, document: dict[str, Any]) -> None:
    """A phase for a person."""
    disk = document["disk_gb_s"]
    print(f"\n{title}")
    print("disk: " + ", ".join(f"{r} {v['median']:.2f} ({v['min']:.2f}-{v['max']:.2f}) GB/s" for r, v in disk.items()))
    print(
        f"{'':22}{'budget':>9}{'step s':>19}{'x plain':>18}{'read':>7}{'write':>7} B/par{'x least':>9}{'disk s':>8}"
        f"{'roofline':>9}{'x roofline':>11}{'stall':>7}  losses"
    )
    for row in document["rows"]:
        step, ratio, ram = row["step_seconds"], row["over_plain"], document["budgets"].get(row["name"])
        print(
            f"{row['work'] + ' ' + row['batch_x_seq']:22}{row['name']:>9}"
            f"{step['median']:7.2f} ({step['min']:.2f}-{step['max']:.2f})"
            f"{ratio['median']:6.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"
            f"{row['read_bytes_per_parameter']:7.2f}{row['written_bytes_per_parameter']:7.2f}      "
            f"{(row['read_bytes'] + row['written_bytes']) / row['least_bytes'] if row['least_bytes'] else 1.0:9.2f}"
            f"{row['disk_seconds']:8.2f}{row['roofline_seconds']:9.2f}{row['over_roofline']:11.2f}"
            f"{row['stall_seconds'] or 0:7.2f}  {'equal' if row['same_losses'] == 1 else 'DIFFER'}"
            + ("" if ram is None else f"  {ram / 1e6:.0f} MB")
        )


def print_memory(rows: Mapping[str, Any]) -> None:
    """The peaks for a person."""
    print("\nPeak RSS, each in a process of its own, from the first step on")
    for name, row in rows.items():
        pools = ", ".join(f"{pool} {peak / 1e6:.0f} MB" for pool, peak in row["peak_pool_bytes"].items())
        print(f"{name:>10}{row['peak_rss_bytes'] / 1e6:9.0f} MB  {pools}")


def print_linear(document: dict[str, Any]) -> None:
    """The two sizes for a person."""
    print(f"\nCost by size, host budget {document['ram'] / 1e6:.0f} MB, with recomputation")
    for row in document["rows"].values():
        pools = ", ".join(f"{pool} {peak / 1e6:.0f} MB" for pool, peak in row["peak_pool_bytes"].items())
        print(
            f"{row['parameters'] / 1e6:9.1f}M  {row['step_seconds']['median']:7.2f} s  "
            f"{row['nanoseconds_per_parameter']:6.2f} ns/parameter  RSS {row['peak_rss_bytes'] / 1e6:.0f} MB, "
            f"activations {row['activation_bytes'] / 1e6:.0f} MB; {pools}"
        )


def write_plot(document: dict[str, Any], state_bytes: int, path: Path) -> None:
    """Time and NVMe bytes of a step against the host budget, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row["name"] != "plain"]
    plain = next(row for row in document["rows"] if row["name"] == "plain")
    shares = [document["budgets"][row["name"]] / state_bytes * 100 for row in rows]
    figure = Figure(figsize=(9.0, 6.4), dpi=110, layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True)
    medians = [row["step_seconds"]["median"] for row in rows]
    around = [
        [row["step_seconds"]["median"] - row["step_seconds"]["min"] for row in rows],
        [row["step_seconds"]["max"] - row["step_seconds"]["median"] for row in rows],
    ]
    above.errorbar(shares, medians, yerr=around, marker="o", capsize=3, color="#0072b2", label="infinity")
    roofline = [row["roofline_seconds"] for row in rows]
    above.plot(shares, roofline, linestyle="--", color="#b04a00", label="roofline")
    above.axhline(plain["step_seconds"]["median"], linestyle=":", color="#404040", label="plain PyTorch, all in memory")
    above.set_ylabel("seconds per step")
    above.set_ylim(bottom=0)
    above.legend()
    for key, marker, colour in (("read_bytes", "v", "#0072b2"), ("written_bytes", "^", "#b04a00")):
        label = key.removesuffix("_bytes") + " per step"
        below.plot(shares, [row[key] / GB for row in rows], marker=marker, color=colour, label=label)
    below.set_ylabel("NVMe, GB")
    below.set_xlabel("host memory budget, % of the state")
    below.set_ylim(bottom=0)
    below.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_png(path)  # type: ignore[no-untyped-call]
