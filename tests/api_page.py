"""The API reference: docs/api.md from the docstrings of what is public. ``python tests/api_page.py`` writes it."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import infinity
import infinity.integrations

DOCUMENT = Path(__file__).parents[1] / "docs" / "api.md"

_HEAD = """# API

Written by `python tests/api_page.py` from the docstrings; do not edit. What is not on this page is not promised.

The fields of `Config` have [a page of their own](config.md), and so have the [commands](commands.md) and what is said
here in a word of [errors](troubleshooting.md).
"""

_INTRODUCTIONS = {
    "infinity.integrations.accelerate": "See [Accelerate](accelerate.md).",
    "infinity.integrations.deepspeed": "See [coming from DeepSpeed](deepspeed.md).",
    "infinity.integrations.lightning": "See [Lightning](lightning.md).",
    "infinity.integrations.peft": "See [LoRA](lora.md).",
    "infinity.integrations.transformers": "See [Trainer](trainer.md) and [pretrained weights](pretrained.md).",
}
"""Where the guide to an integration is."""

_SAME = {"infinity.integrations.pytorch_lightning": "infinity.integrations.lightning"}
"""Integrations that have what another one has, for another package."""

_INNER = {
    "Accelerator": {"over", "prepare_model", "prepare_optimizer"},
    "DeepSpeedOptimizer": {"adopt", "release_user"},
    "InfinityTrainer": {"create_accelerator_and_postprocess", "evaluation_loop"},
    "StoredState": {"sources", "value", "format_of", "state_format_of", "small_state", "full", "computing"},
    "TiledEmbedding": {"of_weights", "extra_repr", "reset_parameters", "num_rows", "parameters_of", "tie_weight"},
    "TiledLinear": {"of_tiles", "extra_repr", "reset_parameters", "num_rows", "parameters_of", "tie_weight"},
}
"""Members for other parts of infinity, or that a base class calls."""

_HANDED_OUT = {"StoredState": ("Args", "Raises")}
"""Classes that no user makes: sections that are about making one."""

_MAX_WIDTH = 100
_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Attributes|Examples?|Note):$")
_ITEM = re.compile(r"^(\*{0,2}[\w.]+)(?: \(([^)]*)\))?: (.*)$")


def render() -> str:
    """The whole page."""
    values = {name: getattr(infinity, name) for name in infinity.__all__}
    classes = {name: value for name, value in values.items() if isinstance(value, type)}
    errors = {name: value for name, value in classes.items() if issubclass(value, Exception)}
    functions = {name: value for name, value in values.items() if name not in classes}
    figures = {name for name in classes if name.endswith(("Stats", "Usage"))}
    return "\n".join(
        [
            _HEAD,
            *_section("Functions", "infinity", functions),
            *_section("Engine and configuration", "infinity", {name: classes[name] for name in ("Engine", "Config")}),
            *_section("Figures of a step", "infinity", {name: classes[name] for name in figures}),
            *_section(
                "Other classes",
                "infinity",
                {
                    name: value
                    for name, value in classes.items()
                    if name not in errors and name not in figures and name not in {"Engine", "Config"}
                },
            ),
            *_planning(),
            *(line for module in _integrations() for line in _integration(module)),
            *_section("Errors", "infinity", errors),
        ]
    )


def _planning() -> Iterator[str]:
    module = importlib.import_module("infinity.plan")
    result = importlib.import_module("infinity.plan.result")
    trace = importlib.import_module("infinity.trace")
    yield "## Planning and traces\n\nSee [plan](plan.md) and [tuning](tuning.md).\n"
    yield from _entry("infinity.plan", module.plan)
    for name in ("Plan", "Wear"):
        yield from _entry(name, getattr(result, name))
    yield from _entry("infinity.trace.write_trace", trace.write_trace)


def _integrations() -> Iterator[ModuleType]:
    """Those that say what is public in them, by name."""
    names = [found.name for found in pkgutil.iter_modules(infinity.integrations.__path__, "infinity.integrations.")]
    for name in sorted(names):
        module = importlib.import_module(name)
        if hasattr(module, "__all__"):
            yield module


def _integration(module: ModuleType) -> Iterator[str]:
    if other := _SAME.get(module.__name__):
        assert module.__all__ == importlib.import_module(other).__all__
        package = module.__name__.rpartition(".")[2]
        yield f"## `{module.__name__}`\n\nThe names of `{other}`, for the package `{package}`.\n"
        return
    values = {name: getattr(module, name) for name in module.__all__}
    made = {name: value for name, value in values.items() if inspect.isfunction(value) or isinstance(value, type)}
    parts = [name for name, value in values.items() if isinstance(value, ModuleType)]
    yield from _section(f"`{module.__name__}`", module.__name__, made, _INTRODUCTIONS.get(module.__name__, ""))
    if parts:
        yield f"Modules, with the names that DeepSpeed has in them: {', '.join(f'`{part}`' for part in parts)}.\n"


def _section(title: str, home: str, values: dict[str, Any], introduction: str = "") -> Iterator[str]:
    yield f"## {title}\n"
    if introduction:
        yield f"{introduction}\n"
    for name in sorted(values, key=str.lower):
        is_class = isinstance(values[name], type)
        yield from _entry(name if is_class else f"{home}.{name}", values[name])


def _entry(name: str, value: Any) -> Iterator[str]:
    title = name.removeprefix("infinity.integrations.").removeprefix("infinity.")
    if not isinstance(value, type):
        yield f"### `{title}`\n\n```text\n{_signature(name, value)}\n```\n\n{_markdown(value)}\n"
        return
    of = ""
    if issubclass(value, Exception):
        of = f"A kind of {' and '.join(f'`{base.__name__}`' for base in value.__bases__)}.\n\n"
    yield f"### `{title}`\n\n{of}{_markdown(value, _HANDED_OUT.get(title, ()))}\n"
    for member_name, member in _members(value):
        if member_name in _INNER.get(title, set()):
            continue
        if isinstance(member, property) and member.fget is not None:
            yield f"#### `{title}.{member_name}`\n\nAn attribute. {_markdown(member.fget)}\n"
        elif inspect.isfunction(function := getattr(member, "__func__", member)):
            called = _signature(f"{title}.{member_name}", function)
            yield f"#### `{title}.{member_name}`\n\n```text\n{called}\n```\n\n{_markdown(function)}\n"


def _members(value: type) -> Iterator[tuple[str, Any]]:
    """What has a docstring in infinity's own classes, base classes' last, without what they make of others' methods."""
    seen: set[str] = set()
    for owner in value.__mro__:
        if not owner.__module__.startswith("infinity."):
            continue
        for name, member in vars(owner).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if name.startswith("_") or name in seen or not getattr(function, "__doc__", None):
                continue
            seen.add(name)
            if getattr(function, "__module__", "").startswith("infinity."):
                yield name, member


