"""Commands about measurements: runs against the simulator, constants, machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milpplan.cli import options as o
from milpplan.cli.program import command


@command()
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


@command()
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


@command()
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
