"""The flags of ``infinity train``, made from ``TrainSettings`` and ``infinity.Config``."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from infinity.config import Config
from infinity.console.flags import given_fields, make_flags
from infinity.console.interrupt import StopRequest
from infinity.console.output import STANDARD_OUTPUT
from infinity.train.run import run
from infinity.train.settings import TrainSettings

_PANELS = {
    "Model": ("layers", "hidden", "heads", "seq"),
    "Text": ("data", "data_limit"),
    "Training": ("steps", "batch", "accumulate", "lr", "warmup", "seed", "eval_every", "eval_batches", "plain"),
    "Results": ("save", "json", "trace", "trace_steps"),
}
_ENGINE_PANEL = "Device, memory and disk (infinity.Config)"
_CONFIG_PANELS = dict.fromkeys(Config.model_fields, _ENGINE_PANEL) | {"recompute": "Model"}

CONFIG_DEFAULTS: dict[str, object] = {"hbm": "32MiB", "ram": "96MiB"}
"""Small enough that the default model's training state is several times larger than both together."""

_CONFIG_DOCS = {
    "nvme": "Directories for the state that fits in neither memory; several are striped. One whose parent exists is "
    "created, and removed at the end unless a state is kept in it (--durability).",
    "debug": "Fill released memory with NaN, so that any use after release shows (also INFINITY_DEBUG=1), and show "
    "errors with their traceback.",
}


def make_config(base: Path | None, flags: dict[str, Any]) -> Config:
    """Join what says how to train: flags go before the file, the file before this command's defaults.

    Raises:
        ConfigError: the file or a flag cannot be used.
    """
    fields = dict(CONFIG_DEFAULTS)
    if base is not None:
        config = Config.from_json(base)
        fields |= {name: getattr(config, name) for name in config.model_fields_set}
    return Config(**fields | given_fields(Config, flags))


def main(config: Path | None, **flags: Any) -> None:
    """Train a GPT on text, with its state on device, host and NVMe.

    Everything has a default but the directory for the state: infinity train --nvme /tmp/infinity. On several
    accelerators or machines: torchrun --nproc-per-node 8 -m infinity.train --nvme /tmp/infinity. Exit code 1: a loss
    was NaN or infinite.
    """
    settings = TrainSettings(**given_fields(TrainSettings, flags))
    console = Console(
        stderr=settings.json_file == STANDARD_OUTPUT,
        quiet=os.environ.get("RANK", "0") != "0",  # of torchrun's ranks one speaks
    )
    with StopRequest() as stop:
        try:
            run(settings, make_config(config, flags), console, stop)
        except KeyboardInterrupt:
            console.print("interrupted; this run's weights were not saved")
        if stop:
            raise typer.Exit(stop.exit_code)


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
        *make_flags(TrainSettings, {name: panel for panel, names in _PANELS.items() for name in names}),
        *make_flags(Config, _CONFIG_PANELS, defaults=CONFIG_DEFAULTS, docs=_CONFIG_DOCS),
        _CONFIG_FILE,
    ]
)
