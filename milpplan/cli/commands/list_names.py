"""The command ``list``."""

from __future__ import annotations

from typing import Annotated

import typer

from milpplan.cli.outcome import show_blocks


def list_names(kind: Annotated[str, typer.Argument(metavar="models|hardware")]) -> None:
    """List the models or the hardware that ship with milpplan."""
    from milpplan.cli import arguments
    from milpplan.reports.answers import descriptions

    tables = {"models": descriptions.model_table, "hardware": descriptions.hardware_table}
    show_blocks([tables[arguments.choice(kind, "list", tables)]()])
