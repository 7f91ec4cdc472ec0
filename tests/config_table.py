"""The configuration reference: docs/config.md from infinity/config.py. ``python tests/config_table.py`` writes it."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from infinity.config import Config

DOCUMENT = Path(__file__).parents[1] / "docs" / "config.md"

_HEAD = """# Configuration

Written by `python tests/config_table.py` from `infinity/config.py`; do not edit.

Everything that you can choose, in one class. `infinity.Config` takes keywords, a dictionary, a JSON file, or a
[DeepSpeed configuration](deepspeed-keys.md):

```python
import infinity

config = infinity.Config(hbm="2GiB", ram="8GiB", nvme="/mnt/nvme0", precision="bf16")
config = infinity.Config.from_dict({"hbm": "2GiB", "ram": "8GiB", "nvme": ["/mnt/nvme0"]})
```

`infinity.initialize` takes a `Config`, such a dictionary, or the path of a JSON file:

<!-- file: config.json -->
```json
{"hbm": "2GiB", "ram": "8GiB", "nvme": ["/mnt/nvme0"], "precision": "bf16", "max_grad_norm": 1.0}
```

```python
config = infinity.Config.from_json("config.json")
```

`infinity train` has each field as a flag (`--hbm 2GiB`, `--max-grad-norm 1.0`) and reads the file by `--config`.

An unknown key is refused by name, and so is a value that cannot be used. Sizes are bytes: a number, or a string such as
`"20GiB"` (2^30 bytes) or `"20GB"` (10^9).
"""

GROUPS = {
    "Where state lives": ["device", "hbm", "ram", "nvme", "nvme_weights"],
    "Several ranks": ["stage", "shard_ranks", "reduction_dtype", "ranks_timeout_seconds"],
    "Precision": ["precision", "keep_fp32", "accumulation_dtype", "optimizer_states"],
    "Loss scaling": [
        "loss_scale",
        "initial_loss_scale",
        "loss_scale_window",
        "loss_scale_hysteresis",
        "min_loss_scale",
    ],
    "What moves when": ["units", "prefetch", "sub_group_bytes", "overlap", "tile_large_layers"],
    "Activations": ["recompute", "activation_bytes"],
    "Steps": ["accumulation_steps", "accumulation", "max_grad_norm", "speculation", "on_nonfinite"],
    "Durability": ["durability", "resume", "retained_commits", "verify"],
    "Input and output": ["io_backend", "io_num_threads", "io_block_bytes"],
    "Compiling and debugging": ["compile", "compile_backend", "debug"],
}
"""Which fields stand together, by the heading above them."""


def render() -> str:
    """The whole page."""
    fields = _fields()
    known = {name for names in GROUPS.values() for name in names}
    assert known == set(fields), f"GROUPS of tests/config_table.py and Config differ in {known ^ set(fields)}"
    lines = [_HEAD]
    for title, names in GROUPS.items():
        lines.append(f"## {title}\n")
        for name in names:
            annotation, doc = fields[name]
            lines.append(f"### `{name}`\n\n{_kind(annotation)}. Default: {_default(name)}.\n\n{doc}\n")
    return "\n".join(lines)


def _fields() -> dict[str, tuple[str, str]]:
    """By the name of each field: its annotation as the source has it, and the documentation below it."""
    [definition] = ast.parse(inspect.getsource(Config)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id != "model_config":
            assert isinstance(after, ast.Expr)
            doc = inspect.cleandoc(ast.literal_eval(after.value))
            found[node.target.id] = ast.unparse(node.annotation), doc.replace("``", "`")
    return found


_KINDS = {
    "str": "A string",
    "bool": "`True` or `False`",
    "Precision": '`"fp32"`, `"bf16"` or `"fp16"`',
    "BackendName": '`"auto"`, `"threads"`, `"uring"` or `"aiofiles"`',
    "Bytes": "A size",
    "Paths": "A path, or several",
    "Names": '`"auto"`, or names',
    "Patterns": "A pattern, or several",
    "Scale": "A number above 0",
    "int": "A whole number",
    "float": "A number",
    "tuple": "Numbers",
}


def _kind(annotation: str) -> str:
    """In words, what a field takes."""
    parts = []
    for part in _alternatives(annotation):
        if part == "None":
            parts.append("`None`")
        elif match := re.search(r"Literal\[([^\]]*)\]", part):
            values = match[1].replace("'", '"').split(", ")
            parts.append(
                ", ".join(f"`{value}`" for value in values[:-1]) + (" or " if values[:-1] else "") + f"`{values[-1]}`"
            )
        else:
            inner = re.sub(r"^Annotated\[", "", part)
            name = re.split(r"\W", inner)[0]
            parts.append(_KINDS[name] + _bounds(part))
    words = "; or ".join(parts)
    return words[0].upper() + words[1:].replace("; or A", "; or a")


def _alternatives(annotation: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, character in enumerate(annotation):
        depth += (character == "[") - (character == "]")
        if character == "|" and depth == 0:
            parts.append(annotation[start:index].strip())
            start = index + 1
    return [*parts, annotation[start:].strip()]


def _bounds(part: str) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most"}
    found = [f"{words[key]} {value}" for key, value in re.findall(r"\b(ge|gt|le)=([\d.]+)", part)]
    return f", {', '.join(found)}" if found else ""


def _default(name: str) -> str:
    value: Any = Config.model_fields[name].default
    if name == "debug":  # its default asks the environment
        return "`False`"
    if isinstance(value, ByteSize):
        return "0" if value == 0 else f'`"{value.human_readable().replace(".0", "")}"`'
    if value == ():
        return "none"
    return f"`{json.dumps(value) if isinstance(value, str) else value}`"


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
