"""The command ``calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o

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
) -> None:
    """Fit constants of hardware and software to your own measurements, as an overlay on a description."""
    from milpplan.cli import calibrate as calibration

    code = calibration.run(source, hardware, out, name, constant or [], gpus_per_node, time_limit, as_json)
    raise typer.Exit(int(code))
