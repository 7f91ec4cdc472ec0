"""What stands around the code agrees with it: README, constraints, version, documentation of the public surface."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import infinity
from infinity.config import Config

_REPOSITORY = Path(__file__).parents[1]
_MAIN_COMMAND = "pip install -c constraints.txt -e '.[test]' && python -m infinity.train --nvme /tmp/infinity"
_TEST_COMMAND = "pip install -c constraints.txt -e '.[test]' && pytest"
_FIRST_SCREEN_LINES = 30

_OF_TORCH = ("cuda-", "nvidia-", "triton")
"""How the packages begin that torch brings for its accelerator: it pins them itself, differently in each build."""

_WORKPLACE = re.compile(r"(?<![\w.~*}-])/(?:(?:work|root|home|opt)/|tmp/(?!infinity\b))[\w.]")
"""Absolute paths that exist on one machine or for one person; ``/tmp/infinity`` is README's own example."""


def _read(name: str) -> str:
    return (_REPOSITORY / name).read_text(encoding="utf-8")


def _pyproject_list(name: str) -> list[str]:
    """A list of strings in pyproject.toml: what TOML writes there, Python reads as well."""
    match = re.search(rf"^{name} = (\[$.*?^\])$", _read("pyproject.toml"), re.MULTILINE | re.DOTALL)
    assert match is not None, f"pyproject.toml has no list named {name}"
    values = ast.literal_eval(match[1])
    assert isinstance(values, list)
    return [str(value) for value in values]


def _constraints() -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in _read("constraints.txt").splitlines())
    return [Requirement(line) for line in lines if line]


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    environment = {key: str(value) for key, value in default_environment().items()}
    return requirement.marker is None or any(
        requirement.marker.evaluate({**environment, "extra": extra}) for extra in extras or {""}
    )


def _installed_names() -> set[str]:
    """Every package that the tests need here, found by following what installed packages say they need."""
    names: set[str] = set()
    queue = [Requirement(text) for text in _pyproject_list("dependencies") + _pyproject_list("test")]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in names or name.startswith(_OF_TORCH):
            continue
        names.add(name)
        needed = [Requirement(text) for text in metadata.requires(requirement.name) or ()]
        queue += [each for each in needed if _applies(each, requirement.extras)]
    return names


def _files() -> Iterator[Path]:
    """Every file of the project: no tool's caches, no environments, nothing built."""
    for directory, subdirectories, names in os.walk(_REPOSITORY):
        subdirectories[:] = [
            name
            for name in subdirectories
            if name in {".ci", ".github"}
            or not (name.startswith(".") or name in {"__pycache__", "build", "dist"} or name.endswith(".egg-info"))
        ]
        yield from (Path(directory, name) for name in names if name != ".git")


def test_readme_gives_each_command_once_on_its_first_screen() -> None:
    lines = _read("README.md").splitlines()
    for command in (_MAIN_COMMAND, _TEST_COMMAND):
        assert [line for line in lines if command == line.strip()] == [command]
        assert lines.index(command) < _FIRST_SCREEN_LINES


def test_ci_takes_exactly_the_test_command() -> None:
    [pattern] = re.findall(r"grep -E '([^']*)' README\.md", _read(".ci/run"))
    assert re.findall(pattern, _read("README.md"), re.MULTILINE) == [_TEST_COMMAND]
    assert os.access(_REPOSITORY / ".ci/run", os.X_OK)


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/deviations.md",
        "docs/distributed.md",
        "docs/parity.md",
    ],
)
def test_what_documents_refer_to_exists(document: str) -> None:
    text = _read(document)
    directory = (_REPOSITORY / document).parent
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (directory / link).exists()] == []
    for path in re.findall(r"`((?:infinity|io|store|engine|train|tests|docs|bench)/[\w/.-]+\.(?:py|md))`", text):
        assert (_REPOSITORY / path).exists() or (_REPOSITORY / "infinity" / path).exists(), path


def test_constraints_are_plain_pins() -> None:
    for constraint in _constraints():
        [specifier] = constraint.specifier
        assert specifier.operator == "=="
        assert re.fullmatch(r"[\w.]+", specifier.version), f"{constraint}: no local suffix, no wildcard"
        assert constraint.url is None
        assert not constraint.extras


def test_constraints_allow_what_pyproject_asks_for() -> None:
    pins: dict[str, list[str]] = {}
    for constraint in _constraints():
        [specifier] = constraint.specifier
        pins.setdefault(canonicalize_name(constraint.name), []).append(specifier.version)
    for requirement in map(Requirement, _pyproject_list("dependencies") + _pyproject_list("test")):
        versions = pins.get(canonicalize_name(requirement.name), [])
        assert versions, f"constraints.txt does not pin {requirement.name}"
        assert all(requirement.specifier.contains(version) for version in versions), requirement


def test_constraints_pin_each_package_once_here_and_all_that_the_tests_need() -> None:
    names = [canonicalize_name(each.name) for each in _constraints() if _applies(each, set())]
    assert sorted(set(names)) == sorted(names)
    assert _installed_names() - set(names) == set()


def test_no_file_names_a_path_of_one_machine() -> None:
    found = []
    for file in _files():
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if _WORKPLACE.search(line):
                found.append(f"{file.relative_to(_REPOSITORY)}:{number}: {line.strip()}")
    assert found == []


@pytest.mark.parametrize("place", ["work/main", "root/.cache", "home/me", "opt/wheels", "tmp/venv", "tmp/infinity2"])
def test_a_path_of_one_machine_is_recognised(place: str) -> None:
    assert _WORKPLACE.search(f"run '/{place}' now")


@pytest.mark.parametrize("text", ["/tmp/infinity", "a/work/b", "of /workers", "./home/x", "/mnt/nvme0", "and/or"])
def test_other_paths_are_not(text: str) -> None:
    assert not _WORKPLACE.search(text)


def test_every_config_field_is_documented_in_the_source() -> None:
    [definition] = [
        node
        for node in _parse_module(inspect.getsourcefile(Config)).body
        if isinstance(node, ast.ClassDef) and node.name == "Config"
    ]
    documented = {
        node.target.id
        for node, after in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
        and after.value.value.strip()
    }
    assert set(Config.model_fields) - documented == set()


def _parse_module(path: str | None) -> ast.Module:
    assert path is not None
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def _public_members(value: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(value).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if not name.startswith("_") and inspect.isfunction(function):
            yield f"{value.__name__}.{name}", function


@pytest.mark.parametrize("name", infinity.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    value = getattr(infinity, name)
    members = [(name, value), *(_public_members(value) if isinstance(value, type) else ())]
    for member_name, member in members:
        doc = vars(member).get("__doc__") if isinstance(member, type) else member.__doc__
        assert doc, f"{member_name} has no docstring"
        assert not doc.startswith(f"{member_name}("), f"{member_name} has only the signature that a dataclass makes"


def test_public_names_are_sorted_and_unique() -> None:
    assert sorted(set(infinity.__all__)) == infinity.__all__


def test_version_is_the_same_everywhere() -> None:
    [version] = re.findall(r'^version = "(.+)"$', _read("pyproject.toml"), re.MULTILINE)
    assert infinity.__version__ == version
    assert f"\n## [{version}]" in _read("CHANGELOG.md")
