"""The command ``explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o

EXAMPLES: Final = (
    ("What limits the plan, and what more memory or bandwidth would gain", "plan.json"),
    ("Why not tensor parallelism of 8", "plan.json --why-not tp=8"),
)


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file, or the JSON of a solve.")],
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            "--why-not",
            "--wish",
            metavar="NAME=VALUE,...",
            help="A choice to price, as tp=8 or recompute=full. Repeatable.",
            show_default="the plan's neighbours",
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", metavar="S", help="Seconds for all questions; more narrows the ranges."),
    ] = 60.0,
    gap: o.Gap = 1e-4,
    as_json: o.AsJson = False,
) -> None:
    """Explain a plan: what limits it, what more memory or bandwidth would gain, why not another choice; proved."""
    from milpplan.cli import explain as explaining

    raise typer.Exit(int(explaining.run(plan, why_not or [], time_limit, gap, as_json)))
