"""The command ``switch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o

EXAMPLES: Final = (("What moves when a job changes its plan", "before.json after.json"),)


def switch(
    source: Annotated[Path, typer.Argument(metavar="FROM.json", help="A plan file, or the JSON of a solve.")],
    target: Annotated[Path, typer.Argument(metavar="TO.json", help="Another plan for the same model and GPUs.")],
    senders: Annotated[
        str,
        typer.Option(
            "--senders",
            metavar="nearest|exact|relay",
            help="Nearest holders; the fastest direct senders, proved; or with relays inside fast domains.",
        ),
    ] = "relay",
    bandwidths: Annotated[
        str | None,
        typer.Option(
            "--bandwidths",
            metavar="INSIDE,BETWEEN",
            help="Bytes/s of a GPU inside its fast domain and between, as 200e9,25e9; no latencies.",
            show_default="the hardware's",
        ),
    ] = None,
    as_json: o.AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON here.")] = None,
) -> None:
    """Plan the switch of a job to another plan: who sends which states to whom, and how long that takes."""
    from milpplan.cli import switch as switching

    raise typer.Exit(int(switching.run(source, target, senders, bandwidths, as_json, out)))
