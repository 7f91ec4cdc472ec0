"""The kinds of values that fields of ``Config`` take, and what is refused in each."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field

PLACEHOLDERS = ("{rank}", "{local_rank}", "{host}")
"""What each rank replaces by its own in a path."""


def _refuse_bool_bytes(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number of bytes or a string such as '20GiB'")
    return value


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _one_name_is_a_list(value: object) -> object:
    names = [value] if isinstance(value, str) and value != "auto" else value
    if isinstance(names, (list, tuple)) and (
        not names or any(isinstance(name, str) and not name.strip() for name in names)
    ):
        raise ValueError("expected 'auto' or class names of modules; a name is missing or empty")
    return names


def _one_pattern_is_a_list(value: object) -> object:
    patterns = [value] if isinstance(value, str) else value
    if isinstance(patterns, (list, tuple)) and any(isinstance(each, str) and not each.strip() for each in patterns):
        raise ValueError("expected patterns of names of parameters, one of them is empty")
    return patterns


def _one_path_is_a_list(value: object) -> object:
    paths = [value] if isinstance(value, (str, os.PathLike)) else value
    if isinstance(paths, (list, tuple)) and any(isinstance(path, str) and not path.strip() for path in paths):
        raise ValueError("expected paths of directories, one of them is empty")
    return [_pattern(_home(path)) for path in paths] if isinstance(paths, (list, tuple)) else paths


def _home(path: object) -> object:
    try:
        return Path(path).expanduser() if isinstance(path, (str, Path)) else path
    except RuntimeError as error:
        raise ValueError(f"expected a path, and {str(path)!r} names no user's home") from error


def _pattern(path: object) -> object:
    if isinstance(path, os.PathLike):
        text = os.fspath(path)
        for name in re.findall(r"\{[^{}]*\}", text):
            if name not in PLACEHOLDERS:
                raise ValueError(f"no placeholder is called {name}; there are {', '.join(PLACEHOLDERS)}")
        if re.search(r"[{}]", re.sub(r"\{[^{}]*\}", "", text)):
            raise ValueError(f"a brace stands alone in {text!r}; braces enclose placeholders only")
    return path


def _digits_are_a_number(value: object) -> object:
    if isinstance(value, (bool, float)):
        raise ValueError("expected a whole number")
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]+", value) else value


Bytes = Annotated[ByteSize, BeforeValidator(_refuse_bool_bytes), Field(ge=0)]
Number = BeforeValidator(_refuse_bool)
Scale = Annotated[float, Number, Field(ge=2.0**-126, le=2.0**126)]  # it and its inverse are numbers in fp32
Digit = BeforeValidator(_digits_are_a_number)
Names = Annotated[Literal["auto"] | tuple[str, ...], BeforeValidator(_one_name_is_a_list)]
Patterns = Annotated[tuple[str, ...], BeforeValidator(_one_pattern_is_a_list)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_one_path_is_a_list)]
