"""The program and its options before the command. ``milpplan.cli.app`` adds the commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import milpplan
from milpplan.cli.outcome import Commands, emit, of_error, say_error, unwritten
from milpplan.errors import InvalidInputError

app = typer.Typer(
    name="milpplan",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Proved-best parallel training plans for large language models. Results on stdout, progress on stderr. "
        "Exit codes: 0 optimal within the tolerance, 2 wrong usage or bad input, 3 proved infeasible, 4 a plan "
        "that is not proved within the tolerance (its gap is printed), 5 stopped without a plan, 6 internal "
        "failure."
    ),
)


def run() -> None:
    """Run the command in ``sys.argv``."""
    try:
        app()
    except (InvalidInputError, OSError) as error:
        # Errors of the commands are handled there; only --help and --version can raise here.
        refusal = error if isinstance(error, InvalidInputError) else unwritten(error)
        say_error(refusal)
        sys.exit(of_error(refusal))


def _version(wanted: bool) -> None:
    if wanted:
        emit(f"milpplan {milpplan.__version__}\n")
        raise typer.Exit(0)


@app.callback()
def _milpplan(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    """Declare the options before the command."""
