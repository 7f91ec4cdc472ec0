"""The flags of ``infinity plan``, made from ``PlanSettings`` and ``infinity.Config``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.bench.plot import check_plot
from infinity.config import Config
from infinity.console.flags import given_fields, make_flags
from infinity.console.output import STANDARD_OUTPUT, OutputConsole, check_output, is_plain, write_json
from infinity.plan.call import plan_with
from infinity.plan.estimate import TooSmallError
from infinity.plan.plot import write_plot
from infinity.plan.result import SCHEMA
from infinity.plan.settings import PlanSettings
from infinity.plan.table import as_tables, shortage_table

_PANELS = {
    "Model": ("model", "kwargs", "hf", "parameters", "layers", "hidden", "heads", "vocab"),
    "Training": ("batch", "seq", "accumulate", "optimizer", "ranks"),
    "Machine": (
        "bench", "read", "write", "mixed", "pcie", "network", "flops", "compute_seconds", "optimizer_speed",
        "endurance",
    ),
    "Results": ("plot", "json"),
}  # fmt: skip
_ENGINE_PANEL = "Device, memory and disk (infinity.Config)"
_DOCS = {"nvme": "Directories for the state that fits in neither memory. They need not exist."}


def main(config: Path | None, **flags: Any) -> None:
    """Tell whether a model fits, and how fast it will train.

    Nothing is made: no memory, no files. Bytes of state and the smallest budgets are the engine's own; what moves and
    how long a step takes comes from steps in virtual time, by the engine's own scheduler. Exit code 1: the budgets
    cannot train the model; what would do is shown.

    For example: infinity plan --layers 48 --hidden 1600 --heads 25 --ram 8GiB --nvme /mnt/nvme0 --read 3GB/s
    """
    settings = PlanSettings(**given_fields(PlanSettings, flags))
    base = {} if config is None else _set_fields(Config.from_json(config))
    chosen = Config(**base | given_fields(Config, flags))
    if settings.json_file is not None and settings.json_file != STANDARD_OUTPUT:
        check_output(settings.json_file, "--json", replaced=False)
    if settings.plot_file is not None:
        check_plot(settings.plot_file)
    console = OutputConsole(stderr=settings.json_file == STANDARD_OUTPUT)
    try:
        plan = plan_with(None, chosen, settings)
    except TooSmallError as error:
        budgets = {name: int(getattr(chosen, name)) for name in error.smallest}
        console.print(shortage_table(error, budgets))
        if settings.json_file is not None:
            write_json(_refusal(error), settings.json_file)
        raise
    for table in as_tables(plan):
        table.safe_box = is_plain(console)
        console.print(table)
    if settings.json_file is not None:
        write_json(plan.as_document(), settings.json_file)
    if settings.plot_file is not None:
        write_plot(plan, settings.plot_file)


def _refusal(error: TooSmallError) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "fits": False,
        "error": str(error),
        "smallest": dict(error.smallest),
        "short": dict(error.short),
        "ranks_needed": error.ranks_needed,
    }


def _set_fields(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.model_fields_set}


_CONFIG_FILE = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            help="JSON file with fields of infinity.Config; flags go before it.",
            metavar="FILE",
            rich_help_panel=_ENGINE_PANEL,
        ),
    ],
)
main.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *make_flags(PlanSettings, {name: panel for panel, names in _PANELS.items() for name in names}),
        *make_flags(Config, _ENGINE_PANEL, docs=_DOCS),
        _CONFIG_FILE,
    ]
)
