"""Small files of /proc and /sys; nothing here fails where one is missing, or hidden from this user by a container."""

from __future__ import annotations

import os
import re
from pathlib import Path


def chosen(text: str) -> str:
    """Of a list of choices, as the kernel writes them, the one in brackets."""
    match = re.search(r"\[(.+?)\]", text)
    return match[1] if match else text


def read_integer(*files: Path) -> int | None:
    """The number in the first of the files that has one."""
    for file in files:
        text = read_text(file)
        if text is not None and re.fullmatch(r"-?\d+", text):
            return int(text)
    return None


def is_there(path: Path) -> bool:
    """Whether a path exists and can be seen."""
    return os.access(path, os.F_OK)


def read_text(file: Path) -> str | None:
    """What is in a file, without blanks around it; ``None`` where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return None


def read_table(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = re.findall(r"^(\w+):?\s+(\d+)", read_text(file) or "", re.MULTILINE)
    return {name: int(number) for name, number in pairs}
