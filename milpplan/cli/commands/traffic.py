"""The command ``traffic``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o

EXAMPLES: Final = (
    ("Who sends how much to whom", "plan.json"),
    ("Traffic as a page", "plan.json --html traffic.html"),
)


def traffic(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan file, or the JSON of a solve.")],
    algorithm: Annotated[
        str,
        typer.Option(
            "--algorithm",
            metavar="ring|tree|hierarchical",
            help="What collectives are made of; tree: all-reduces only.",
        ),
    ] = "ring",
    as_json: o.AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON here.")] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write heat maps and curves as a page (milpplan[report])."),
    ] = None,
) -> None:
    """Count who sends how much to whom in one step of a plan: by parallelism, tier, link and time."""
    from milpplan.cli import traffic as counting

    raise typer.Exit(int(counting.run(plan, algorithm, as_json, out, html)))
