"""What users leave out of a command line."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

ALONE = {"--resume": "auto"}
"""What a flag means that is given without its value."""


class FlagCommand(TyperCommand):
    """A command whose flags may stand without a value where ``ALONE`` has one for them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in what was left out."""
        completed: list[str] = []
        for argument, following in zip(args, [*args, "-"][1:], strict=True):
            completed.append(argument)
            if argument in ALONE and following.startswith("-"):
                completed.append(ALONE[argument])
        return super().parse_args(ctx, completed)
