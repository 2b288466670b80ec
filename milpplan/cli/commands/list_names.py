"""The command ``list``."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from milpplan.cli.outcome import show

EXAMPLES: Final = (("Models by name", "models"), ("Hardware by name", "hardware"))


def list_names(kind: Annotated[str, typer.Argument(metavar="models|hardware")]) -> None:
    """List the models or the hardware that ship with milpplan."""
    from milpplan.cli import arguments
    from milpplan.reports.text import descriptions

    tables = {"models": descriptions.model_table, "hardware": descriptions.hardware_table}
    show(tables[arguments.choice(kind, "list", tables)]())
