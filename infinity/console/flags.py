"""Command-line flags made from the fields of pydantic models, so that each choice is named and explained once.

A flag that was not given is ``None`` and stays out of the model, which then has its own default. Values travel as the
strings that the user wrote; the model parses, checks and refuses them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from rich.markup import escape


def make_flags(
    model: type[BaseModel],
    panels: Mapping[str, str] | str,
    *,
    defaults: Mapping[str, object] | None = None,
    docs: Mapping[str, str] | None = None,
) -> Iterator[inspect.Parameter]:
    """Describe one flag for each field of ``model``, as parameters of a typer function.

    Args:
        model: where the fields are; the docstring under a field is the flag's help.
        panels: in which part of ``--help`` a flag stands, by its name, or one part for all.
        defaults: shown as the default in place of the field's own, by flag name.
        docs: help in place of the field's docstring, by flag name.
    """
    help_of = {**_field_docs(model), **(docs or {})}
    for field_name, field in model.model_fields.items():
        name = field.alias or field_name
        default = (defaults or {}).get(name, field.get_default(call_default_factory=True))
        shown = "none" if default is None or default == () else _show(default)
        # The default stands in the help text because typer would show none for a flag whose default is None.
        word = name.replace("_", "-")
        option = typer.Option(
            f"--{word}/--no-{word}" if field.annotation is bool else f"--{word}",
            help=f"{escape(help_of.get(name) or help_of[field_name])} [dim]{escape(f'[default: {shown}]')}[/dim]",
            show_default=False,
            metavar=None if field.annotation is bool else _metavar(field),
            rich_help_panel=panels if isinstance(panels, str) else panels[name],
        )
        kind: Any = bool if field.annotation is bool else list[str] if _is_list(field) else str
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option],
        )


def given_fields(model: type[BaseModel], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``model`` that the user gave as flags, ready for its constructor.

    Args:
        model: one that ``make_flags`` made flags of.
        flags: what typer passed, by flag name; ``None`` for those not given.
    """
    given = {}
    for field_name, field in model.model_fields.items():
        name = field.alias or field_name
        value = flags[name]
        if value is not None:
            given[name] = _parts(value, field) if _is_list(field) else value
    return given


def _parts(given: str | Sequence[str], field: FieldInfo) -> object:
    """Of a flag that takes several values: all that was given to it, at once or each with a flag of its own."""
    values = [given] if isinstance(given, str) else given
    if list(values) == [field.default]:  # a word
        return field.default
    return tuple(part for value in values for part in value.split(","))


def _field_docs(model: type[BaseModel]) -> dict[str, str]:
    """The docstring under each field, on one line and without reStructuredText's backquotes."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, doc in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
            assert isinstance(doc.value, ast.Constant)
            docs[field.target.id] = " ".join(str(doc.value.value).replace("``", "").split())
    return docs


def _show(default: object) -> str:
    if isinstance(default, ByteSize):
        return default.human_readable().replace(".0", "")
    return str(default).lower() if isinstance(default, bool) else str(default)


def _kinds(annotation: object) -> Iterator[object]:
    """The types that an annotation is made of: itself, and those inside unions, ``Annotated`` and generics."""
    yield get_origin(annotation) or annotation
    if get_origin(annotation) is not Literal:
        for inner in get_args(annotation):
            yield from _kinds(inner)


def _is_list(field: FieldInfo) -> bool:
    return tuple in _kinds(field.annotation)


def _metavar(field: FieldInfo) -> str:
    kinds = list(_kinds(field.annotation))
    if get_origin(field.annotation) is Literal:
        return "|".join(map(str, get_args(field.annotation)))
    several = tuple in kinds
    path = "DIR" if several else "PATH"
    words = {ByteSize: "SIZE", Path: path, float: "NUMBER", int: "COUNT", str: "NAME"}
    word = next((word for kind, word in words.items() if kind in kinds), "VALUE")
    return f"{word}[,{word}…]" if several else word
