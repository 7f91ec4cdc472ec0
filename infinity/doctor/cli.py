"""The flags of ``infinity doctor``."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from infinity.config import Config
from infinity.console.interrupt import ended_by_signals
from infinity.console.output import STANDARD_OUTPUT, OutputConsole, check_output, write_json
from infinity.doctor.examine import Section, examine
from infinity.doctor.page import as_document, can_train, show_section, show_verdict
from infinity.doctor.view import View
from infinity.rank_paths import nvme_for_rank

MISSING_EXIT_CODE = 1


def main(
    nvme: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR[,DIR…]", help="Directories for the NVMe tier. A missing one is said, not made."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Neither measure bandwidth nor let two ranks meet.")] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page as one JSON document; - is standard output.")
    ] = None,
) -> None:
    """Say what this machine offers to training, what is slow or missing, and the command that mends it.

    Each line begins with good, slow (training runs, and loses by it) or missing.
    A $ begins a command for a shell; those for root say nothing of sudo. Things
    are tried where they can be: nothing is changed, and small files in the given
    directories are removed again.

    Exit codes: 0 training can run; 1 something essential is missing; 2 it cannot
    be done.

    For example: infinity doctor --nvme /tmp/infinity
    """
    paths = _paths(nvme or [])
    if json is not None and json != STANDARD_OUTPUT:
        check_output(json, "--json", replaced=False)
    if os.environ.get("LOCAL_RANK", "0") != "0":  # of the ranks of a machine one looks at it
        return
    sections: list[Section] = []
    console = OutputConsole(stderr=json == STANDARD_OUTPUT)
    with ended_by_signals():
        for section in examine(View(quick=quick), paths):
            sections.append(section)
            show_section(console, section)
    show_verdict(console, sections)
    if json is not None:
        write_json(as_document(sections), json)
    if not can_train(sections):
        raise typer.Exit(MISSING_EXIT_CODE)


def _paths(given: list[str]) -> list[Path]:
    """The directories; placeholders stand for this rank's."""
    if not given:
        return []
    config = Config(nvme=[part for value in given for part in value.split(",")])
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    return list(nvme_for_rank(config, rank, 1, local_rank, socket.gethostname()).nvme)
