"""The command ``traffic``: the bytes of a step of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli import command
from milpplan.cli import options as o
from milpplan.cli.arguments import check_plan_of_file, within_range
from milpplan.cli.outcome import ExitCode, emit, say, show_blocks
from milpplan.communication.traffic import traffic as count_traffic
from milpplan.communication.wires import ALGORITHMS
from milpplan.reports import write_whole
from milpplan.reports.answers import traffic_blocks, traffic_document
from milpplan.reports.documents.document import read_plan
from milpplan.reports.files import check_writable
from milpplan.reports.html.page_template import require_jinja
from milpplan.reports.html.traffic_page import traffic_page
from milpplan.units import counted

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
) -> ExitCode:
    """Count who sends how much to whom in one step of a plan: by parallelism, tier, link and time."""
    chosen = next(name for name in ALGORITHMS if name == command.choice(algorithm, "--algorithm", ALGORITHMS))
    if html is not None:
        require_jinja()
    for target in (out, html):
        if target is not None:
            check_writable(target)
    problem, counted_plan = read_plan(plan)
    check_plan_of_file(problem, counted_plan)
    with within_range():
        report = count_traffic(problem, counted_plan, chosen)
    document = traffic_document(report) if as_json or out is not None else ""
    if as_json:
        emit(document)
    else:
        show_blocks(traffic_blocks(report))
    if out is not None:
        write_whole(out, document)
        say(f"Written to {out}.")
    if html is not None:
        write_whole(
            html, traffic_page(report, f"{problem.model.name} on {counted(counted_plan.layout.num_gpus, 'GPU')}")
        )
        say(f"Written to {html}.")
    return ExitCode.OPTIMAL
