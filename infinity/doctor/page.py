"""Shows sections to a person, and as one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

import infinity
from infinity.doctor.examine import Section
from infinity.doctor.findings import Finding, State

_COLOURS: dict[State, str] = {"good": "green", "slow": "yellow", "missing": "red"}
_STATE_WIDTH = 8
_NAME_WIDTH = 14


def show_section(console: Console, section: Section) -> None:
    """A title, and a line for each finding with what follows from it and its repair below."""
    console.print(Text(section.title, style="bold"))
    for finding in section.findings:
        _show(console, finding)


def _show(console: Console, finding: Finding) -> None:
    line = Text("  ")
    line.append(finding.state.ljust(_STATE_WIDTH), style=_COLOURS[finding.state])
    line.append(finding.name.ljust(_NAME_WIDTH))
    line.append(finding.text)
    console.print(line, soft_wrap=True)
    indent = " " * (2 + _STATE_WIDTH + _NAME_WIDTH)
    if finding.why:
        console.print(Text(f"{indent}{finding.why}", style="dim"), soft_wrap=True)
    for repair in finding.repairs:
        console.print(
            Text(f"{indent}$ {repair}" if not repair.startswith("#") else f"{indent}{repair}", style="cyan"),
            soft_wrap=True,
        )


def show_verdict(console: Console, sections: Sequence[Section]) -> None:
    """Whether training can run."""
    findings = [finding for section in sections for finding in section.findings]
    preventing = [finding.name for finding in findings if finding.prevents_training]
    slow, missing = (sum(finding.state == state for finding in findings) for state in ("slow", "missing"))
    counts = f"{slow} slow, {missing} missing"
    if preventing:
        names = ", ".join(dict.fromkeys(preventing))
        console.print(Text(f"Training cannot run: see {names} ({counts}).", style="bold red"), soft_wrap=True)
    else:
        console.print(Text(f"Training can run ({counts}).", style="bold green"), soft_wrap=True)


def as_document(sections: Sequence[Section]) -> dict[str, Any]:
    """All of it, as JSON holds it."""
    return {
        "schema": 1,
        "infinity": infinity.__version__,
        "can_train": can_train(sections),
        "sections": [
            {"title": section.title, "findings": [finding.as_document() for finding in section.findings]}
            for section in sections
        ],
    }


def can_train(sections: Sequence[Section]) -> bool:
    """Whether nothing essential is missing."""
    return not any(finding.prevents_training for section in sections for finding in section.findings)
