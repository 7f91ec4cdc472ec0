"""The flags of ``infinity bench``, made from ``BenchSettings``."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import time
from typing import Any

import psutil
import typer
from rich.console import Console

from infinity.bench.passes import InterruptedRunError
from infinity.bench.run import RegressionError, run
from infinity.bench.settings import BenchSettings
from infinity.console.flags import given_fields, make_flags
from infinity.console.interrupt import StopRequest
from infinity.console.output import STANDARD_OUTPUT, OutputConsole, OutputError
from infinity.errors import MismatchError

MISMATCH_EXIT_CODE = 1
REGRESSION_EXIT_CODE = 3
BROKEN_PIPE_EXIT_CODE = 128 + signal.SIGPIPE

_PANELS = {
    "Where": ("nvme", "device", "io_backend"),
    "How much": ("size", "time", "repeats", "quick", "points", "fio"),
    "Results": ("json", "plot", "config", "baseline", "tolerance"),
}
_DEFAULTS: dict[str, object] = {
    "size": "at most 1GiB",
    "time": "60, or 10 with --quick",
    "repeats": "5, or 3 with --quick",
}


def main(**flags: Any) -> None:
    """Measure how fast bytes move between NVMe, host memory and the device.

    Files are written, read back and compared, every byte, in a directory that
    is removed at the end. The best settings are found, shown, and can be
    written for training with --config. GB = 1e9 bytes. CPU s/GB is CPU time of
    the whole process. Latency is that of one block. Under torchrun, collectives
    are measured as well.

    Exit codes: 0 done; 1 the bytes read back are not those written; 2 it cannot
    be done; 3 slower than --baseline; 128 and more: ended by a signal.

    For example: infinity bench --nvme /tmp/infinity
    """
    began = time.perf_counter() - max(0.0, time.time() - psutil.Process().create_time())
    settings = BenchSettings(**given_fields(BenchSettings, flags))
    console = OutputConsole(
        stderr=settings.json_file == STANDARD_OUTPUT,
        quiet=os.environ.get("RANK", "0") != "0",  # of torchrun's ranks one speaks
    )
    stop = StopRequest()
    try:
        with stop:
            _run(settings, console, stop, began)
    except OutputError as error:
        if stop:  # the terminal has gone, and told us
            raise typer.Exit(stop.exit_code) from None
        if error.errno == errno.EPIPE:
            raise typer.Exit(BROKEN_PIPE_EXIT_CODE) from None
        raise


def _run(settings: BenchSettings, console: Console, stop: StopRequest, began: float) -> None:
    try:
        run(settings, console, stop, began=began)
    except InterruptedRunError:
        console.print("interrupted; nothing was left behind")
    except MismatchError as error:
        Console(stderr=True).print(f"error: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(MISMATCH_EXIT_CODE) from None
    except RegressionError:
        raise typer.Exit(REGRESSION_EXIT_CODE) from None
    if stop:
        raise typer.Exit(stop.exit_code)


main.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    list(
        make_flags(
            BenchSettings, {name: panel for panel, names in _PANELS.items() for name in names}, defaults=_DEFAULTS
        )
    )
)
