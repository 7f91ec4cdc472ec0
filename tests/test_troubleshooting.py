"""docs/troubleshooting.md has each class of error, and quotes only messages that the sources have."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import infinity

_REPOSITORY = Path(__file__).parents[1]
_PAGE = _REPOSITORY / "docs/troubleshooting.md"
_QUOTED = re.compile(r"`([^`]+)`")


def _text(node: ast.expr) -> str | None:
    """What a string is, with … for what is not known before it runs."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return f"{_text(node.left) or '…'}{_text(node.right) or '…'}"
    return None


def _messages() -> list[str]:
    """All strings of the sources that may be shown to somebody: no documentation."""
    found = []
    for path in sorted((_REPOSITORY / "infinity").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            text
            for node in ast.walk(tree)
            if isinstance(node, ast.expr) and id(node) not in said and (text := _text(node)) is not None
        ]
    return found


def _quoted(page: str) -> list[str]:
    """The messages in the first columns of the page's tables."""
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| Message |")]
    return [message for row in rows for message in _QUOTED.findall(row.split(" | ")[0])]


def _unknown(quoted: list[str], messages: list[str]) -> list[str]:
    """Those of which no string of the sources has all words, in order; … stands for anything."""
    whole = "\n".join(messages)
    parts = {each: [re.escape(part) for part in each.strip("…").split("…")] for each in quoted}
    return [each for each in quoted if not re.search("[^\n]*".join(parts[each]), whole)]


@pytest.fixture(scope="module")
def page() -> str:
    return _PAGE.read_text(encoding="utf-8")


def test_every_error_has_an_entry_with_messages(page: str) -> None:
    kinds = [
        name
        for name in infinity.__all__
        if isinstance(value := getattr(infinity, name), type) and issubclass(value, Exception)
    ]
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert sorted(sections) == sorted(kinds)
    assert [name for name in kinds if name != "InfinityError" and not _quoted(sections[name])] == []


def test_what_is_quoted_is_said_by_the_sources(page: str) -> None:
    quoted = _quoted(page)
    assert len(quoted) > 50
    assert _unknown(quoted, _messages()) == []


def test_what_nobody_says_is_found() -> None:
    messages = ["budgets too small for …: …", "another message"]
    quoted = ["budgets too small for … this model", "small for …", "too small … message", "another"]
    assert _unknown(quoted, messages) == [quoted[0], quoted[2]]
