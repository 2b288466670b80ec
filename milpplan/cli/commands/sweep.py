"""The command ``sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o

EXAMPLES: Final = (("Solve all cells of a study, or go on", "examples/studies/llama3-70b-which-gpu.toml"),)


def sweep(
    study: Annotated[
        Path, typer.Argument(metavar="STUDY.toml", help="A study file; docs/commands.md describes it.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Directory of the results.",
            show_default="STUDY-results, beside the study",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, max=4096, help="Solves at once.", show_default="all CPUs"),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Solve on a Ray cluster (RAY_ADDRESS, else one started here).")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Solve the cells again that failed before.")
    ] = False,
    as_json: o.AsJson = False,
) -> None:
    """Solve every cell of a design study. If it is stopped, the same command continues."""
    from milpplan.cli import sweep as sweeping

    raise typer.Exit(int(sweeping.run(study, out, workers, ray, retry_failed, as_json)))
