"""The command ``show``."""

from __future__ import annotations

from typing import Annotated

import typer

from milpplan.cli import options as o
from milpplan.cli.completion import presets_like
from milpplan.cli.outcome import emit, say


def show_preset(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A model or hardware, by name or path.", autocompletion=presets_like),
    ],
    ignore: o.Ignore = None,
) -> None:
    """Print a model or hardware description. A file is checked first, a config.json translated. The number of
    parameters of a model goes to stderr."""
    from milpplan.reports.answers import descriptions

    text, told = descriptions.description(name, ignore or ())
    emit(text)
    if told:
        say(told)
