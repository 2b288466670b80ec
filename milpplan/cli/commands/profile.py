"""The command ``profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o

EXAMPLES: Final = (("Measure this machine for five minutes", "--hardware dgx-h200 --out my-gpus.toml"),)


def profile(
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="NAME", help="The description to lie on: a name or a file.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="OVERLAY.toml", help="Write the overlay here.")],
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="RAW.json", help="Measure nothing: take these raw measurements."),
    ] = None,
    raw: Annotated[
        Path | None,
        typer.Option(
            "--raw", metavar="RAW.json", help="Write the measurements here.", show_default="OVERLAY.raw.json"
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="cuda|cpu", help="What to measure; cpu only tries it out."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="N", help="Name of the overlay.", show_default="HARDWARE-profile"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only a coarse part of the measurements.")] = False,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="S", help="Stop measuring after S seconds.")
    ] = 300.0,
    as_json: o.AsJson = False,
) -> None:
    """Measure this machine's GPUs, as an overlay on a description (needs PyTorch: milpplan[profile])."""
    from milpplan.cli import arguments
    from milpplan.cli import profile as profiling

    arguments.positive(time_limit, "--time-limit", "number of seconds")
    code = profiling.run(hardware, out, source, raw, device, name, quick, time_limit, as_json)
    raise typer.Exit(int(code))
