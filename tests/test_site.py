"""docs/ as a site: it builds without a warning and from this machine alone; pages, links and anchors are all there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

_REPOSITORY = Path(__file__).parents[1]
_DOCS = _REPOSITORY / "docs"
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^( *)(`{3,}).*?^ *\2|<!--.*?-->", re.MULTILINE | re.DOTALL)
_LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""Elements that make a browser fetch something, and the attribute that says from where."""


class _Page(HTMLParser):
    """What the tests look at in a page of the site."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.paragraphs: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.anchors.add(str(values["id"]))
        if tag in _LOADED and values.get(_LOADED[tag]) and values.get("rel") != "canonical":
            self.loaded.append(str(values[_LOADED[tag]]))
        if tag == "p":
            self._inside = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.paragraphs[-1] += data


def _build(directory: Path, configuration: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(directory), "-f", str(configuration)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = _build(directory, _REPOSITORY / "mkdocs.yml")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if re.match(r"(WARNING|ERROR)\b", line)] == []
    return directory


@pytest.fixture(scope="module")
def rendered(site: Path) -> dict[str, _Page]:
    """By the name of each file in docs/."""
    found = {}
    for path in _DOCS.glob("*.md"):
        built = site / ("index.html" if path.stem == "index" else f"{path.stem}/index.html")
        found[path.name] = _Page(built.read_text(encoding="utf-8"))
    return found


def _nav(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, list):
                yield from _nav(value)
            else:
                yield value


def test_the_navigation_has_each_page_once() -> None:
    config = pytest.importorskip("mkdocs.config").load_config(str(_REPOSITORY / "mkdocs.yml"))
    assert sorted(_nav(config["nav"])) == sorted(path.name for path in _DOCS.glob("*.md"))
    assert [path.name for path in _DOCS.rglob("*.md") if path.parent != _DOCS] == []


def test_the_site_loads_nothing_from_another_host(site: Path, rendered: dict[str, _Page]) -> None:
    loaded = {address for page in rendered.values() for address in page.loaded}
    assert loaded
    assert [address for address in loaded if urlsplit(address).netloc] == []
    sheets = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert sheets
    assert [found for text in sheets for found in re.findall(r"url\(\s*[\"']?(https?:[^)]*)", text)] == []


def test_every_link_and_anchor_exists(rendered: dict[str, _Page]) -> None:
    broken = []
    for path in [_REPOSITORY / "README.md", _REPOSITORY / "CONTRIBUTING.md", *_DOCS.glob("*.md")]:
        for link in _LINK.findall(_FENCED.sub("", path.read_text(encoding="utf-8"))):
            if urlsplit(link).scheme:
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.exists() or (
                anchor and target.parent == _DOCS and anchor not in rendered[target.name].anchors
            ):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_lists_and_tables_are_rendered_as_such(rendered: dict[str, _Page]) -> None:
    """Where the site's Markdown wants an empty line before them and has none, they are left in the paragraph."""
    left = [
        f"{name}: {text[:80]}"
        for name, page in rendered.items()
        for text in page.paragraphs
        if re.search(r"^\s*(?:[-*] |\d+\. |\|.*\|$|```)", text, re.MULTILINE)
    ]
    assert left == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[missing](missing.md)", "missing.md"),
        ("[anchor](#missing)", "missing"),
        ("![picture](missing.png)", "missing.png"),
    ],
)
def test_a_broken_page_fails_the_build(text: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Page\n\n{text}\n", encoding="utf-8")
    configuration = (_REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    head, _, _ = configuration.partition("nav:")
    (tmp_path / "mkdocs.yml").write_text(head, encoding="utf-8")
    done = _build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode == 1
    assert word in done.stderr
