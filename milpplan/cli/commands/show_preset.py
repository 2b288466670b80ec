"""The command ``show``."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from milpplan.cli import options as o
from milpplan.cli.outcome import emit, say
from milpplan.reports.answers.descriptions import description

EXAMPLES: Final = (
    ("What is known of a model", "llama3-70b"),
    ("The start of a cluster file of your own", "dgx-h100 > my-cluster.toml"),
)


def show_preset(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A model or hardware, by name or path.", autocompletion=o.presets_like
        ),
    ],
    ignore: o.Ignore = None,
) -> None:
    """Print a model or hardware description. A file is checked first, a config.json translated. The number of
    parameters of a model goes to stderr."""
    text, remark = description(name, ignore or ())
    emit(text)
    if remark:
        say(remark)
