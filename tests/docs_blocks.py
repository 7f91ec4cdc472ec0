"""The examples of README.md and docs/: read from the pages, judged, and run as a reader would run them.

In a page, an HTML comment says what a block needs or why it stays unrun; readers do not see it:

- ``<!-- setup``, lines of Python, ``-->``: run where it stands, in the namespace of the page's Python blocks. ``check``
  in the place of ``setup`` is the same, for what has to be true there.
- ``<!-- file: train.py -->``: the next block is written to that file; a later block has to run it.
- ``<!-- not run: REASON -->``: the next block cannot run here, for the reason given.

Everything else runs: Python in one process and namespace per page, ``sh`` by bash, in order, in one empty directory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import traceback
import types
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path

_REPOSITORY = Path(__file__).parents[1]
_DISKS = ("nvme0", "nvme1")
"""What is "mounted" below /mnt for a page."""

MAX_SCRIPT_LINES = 39
"""A complete script that a page gives to a new user stays under 40 lines."""

_LANGUAGES = frozenset({"python", "sh", "json", "text", "yaml", "ini", "toml", "dockerfile", "diff"})
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})\s*([^\s`]*)[^`]*$")
_DIRECTIVE = re.compile(r"^ *<!-- *(file|not run): *(.*?) *-->$")
_LOOKS_LIKE_DIRECTIVE = re.compile(r"^ *<!-- *(?:setup|check|file|not[ -]run|no[ -]run|skip)\b", re.IGNORECASE)
_DISK_PATH = re.compile(r"(?<![\w.~/])/mnt/")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page, or the code of a ``setup`` or ``check`` comment."""

    line: int  # of its first line of text, counted from 1
    language: str
    text: str
    file: str | None = None
    reason: str | None = None
    setup: bool = False

    @property
    def runs(self) -> bool:
        """Whether the block is executed, rather than written, shown or left out."""
        return self.language in {"python", "sh"} and self.file is None and self.reason is None


@dataclasses.dataclass(frozen=True)
class Page:
    """The blocks of a page, and what is wrong with them before anything runs."""

    name: str
    blocks: list[Block]
    problems: list[str]


def pages() -> list[str]:
    """README.md and every page of docs/, relative to the repository."""
    found = sorted((_REPOSITORY / "docs").rglob("*.md"))
    return ["README.md", *(str(path.relative_to(_REPOSITORY)) for path in found)]


def read_page(name: str) -> Page:
    """The page as it stands in the repository."""
    return parse(name, (_REPOSITORY / name).read_text(encoding="utf-8"))


def parse(name: str, text: str) -> Page:
    """The page of that name with this text: all its blocks, and every problem with them."""
    blocks: list[Block] = []
    problems: list[str] = []
    for found in _scan(name, text.splitlines()):
        if isinstance(found, Block):
            blocks.append(found)
        else:
            problems.append(found)
    for index, block in enumerate(blocks):
        problems += [f"{name}:{block.line}: {problem}" for problem in _problems(block, blocks[index + 1 :])]
    return Page(name, blocks, problems)


def _scan(name: str, lines: list[str]) -> Iterator[Block | str]:
    """Every block in order; a string for what cannot be read."""
    directives: dict[str, str] = {}
    position = 0
    while position < len(lines):
        line = lines[position]
        position += 1
        if line.strip() in {"<!-- setup", "<!-- check"}:
            end = next((at for at in range(position, len(lines)) if lines[at].strip() == "-->"), None)
            if end is None:
                yield f"{name}:{position}: this comment never ends: expected a line with --> alone"
                return
            yield Block(position + 1, "python", _joined(lines[position:end], 0), setup=True)
            position = end + 1
        elif match := _DIRECTIVE.match(line):
            directives[match[1]] = match[2]
        elif _LOOKS_LIKE_DIRECTIVE.match(line):
            yield f"{name}:{position}: not understood: {line.strip()}"
        elif match := _FENCE.match(line):
            indent, mark, language = match.groups()
            closing = re.compile(rf" *{mark[0]}{{{len(mark)},}} *$")
            end = next((at for at in range(position, len(lines)) if closing.match(lines[at])), None)
            if end is None:
                yield f"{name}:{position}: this block never ends"
                return
            body = _joined(lines[position:end], len(indent))
            yield Block(position + 1, language, body, directives.get("file"), directives.get("not run"))
            directives = {}
            position = end + 1
        elif line.strip() and directives:
            yield f"{name}:{position}: expected a block right after the comment {directives}, got {line.strip()!r}"
            directives = {}
    if directives:
        yield f"{name}: the page ends after the comment {directives}, expected a block"


