"""The command ``simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o

EXAMPLES: Final = (
    ("Time and memory of a plan, yours or a solve's", "plan.json"),
    ("Every stage, as JSON", "plan.json --json"),
)


def simulate(
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN.json", help="A plan file, or the JSON of a solve.")
    ] = None,
    calculon: o.Calculon = None,
    as_json: o.AsJson = False,
) -> None:
    """Simulate one step of a plan. Exits with 3 if the plan does not fit in memory."""
    from milpplan.cli import calculon as calculons

    raise typer.Exit(int(calculons.simulate(calculon, plan, as_json)))
