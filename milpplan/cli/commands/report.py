"""The command ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

EXAMPLES: Final = (("A page to show, and a trace for Perfetto", "plan.json -o report.html --trace trace.json"),)


def report(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file, or the JSON of a solve.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PAGE.html", help="Write the page here (milpplan[report])."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="TRACE.json", help="Write the step for ui.perfetto.dev here."),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", metavar="S", help="Seconds to look for alternatives."),
    ] = 10.0,
    within: Annotated[
        float,
        typer.Option("--within", metavar="SHARE", help="Alternatives take at most this share more."),
    ] = 0.01,
) -> None:
    """Write a plan as a page that needs no network, and its step as a trace. A solve's file brings its proof."""
    from milpplan.cli import report as reporting

    raise typer.Exit(int(reporting.run(plan, out, trace, time_limit, within)))
