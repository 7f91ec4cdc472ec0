"""Named bars, what was measured against each, and whether it was met; and what a run needs before it begins."""

from __future__ import annotations

import json
import operator
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from infinity.console.formats import format_bytes
from infinity.machine.memory import available_memory_bytes

_COMPARE = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True, slots=True)
class Check:
    """One bar.

    Attributes:
        name: what is measured.
        value: what came out.
        direction: ``"<="`` where less is better.
        bar: what it must reach.
        unit: of both.
    """

    name: str
    value: float
    direction: Literal["<=", ">="]
    bar: float
    unit: str = "x"

    @property
    def met(self) -> bool:
        """Whether the value reaches the bar, exactly: nothing is rounded in its favour."""
        return bool(_COMPARE[self.direction](self.value, self.bar))

    @property
    def missed_by(self) -> float:
        """How far the value is on the wrong side, as a fraction of the bar; 0 where it is met."""
        return 0.0 if self.met else abs(self.value - self.bar) / self.bar

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"met": self.met, "missed_by": self.missed_by}


def print_checks(checks: Sequence[Check]) -> None:
    """All of them, then what is missing."""
    width = max((len(check.name) for check in checks), default=0)
    print("\nTargets")
    for check in checks:
        print(
            f"  {'met   ' if check.met else 'MISSED'}  {check.name:{width}}  "
            f"{check.value:8.3f} {check.direction} {check.bar:g} {check.unit}"
        )
    missed = [check for check in checks if not check.met]
    print(f"\n{len(checks) - len(missed)} of {len(checks)} targets met")
    for check in missed:
        bar = f"the bar is {check.bar:g} {check.unit}"
        print(f"  missed by {check.missed_by:.1%}: {check.name}: {check.value:.3f}, {bar}")


def report(document: dict[str, Any], checks: Sequence[Check], json_file: Path | None) -> int:
    """Print the checks, write all as JSON if that is wanted; 0 where every one is met, else 1."""
    print_checks(checks)
    if json_file is not None:
        document["checks"] = [check.as_dict() for check in checks]
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(check.met for check in checks) else 1


def require_room(directory: Path, *, disk_bytes: float, memory_bytes: float) -> None:
    """Say what a run needs, and refuse where that is not free.

    Raises:
        SystemExit: there is too little.
    """
    free_disk = shutil.disk_usage(directory).free
    free_memory = available_memory_bytes()
    print(
        f"needs about {format_bytes(disk_bytes)} in {directory} (free: {format_bytes(free_disk)}), deleted at the end, "
        f"and {format_bytes(memory_bytes)} of memory (available: {format_bytes(free_memory)})",
        flush=True,
    )
    if disk_bytes > free_disk:
        raise SystemExit(f"{directory}: too little room on the disk; give --nvme on another one, or a smaller model")
    if memory_bytes > free_memory:
        raise SystemExit("too little memory available; end other programs, or give a smaller model")
