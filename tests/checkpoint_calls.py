"""How tests call ``infinity checkpoint``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infinity import __main__ as command_line


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_info:
        command_line.main(["checkpoint", *map(str, arguments)])
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


def answer(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    """What a command writes as JSON."""
    capsys.readouterr()
    assert call(*arguments, "--json", "-") == code
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document
