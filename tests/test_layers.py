"""House rules that the source itself can be asked about: one direction of imports, no code from data, small files."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).parents[1] / "infinity"
_FILES = sorted(_PACKAGE.rglob("*.py"))
_MAX_LINES = 400

_ROOT = "__init__"
_LAYERS = (
    {"config", "deepspeed_json", "errors", "fields", "machine", "rank_paths", "trace"},
    {"nn"},
    {"io"},
    {"store"},
    {"engine"},
    {_ROOT},
    {"integrations"},
    {"console"},
    {"__main__", "bench", "checkpoint", "doctor", "plan", "train"},
)
"""From the ground up: a file imports from its own layer and from those before it."""

_LAYER_OF = {name: number for number, names in enumerate(_LAYERS) for name in names}
_DISTRIBUTED = (("engine", "collectives.py"), ("engine", "meeting.py"))
_RUNS_DATA = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "torch.load"}
_RUNS_TEXT = {"eval", "exec"}


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported in a file of ``package``, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _layer_name(dotted: str) -> str:
    """Which name of ``_LAYERS`` a full name inside the package belongs to."""
    second = dotted.split(".")[1:2]
    return second[0] if second and second[0] in _LAYER_OF else _ROOT


def _upward_imports(tree: ast.AST, package: str, name: str) -> list[str]:
    return [
        f"line {line}: {name} imports {imported}"
        for line, imported in _imports(tree, package)
        if imported.split(".")[0] == "infinity" and _LAYER_OF[_layer_name(imported)] > _LAYER_OF[name]
    ]


def _attributes(tree: ast.AST, dotted: str) -> Iterator[ast.Attribute]:
    """Every place where ``owner.name`` is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == dotted:
            yield node


def _uses_of_distributed(tree: ast.AST) -> list[str]:
    imported = [line for line, name in _imports(tree, "infinity") if f"{name}.".startswith("torch.distributed.")]
    named = [node.lineno for node in _attributes(tree, "torch.distributed")]
    return [f"line {line}: torch.distributed" for line in imported + named]


def _code_from_data(tree: ast.AST) -> list[str]:
    complaints = [
        f"line {line}: import of {name}"
        for line, name in _imports(tree, "infinity")
        if name in _RUNS_DATA or name.split(".")[0] in _RUNS_DATA
    ]
    safe_loads: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _RUNS_TEXT:
            complaints.append(f"line {node.lineno}: {node.id}")
        if isinstance(node, ast.Call):
            constants = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            if constants.get("weights_only") is True:
                safe_loads.add(node.func)
            if any(k.arg == "allow_pickle" for k in node.keywords) and constants.get("allow_pickle") is not False:
                complaints.append(f"line {node.lineno}: allow_pickle")
    unsafe = [node for node in _attributes(tree, "torch.load") if node not in safe_loads]
    return complaints + [f"line {node.lineno}: torch.load without weights_only=True" for node in unsafe]


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def _in_all_files(rule: Callable[[Path], Iterable[str]]) -> list[str]:
    """What a rule has to say against the package, each with its file."""
    assert len(_FILES) > 30, "the package is not where these tests look for it"
    return [f"{file.relative_to(_PACKAGE)}: {complaint}" for file in _FILES for complaint in rule(file)]


def test_every_file_has_a_layer_and_imports_nothing_above_it() -> None:
    def rule(file: Path) -> list[str]:
        path = file.relative_to(_PACKAGE)
        name = path.with_suffix("").parts[0]
        if name not in _LAYER_OF:
            return [f"{name} is in no layer; give it its place in _LAYERS"]
        return _upward_imports(_parse(file), ".".join(["infinity", *path.parent.parts]), name)

    assert _in_all_files(rule) == []


def test_only_the_collectives_use_torch_distributed() -> None:
    def rule(file: Path) -> list[str]:
        return [] if file.relative_to(_PACKAGE).parts in _DISTRIBUTED else _uses_of_distributed(_parse(file))

    assert _in_all_files(rule) == []
    for parts in _DISTRIBUTED:
        assert _uses_of_distributed(_parse(_PACKAGE.joinpath(*parts))), "the exception is for nothing"


def test_nothing_that_is_read_becomes_code() -> None:
    assert _in_all_files(lambda file: _code_from_data(_parse(file))) == []


def test_every_file_says_what_it_is() -> None:
    assert _in_all_files(lambda file: [] if ast.get_docstring(_parse(file)) else ["no module docstring"]) == []


def test_every_file_is_small() -> None:
    def rule(file: Path) -> list[str]:
        num_lines = len(file.read_text(encoding="utf-8").splitlines())
        return [] if num_lines <= _MAX_LINES else [f"{num_lines} lines, at most {_MAX_LINES}; a concept is missing"]

    assert _in_all_files(rule) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("io", "from infinity.store.pool import Lease"),
        ("io", "from infinity import store"),
        ("io", "import infinity.store.pool as pool"),
        ("config", "from infinity.io.memory import allocate"),
        ("store", "def late():\n    from infinity.engine.unit import Unit"),
        ("store", "from ..engine import unit"),
        ("store", "from ..engine.unit import Unit"),
        ("engine", "import infinity"),
        ("engine", "from infinity import Config"),
        ("engine", "from infinity.train.model import GPT"),
        ("__init__", "from infinity.integrations import deepspeed"),
        ("integrations", "from infinity.bench.run import run"),
    ],
)
def test_an_upward_import_is_found(name: str, source: str) -> None:
    assert len(_upward_imports(ast.parse(source), f"infinity.{name}", name)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("config", "from infinity.errors import ConfigError"),
        ("store", "from infinity.io.backend import File\nfrom infinity.store.pool import Lease\nimport torch.nn"),
        ("store", "from .pool import Lease\nfrom ..io import memory"),
        ("train", "import infinity\nfrom infinity.engine.unit import Unit\nfrom infinity.bench import run"),
        ("engine", "import infinitylike.train"),
    ],
)
def test_a_downward_import_is_not(name: str, source: str) -> None:
    assert _upward_imports(ast.parse(source), f"infinity.{name}", name) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "from torch.distributed.tensor import DTensor",
        "import torch\ntorch.distributed.barrier()",
    ],
)
def test_a_use_of_torch_distributed_is_found(source: str) -> None:
    assert len(_uses_of_distributed(ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import os, marshal",
        "from torch import load",
        "eval(text)",
        "run = exec",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=chosen)",
        "load = torch.load",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_code_from_data_is_found(source: str) -> None:
    assert len(_code_from_data(ast.parse(source))) == 1


def test_safe_reading_is_allowed() -> None:
    source = "torch.load(path, weights_only=True)\nnumpy.load(path, allow_pickle=False)\nmodel.eval()\njson.load(file)"
    assert _code_from_data(ast.parse(source)) == []
