"""The command ``validate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o

EXAMPLES: Final = (("The simulator against published runs", ""), ("Against your own", "--runs my_runs.json"))


def validate(
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            metavar="FILE",
            help="Measured runs as JSON, plain or gzipped.",
            show_default="published runs",
        ),
    ] = None,
    as_json: o.AsJson = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="DIR", help="Write figures (SVG) into this directory.")
    ] = None,
    each: Annotated[
        bool,
        typer.Option("--each", help="Print every run with what was assumed, where they are more than a page."),
    ] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks/--no-stacks", help="With the constants fitted to each framework, or without.")
    ] = True,
) -> None:
    """Compare the simulator with measured training runs: step time, memory, and the order of layouts."""
    from milpplan.cli import validate as validation

    raise typer.Exit(int(validation.run(runs, as_json, plot, stacks, each)))
