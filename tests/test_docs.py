"""Every example of README.md and docs/ runs as written; what reads and runs them can fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import docs_blocks

_TIMEOUT_SECONDS = 240.0
"""Far more than any page takes: the machine may be busy."""


@pytest.mark.timeout(_TIMEOUT_SECONDS + 30)
@pytest.mark.parametrize("name", docs_blocks.pages())
def test_the_examples_of_a_page_run_as_written(name: str, tmp_path: Path) -> None:
    page = docs_blocks.read_page(name)
    assert page.problems == []
    if any(block.runs for block in page.blocks):
        failure = docs_blocks.run(page, tmp_path, _TIMEOUT_SECONDS)
        assert failure is None, failure


def test_most_examples_run() -> None:
    num_run, num_not_run = docs_blocks.count(map(docs_blocks.read_page, docs_blocks.pages()))
    assert num_run > 3 * num_not_run


def _page(*lines: str) -> docs_blocks.Page:
    return docs_blocks.parse("page.md", "\n".join(lines))


_FENCED = ("```python", "value = 1", "```")


def test_blocks_are_found_with_their_lines_and_comments() -> None:
    page = _page(
        "Text.",
        "<!-- setup",
        "before = 1",
        "-->",
        "```python",
        "after = before",
        "```",
        "1. In a list:",
        "",
        "   ```sh",
        "   echo yes",
        "   ```",
        "<!-- file: a.py -->",
        "",
        *_FENCED,
        "<!-- not run: needs two machines -->",
        "~~~sh",
        "python a.py",
        "~~~",
        "```sh",
        "python a.py",
        "```",
        "```text",
        "`a` ``b``",
        "```",
    )
    assert page.problems == []
    assert [(each.line, each.language, each.text, each.file, each.reason, each.setup) for each in page.blocks] == [
        (3, "python", "before = 1\n", None, None, True),
        (6, "python", "after = before\n", None, None, False),
        (11, "sh", "echo yes\n", None, None, False),
        (16, "python", "value = 1\n", "a.py", None, False),
        (20, "sh", "python a.py\n", None, "needs two machines", False),
        (23, "sh", "python a.py\n", None, None, False),
        (26, "text", "`a` ``b``\n", None, None, False),
    ]
    assert [each.runs for each in page.blocks] == [True, True, True, False, False, True, False]
    assert docs_blocks.count([page]) == (4, 1)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (("```bash", "ls", "```"), "language 'bash'"),
        (("```", "ls", "```"), "language ''"),
        (("```python", "a = = 1", "```"), "no Python"),
        (("<!-- not run: needs two machines -->", "```python", "a = = 1", "```"), "no Python"),
        (("```json", "{'a': 1}", "```"), "no JSON"),
        (("<!-- not run: -->", *_FENCED), "expected a reason"),
        (("<!-- not run: later -->", *_FENCED), "expected a reason"),
        (("<!-- no run: needs two machines -->", *_FENCED), "not understood"),
        (("<!-- skip -->", *_FENCED), "not understood"),
        (("<!-- not run: needs two machines -->", "Text between.", *_FENCED), "expected a block right after"),
        (("<!-- not run: needs two machines -->",), "the page ends"),
        (("<!-- setup", "a = 1"), "never ends"),
        (("```python", "a = 1"), "never ends"),
        (("<!-- file: a.py -->", *_FENCED), "no later block runs it"),
        (("<!-- file: ../a.py -->", *_FENCED, "```sh", "python ../a.py", "```"), "below the page's directory"),
        (("<!-- file: a.py -->", "<!-- not run: needs a disk -->", *_FENCED, "```sh", "a.py", "```"), "one of them"),
        (("<!-- file: a.py -->", "```python", *["a = 1"] * 40, "```", "```sh", "a.py", "```"), "has 40 lines"),
    ],
)
def test_what_is_wrong_with_a_page_is_said(lines: tuple[str, ...], problem: str) -> None:
    problems = _page(*lines).problems
    assert len(problems) == 1
    assert problem in problems[0]
    assert problems[0].startswith("page.md")


def test_blocks_share_one_namespace_directory_and_disk(tmp_path: Path) -> None:
    page = _page(
        "<!-- setup",
        "from pathlib import Path",
        "assert list(Path().iterdir()) == []",
        "-->",
        "<!-- file: there.py -->",
        "```python",
        "from pathlib import Path",
        'Path("/mnt/nvme0/written").write_text("by a file")',
        "```",
        "```sh",
        "python there.py && cat /mnt/nvme0/written | tee copy",
        "```",
        "```python",
        "class Kept:",
        "    pass",
        'assert Path("copy").read_text() == "by a file"',
        "```",
        "```python",
        "import pickle",
        "assert isinstance(pickle.loads(pickle.dumps(Kept())), Kept)",
        "```",
    )
    assert page.problems == []
    assert docs_blocks.run(page, tmp_path, 60) is None


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (("```python", "print('before')", "1 / 0", "```"), ["ZeroDivisionError", "page.md:3", "before", "line 4"]),
        (("```python", "raise SystemExit(0)", "```"), ["SystemExit", "page.md:3"]),
        (("```sh", "echo before; false | true", "```"), ["before", "CalledProcessError", "page.md:3"]),
        (("```sh", "echo $unset", "```"), ["unset", "page.md:3"]),
        (("```sh", "exit 3", "```"), ["status 3", "page.md:3"]),
    ],
)
def test_a_block_that_fails_is_named(block: tuple[str, ...], words: list[str], tmp_path: Path) -> None:
    failure = docs_blocks.run(_page("Text.", *block, *_FENCED), tmp_path, 60)
    assert failure is not None
    assert [word for word in words if word not in failure] == []


def test_a_block_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    page = _page("```sh", "sleep 600 & echo $! > pid; wait", "```")
    failure = docs_blocks.run(page, tmp_path, 2)
    assert failure is not None
    assert "not done after 2 s" in failure
    pid = int((tmp_path / "here/pid").read_text())
    deadline = time.monotonic() + 30
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