def _joined(lines: list[str], indent: int) -> str:
    return "".join(f"{line[indent:] if line[:indent].isspace() else line}\n" for line in lines)


def _problems(block: Block, later: list[Block]) -> Iterator[str]:
    """What is wrong with one block, given those that come after it in the page."""
    if block.language not in _LANGUAGES:
        yield f"language {block.language!r}: expected one of {', '.join(sorted(_LANGUAGES))}"
    if block.reason is not None and len(block.reason.split()) < 2:
        yield f"not run: expected a reason, got {block.reason!r}"
    if block.reason is not None and block.file is not None:
        yield "both a file and not run: expected one of them"
    if block.language == "python":
        try:
            compile(block.text, "block", "exec")
        except SyntaxError as error:
            yield f"no Python: {error.msg} in its line {error.lineno}"
    if block.language == "json":
        try:
            json.loads(block.text)
        except ValueError as error:
            yield f"no JSON: {error}"
    if block.file is not None:
        yield from _problems_of_file(block, block.file, later)


def _problems_of_file(block: Block, file: str, later: list[Block]) -> Iterator[str]:
    if Path(file).is_absolute() or ".." in Path(file).parts or not file:
        yield f"file: expected a name below the page's directory, got {file!r}"
    if not any(file in other.text for other in later if other.runs):
        yield f"{file} is written, but no later block runs it"
    num_lines = len(block.text.splitlines())
    if block.language in {"python", "sh"} and num_lines > MAX_SCRIPT_LINES:
        yield f"{file} has {num_lines} lines; a new user's script has at most {MAX_SCRIPT_LINES}"


def run(page: Page, directory: Path, timeout_seconds: float) -> str | None:
    """Run all blocks of a page in ``directory``, an empty one, in a process of its own.

    Returns:
        None where all went well, else what failed: page, line, and the end of what was printed.
    """
    home, log = directory / "here", directory / "log"
    home.mkdir()
    for disk in _DISKS:
        (directory / "mnt" / disk).mkdir(parents=True)
    # The server has imported torch when it forks: a page costs no import, and nothing of other tests is in it.
    context = get_context("forkserver")
    context.set_forkserver_preload(["infinity"])
    process = context.Process(target=_run_here, args=(page, home, log))
    process.start()
    process.join(timeout_seconds)
    late = process.is_alive()
    _end(process.pid)
    process.join()
    if process.exitcode == 0 and not late:
        return None
    words = f"not done after {timeout_seconds} s" if late else f"exit code {process.exitcode}"
    printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return f"{page.name}: {words}\n{printed[-6000:]}"


def _end(pid: int | None) -> None:
    """End what a page has started and left: its process is the leader of a group of its own."""
    if pid is not None:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _run_here(page: Page, home: Path, log: Path) -> None:
    """In the process of the page: run its blocks; exits with 1 after saying which one failed and why."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(home)
    os.environ.update(_environment())
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.path.insert(0, str(home))
    for block in page.blocks:
        try:
            _run_block(block, page.name, main, home)
        except BaseException:
            traceback.print_exc()
            print(f"{page.name}:{block.line}: this block failed", file=sys.stderr, flush=True)
            sys.exit(1)
    sys.stdout.flush()


def _environment() -> dict[str, str]:
    """What blocks run with: this interpreter's commands and this project first, and no way to a model hub."""
    before = os.environ.get("PYTHONPATH", "")
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{_REPOSITORY}{os.pathsep}{before}" if before else str(_REPOSITORY),
        "HF_HUB_OFFLINE": "1",
    }


def _run_block(block: Block, page: str, main: types.ModuleType, home: Path) -> None:
    text = _DISK_PATH.sub(f"{home.parent}/mnt/", block.text)
    if block.file is not None:
        path = home / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    elif not block.runs:
        return
    elif block.language == "sh":
        # A session of the page: killed with it. No input: a command that asks fails instead of waiting.
        subprocess.run(["bash", "-euo", "pipefail", "-c", text], stdin=subprocess.DEVNULL, check=True)
    else:
        # Empty lines before it, so that a traceback names the line of the page.
        source = "\n" * (block.line - 1) + text
        exec(compile(source, str(_REPOSITORY / page), "exec"), vars(main))


def count(pages: Iterable[Page]) -> tuple[int, int]:
    """How many blocks of Python and sh run (or are written and run), and how many have a reason not to."""
    blocks = [
        block for page in pages for block in page.blocks if block.language in {"python", "sh"} and not block.setup
    ]
    not_run = sum(block.reason is not None for block in blocks)
    return len(blocks) - not_run, not_run
