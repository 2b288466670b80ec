"""The command ``gap``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import options as o

EXAMPLES: Final = (
    ("How far your script is from the best", "run.sh --from megatron --hardware dgx-h100"),
    ("From a pipe, such as a job's command line", "- --from megatron --hardware dgx-h100 < run.sh"),
    ("In money, for a run of 15 trillion tokens", "plan.json --tokens 15e12 --price-per-gpu-hour 2.5"),
)

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE ...",
        help="Plan files; with --from files of a launcher, - for standard input. Several: a table.",
    ),
]
From = Annotated[
    str | None, typer.Option("--from", metavar=o.LAUNCHERS, help="The launcher whose files these are.")
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar=o.LAUNCHERS,
        help="Also judge by the best that this launcher can run.",
        show_default="that of --from",
    ),
]
Hardware = Annotated[
    str | None, typer.Option("--hardware", metavar="NAME", help="The cluster of a launcher's files.")
]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Their model, checked against them.", show_default="theirs"),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", metavar="N", min=1, help="Their processes.", show_default="theirs")
]
VocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", metavar="N", min=1, help="Their vocabulary.", show_default="theirs"),
]
Whole = Annotated[
    str,
    typer.Option(
        "--space",
        metavar="free|uniform|any|declared",
        help="The whole space, as of solve, and the plan's own switches; declared: that of the plan file.",
    ),
]
TimeLimit = Annotated[
    float, typer.Option("--time-limit", metavar="S", help="Seconds for a plan; more narrows the gaps.")
]
Tokens = Annotated[
    float | None,
    typer.Option("--tokens", metavar="T", help="Tokens of the run, for GPU-hours.", show_default="1e12"),
]
Price = Annotated[
    float | None,
    typer.Option("--price-per-gpu-hour", metavar="P", help="For amounts of money, in any currency."),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", help="Also write a page of figures (milpplan[report])."),
]
Best = Annotated[
    Path | None,
    typer.Option("--out", metavar="PLAN.json", help="Write the best plan known that the launcher can run."),
]


def gap(
    files: Files = None,
    source: From = None,
    target: Target = None,
    calculon: o.Calculon = None,
    hardware: Hardware = None,
    model: Model = None,
    gpus: Gpus = None,
    vocab_size: VocabSize = None,
    ignore: o.IgnoreFlag = None,
    settings: o.Settings = None,
    arguments: o.Arguments = None,
    space: Whole = "free",
    schedule: o.ScheduleNames = None,
    allow: o.Allow = None,
    time_limit: TimeLimit = 60.0,
    tolerance: o.Gap = 1e-4,
    tokens: Tokens = None,
    price: Price = None,
    report: Report = None,
    out: Best = None,
    as_json: o.AsJson = False,
) -> None:
    """Judge plans that anybody made: how far they are from the proved best, what closes the gap, what it costs.
    Exits with 0 if every gap is proved to the tolerance, 3 if a plan does not fit, 4 if a gap is only proved to a
    range."""
    from milpplan.cli import gap as gap_work

    where = gap_work.Source(
        source,
        target,
        hardware,
        model,
        gpus,
        vocab_size,
        tuple(ignore or ()),
        calculon,
        tuple(settings or ()),
        arguments,
    )
    wanted = gap_work.Wanted(
        space, schedule, tuple(allow or ()), time_limit, tolerance, tokens, price, report, out, as_json
    )
    raise typer.Exit(int(gap_work.run(files or [], where, wanted)))
