"""Architectures of Hugging Face ``transformers`` in the parity table: the bits of plain PyTorch.

The table is in ``parity_table.py`` and listed in ``docs/parity.md``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import families_hf
from covering import Row
from parity import tiny_scale
from parity_table import CASES_HF, name_of, run

__all__ = ["tiny_scale"]

pytest.importorskip("transformers", reason="needs Hugging Face transformers, which the extra 'test' installs")


@pytest.mark.parametrize("row", CASES_HF, ids=name_of)
def test_a_case_of_the_table(row: Row, tmp_path: Path) -> None:
    run(families_hf.FAMILIES, row, tmp_path)
