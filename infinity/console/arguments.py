"""What users leave out of a command line."""

from __future__ import annotations

import os
from typing import Any

from typer.core import TyperCommand

from infinity.errors import ConfigError

ALONE = {"--resume": "auto"}
"""What a flag means that is given without its value."""


class FlagCommand(TyperCommand):
    """A command whose flags may stand without a value where ``ALONE`` has one for them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in what was left out.

        Raises:
            ConfigError: under torchrun, what click would say on every rank.
        """
        completed: list[str] = []
        for argument, following in zip(args, [*args, "-"][1:], strict=True):
            completed.append(argument)
            if argument in ALONE and following.startswith("-"):
                completed.append(ALONE[argument])
        try:
            return super().parse_args(ctx, completed)
        except Exception as error:
            complaint = getattr(error, "format_message", None)  # click's, which is in another place in each typer
            if complaint is None or "RANK" not in os.environ:
                raise
            raise ConfigError(complaint()) from None  # so that one rank says it
