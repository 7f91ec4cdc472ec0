"""``infinity <command>``, also ``python -m infinity``: joins the commands and says errors in one line.

A command is a package of infinity with a ``cli.py`` that holds a typer callback named ``main``, or a typer application
named ``app`` where it has commands of its own; its line in the list of commands is the first line of the package's
docstring. Only the command that runs is imported, and with it torch: so an interrupt while torch loads, which takes
seconds, ends as quietly as one later.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import infinity
from infinity.console.arguments import FlagCommand
from infinity.console.output import tolerate_any_text
from infinity.errors import InfinityError

ERROR_EXIT_CODE = 2
INTERRUPT_EXIT_CODE = 130
"""What a shell expects of a process that SIGINT ended."""


def command_names() -> list[str]:
    """The names of all commands, in alphabetical order."""
    return sorted(cli.parent.name for cli in Path(__file__).parent.glob("*/cli.py"))


def application(chosen: str | None = None) -> typer.Typer:
    """The command line of infinity.

    Args:
        chosen: the command that will run and whose flags are therefore needed. The others are only listed.
    """
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
        ] = False,
    ) -> None:
        """Train PyTorch models larger than accelerator memory, and larger than RAM."""

    for name in command_names():
        summary = (importlib.import_module(f"infinity.{name}").__doc__ or "").partition("\n")[0]
        if name == chosen:
            cli = importlib.import_module(f"infinity.{name}.cli")
            if hasattr(cli, "app"):
                app.add_typer(cli.app, name=name, short_help=summary)
            else:
                app.command(name, short_help=summary, cls=FlagCommand)(cli.main)
        else:
            app.command(name, help=summary)(_listed)
    return app


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"infinity {infinity.__version__}")
        raise typer.Exit


def _listed() -> None:
    """Stand for a command that is not the one chosen."""
    raise AssertionError("only the chosen command is called")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, 2 for errors, 130 for an interrupt, or what the command or its error says.

    Args:
        arguments: what follows the program's name; ``None``: ``sys.argv[1:]``.
    """
    tolerate_any_text()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        application(arguments[0] if arguments else None)(args=arguments, prog_name="infinity")
    except InfinityError as error:
        words = _words_of(error)
        if "--debug" in arguments:
            raise
        if words is not None:
            Console(stderr=True).print(
                f"error: {words}", style="bold red", markup=False, highlight=False, soft_wrap=True
            )
        sys.exit(getattr(error, "exit_code", ERROR_EXIT_CODE))
    except Exception as error:
        _words_of(error)
        raise
    except KeyboardInterrupt:
        sys.exit(INTERRUPT_EXIT_CODE)


def _words_of(error: Exception) -> str | None:
    """What to say of an error; ``None`` where another rank says it."""
    if "RANK" not in os.environ:
        return str(error)
    from infinity.console import last_words  # with torch, which has been loaded by now

    if not last_words.in_ranks():
        return str(error)
    return last_words.named(error) if last_words.leave_words(error) else None


def run_command(name: str) -> None:
    """Run one command with this process's arguments: what ``python -m infinity.<name>`` does."""
    main([name, *sys.argv[1:]])


if __name__ == "__main__":
    main()
