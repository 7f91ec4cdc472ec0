"""What a configuration takes, and what it refuses by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity import Config, ConfigError

FIELDS = [name for name, field in Config.model_fields.items() if field.annotation is not bool]


@pytest.mark.parametrize("value", [True, False, [True]])
@pytest.mark.parametrize("name", FIELDS)
def test_a_boolean_is_nothing_but_a_boolean(name: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"nvme": [str(tmp_path)], name: value}))
    with pytest.raises(ConfigError, match=rf"Config: {name}: "):
        Config.from_json(file)
    with pytest.raises(ConfigError, match=rf"Config: {name}: "):
        Config(**{"nvme": tmp_path, name: value})


@pytest.mark.parametrize("name", ["prefetch", "io_num_threads"])
def test_what_a_count_takes_beside(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: expected a number, got True"):
        Config(**{name: True})
    assert getattr(Config(**{name: "3"}), name) == getattr(Config(**{name: 3}), name) == 3


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"ram": 1, "hbm": 2, "ram": 3}', "'ram'"),
        ('{"ram": 1, "hbm": 2, "ram": 3, "hbm": 2}', "'hbm', 'ram'"),
        ('{"ram": {"x": 1, "x": 1}}', "'x'"),
    ],
)
def test_a_key_that_stands_twice_is_refused_by_name(text: str, names: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.json: not valid JSON: key {names} stands there more than once"):
        Config.from_json(file)


def deep(file: Path) -> None:
    file.write_text("[" * 100_000)


def binary(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (deep, "not valid JSON"),
        (binary, "not valid JSON"),
        (Path.mkdir, "Is a directory; give an existing JSON file"),
        (lambda file: file.symlink_to("gone"), "No such file or directory; give an existing JSON file"),
    ],
)
def test_a_file_that_cannot_be_read(make: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    make(file)
    with pytest.raises(ConfigError, match=rf"config file .*config\.json: {message}"):
        Config.from_json(file)


@pytest.mark.parametrize(
    ("given", "units"),
    [("auto", "auto"), ("Block", ("Block",)), (["Block"], ("Block",)), (("Block", "Head"), ("Block", "Head"))],
)
def test_one_name_is_a_list_of_one(given: Any, units: object) -> None:
    assert Config(units=given).units == units


@pytest.mark.parametrize("given", ["", " ", [], ["Block", ""]])
def test_units_without_a_name(given: Any) -> None:
    with pytest.raises(ConfigError, match="units: expected 'auto' or class names of modules; a name is missing or em"):
        Config(units=given)


def test_a_type_checker_knows_the_public_names_and_no_others(tmp_path: Path) -> None:
    package = Path(infinity.__file__).parent
    (tmp_path / "infinity").mkdir()
    for name in ("__init__.py", "errors.py", "py.typed"):  # those that need no torch, which takes long
        shutil.copy(package / name, tmp_path / "infinity")
    (tmp_path / "user.py").write_text("import infinity\ninfinity.ModelError('x').args\ninfinity.ModelEror('x')\n")
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--no-incremental", "user.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert 'user.py:3: error: Module has no attribute "ModelEror"' in said
    assert "user.py:2:" not in said


def test_what_ranks_divide() -> None:
    assert [Config(stage=given).stage for given in (0, 1, 2, 3, "2")] == [0, 1, 2, 3, 2]
    for given in (4, "4", "", -1, 1.0):
        with pytest.raises(ConfigError, match="Config: stage: "):
            Config(stage=given)


def test_ranks_wait_for_a_time_that_ends() -> None:
    assert Config().ranks_timeout_seconds == 600
    for given in (0, -1, float("inf"), float("nan"), 1e9):
        with pytest.raises(ConfigError, match="Config: ranks_timeout_seconds: "):
            Config(ranks_timeout_seconds=given)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/mnt/{node}", r"no placeholder is called \{node\}; there are \{rank\}, \{local_rank\}, \{host\}, got "),
        ("/mnt/{rank}/{}", r"no placeholder is called \{\};"),
        ("/mnt/{rank:04}", r"no placeholder is called \{rank:04\};"),
        ("/mnt/{{rank}}", r"a brace stands alone in '/mnt/\{\{rank\}\}'"),
        ("/mnt/{rank", r"a brace stands alone in '/mnt/\{rank'"),
        ("/mnt/rank}", r"a brace stands alone in '/mnt/rank\}'"),
    ],
)
def test_a_pattern_that_is_none_is_refused_by_name(path: str, message: str) -> None:
    for given in (path, Path(path), ["/mnt/nvme", path]):
        with pytest.raises(ConfigError, match=f"Config: nvme: {message}"):
            Config(nvme=given)
