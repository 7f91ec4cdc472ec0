"""docs/coming-from.md names every argument of what people come from, and only settings that infinity has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from infinity.config import Config

_PAGE = Path(__file__).parents[1] / "docs/coming-from.md"
_UNNAMED = {"self", "module", "dim", "check_reduction", "keep_low_precision_grads", "cast_root_forward_inputs"}
"""What is no choice, or says nothing any more."""
_OF_INFINITY = {
    "process_group",
    "modify",
    "infinity_config",
    "save_state",
    "get_state_dict",
    "save_checkpoint",
    "comm_hook",
    "broadcast_buffers",
}
"""Names in the tables' right columns that are no fields of ``Config``."""


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    return dict(
        re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", _PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )


def _rows(section: str) -> list[tuple[str, str]]:
    cells = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(theirs, ours) for theirs, ours in cells[1:]]


@pytest.mark.parametrize(
    ("title", "made"),
    [
        ("PyTorch DDP", DistributedDataParallel),
        ("FSDP1", FullyShardedDataParallel),
        ("FSDP1", MixedPrecision),
        ("FSDP2", fully_shard),
        ("FSDP2", MixedPrecisionPolicy),
        ("FSDP2", CPUOffloadPolicy),
    ],
)
def test_every_argument_has_a_row(sections: dict[str, str], title: str, made: Any) -> None:
    theirs = " ".join(row[0] for row in _rows(sections[title]))
    named = set(re.findall(r"\w+", theirs))
    # What may be set anew in a newer version, too: then the page needs a row, or ``_UNNAMED`` a name.
    arguments = {name for name in inspect.signature(made).parameters if not name.startswith("_")}
    assert arguments - _UNNAMED - named == set()


def test_settings_that_it_sends_to_exist(sections: dict[str, str]) -> None:
    ours = [ours for section in sections.values() for _, ours in _rows(section)]
    assert len(ours) > 60
    set_to = {name for cell in ours for name in re.findall(r"\b([a-z_]+)=", cell)}
    alone = {name for cell in ours for name in re.findall(r"`([a-z]+_[a-z_]+)`", cell)}
    assert (set_to | alone) - set(Config.model_fields) - _OF_INFINITY == set()
