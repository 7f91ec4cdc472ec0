"""The flags of ``infinity bench``, made from ``BenchSettings``."""

from __future__ import annotations

import inspect
from typing import Any

import typer
from rich.console import Console

from infinity.bench.passes import InterruptedRunError
from infinity.bench.pattern import MismatchError
from infinity.bench.run import run
from infinity.bench.settings import BenchSettings
from infinity.console.flags import given_fields, make_flags
from infinity.console.interrupt import StopRequest
from infinity.console.output import STANDARD_OUTPUT

MISMATCH_EXIT_CODE = 1

_PANELS = {
    "Where": ("nvme", "device", "io_backend"),
    "How much": ("size", "time", "repeats", "quick", "points"),
    "Results": ("json",),
}
_DEFAULTS: dict[str, object] = {
    "size": "at most 1GiB",
    "time": "20, or 10 with --quick",
    "repeats": "5, or 3 with --quick",
    "points": "4MiBx8,8MiBx4,32MiBx2",
}


def main(**flags: Any) -> None:
    """Measure how fast bytes move between NVMe, host memory and the device.

    Files are written, read back and compared in a directory of its own, which is removed at the end. GB = 1e9 bytes.
    CPU s/GB is CPU time of the whole process. Latency is that of one request. Exit code 1: the bytes read back are not
    those written. For example: infinity bench --nvme /tmp/infinity
    """
    settings = BenchSettings(**given_fields(BenchSettings, flags))
    console = Console(stderr=settings.json_file == STANDARD_OUTPUT)
    with StopRequest() as stop:
        try:
            run(settings, console, stop)
        except InterruptedRunError:
            console.print("interrupted; nothing was left behind")
        except MismatchError as error:
            Console(stderr=True).print(
                f"error: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(MISMATCH_EXIT_CODE) from None
        if stop:
            raise typer.Exit(stop.exit_code)


main.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    list(
        make_flags(
            BenchSettings, {name: panel for panel, names in _PANELS.items() for name in names}, defaults=_DEFAULTS
        )
    )
)
