"""The command ``list``."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from milpplan.cli.command import choice
from milpplan.cli.outcome import show_blocks
from milpplan.reports.answers.descriptions import hardware_table, model_table, stack_table

EXAMPLES: Final = (("Models by name", "models"), ("Hardware by name", "hardware"))


def list_names(kind: Annotated[str, typer.Argument(metavar="models|hardware")]) -> None:
    """List the models or the hardware that ship with milpplan."""
    if choice(kind, "list", ("models", "hardware")) == "models":
        show_blocks([model_table()])
    else:
        from milpplan.validation.evidence import scored_runs

        show_blocks([hardware_table(scored_runs), stack_table()])
