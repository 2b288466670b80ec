"""The command ``calibrate``: an overlay from measurements."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from milpplan.calibration.sources import calibrated, write_overlay
from milpplan.calibration.tables import calibration_blocks, document_text
from milpplan.cli import options as o
from milpplan.cli.checks import positive
from milpplan.cli.interrupts import limited
from milpplan.cli.outcome import ExitCode, emit, say, show_blocks
from milpplan.cli.plan_checks import within_range
from milpplan.problem.overlay import USUAL
from milpplan.reports.files import check_writable

EXAMPLES: Final = (
    ("Constants that fit your measured steps", "my_runs.json --hardware dgx-h100 --out my-cluster.toml"),
)


def calibrate(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="Measured runs (JSON), nccl-tests output, or a CSV of products."),
    ],
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="NAME", help="The description to lie on: a name or a file.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="OVERLAY.toml", help="Write the overlay here.")],
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="N", help="Name of the overlay.", show_default="from hardware and source"),
    ] = None,
    constant: Annotated[
        list[str] | None,
        typer.Option("--constant", metavar="NAME", help="Fit only this constant. Repeatable.", show_default="all"),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node", metavar="N", min=2, help="Ranks of an nccl-tests output that does not say them."
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", metavar="S", help="Give up after S seconds, without an overlay."),
    ] = None,
    as_json: o.AsJson = False,
) -> ExitCode:
    """Fit constants of hardware and software to your own measurements, as an overlay on a description."""
    positive(time_limit, "--time-limit", "number of seconds")
    check_writable(out)
    console = Console(file=sys.stderr)
    with limited(time_limit), console.status("reading") as status, within_range():
        callback = status.update if console.is_terminal else None
        result = calibrated(source, hardware, name, out, constant or USUAL, gpus_per_node, callback)
    write_overlay(out, result.overlay)
    if as_json:
        emit(document_text(result))
    else:
        show_blocks(calibration_blocks(result))
    say(f"Written to {out}.")
    return ExitCode.OPTIMAL
