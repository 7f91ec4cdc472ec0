"""The generated pages of docs/ are those that the code gives now."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest

import api_page
import config_table
import infinity


@pytest.mark.parametrize("page", [api_page, config_table])
def test_a_generated_page_is_up_to_date(page: ModuleType) -> None:
    written = page.DOCUMENT.read_text(encoding="utf-8")
    assert written == page.render(), f"run python tests/{page.__name__}.py, which writes {page.DOCUMENT.name}"


def test_every_public_name_is_in_the_reference() -> None:
    text = api_page.DOCUMENT.read_text(encoding="utf-8")
    missing = [name for name in infinity.__all__ if f"\n### `{name}`\n" not in text]
    missing += [
        name for name in vars(infinity.Engine) if not name.startswith("_") and f"\n#### `Engine.{name}`\n" not in text
    ]
    assert missing == []


def test_a_field_of_the_configuration_that_stands_under_no_heading_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(config_table.GROUPS, "Precision", config_table.GROUPS["Precision"][1:])
    with pytest.raises(AssertionError, match="precision"):
        config_table.render()


@dataclasses.dataclass
class Undocumented:
    first: int


def test_what_is_public_has_a_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infinity, "__all__", [*infinity.__all__, "Undocumented"])
    monkeypatch.setattr(infinity, "Undocumented", Undocumented, raising=False)
    with pytest.raises(ValueError, match="Undocumented"):
        api_page.render()