def _signature(name: str, function: Callable[..., Any]) -> str:
    """As a caller sees it: without ``self``, with values in the place of names that are private."""
    values = inspect.signature(function).parameters
    managed = inspect.isgeneratorfunction(inspect.unwrap(function)) and inspect.unwrap(function) is not function
    function = inspect.unwrap(function)
    [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first = positional[0].arg if positional else ""
    parts = [_parameter(each, values[each.arg]) for each in positional if not (each.arg == first in {"self", "cls"})]
    if arguments.vararg is not None:
        parts.append(f"*{_parameter(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [_parameter(each, values[each.arg]) for each in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        parts.append(f"**{_parameter(arguments.kwarg, None)}")
    returns = ast.unparse(node.returns) if node.returns is not None else "Any"
    if managed:
        returns = re.sub(r"^(Iterator|Generator)\[([^,\]]*).*\]$", r"AbstractContextManager[\2]", returns)
    line = f"{name}({', '.join(parts)}) -> {returns}"
    if len(line) <= _MAX_WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f") -> {returns}"


def _parameter(node: ast.arg, seen: inspect.Parameter | None) -> str:
    kind = f": {ast.unparse(node.annotation)}" if node.annotation is not None else ""
    if seen is None or seen.default is inspect.Parameter.empty:
        return f"{node.arg}{kind}"
    value = seen.default
    # The names of other objects are shown, not their addresses.
    text = repr(value) if type(value).__module__ == builtins.__name__ and not callable(value) else type(value).__name__
    return f"{node.arg}{kind} = {text}"


def _markdown(value: Any, without: Collection[str] = ()) -> str:
    """A docstring of the house's style as Markdown, but for some of its sections."""
    out: list[str] = []
    section = ""
    for line in _documentation(value).replace("``", "`").splitlines():
        if match := _SECTION.match(line):
            section = match[1]
            if section not in without:
                out.append(f"**{section}**\n")
        elif section and line and not line.startswith(" "):
            section = ""
            out.append(line)
        elif section in without:
            continue
        elif section and line.startswith("    ") and line[4] != " " and (item := _ITEM.match(line.strip())):
            out.append(f"- `{item[1]}`{f' ({item[2]})' if item[2] else ''}: {item[3]}")
        elif section in {"Args", "Raises", "Attributes"}:
            out.append(f"  {line.strip()}".rstrip())
        else:
            out.append(line.strip() if section else line)
    return "\n".join(out).strip()


def _documentation(value: Any) -> str:
    documentation = inspect.cleandoc(value.__doc__ or "")
    made = dataclasses.is_dataclass(value) and documentation.startswith(f"{getattr(value, '__name__', '')}(")
    if not documentation or made:
        raise ValueError(f"{value} is public and has no docstring")
    return documentation


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
